"""The fuzzer: its reference, short runs, and planted bugs that it finds and shrinks."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from rotary_cases import Case, cases
from rotary_reference import rotated

import mrrope

pytest.importorskip("transformers")

from fuzz import float64_reference, model_checks, op_checks
from fuzz.campaign import Campaign, campaign_for
from fuzz.float64_reference import PhaseSteps
from fuzz.model_cases import ModelCase
from fuzz.op_cases import OpCase
from fuzz.shrinking import CaseError, changed_fields, draw, reproduction_script, shrink

TESTS = Path(__file__).parents[2]
FAMILIES = ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt_neox", "mistral"]


@given(case=cases())
@settings(max_examples=60)
def test_the_reference_on_a_device_is_the_one_in_numpy(device: str, case: Case) -> None:
    q, _ = case.heads_on(device)
    positions, table = case.positions(device), case.table()
    by = float64_reference.rotations(positions, PhaseSteps.of([table], device), case.layout, None)
    want = rotated(q, positions, table, case.layout, case.pairing)
    torch.testing.assert_close(float64_reference.rotated(q, by, case.pairing).cpu(), want, rtol=0.0, atol=1e-14)


def test_random_op_calls(device: str, tmp_path: Path) -> None:
    fuzzing = campaign_for("ops", device, tmp_path)
    result = fuzzing.run(seed=20, seconds=600.0, most=400)
    assert not result["finds"], result["finds"]
    assert result["cases"] == 400
    assert result["by"].keys() == set(op_checks.CALLS)


@pytest.mark.usefixtures("quiet_transformers")
def test_random_model_runs(tmp_path: Path) -> None:
    fuzzing = Campaign("models", lambda rng: draw(ModelCase, rng, device="cpu", family=rng.choice(FAMILIES)),
                       lambda case: case.family, model_checks.failures_in, tmp_path)  # fmt: skip
    result = fuzzing.run(seed=20, seconds=600.0, most=12)
    assert not result["finds"], result["finds"]
    assert result["cases"] == 12


def test_a_planted_bug_is_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: an error of 1 % for interleaved pairs in bshd with more than one sequence."""
    rotary = mrrope.rotary

    def slightly_wrong(q, k, positions, table, layout="bhsd", pairing="halves", table_index=None):
        q, k = rotary(q, k, positions, table, layout, pairing, table_index)
        is_wrong = pairing == "interleaved" and layout == "bshd" and len(q) > 1
        return (q * 1.01 if is_wrong else q), k

    monkeypatch.setattr(mrrope, "rotary", slightly_wrong)
    fuzzing = Campaign("ops", lambda rng: draw(OpCase, rng, device="cpu", mode="eager", op="rotary"),
                       lambda case: case.op, op_checks.failures_in, tmp_path, batch=10)  # fmt: skip
    result = fuzzing.run(seed=0, seconds=600.0, most=400)
    (find,) = [find for find in result["finds"] if find["failure"] == "rotary: q against float64"]
    small = {"layout": "bshd", "pairing": "interleaved", "batch": 2}
    (script,) = find["scripts"]
    assert "OpCase(layout='bshd', pairing='interleaved', batch=2)" in script
    monkeypatch.undo()
    OpCase(**small).run()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [
        s for f in result["finds"] for s in f["scripts"]
    ]


def test_an_accepted_invalid_argument_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OpCase(fault="positions: floats")
    case.run()
    rotary = mrrope.rotary
    monkeypatch.setattr(mrrope, "rotary", lambda positions, **rest: rotary(positions=positions.long(), **rest))
    (failure,) = op_checks.failures_in([case])
    assert failure is not None
    assert failure.kind == "rotary: takes positions: floats"


def test_a_rejected_call_that_writes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_and_refuses(q, **rest):
        q.zero_()
        raise ValueError("positions must be integers, got something else")

    monkeypatch.setattr(mrrope, "rotary_", writes_and_refuses)
    (failure,) = op_checks.failures_in([OpCase(op="rotary_", fault="positions: floats")])
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
    (failure,) = model_checks.failures_in([case])
    assert failure is not None
    assert failure.kind == "a model is not stock to the bit when unpatched"


# Families with a table of 64 positions: an index past its end raises on a CPU and kills the process on a GPU.
POSITION_TABLES = ["codegen", "gptj", "roformer"]


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("family", POSITION_TABLES)
def test_a_length_that_fails_on_the_cpu_never_runs_on_a_device(family: str) -> None:
    """The meta device, as a GPU, does not raise where an index is out of range."""
    case = ModelCase(device="meta", family=family, mode="steps", length=66)
    runs = []
    handle = case.model().register_forward_pre_hook(lambda *_: runs.append(1))
    case.run()
    handle.remove()
    assert not runs


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("family", POSITION_TABLES)
def test_models_with_a_table_of_positions_keep_the_gpu_alive(cuda: str, family: str) -> None:
    ModelCase(device=cuda, family=family, mode="steps", length=66, scale=2.0).run()
    ModelCase(device=cuda, family=family, mode="steps", length=17, scale=2.0).run()


@pytest.mark.usefixtures("quiet_transformers")
def test_a_lost_device_ends_a_campaign_at_the_case_that_lost_it(tmp_path: Path) -> None:
    case = ModelCase(method="mrrope_pro", scale=2.0, length=9)

    def lose(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    fuzzing = Campaign("models", lambda _: case, lambda case: case.family, model_checks.failures_in, tmp_path)
    handle = case.model().register_forward_pre_hook(lose)
    with pytest.raises(torch.AcceleratorError):
        fuzzing.run(seed=0, seconds=600.0, most=2)
    handle.remove()
    assert (tmp_path / "lost-device.txt").read_text() == f"{case!r}\n"


def test_shrinking_ends_at_the_simplest_case_that_fails() -> None:
    case = draw(OpCase, random.Random(3), device="cpu", tokens=65, q_heads=8)
    smallest = shrink(case, lambda case: CaseError("too many") if case.tokens * case.q_heads > 20 else None)
    assert changed_fields(smallest).keys() <= {"tokens", "q_heads"}
    assert smallest.tokens * smallest.q_heads > 20


def run_in_tests(*arguments: object) -> None:
    paths = [".", "python/support", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, cwd=TESTS, env=environment, check=True, capture_output=True, timeout=240)


def test_command_line(tmp_path: Path) -> None:
    options = ["--only", "ops", "--cases", "40", "--seed", "5", "--finds", tmp_path]
    run_in_tests("-m", "fuzz", *options, "--output", tmp_path / "result.json")
    assert '"cases": 40' in (tmp_path / "result.json").read_text()


def test_a_script_and_its_replay_command_run(tmp_path: Path) -> None:
    script = reproduction_script(OpCase(op="rotary_", batch=2), CaseError("kind", "detail"))
    (tmp_path / "script.py").write_text(script)
    run_in_tests(tmp_path / "script.py")
    (case,) = re.findall("--replay '(.*)'", script)
    run_in_tests("-m", "fuzz", "--replay", case)
