"""Modules compiled by vLLM's own pipeline on the CPU, and the graphs and code that it makes of them."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tiny_engine import engine_config
from torch import fx, nn
from torch._inductor.graph import GraphLowering
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

FOLDER = Path(tempfile.mkdtemp())
"""The model's folder, which is in the keys of compiled graphs."""


@dataclass
class Compiled:
    """What the compiler made, of all graphs together."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each op, after all passes."""
    code: str = ""
    """Inductor's Python code."""


@contextmanager
def recorded(monkeypatch) -> Iterator[Compiled]:
    """Record the compilations in this context. No compiled graph comes from a cache."""
    compiled = Compiled()
    run_passes = PostGradPassManager.__call__

    def run(manager: PostGradPassManager, graph: fx.Graph) -> None:
        run_passes(manager, graph)
        compiled.calls.update(str(node.target) for node in graph.nodes if node.op == "call_function")

    def save(code: str) -> None:
        compiled.code += code

    with monkeypatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        patch.setattr(PostGradPassManager, "__call__", run)
        patch.setattr(GraphLowering, "save_output_code", staticmethod(save))
        yield compiled


def vllm_config(mode: CompilationMode = CompilationMode.VLLM_COMPILE, cudagraph_mode: str = "NONE") -> VllmConfig:
    """Return a configuration that compiles as a server of a model with our types does."""
    compilation = CompilationConfig(mode=mode, cudagraph_mode=cudagraph_mode, custom_ops=["none"])
    rope_parameters = {"rope_type": "mrrope_pro", "factor": "auto"}
    return engine_config(FOLDER, rope_parameters, dtype="float32", compilation_config=compilation)


def model_of(make: Callable[[], nn.Module], config: VllmConfig) -> nn.Module:
    """Return a model that vLLM compiles at its first call, of one module that takes positions and hidden states."""

    @support_torch_compile(dynamic_arg_dims={"positions": -1, "hidden_states": 0})
    class Model(nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__()
            self.body = make()

        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.body(positions, hidden_states)

    with set_current_vllm_config(config):
        return Model(vllm_config=config)


def run(model: nn.Module, config: VllmConfig, positions: torch.Tensor, hidden_states: torch.Tensor):
    """Call a model as the engine does."""
    with torch.inference_mode(), set_forward_context({}, config):
        return model(positions, hidden_states)
