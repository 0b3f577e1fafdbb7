"""Every RoPE family of the installed transformers, exported: the patched model's logits by transformers alone, or one
line that says why not."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mrrope
from mrrope.export import ENGINES

pytest.importorskip("transformers")

import plain_transformers
import tiny_models

pytestmark = pytest.mark.usefixtures("quiet_transformers")

LENGTHS = (20, 100, 100)
"""Below the trained length of 64 tokens and, twice, past it: transformers changes state at the first time."""
FAMILIES = tiny_models.causal_lm_families()
NO_MODULE = "rotary position embeddings, and .* has none"
STANDING_STILL = "some pairs of .* do not rotate"
SEVERAL = "parts of it have RoPEs that differ from rope_parameters"
REFUSED = {
    "blt": SEVERAL,
    "codegen": NO_MODULE,
    "gemma4": STANDING_STILL,
    "gemma4_assistant": STANDING_STILL,
    "gemma4_text": STANDING_STILL,
    "gemma4_unified": STANDING_STILL,
    "gemma4_unified_assistant": STANDING_STILL,
    "gemma4_unified_text": STANDING_STILL,
    "gptj": NO_MODULE,
    "granite_swa": SEVERAL,
    "granitemoe_swa": SEVERAL,
    "recurrent_gemma": "original_max_position must be given",
    "roformer": NO_MODULE,
}
"""What no configuration of transformers can say, and why."""


def strict_export(model, engine: str) -> dict | str:
    """An exported configuration as JSON gives it back, or the one line of an error."""
    try:
        exported = mrrope.export_config(model.config, "mrrope_pro", scale=4.0, engine=engine)
    except ValueError as error:
        return str(error)
    return json.loads(json.dumps(exported, allow_nan=False))


@torch.no_grad()
def logits(model) -> list[torch.Tensor]:
    return [model(**tiny_models.inputs(model, tiny_models.tokens(1, length))).logits for length in LENGTHS]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@torch.no_grad()
def tolerance(model, want: list[torch.Tensor]) -> float:
    """Eight times what rounding its embeddings once does to the model; transformers' angles, float32, are off by
    100 * 6e-8, so no less than 1e-5."""
    weight = model.get_input_embeddings().weight
    kept = weight.clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight *= 1 + torch.finfo(weight.dtype).eps * noise
    effect = max(map(relative, logits(model), want))
    weight.copy_(kept)
    return max(1e-5, 8 * effect)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, quiet_transformers) -> dict[str, tuple[list[torch.Tensor] | str, list, list, float]]:
    """By family: the logits of transformers alone, those of the patched model and of the stock one, and a tolerance."""
    root: Path = tmp_path_factory.mktemp("exported")
    expected = {}
    for family in FAMILIES:
        model = tiny_models.tiny_model(family)
        exported = strict_export(model, "transformers-longrope")
        if isinstance(exported, str):
            continue
        folder = root / family
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(exported))
        attention = model.config._attn_implementation
        weights = {"class": type(model).__name__, "attention": attention, "state": model.state_dict()}
        torch.save(weights, folder / "weights.pt")
        stock = logits(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of families that get the table but not the fused op
            mrrope.patch(model, "mrrope_pro", scale=4.0)
        patched = logits(model)
        expected[family] = patched, stock, tolerance(model, patched)
    script = Path(plain_transformers.__file__)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [sys.executable, script, root, *map(str, LENGTHS)]
    subprocess.run(arguments, check=True, cwd=script.parent, env=environment)
    return {family: (torch.load(root / family / "logits.pt"), *known) for family, known in expected.items()}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_transformers_alone_gives_the_patched_models_logits(family, compared):
    found, patched, stock, allowed = compared[family]
    assert not isinstance(found, str), found
    assert max(map(relative, found, patched)) < allowed
    assert max(map(relative, stock, patched)) > 10 * allowed, "the new table must matter"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_engine_gets_strict_json_or_one_line(family):
    model = tiny_models.tiny_model(family)
    results = {engine: strict_export(model, engine) for engine in ENGINES}
    refused = isinstance(results["transformers-longrope"], str)
    assert refused == (family in REFUSED), results["transformers-longrope"]
    if refused:
        with pytest.raises(ValueError, match=REFUSED[family]):
            mrrope.export_config(model.config, "mrrope_pro", scale=4.0, engine="transformers-longrope")
    assert not any("\n" in result for result in results.values() if isinstance(result, str))
    for engine in ("vllm", "sglang"):
        # What transformers itself cannot be told, they cannot.
        assert isinstance(results[engine], str) or not refused
