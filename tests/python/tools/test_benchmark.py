"""``mrrope bench``: correct workloads, interleaved timing, and failures of peers."""

import importlib.metadata
import json
import math
import time

import pytest
import torch

from mrrope.benchmark import implementations, measure, peers, report, timing, workloads
from mrrope.benchmark.implementations import OURS, TRANSFORMERS, Contender, ours_by_cos_sin
from mrrope.benchmark.timing import COPY, COPY_BY_KERNEL, InterleavedTimer, interleaved_medians, with_faster_copy
from mrrope.benchmark.workloads import CASES, LAYOUTS, Case, Heads, Positions
from mrrope.cli import main

SMALL = [
    *(Case(5, 3, 2, layout=layout, head_dim=16, rotary_dim=16, dtype="float32") for layout in LAYOUTS),
    Case(5, 3, 2, head_dim=16, rotary_dim=8, dtype="float32"),
    Case(5, 3, 2, head_dim=16, rotary_dim=16, dtype="float32", pairing="interleaved"),
    Case(5, 3, 2, head_dim=16, rotary_dim=16, dtype="float32", backward=True),
    Case(5, 3, 2, head_dim=16, rotary_dim=16, dtype="bfloat16"),
]


@pytest.mark.parametrize("device", sorted(CASES))
def test_rows_have_names_of_their_own(device):
    names = [case.name for case in CASES[device]]
    assert len(set(names)) == len(names)


def test_every_contender_can_have_a_colour_of_its_own():
    assert len(set(report.COLOURS)) == len(report.COLOURS) >= len((*OURS, *TRANSFORMERS, *peers.PEERS))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_all_implementations_rotate_alike(case):
    """mrrope and transformers agree with the benchmark's own reference."""
    for contender in (*OURS, *TRANSFORMERS):
        if contender.takes(case):
            error = measure.relative_error(case, contender, "cpu")
            # transformers computes angles in float32.
            by_its_angles = contender in TRANSFORMERS or contender.rotate is ours_by_cos_sin
            angle_error = measure.CONTEXT_BEFORE * 2.0**-24 if by_its_angles else 0.0
            assert error < (5e-7 if case.dtype == "float32" else 5e-3) + angle_error, contender.name


def test_a_wrong_rotation_is_an_error_of_its_size():
    def unrotated(heads: Heads):
        return heads.rotated()

    assert measure.relative_error(SMALL[0], Contender("wrong", unrotated), "cpu") > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_what_they_are_called(layout):
    case = Case(5, 3, 2, layout=layout, head_dim=16, rotary_dim=16)
    heads = Heads(case, Positions(case, "cpu"))
    assert heads.by_head(heads.q).shape == (1, 3, 5, 16)
    assert heads.by_token(heads.k).shape == (1, 5, 2, 16)
    assert heads.by_token(heads.q).is_contiguous() == (layout != "bhsd")
    assert heads.by_head(heads.q).data_ptr() == heads.q.data_ptr()
    assert sum(copy.numel() for copy in heads.copies) == case.bytes == 2 * 5 * (3 + 2) * 16 * 2


def test_tables_of_peers_hold_our_frequencies():
    case = Case(7, head_dim=16, rotary_dim=16, dtype="float32")
    shared = Positions(case, "cpu", first=3)
    exact = torch.arange(3, 10).double()[:, None] * shared.table.inv_freq
    cos, sin = shared.cos_sin
    torch.testing.assert_close(cos[0].double(), torch.cat([exact, exact], -1).cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, :, :8].double(), exact.sin(), rtol=0, atol=1e-5)
    torch.testing.assert_close(shared.cache[3:].double(), torch.cat([exact.cos(), exact.sin()], -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(shared.angles[:, 0, 0, :8].double(), exact, rtol=1e-6, atol=0)


def test_a_peer_that_fails_is_named_and_the_rest_goes_on():
    def broken(heads):
        raise RuntimeError("made for another torch, at /home/somebody/peer/op.cuh:7: head_dim 3/4")

    (row,) = measure.measure(SMALL[:1], (*OURS[:1], Contender("peer", broken)), "cpu")
    # Results files hold no paths, only file names.
    assert row["failures"] == {"peer": "RuntimeError: made for another torch, at op.cuh:7: head_dim 3/4"}
    assert set(row["seconds"]) == set(row["errors"]) | {"copy"} == {"copy", OURS[0].name}
    with pytest.raises(RuntimeError, match="made for another torch"):
        next(measure.measure(SMALL[:1], (Contender("mrrope", broken),), "cpu"))


def test_a_peer_that_fails_when_it_is_timed_is_named_too():
    """For example for lack of memory: the correctness check has only a few tokens."""
    rotations = iter([OURS[0].rotate])
    peer = Contender("peer", lambda heads: next(rotations)(heads))
    (row,) = measure.measure(SMALL[:1], (*OURS[:1], peer), "cpu")
    assert row["failures"] == {"peer": "StopIteration: "}
    assert set(row["seconds"]) == {"copy", *row["errors"]} == {"copy", OURS[0].name}


def test_peers_skip_cases_that_abort_the_process():
    takes = {name: takes for name, _, takes in peers.PEERS}["flashinfer"]
    wide = {case.head_dim: takes(case) for case in workloads.CASES["cuda"] if case.dtype == "bfloat16"}
    assert {head_dim: wide[head_dim] for head_dim in (64, 80, 96, 128)} == {64: True, 80: False, 96: False, 128: True}


def test_versions_of_peers():
    assert peers.versions(["torch", "no_such_peer"]) == {"torch": importlib.metadata.version("torch")}


def test_a_capture_that_breaks_off_leaves_the_others_a_pool(monkeypatch):
    """torch refuses to capture into a pool that a failed capture has used."""
    pools, broken = iter(range(9)), set()

    def graph_of(steps, pool):
        if pool in broken:
            raise RuntimeError("already recording")
        for step in steps:
            broken.add(pool)
            step()
            broken.remove(pool)
        return lambda: None

    monkeypatch.setattr(timing, "_discard_first_graph", lambda: None)
    monkeypatch.setattr(timing, "_capture", graph_of)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    timer = timing.InterleavedTimer("cuda")
    with pytest.raises(ZeroDivisionError):
        timer.add("broken", [lambda: 1 / 0])
    timer.add("whole", [lambda: 1])
    assert timer.names == ["whole"]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(workloads.CASES, "cpu", SMALL[:2])
    monkeypatch.setattr(implementations, "MAX_DECODE_TOKENS", 1)
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path / "speed")]) == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    assert [row["name"] for row in record["rows"]] == [case.name for case in SMALL[:2]]
    assert record["complete"]
    for row in record["rows"]:
        assert row["seconds"].keys() == {"copy", *row["errors"]}
        assert all(0 < value < math.inf for value in row["seconds"].values())
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "transformers eager" in printed
    assert "torch, mul_" in printed


def test_rows_before_an_error_of_the_gpu_are_kept(tmp_path, monkeypatch):
    medians, taken = timing.InterleavedTimer.medians, []

    def medians_once(timer):
        if taken:
            raise RuntimeError("an illegal memory access was encountered")
        taken.append(timer)
        return medians(timer)

    monkeypatch.setitem(workloads.CASES, "cpu", SMALL[:2])
    monkeypatch.setattr(timing.InterleavedTimer, "medians", medians_once)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(["bench", "--device", "cpu", "--output", str(tmp_path / "speed")])
    record = json.loads((tmp_path / "speed.json").read_text())
    assert [row["name"] for row in record["rows"]] == [SMALL[0].name]
    assert not record["complete"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must leave a row"),
        (
            ["--device", "cpu", "--output", "not/there/speed"],
            "--output must be in a folder that exists, and there is no not/there",
        ),
        pytest.param(
            ["--device", "cuda"],
            "--device must be cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rounds_are_interleaved_and_alternate_their_order():
    seen = []
    timer = InterleavedTimer("cpu")
    for name, steps in (("a", 2), ("b", 1)):
        timer.add(name, [lambda name=name: seen.append(name)] * steps)
    seen.clear()  # add() runs one step of each
    timer.run_rounds(2)
    assert "".join(seen) == "baa" + "aab"
    assert [len(timer.seconds[name]) for name in timer.names] == [2, 2]
    timer.drop("a")
    timer.warm_up(0.0)
    timer.run_rounds(1)
    assert "".join(seen[6:]) == "bb"


def test_ratios_are_of_the_rounds_that_both_ran():
    timer = InterleavedTimer("cpu")
    timer.seconds = {"late": [2.0, 9.0, 2.0], "early": [50.0, 1.0, 3.0, 2.0]}
    assert timer.median("early") == 2.5
    assert timer.ratio("late", "early") == 2.0  # of 2 / 1, 9 / 3 and 2 / 2


def test_the_faster_of_two_copies_counts():
    seconds = interleaved_medians({COPY: [lambda: time.sleep(0.01)], COPY_BY_KERNEL: [int], "other": [int]}, "cpu")
    assert list(with_faster_copy(seconds)) == [COPY, "other"]
    assert with_faster_copy(seconds)[COPY] == seconds[COPY_BY_KERNEL] < 0.01 <= seconds[COPY]
