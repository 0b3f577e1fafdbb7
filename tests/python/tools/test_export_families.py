"""Exports of every RoPE family of the installed transformers: the patched model's logits without mrrope, or a one-line
error."""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import mrrope
from mrrope.export.hf_config import ENGINES

pytest.importorskip("transformers")

import logits_without_mrrope
import tiny_models
from model_tolerance import relative, tolerance

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_transformers")]

ENGINE = "transformers-longrope"
LENGTH = 100
"""Past the trained length of 64 tokens."""
FAMILIES = tiny_models.causal_lm_families()
NO_MODULE = "rotary position embeddings, and .* has none"
UNROTATED_PAIRS = "some pairs of .* do not rotate"
SEVERAL_ROPES = "parts of it have RoPEs that differ from rope_parameters"
REFUSED = {
    "blt": SEVERAL_ROPES,
    "codegen": NO_MODULE,
    "gemma4": UNROTATED_PAIRS,
    "gemma4_assistant": UNROTATED_PAIRS,
    "gemma4_text": UNROTATED_PAIRS,
    "gemma4_unified": UNROTATED_PAIRS,
    "gemma4_unified_assistant": UNROTATED_PAIRS,
    "gemma4_unified_text": UNROTATED_PAIRS,
    "gptj": NO_MODULE,
    "granite_swa": SEVERAL_ROPES,
    "granitemoe_swa": SEVERAL_ROPES,
    "recurrent_gemma": "original_max_position must be given",
    "roformer": NO_MODULE,
}
"""Families that no configuration of transformers can express, and why."""


@dataclass
class Exported:
    """A family's exports, and the logits to compare."""

    results: dict[str, dict | str]
    """By engine: the configuration, or the one-line error."""
    stock: torch.Tensor | None = None
    """None, like all fields below, where there is no configuration for transformers without mrrope."""
    patched: torch.Tensor | None = None
    tolerance: float | None = None
    alone: list[torch.Tensor] | str | None = None
    """Logits of consecutive forward calls without mrrope, or the error that transformers raised."""


def export_to(engine: str, model) -> dict | str:
    try:
        return mrrope.export_config(model.config, "mrrope_pro", scale=4.0, engine=engine)
    except ValueError as error:
        return str(error)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(**tiny_models.inputs(model, tiny_models.tokens(1, LENGTH))).logits


def save(model, config: dict, folder: Path) -> None:
    """Save what the process without mrrope reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    attention = model.config._attn_implementation
    torch.save(
        {"class": type(model).__name__, "attention": attention, "state": model.state_dict()}, folder / "weights.pt"
    )


@pytest.fixture(scope="module")
def exports(tmp_path_factory, quiet_transformers) -> dict[str, Exported]:
    root: Path = tmp_path_factory.mktemp("exported")
    exports = {}
    for family in FAMILIES:
        model = tiny_models.tiny_model(family)
        exports[family] = found = Exported({engine: export_to(engine, model) for engine in ENGINES})
        if isinstance(found.results[ENGINE], str):
            continue
        save(model, found.results[ENGINE], root / family)
        found.stock, found.tolerance = logits(model), tolerance(model, logits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # families that get the table but not the fused op warn
            mrrope.patch(model, "mrrope_pro", scale=4.0)
        found.patched = logits(model)
    script = Path(logits_without_mrrope.__file__)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [sys.executable, script, root, *(str(LENGTH) for _ in range(2))]
    subprocess.run(arguments, check=True, cwd=script.parent, env=environment)
    for folder in root.iterdir():
        exports[folder.name].alone = torch.load(folder / "logits.pt")
    return exports


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_transformers_alone_gives_the_patched_models_logits(family, exports):
    """Two calls, because the first past the original length changes the module's state."""
    found = exports[family]
    assert isinstance(found.alone, list), found.alone
    assert max(relative(one, found.patched) for one in found.alone) < found.tolerance
    assert relative(found.stock, found.patched) > 10 * found.tolerance, "the new table must matter"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_engine_gets_strict_json_or_one_line(family, exports):
    results = exports[family].results
    for result in results.values():
        if isinstance(result, str):
            assert "\n" not in result
        else:
            assert json.loads(json.dumps(result, allow_nan=False)) == result
    why = results[ENGINE] if isinstance(results[ENGINE], str) else None
    assert (why is not None) == (family in REFUSED), why
    if why is not None:
        assert re.search(REFUSED[family], why)
        # Engines based on transformers cannot express what transformers cannot.
        assert all(isinstance(results[engine], str) for engine in ("vllm", "sglang"))
