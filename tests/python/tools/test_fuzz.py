"""The fuzzer: its reference, short runs, and planted bugs that it finds and shrinks."""

import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
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

pytestmark = pytest.mark.slow

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


def test_every_op_is_fuzzed() -> None:
    in_place = {name.removesuffix("_") for name in op_checks.CALLS}
    assert {path.stem for path in (Path(mrrope.__file__).parent / "ops").glob("[a-z]*.py")} - in_place == {
        "decompositions",
        "launch_log",
    }


def is_vectorized(case: OpCase) -> bool:
    """Return whether heads and caches are made of aligned vectors of 16 bytes."""
    vector = 16 // case.torch_dtype.itemsize
    fits = case.rotary_dim // 2 % vector == 0 and case.head_dim % (2 * vector) == 0
    return fits and case.memory != "unaligned" and case.cache_memory != "unaligned"


def threads_of(case: OpCase, heads: int) -> int:
    """Return the threads that a launch has with one head and two vectors each, as the launch plans count them."""
    lanes = case.head_dim * case.torch_dtype.itemsize // 32
    return case.sequences * case.tokens * heads * lanes


def has_eight_heads_per_thread(case: OpCase) -> bool:
    """Return whether the plans in kernels/qk_norm_rotary*_plan.cpp give a thread eight heads of this case."""
    if case.over != "head" or case.table_heads > 1 or not is_vectorized(case) or case.fault or case.q_heads <= 4:
        return False
    if case.op == "qk_norm_rotary_and_cache_":
        least = 3 << (18 if case.float8 and not case.q_float8 else 17)
        return threads_of(case, case.q_heads + 2 * case.k_heads) >= least
    has_lookup = case.tables != "one" or case.position_rows > 0
    return threads_of(case, case.q_heads + case.k_heads * case.has_k) >= (1 << 18 if has_lookup else 1 << 21)


def test_large_cases_reach_the_plans_of_large_launches() -> None:
    rng = random.Random(1)
    drawn = [draw(OpCase, rng, device="cuda", **op_checks.large_shape(rng, "cuda")) for _ in range(2500)]
    for op in ("qk_norm_rotary", "qk_norm_rotary_", "qk_norm_rotary_and_cache_"):
        of_op = [case for case in drawn if case.op == op and has_eight_heads_per_thread(case)]
        assert sum(case.tables == "one" and not case.position_rows for case in of_op) > 3, op
        assert sum(case.tables != "one" or case.position_rows > 0 for case in of_op) > 3, op
    assert 2**26 <= max(case.components for case in drawn) < 2**27


@pytest.mark.parametrize(("on", "least", "most"), [("cpu", 1, 15), ("cuda", 15, 60)])
def test_a_share_of_the_cases_is_large(on: str, least: int, most: int) -> None:
    rng = random.Random(2)
    assert least <= sum(op_checks.random_case(rng, on).size > 0 for _ in range(5000)) <= most


def test_a_large_case_runs_and_shrinks() -> None:
    case = OpCase(op="qk_norm_rotary_and_cache_", q_heads=8, k_heads=2, head_dim=64, rotary_dim=64, size=2**17)
    case = case.normalized()
    assert case.components >= 2**17
    case.run()
    smallest = shrink(case, lambda case: CaseError("has heads") if case.q_heads > 4 else None)
    assert changed_fields(smallest) == {"q_heads": 5}


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


CACHE_OPS = ["rotary_and_cache_", "qk_norm_rotary_and_cache_"]


@pytest.mark.parametrize("op", CACHE_OPS)
def test_cache_ops_that_read_one_position_of_several_are_found(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    case = OpCase(op=op, tokens=5, head_dim=16, rotary_dim=16, position_rows=3, reach=4096, seed=3)
    case.run()
    replace(case, table_heads=2, q_heads=4, k_heads=2, tables="index", table_count=3).normalized().run()
    called = getattr(mrrope, op)
    monkeypatch.setattr(mrrope, op, lambda positions, **rest: called(positions=positions[:1].expand(3, -1, -1), **rest))
    (failure,) = op_checks.failures_in([case])
    assert failure is not None
    assert failure.kind == f"{op}: q against float64"


def test_a_lost_nan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OpCase(op="rotary_cos_sin", head_dim=16, rotary_dim=8, special="heads")
    case.run()
    rotary_cos_sin = mrrope.rotary_cos_sin
    monkeypatch.setattr(
        mrrope, "rotary_cos_sin", lambda **given: [torch.nan_to_num(x, nan=0.0) for x in rotary_cos_sin(**given)]
    )
    (failure,) = op_checks.failures_in([case])
    assert failure is not None
    assert failure.kind == "rotary_cos_sin: q against float64"


def test_the_bits_of_a_nan_may_differ_between_a_call_and_its_copy() -> None:
    case = OpCase(op="rotary_cos_sin", layout="thd", tokens=2, q_heads=3, k_heads=3, memory="expanded", special="both",
                  alias="k", alias_form="heads", columns_memory="expanded", columns_dtype="float32",
                  seed=157919817)  # fmt: skip
    case.run()


@pytest.mark.parametrize(
    ("value", "is_right"), [(math.nan, True), (math.inf, False), (0.0, False)], ids=["NaN", "infinity", "zero"]
)
def test_a_nan_is_right_only_where_one_is_expected(value: float, is_right: bool) -> None:
    expected, found = torch.tensor([1.0, math.nan, -math.inf]).double(), torch.tensor([1.0, value, -math.inf])
    assert float64_reference.exceeds(found, expected, 1e-6).item() is not is_right
    assert float64_reference.exceeds(torch.full((3,), math.nan), torch.ones(3).double(), 1e-6)
    assert float64_reference.exceeds(torch.tensor([math.inf]), torch.tensor([-math.inf]).double(), 1e-6)
    assert float64_reference.exceeds(torch.tensor([3e38]), torch.tensor([math.inf]).double(), math.inf)


@pytest.mark.parametrize(
    ("found", "expected", "is_right"),
    [(math.inf, 84015.0, True), (-math.inf, -84015.0, True), (math.inf, 65490.0, True), (65504.0, 65510.0, True),
     (-math.inf, 84015.0, False), (math.inf, 60000.0, False), (65504.0, 84015.0, False), (math.nan, 84015.0, False)],
)  # fmt: skip
def test_an_infinity_is_right_beyond_the_largest_number_of_the_dtype(
    found: float, expected: float, is_right: bool
) -> None:
    # A sum of 520 products of float16 numbers around 100 was 84015; see the gradient of q_weight of qk_norm_rotary.
    actual = torch.tensor([found], dtype=torch.float16)
    assert float64_reference.exceeds(actual, torch.tensor([expected]).double(), 32.0).item() is not is_right


ALIASED = [(op, "k", form) for op in (*CACHE_OPS, "mla_rotary_and_cache_") for form in ("itself", "view", "heads")]
ALIASED += [(op, "v", "itself") for op in (*CACHE_OPS, "mla_rotary_and_cache_")]
ALIASED += [(op, "k", "itself") for op in ("rotary", "qk_norm_rotary", "rotary_cos_sin")]


@pytest.mark.parametrize(("op", "alias", "form"), ALIASED)
def test_q_is_a_valid_key_where_it_is_not_written(op: str, alias: str, form: str) -> None:
    shape = {"tokens": 5, "q_heads": 2, "k_heads": 2, "head_dim": 16, "rotary_dim": 8, "reach": 4096}
    case = OpCase(op=op, alias=alias, alias_form=form, q_out=True, **shape).normalized()
    call = op_checks.CALLS[op](case)
    assert call.conflict() == []
    assert call.arguments[call.alias].data_ptr() == call.arguments[call.query].data_ptr()
    case.run()


@pytest.mark.parametrize("op", [*CACHE_OPS, "mla_rotary_and_cache_"])
def test_q_in_place_that_is_also_the_key_is_found(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    case = OpCase(op=op, alias="k").normalized()
    call = op_checks.CALLS[op](case)
    assert call.arguments[call.alias] is call.arguments[call.query]
    assert call.conflict() == [call.query, call.alias]
    monkeypatch.setattr(mrrope, op, lambda **given: given[call.query].zero_())
    (failure,) = op_checks.failures_in([case])
    assert failure is not None
    assert failure.kind == f"{op}: takes {call.query} itself as {call.alias}"


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
