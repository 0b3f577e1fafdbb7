"""register_kernels: models loaded with use_kernels=True run rotary_cos_sin, in inference and training.

Whether transformers has slots for kernels is decided when it is imported, so these tests run in a process of their own.
"""

import importlib
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mrrope

pytest.importorskip("transformers")

import tiny_models
import transformers
from model_tolerance import relative, tolerance
from op_counter import OpCounter
from op_errors import assert_refused
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import hub_kernels
from transformers.models.llama import modeling_llama
from transformers.utils import is_kernels_available

from mrrope._core import build_info
from mrrope.hf import kernels_slot, rotary_layer
from mrrope.hf.kernels_slot import SLOT, InProcess
from mrrope.hf.rotary_layer import COLUMN_USES, RotaryPosEmb, column_use_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_kernels_available(), reason="transformers finds no package kernels that it takes"),
]
IN_USE = os.environ["USE_HUB_KERNELS"] == "YES"
needs_kernels = pytest.mark.skipif(not IN_USE, reason="runs in the process that test_with_kernels_in_use starts")

OPENED = ("gpt_neox", "glm", "cohere")
"""Families that transformers gives no slot."""
PAGE = Path(__file__).parents[3] / "docs" / "use-kernels.md"
DOCUMENTED_VERSION = "5.17."
LOADED = ("llama", "qwen3", "phi", "nanochat", *OPENED)
"""Plain, with q and k normed, partial, backwards; partial in its function, interleaved and partial, interleaved."""


@pytest.mark.skipif(IN_USE, reason="is the process that this test starts")
def test_with_kernels_in_use() -> None:
    command = [sys.executable, "-m", "pytest", "-q", Path(__file__)]
    environment = os.environ | {"USE_HUB_KERNELS": "YES", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parent
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "families have the slot" in run.stdout


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """Register, with transformers' own mapping cut down to its rotary kernel: the others would be downloaded."""
    if IN_USE:
        hub_kernels._KERNEL_MAPPING_CACHE = {SLOT: hub_kernels.get_kernel_mapping_transformers()[SLOT]}
        mrrope.register_kernels(*OPENED)
        mrrope.register_kernels(*OPENED)  # again: no effect


def text(model: nn.Module) -> Tensor:
    return tiny_models.tokens(2, 24).to(next(model.parameters()).device)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**tiny_models.inputs(model, text(model))).logits


@torch.enable_grad()
def gradients(model: Any) -> Tensor:
    """Return the gradients of all parameters, in one vector."""
    loss = model(**tiny_models.inputs(model, text(model))).logits.float().logsumexp(-1).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([x.flatten() for x in found if x is not None])


def counted(run: Any, model: Any) -> tuple[Tensor, int]:
    with OpCounter("rotary_cos_sin") as calls:
        result = run(model)
    return result, calls.count


def layers_of(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def restore(model: nn.Module) -> None:
    """Give the family's function its own code again: it is one module for all models of a process."""
    for module in model.modules():
        for function in getattr(module, "_kernel_funcs", {}).values():
            vars(function).pop("forward", None)


# --- loaded models ---


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LOADED)
def test_from_pretrained(device: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model(family, dtype=dtype).save_pretrained(tmp_path)
    load = lambda **options: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options).to(device)  # noqa: E731
    plain = load()
    restore(plain)
    assert counted(logits, plain)[1] == 0
    want, want_gradients = logits(plain), gradients(plain)
    limits = tolerance(plain, logits), tolerance(plain, gradients)

    model = load(device_map=device, use_kernels=True)
    assert not model.training
    logits(model)  # probes
    layers = layers_of(model)
    got, calls = counted(logits, model)
    assert calls == layers
    assert relative(got, want) < limits[0]
    for training in (True, False):
        model.train(training)
        got, calls = counted(gradients, model)
        assert calls == 2 * layers
        assert relative(got, want_gradients) < limits[1]
    restore(model)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "glm"])
def test_compiled(device: str, dynamo: None, family: str) -> None:
    model = tiny_model(family).to(device).train()
    hub_kernels.kernelize(model)
    want = gradients(model)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert relative(gradients(model), want) < 1e-5
    restore(model)


@needs_kernels
def test_generate(device: str) -> None:
    model = tiny_model("llama").to(device)
    restore(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(text(model), **options)
    hub_kernels.kernelize(model)
    with OpCounter("rotary_cos_sin") as calls:
        assert torch.equal(model.generate(text(model), **options), want)
    assert calls.count == 8 * layers_of(model)
    restore(model)


@needs_kernels
def test_the_stock_kernel_of_other_devices_stays() -> None:
    from kernels.layer.globals import _KERNEL_MAPPING

    hub_kernels.register_kernel_mapping_transformers()
    slot = _KERNEL_MAPPING.get()[SLOT]
    assert {"cpu", "cuda", "rocm", "xpu"} <= slot.keys()
    intervals = slot["cuda"].repos_by_capability
    found = [*intervals.find_smallest_interval(90).values()]
    assert isinstance(found[0], InProcess) != bool(build_info()["without_cuda"])


# --- every family ---

rows: dict[str, str] = {}


def slots_of(model: nn.Module) -> list[nn.Module]:
    functions = [f for module in model.modules() for f in getattr(module, "_kernel_funcs", {}).values()]
    return [function for function in functions if type(function).kernel_layer_name == SLOT]


def expect_own_logits(family: str) -> int:
    """Expect a kernelized model's own logits, and return the calls of the op."""
    model = tiny_model(family)
    restore(model)
    want, limit = logits(model), tolerance(model, logits)
    hub_kernels.kernelize(model)
    logits(model)  # probes
    got, calls = counted(logits, model)
    restore(model)
    assert relative(got, want) <= (limit if calls else 0.0)
    return calls


@needs_kernels
@pytest.mark.parametrize("family", tiny_models.causal_lm_families() if IN_USE else ["none"])
def test_family(family: str) -> None:
    """Families that have a slot, or can be given one, run the op and give their own logits."""
    model = tiny_model(family)
    module = type(model).__module__.split(".")[-2]
    if slots_of(model) and module not in OPENED and rows.get(module) != "opened":
        assert expect_own_logits(family) > 0
        rows[family] = "slot"
        return
    try:
        mrrope.register_kernels(module)
    except ValueError:
        rows[family] = "none"
    else:
        rows[family] = "opened" if expect_own_logits(family) else "none"


@needs_kernels
def test_which_families_have_the_slot(capsys: pytest.CaptureFixture[str]) -> None:
    if rows.keys() != set(tiny_models.causal_lm_families()):
        pytest.skip("says something only when every family was tried in the same run")
    found = {kind: {family for family, of in rows.items() if of == kind} for kind in ("slot", "opened", "none")}
    with capsys.disabled():
        for kind, families in found.items():
            print(f"\n{kind}: {' '.join(sorted(families))}")
        print(f"{len(found['slot'])} of {len(rows)} families have the slot")
    if transformers.__version__.startswith(DOCUMENTED_VERSION):
        for kind, row in (("slot", "have the slot"), ("opened", "can be given it")):
            count, patterns = documented_families(row)
            assert len(found[kind]) == count
            assert {family for family in rows if any(fnmatch(family, pattern) for pattern in patterns)} == found[kind]


def documented_families(row: str) -> tuple[int, list[str]]:
    """Return the count and the names, with wildcards, in a row of the page's table."""
    count, names = re.search(rf"^\| (\d+) {row} \| (.*) \|$", PAGE.read_text(), re.MULTILINE).groups()
    return int(count), names.replace("\\*", "*").split(", ")


# --- with patch ---


@needs_kernels
@pytest.mark.parametrize("first", ["kernelize", "patch"])
@pytest.mark.parametrize("family", LOADED)
def test_patched(family: str, first: str, recwarn: pytest.WarningsRecorder) -> None:
    """A patched model runs patch's op, whichever came first, and the kernel again when it is unpatched."""
    model, plain = tiny_model(family), logits(tiny_model(family))
    reference = mrrope.patch(tiny_model(family), "mrrope_pro", scale=4.0)
    want, limit = logits(reference), tolerance(reference, logits)
    mrrope.unpatch(reference)
    steps: dict[str, Any] = {
        "kernelize": hub_kernels.kernelize,
        "patch": lambda m: mrrope.patch(m, "mrrope_pro", scale=4.0),
    }
    for step in sorted(steps, reverse=first == "patch"):
        steps[step](model)
    got, calls = counted(logits, model)
    assert not [warning for warning in recwarn if "not the fused op" in str(warning.message)]
    assert calls == 0
    assert torch.equal(got, want)
    assert counted(logits, mrrope.unpatch(model))[1] == layers_of(model)
    assert relative(logits(model), plain) < limit
    restore(model)
    assert torch.equal(logits(model), plain)


@needs_kernels
def test_registered_after_patch() -> None:
    model = mrrope.patch(tiny_model("llama"), "mrrope_pro", scale=4.0)
    want = logits(model)
    mrrope.register_kernels()
    assert torch.equal(logits(model), want)
    mrrope.unpatch(model)


# --- the layer ---


def own(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb


@needs_kernels
@pytest.mark.parametrize(
    ("family", "convention"),
    {
        "llama": (False, "halves", "halves"),
        "nanochat": (True, "halves", "halves"),
        "gpt_oss": (False, "halves", "pairs"),
        "gpt_neox": (False, "halves", "halves"),
        "glm": (False, "interleaved", "halves"),
        "cohere": (False, "interleaved", "interleaved"),
    }.items(),
)
@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16])
def test_conventions(
    family: str, convention: tuple[Any, ...], default_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary_layer, "_FOUND", {})
    module = type(own(family))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        assert COLUMN_USES[column_use_of(module)] == convention
    finally:
        torch.set_default_dtype(before)


def call(**changes: Any) -> dict[str, Any]:
    cos, sin = (x.repeat(1, 1, 2) for x in torch.randn(2, 2, 5, 4))
    return {"q": torch.randn(2, 3, 5, 8), "k": torch.randn(2, 1, 5, 8), "cos": cos, "sin": sin} | changes


CALLS = {
    "as Llama calls it": ({}, 1),
    "a sequence for all": ({"cos": torch.ones(1, 5, 8), "sin": torch.ones(1, 5, 8)}, 1),
    "tokens first": ({"q": torch.randn(2, 5, 3, 8), "k": torch.randn(2, 5, 1, 8), "unsqueeze_dim": 2}, 1),
    "packed": (
        {"q": torch.randn(5, 3, 8), "k": torch.randn(5, 1, 8), "cos": torch.ones(5, 8), "sin": torch.ones(5, 8)},
        1,
    ),
    "strided heads": ({"q": torch.randn(2, 3, 8, 5).transpose(2, 3)}, 1),
    "two dtypes": ({"q": torch.randn(2, 3, 5, 8).double()}, 0),
    "cosines that have a gradient": ({"cos": torch.ones(2, 5, 8, requires_grad=True)}, 0),
    "keys of another length": ({"k": torch.randn(2, 1, 1, 8)}, 0),
    "a head dimension already": ({"cos": torch.ones(2, 5, 8)[:, None], "sin": torch.ones(2, 5, 8)[:, None]}, 0),
}


@needs_kernels
@pytest.mark.parametrize(("changes", "calls"), CALLS.values(), ids=CALLS.keys())
def test_what_the_op_does_not_take_runs_the_own_code(changes: dict[str, Any], calls: int) -> None:
    function: Any = modeling_llama.apply_rotary_pos_emb
    column_use_of(type(function))
    arguments = call(**changes)
    try:
        want = type(function).forward(function, **arguments)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20].replace("(", r"\(")):
            RotaryPosEmb.forward(function, **arguments)
        return
    with OpCounter("rotary_cos_sin") as counter:
        got = RotaryPosEmb.forward(function, **arguments)
    assert counter.count == calls
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_an_unknown_convention_runs_the_own_code() -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            return q + cos.unsqueeze(unsqueeze_dim), k

    arguments = call()
    assert column_use_of(Other) == -1
    got = RotaryPosEmb.forward(Other(), **arguments)  # type: ignore[arg-type]
    assert torch.equal(got[0], arguments["q"] + arguments["cos"][:, None])


# --- errors ---


@needs_kernels
def test_refused_model_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_slot, "_OPENED", set())
    assert_refused(
        lambda: mrrope.register_kernels("gptj"), ValueError, "model_types", "'gptj'", "(tensor: torch.Tensor"
    )
    assert_refused(lambda: mrrope.register_kernels("bert"), ValueError, "model_types", "'bert'", "none")
    with pytest.raises(ImportError):
        mrrope.register_kernels("no_such_family")
    model = mrrope.patch(tiny_model("glm4"), "mrrope_pro", scale=4.0)
    assert_refused(lambda: mrrope.register_kernels("glm4"), ValueError, "not patched", "'glm4'", "unpatch first")
    mrrope.unpatch(model)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert_refused(mrrope.register_kernels, ImportError, "needs the package kernels", "pip install kernels")
