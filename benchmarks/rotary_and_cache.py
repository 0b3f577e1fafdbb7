"""Speed and error of rotating q and k and writing k and v to a cache in one pass, beside doing one after the other.

    python benchmarks/rotary_and_cache.py [--device cuda|cpu] [--output benchmarks/results/NAME]

q, k and v are views of one packed projection, bfloat16; up to 256 tokens are of as many sequences, a decoding step,
more are one long sequence. Prints one table and writes NAME.json. Times are medians; on a GPU by CUDA-graph replay,
over buffers that do not fit the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import mrrope
from mrrope.benchmark import record
from mrrope.benchmark.timing import COPY, COPY_BY_KERNEL, Step, buffer_sets, interleaved_medians, with_faster_copy

RESULTS = Path(__file__).parent / "results"
# Rotated again and again in place, q must not grow.
TABLE = mrrope.frequency_table(
    "mrrope_pro", rotary_dim=128, base=5e5, original_max_position=8192, scale=16.0, attention_factor=1.0
)
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_SIZE = 16
MAX_DECODE_TOKENS = 256
TOKENS = {"cuda": (1, 64, 256, 1024, 8192), "cpu": (1, 64)}


@dataclass(frozen=True)
class Case:
    """One row: how many tokens, and the cache they go to."""

    tokens: int
    cache: str  # paged nhd, paged hnd or static
    dtype: str  # of the cache

    @property
    def float8(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def bytes(self) -> int:
        """Read and written once each."""
        components = self.tokens * HEAD_DIM
        return 2 * components * (2 * Q_HEADS + 2 * KV_HEADS) + components * 2 * KV_HEADS * (1 if self.float8 else 2)

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {self.cache}, {self.dtype}"


CASES = {
    device: [
        Case(tokens, cache, dtype)
        for cache, dtype in (
            ("paged nhd", "bfloat16"),
            ("paged hnd", "bfloat16"),
            ("static", "bfloat16"),
            ("paged nhd", "float8_e4m3fn"),
        )
        for tokens in TOKENS[device]
    ]
    for device in TOKENS
}


class Buffers:
    """q, k and v as a packed projection gives them, the caches, and where in those every token goes."""

    def __init__(self, case: Case, device: str) -> None:
        tokens = case.tokens
        packed = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v = packed[:, :Q_HEADS], packed[:, Q_HEADS:-KV_HEADS], packed[:, -KV_HEADS:]
        is_decoding = tokens <= MAX_DECODE_TOKENS
        self.positions = 8000 + torch.arange(tokens, device=device)
        self.heads_first = case.cache != "paged nhd"
        if case.cache == "static":
            blocks, block_size = (tokens, 64) if is_decoding else (1, tokens + 64)
            numbers = torch.arange(tokens, device=device)
            self.block, self.offset = (numbers, numbers % block_size) if is_decoding else (numbers * 0, numbers)
        else:
            # Decoding, every sequence has a block of its own; a long sequence has blocks of its own, in any order.
            blocks, block_size = 2 * (tokens if is_decoding else -(-tokens // BLOCK_SIZE)), BLOCK_SIZE
            order = torch.randperm(blocks, device=device)
            numbers = torch.arange(tokens, device=device)
            self.block = order[numbers if is_decoding else numbers // block_size]
            self.offset = numbers % block_size
        self.slots = self.block * block_size + self.offset if case.cache != "static" else None
        self.sequences = tokens if is_decoding else 1
        shape = (blocks, KV_HEADS, block_size) if self.heads_first else (blocks, block_size, KV_HEADS)
        dtype = getattr(torch, case.dtype)
        self.caches = [torch.zeros(*shape, HEAD_DIM, device=device).to(dtype) for _ in range(2)]
        self.scale = torch.full((1,), 0.01, device=device) if case.float8 else None
        self.copied = torch.ones(case.bytes // 8 * 4, device=device, dtype=torch.uint8)
        self.copy = torch.empty_like(self.copied)

    def by_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] as [batch, heads, tokens, head_dim]."""
        return x.view(self.sequences, -1, *x.shape[1:]).transpose(1, 2)


def copy(buffers: Buffers) -> object:
    return buffers.copy.copy_(buffers.copied)


def copy_by_kernel(buffers: Buffers) -> object:
    return torch.bitwise_not(buffers.copied.view(torch.int32), out=buffers.copy.view(torch.int32))


def fused(buffers: Buffers) -> object:
    b = buffers
    q, k, v, positions = b.q, b.k, b.v, b.positions
    key_cache, value_cache = b.caches
    if b.slots is not None:
        cache_layout = "hnd" if b.heads_first else "nhd"
        return mrrope.rotary_and_cache_(
            q, k, v, positions, TABLE, key_cache, value_cache, b.slots,
            layout="thd", cache_layout=cache_layout, key_scale=b.scale, value_scale=b.scale,
        )  # fmt: skip
    q, k, v = b.by_sequence(q), b.by_sequence(k), b.by_sequence(v)
    positions, places = positions.view(b.sequences, -1), b.offset.view(b.sequences, -1)
    return mrrope.rotary_and_cache_(q, k, v, positions, TABLE, key_cache, value_cache, cache_positions=places)


def scatter(buffers: Buffers) -> None:
    """k and v to their slots."""
    b = buffers
    for cache, heads in zip(b.caches, (b.k, b.v), strict=True):
        if b.scale is not None:
            rounded = (heads.float() / b.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            cache, heads = cache.view(torch.uint8), rounded.view(torch.uint8)
        if b.heads_first:
            cache[b.block, :, b.offset] = heads
        else:
            cache[b.block, b.offset] = heads


compiled_scatter: Callable[[Buffers], None] = torch.compile(scatter, dynamic=False)


def one_after_the_other(buffers: Buffers) -> None:
    mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLE, "thd")
    scatter(buffers)


def compiled_after_the_other(buffers: Buffers) -> None:
    mrrope.rotary_(buffers.q, buffers.k, buffers.positions, TABLE, "thd")
    compiled_scatter(buffers)


CONTENDERS: dict[str, Callable[[Buffers], object]] = {
    "copy": copy,
    "rotary_and_cache_": fused,
    "rotary_, compiled scatter": compiled_after_the_other,
    "rotary_, scatter": one_after_the_other,
}


def relative_error(case: Case, contender: Callable[[Buffers], object], device: str) -> float:
    """Of the cached keys, against their rotation in float64."""
    buffers = Buffers(case, device)
    exact, _ = mrrope.rotary(buffers.k.double(), None, buffers.positions, TABLE, "thd")
    contender(buffers)
    cache = buffers.caches[0].to(torch.float32).double() * (1.0 if buffers.scale is None else buffers.scale.double())
    cache = cache.transpose(1, 2) if buffers.heads_first else cache
    return float((cache[buffers.block, buffers.offset] - exact).norm() / exact.norm())


def steps_of(contender: Callable[[Buffers], object], sets: list[Buffers]) -> list[Step]:
    return [lambda buffers=buffers: contender(buffers) for buffers in sets]  # type: ignore[misc]


def measure(device: str) -> list[dict[str, object]]:
    """A row for every case: seconds and errors by contender."""
    rows: list[dict[str, object]] = []
    contenders = {**CONTENDERS, COPY_BY_KERNEL: copy_by_kernel}
    with tqdm(total=len(CASES[device]), desc="cache", unit="row") as progress:
        for case in CASES[device]:
            progress.set_postfix_str(case.name)
            sets = [Buffers(case, device) for _ in range(buffer_sets(case.bytes, device))]
            torch.compiler.reset()  # every case is compiled for its own shape
            steps = {name: steps_of(contender, sets) for name, contender in contenders.items()}
            seconds = with_faster_copy(interleaved_medians(steps, device))
            errors = {name: relative_error(case, one, device) for name, one in CONTENDERS.items() if name != COPY}
            progress.update()
            rows.append({**asdict(case), "name": case.name, "bytes": case.bytes, "seconds": seconds, "errors": errors})
    return rows


def print_rows(rows: list[dict[str, object]]) -> None:
    """Microseconds, the ratio to the one pass, and the error, by contender."""
    width = max(len(str(row["name"])) for row in rows)
    print(f"\n{'':>{width}}" + "".join(f"{name:>30}" for name in CONTENDERS))
    print(f"{'':>{width}}" + "".join(f"{'us   ratio     error':>30}" for _ in CONTENDERS))
    for row in rows:
        seconds, errors = row["seconds"], row["errors"]
        assert isinstance(seconds, dict)
        assert isinstance(errors, dict)
        cells = []
        for name in CONTENDERS:
            error = f"{errors[name]:.1e}" if name in errors else ""
            cells.append(f"{seconds[name] * 1e6:12.2f}{seconds[name] / seconds['rotary_and_cache_']:8.2f}{error:>10}")
        print(f"{row['name']:>{width}}" + "".join(cells))


def main() -> None:
    """Measures, prints, writes."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(CASES), default=default)
    parser.add_argument("--output", type=Path, help="where to write, without ending")
    options = parser.parse_args()
    output = options.output or RESULTS / f"rotary_and_cache_{options.device}"
    rows = measure(options.device)
    print_rows(rows)
    written = record.write(output.with_suffix(".json"), options.device, rows)
    print(f"\n{written['machine']}; written to {output}.json")


if __name__ == "__main__":
    main()
