"""vLLM's HTTP server on a CPU, in processes of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI

# A machine may have other work to do: two workers of pytest start up to three servers at once.
START_TIMEOUT = 600
ANSWER_TIMEOUT = 600
END_TIMEOUT = 120
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A connection that the server closes while the client takes it for the next request is an error without a retry.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    # vLLM compiles functions of its sampler even with --enforce-eager: half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
OPTIONS = (
    "--host=127.0.0.1",
    "--enforce-eager",
    "--dtype=float32",
    "--served-model-name=tiny",
    "--block-size=32",
    "--disable-uvicorn-access-log",
)


class Server:
    """``vllm serve`` of one model; ends with the context."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *options: str,
        rope_parameters: dict[str, Any] | None = None,
        is_module: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the server; :meth:`wait` for it before the first request.

        Args:
            model: The model's folder.
            log: Where its output goes.
            options: More of the command line.
            rope_parameters: What ``--hf-overrides`` sets.
            is_module: Whether to run vLLM's module of the server instead of ``vllm serve``.
            environment: More environment variables.
        """
        self.log = log
        self._port_holder = _held_port()
        self.port = int(self._port_holder.getsockname()[1])
        if rope_parameters is not None:
            options = (*options, f"--hf-overrides={json.dumps({'rope_parameters': rope_parameters})}")
        command = [Path(sys.executable).parent / "vllm", "serve", model]
        if is_module:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, f"--port={self.port}", *OPTIONS, *options],
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,  # vLLM inspects models in a process that imports from there first
                start_new_session=True,
            )
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> "Server":
        """Wait until the server answers."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.2)
            else:
                return self
        self.end()
        raise RuntimeError(f"the server must start, got:\n{self.log.read_text()}")

    def wait_for_end(self) -> str:
        """Wait until the server ends by itself; return its output."""
        self._process.wait(START_TIMEOUT)
        return self.log.read_text()

    def end(self) -> int:
        """End the server and all its processes; return its exit status."""
        self._port_holder.close()
        self._process.terminate()
        try:
            return self._process.wait(END_TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def complete(self, prompt: Any, *, scale: Any = None, **parameters: Any) -> Any:
        """Return the answer of ``/v1/completions``: greedy, past the end of text, with its tokens."""
        extra = {"ignore_eos": True, "return_token_ids": True, **parameters.pop("extra_body", {})}
        if scale is not None:
            extra["vllm_xargs"] = {"mrrope_scale": scale}
        return self.client.completions.create(
            **{"model": "tiny", "prompt": prompt, "temperature": 0, "extra_body": extra} | parameters
        )

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric: the sum over all that have the labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_TIMEOUT) as answer:
            lines = answer.read().decode().splitlines()
        if not any(line.startswith(f"# TYPE {name} ") for line in lines):
            raise KeyError(f"name must be a metric of the server, got {name}")
        found = [line for line in lines if line.startswith(f"{name}{{")]
        kept = [line for line in found if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rpartition(" ")[2]) for line in kept)


def prompt_logprobs(choice: Any) -> list[float]:
    """Return the log-probability of every token of a prompt but the first: that of the token is the first entry."""
    return [next(iter(entry.values()))["logprob"] for entry in choice.prompt_logprobs[1:]]


def _held_port() -> socket.socket:
    """Return a socket that is bound to a free port, which nothing but a server with SO_REUSEADDR gets meanwhile."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder
