"""launch_log: the kernels that ops launch, and MRROPE_PRINT_PLANS."""

import os
import subprocess
import sys

import pytest
import torch
from markers import needs_cuda

import mrrope
from mrrope.ops.launch_log import launch_log

TABLE = {"rotary_dim": 128, "base": 1e4, "original_max_position": 4096}

PROGRAM = f"""
import torch, mrrope
table = mrrope.frequency_table("rope", **{TABLE})
for _ in range(3):
    mrrope.rotary(torch.ones(1, 2, 5, 128, device="cuda"), None, torch.arange(5, device="cuda"), table)
"""


def rotate(device: str, tokens: int, layout: str = "bhsd") -> None:
    q = torch.randn(1, 32, tokens, 128, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, 8, tokens, 128, device=device, dtype=torch.bfloat16)
    mrrope.rotary(q, k, torch.arange(tokens, device=device), mrrope.frequency_table("rope", **TABLE), layout)


def test_cpus_launch_nothing() -> None:
    with launch_log() as lines:
        rotate("cpu", 3)
    assert lines == []


def test_blocks_do_not_nest() -> None:
    with launch_log(), pytest.raises(RuntimeError, match="launch_log must not be open already"):
        launch_log().__enter__()
    with launch_log():
        pass


@needs_cuda
@pytest.mark.parametrize(("tokens", "vector", "heads_per_thread"), [(1, 1, 1), (8192, 8, 2)])
def test_a_line_has_op_shape_and_plan(tokens: int, vector: int, heads_per_thread: int) -> None:
    with launch_log() as lines:
        rotate("cuda", tokens)
    rotate("cuda", tokens)
    (line,) = lines
    assert line.startswith(f"rotary: 1 x {tokens} tokens, heads 32/8 of 128, bfloat16, halves -> ")
    assert f"rotary_kernel<bfloat16_t, {vector}, {heads_per_thread}, " in line
    assert line.endswith(" x 128 threads")


@needs_cuda
def test_an_exception_ends_the_log() -> None:
    with pytest.raises(ValueError, match="layout must be"), launch_log() as lines:
        rotate("cuda", 2, layout="sideways")
    rotate("cuda", 2)
    assert lines == []
    assert torch.ops.mrrope.collect_launches(False) == []


@needs_cuda
@pytest.mark.parametrize(("value", "count"), [("1", 1), ("0", 0), ("", 0)])
def test_the_variable_prints_each_line_once(value: str, count: int) -> None:
    environment = os.environ | {"MRROPE_PRINT_PLANS": value}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stderr.count("mrrope rotary: 1 x 5 tokens, heads 2/0 of 128, float32, halves -> ") == count
    assert result.stderr.count("mrrope ") == count
