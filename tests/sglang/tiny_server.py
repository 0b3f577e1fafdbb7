"""SGLang's real server on a CPU, with a random Llama of float32 whose tokens are bytes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

NATIVE_LENGTH = 64
SECONDS_TO_START = 1200
"""A server starts in 50 s on two cores; three start at a time, on a machine that may have more to do."""
SECONDS_TO_ANSWER = 600
SECONDS_TO_LOG = 10
STAND_IN = Path(__file__).parent / "stand_in"


def save_model(folder: Path, config: type[PretrainedConfig] = LlamaConfig, **settings: Any) -> Any:
    """Write a random model and a tokenizer of bytes as a folder that SGLang loads. Return the model."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": NATIVE_LENGTH,
        "initializer_range": 0.2,  # attention that depends on positions
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(config(**(sizes | settings))).float().eval()
    model.save_pretrained(folder)
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Answer:
    """What came back of one request."""

    tokens: tuple[int, ...]
    prompt_logprobs: torch.Tensor
    """Log-probability of every prompt token but the first, where asked for."""
    logprobs: torch.Tensor
    cached_tokens: int
    finish_reason: str


class Server:
    """A server in a process of its own, which ends with the context. Starts at once; waited for by its first call."""

    def __init__(
        self, model: Path, log: Path, *options: str, overrides: dict[str, Any] | None = None, plugins: str = "mrrope"
    ) -> None:
        # Held until the end, so that no other process gets the port before the server, whose socket reuses the address.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        self.log = log
        self._is_up = False
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *_ARGUMENTS, "--model-path", str(model), *options]
                + ["--port", self.url.rpartition(":")[2]]
                + (["--json-model-override-args", json.dumps(overrides)] if overrides else []),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent,  # not the checkout, whose package need not be compiled
                env=environment(SGLANG_PLUGINS=plugins),
                start_new_session=True,
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        # Not a signal that it handles: SGLang takes up to 20 s to end its processes, which are a group of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._port.close()

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        """Send a request."""
        self.wait()
        return requests.post(self.url + path, json=body, timeout=SECONDS_TO_ANSWER)

    def get(self, path: str) -> requests.Response:
        """Send a request without a body."""
        self.wait()
        return requests.get(self.url + path, timeout=SECONDS_TO_ANSWER)

    def generate(self, *prompts: Sequence[int], scored: bool = False, **params: Any) -> list[Answer]:
        """Send prompts at once.

        Args:
            prompts: The prompts.
            scored: Whether to return the log-probabilities of the prompts, which are prefilled whole then.
            params: Parameters of the requests; one that is a list holds a value for each.
        """
        each = [
            {key: value[i] if isinstance(value, list) else value for key, value in params.items()}
            for i in range(len(prompts))
        ]
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [GREEDY | own for own in each],
            "return_logprob": True,
            "logprob_start_len": 0 if scored else -1,
        }
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return [_answer(answer) for answer in response.json()]

    def log_end(self) -> int:
        """Return the length of the log, for :meth:`logged`."""
        return len(self.log.read_bytes())

    def logged(self, pattern: str, since: int) -> list[Any]:
        """Return what ``re.findall`` finds in the log after a length of it; the scheduler logs after it answers."""
        limit = time.monotonic() + SECONDS_TO_LOG
        while not (found := re.findall(pattern, self.log.read_bytes()[since:].decode(errors="replace"))):
            assert time.monotonic() < limit, (pattern, self.log.read_bytes()[since:].decode(errors="replace"))
            time.sleep(0.1)
        return found

    def wait(self) -> None:
        """Wait until the server answers."""
        limit = time.monotonic() + SECONDS_TO_START
        while not self._is_up:
            assert self._process.poll() is None, self.log.read_text()[-5000:]
            assert time.monotonic() < limit, self.log.read_text()[-5000:]
            # Answers once the scheduler has generated a token.
            with contextlib.suppress(requests.RequestException):
                self._is_up = requests.get(f"{self.url}/health", timeout=30).status_code == 200
            if not self._is_up:
                time.sleep(0.5)


GREEDY = {"temperature": 0.0, "max_new_tokens": 4}

_ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--skip-server-warmup", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.1", "--host", "127.0.0.1"),
)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs SGLang on a CPU."""
    path = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the compiled one needs a later torch
    }
    return {**os.environ, **own, **more}


def _answer(body: dict[str, Any]) -> Answer:
    meta = body["meta_info"]
    prompt = [value for value, *_ in meta.get("input_token_logprobs", ()) if value is not None]
    new = meta["output_token_logprobs"]
    return Answer(
        tuple(token for _, token, *_ in new),
        torch.tensor(prompt),
        torch.tensor([value for value, *_ in new]),
        meta["cached_tokens"],
        meta["finish_reason"]["type"],
    )
