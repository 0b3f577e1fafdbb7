"""The GPU test record: warns where it is of other sources or incomplete, and tells how far it is behind."""

import subprocess
import warnings
from pathlib import Path

import pytest
from gpu_record import PARTS, RECORD, gaps, load, sources_hash, staleness


@pytest.mark.skipif(not RECORD.exists(), reason="there is no GPU test record")
def test_the_record_is_of_these_sources():
    """CI has no GPU, so that an old record is a warning, not a failure."""
    record = load()
    assert {"commit", "sources", "machine", "parts"} <= record.keys()
    for line in (staleness(record), gaps(record)):
        if line is not None:
            warnings.warn(line, stacklevel=1)


def make_checkout(root: Path) -> str:
    """Return the commit of a new checkout with one kernel."""
    for folder in ("csrc", "kernels", "bindings"):
        (root / folder).mkdir()
    (root / "kernels" / "rotary.cu").write_text("one\n")
    return commit(root)


def commit(root: Path) -> str:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for arguments in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "Change"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_record_of_the_same_sources_is_not_stale(tmp_path):
    record = {"commit": make_checkout(tmp_path), "sources": sources_hash(tmp_path)}
    (tmp_path / "kernels" / "notes.md").write_text("no source")
    commit(tmp_path)
    assert staleness(record, tmp_path) is None


def test_a_stale_record_says_how_many_commits_it_is_behind(tmp_path):
    record = {"commit": make_checkout(tmp_path), "sources": sources_hash(tmp_path)}
    (tmp_path / "kernels" / "rotary.cu").write_text("two\n")
    commit(tmp_path)
    (tmp_path / "bindings" / "new.cpp").write_text("new\n")
    commit(tmp_path)
    line = staleness(record, tmp_path)
    assert line is not None
    assert "\n" not in line
    assert record["commit"][:10] in line
    assert "2 commits since: 2 files changed" in line
    assert "make gpu-test" in line


def test_a_renamed_source_is_another_source(tmp_path):
    make_checkout(tmp_path)
    before = sources_hash(tmp_path)
    (tmp_path / "kernels" / "rotary.cu").rename(tmp_path / "kernels" / "rotate.cu")
    assert sources_hash(tmp_path) != before


def test_without_the_recorded_commit_the_line_is_shorter(tmp_path):
    make_checkout(tmp_path)
    line = staleness({"commit": "0" * 40, "sources": "of another tree"}, tmp_path)
    assert line is not None
    assert "commits since" not in line


def test_a_record_says_what_it_leaves_open():
    parts = {name: {"passed": 1, "failures": []} for name in PARTS}
    assert gaps({"parts": parts}) is None
    parts["python"] = {"passed": 1, "failures": ["one", "two"]}
    parts["sanitizers"]["not_finished"] = ["racecheck rotary_cuda_test RotaryCuda.EveryKernel"]
    del parts["fuzz"]
    assert gaps({"parts": parts}) == (
        "the GPU test record has no part fuzz, 2 failures in python, 1 runs not finished in sanitizers"
    )
