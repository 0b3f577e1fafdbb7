"""The fuzz target itself: its references, a short run, and a planted bug that it finds and shrinks."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, cases
from hypothesis import given, settings
from reference import rotated

import mrrope

pytest.importorskip("transformers")

from fuzz import exact, models, ops
from fuzz.campaign import Campaign
from fuzz.exact import Steps
from fuzz.model_cases import ModelCase
from fuzz.op_cases import OpCase
from fuzz.shrinking import changed_fields, draw, shrink

TESTS = Path(__file__).parents[2]
FAMILIES = ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt_neox", "mistral"]


@given(case=cases())
@settings(max_examples=60)
def test_the_reference_on_a_device_is_the_one_in_numpy(device: str, case: Case) -> None:
    q, _ = case.heads_on(device)
    positions, table = case.positions(device), case.table()
    by = exact.rotations(positions, Steps.of([table], device), case.layout, None)
    want = rotated(q, positions, table, case.layout, case.pairing)
    torch.testing.assert_close(exact.rotated(q, by, case.pairing).cpu(), want, rtol=0.0, atol=1e-14)


def test_random_op_calls(device: str, tmp_path: Path) -> None:
    fuzzing = Campaign("ops", lambda rng: ops.random_case(rng, device), lambda case: case.op, ops.failures_in, tmp_path,
                       batch=50)  # fmt: skip
    result = fuzzing.run(seed=20, seconds=60.0, most=400)
    assert not result["finds"], result["finds"]
    assert result["cases"] == 400
    assert result["by"].keys() == set(ops.ATTEMPTS)


@pytest.mark.usefixtures("quiet_transformers")
def test_random_model_runs(tmp_path: Path) -> None:
    fuzzing = Campaign("models", lambda rng: draw(ModelCase, rng, device="cpu", family=rng.choice(FAMILIES)),
                       lambda case: case.family, models.failures_in, tmp_path)  # fmt: skip
    result = fuzzing.run(seed=20, seconds=60.0, most=12)
    assert not result["finds"], result["finds"]
    assert result["cases"] == 12


def test_a_planted_bug_is_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a thousandth, for few calls: interleaved pairs of bfloat16 in more than one sequence."""
    rotary = mrrope.rotary

    def slightly_wrong(q, k, positions, table, layout="bhsd", pairing="halves", table_index=None):
        q, k = rotary(q, k, positions, table, layout, pairing, table_index)
        is_wrong = pairing == "interleaved" and layout == "bshd" and len(q) > 1
        return (q * 1.01 if is_wrong else q), k

    monkeypatch.setattr(mrrope, "rotary", slightly_wrong)
    fuzzing = Campaign("ops", lambda rng: draw(OpCase, rng, device="cpu", way="eager", op="rotary"),
                       lambda case: case.op, ops.failures_in, tmp_path, batch=10)  # fmt: skip
    result = fuzzing.run(seed=0, seconds=60.0, most=400)
    (find,) = [find for find in result["finds"] if find["failure"] == "rotary: q against float64"]
    small = {"layout": "bshd", "pairing": "interleaved", "batch": 2}
    assert all("OpCase(layout='bshd', pairing='interleaved', batch=2)" in script for script in find["scripts"])
    monkeypatch.undo()
    OpCase(**small).run()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [
        s for f in result["finds"] for s in f["scripts"]
    ]


def test_a_call_that_takes_what_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OpCase(fault="positions: floats")
    case.run()
    rotary = mrrope.rotary
    monkeypatch.setattr(mrrope, "rotary", lambda positions, **rest: rotary(positions=positions.long(), **rest))
    (failure,) = ops.failures_in([case])
    assert failure is not None
    assert failure.kind == "rotary: takes positions: floats"


def test_a_refusal_that_writes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_and_refuses(q, **rest):
        q.zero_()
        raise ValueError("positions must be integers, got something else")

    monkeypatch.setattr(mrrope, "rotary_", writes_and_refuses)
    (failure,) = ops.failures_in([OpCase(op="rotary_", fault="positions: floats")])
    assert failure is not None
    assert "though it refused" in failure.kind


@pytest.mark.usefixtures("quiet_transformers")
def test_a_model_that_is_not_restored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ModelCase(method="mrrope_pro", scale=2.0, length=9)
    case.run()
    unpatch = mrrope.unpatch

    def forgetful(model):
        unpatch(model)
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                buffer.mul_(1.001)

    monkeypatch.setattr(mrrope, "unpatch", forgetful)
    (failure,) = models.failures_in([case])
    assert failure is not None
    assert failure.kind == "a model is not stock to the bit when unpatched"


def test_shrinking_ends_at_the_simplest_case_that_fails() -> None:
    case = draw(OpCase, random.Random(3), device="cpu", tokens=65, q_heads=8)
    smallest = shrink(case, lambda case: ops.CaseError("too many") if case.tokens * case.q_heads > 20 else None)
    assert changed_fields(smallest).keys() <= {"tokens", "q_heads"}
    assert smallest.tokens * smallest.q_heads > 20


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuzz", "--only", "ops", "--cases", "40", "--seed", "5", "--finds", tmp_path,
               "--output", tmp_path / "result.json"]  # fmt: skip
    replay = [sys.executable, "-m", "fuzz", "--replay", '{"kind": "OpCase", "op": "rotary_", "batch": 2}']
    for arguments in (command, replay):
        subprocess.run(arguments, cwd=TESTS, env=environment(), check=True, capture_output=True, timeout=240)
    assert '"cases": 40' in (tmp_path / "result.json").read_text()


def environment() -> dict[str, str]:
    paths = [str(TESTS / "python"), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
