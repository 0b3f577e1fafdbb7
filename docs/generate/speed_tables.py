"""Tables and figures of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from measurements import Row, microseconds, result, rows_of, table

FEWEST_ROWS = 512
"""Of a projection; with fewer, the product and the rotation are done apart by far."""
MOST_DECODED, FEWEST_OF_PREFILL = 256, 8192
"""Tokens of a rotation: up to the first it is a step of decoding, from the second on the reading of a text."""
MODEL_KINDS = ("stock", "rotation alone", "patched", "with fuse_projection")


def with_error(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return ""
    time, error = microseconds(row["seconds"][name]), row["errors"][name]
    # One token was compared at the first position, where nothing turns.
    return f"{time} · {error:.1e}".replace("e-0", "e-") if error else time


def as_ratio(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return "fails" if name in row.get("failures", {}) else ""
    return f"{row['seconds'][name] / row['seconds']['copy']:.2f}"


def rotary() -> list[str]:
    """The rows that people ask for first."""
    others = {"Liger": "liger_kernel", "FlashInfer": "flashinfer", "transformers, compiled": "transformers compiled"}
    others["transformers"] = "transformers eager"
    wanted = [f"{tokens} x 32/8" for tokens in (1, 64, 256, 1024, 8192, 131072)]
    measured = {row["name"]: row for row in rows_of("rotary_cuda.json")}
    rows = [measured[name] for name in (*wanted, "131072 x 4/1", "8192 x 32/8, float32")]
    return table(
        ["tokens x q/k heads", "copy of the bytes", "**mrrope**", *others],
        [
            [row["name"], microseconds(row["seconds"]["copy"]), f"**{with_error(row, 'mrrope')}**"]
            + [with_error(row, name) for name in others.values()]
            for row in rows
        ],
    )


def rotary_ratios() -> list[str]:
    """All rows, as so many copies."""
    rows = rows_of("rotary_cuda.json")
    names = [name for name in dict.fromkeys(name for row in rows for name in row["seconds"]) if name != "copy"]
    return table(
        ["tokens x q/k heads", "copy, us", *names],
        [[row["name"], microseconds(row["seconds"]["copy"]), *(as_ratio(row, name) for name in names)] for row in rows],
    )


def host() -> list[str]:
    """What a call costs in Python and C++."""
    seconds = result("rotary_cuda.json")["host_seconds"]
    return table(list(seconds), [[microseconds(value) for value in seconds.values()]])


def cache() -> list[str]:
    """Rotary and the cache's write in one launch."""
    names = ("rotary_and_cache_", "rotary_, compiled scatter", "rotary_, scatter")
    return table(
        ["tokens, cache", "copy", *(f"`{names[0]}`", *names[1:])],
        [
            [
                row["name"].replace("1 tokens", "1 token"),
                *(microseconds(row["seconds"][name]) for name in ("copy", *names)),
            ]
            for row in rows_of("rotary_and_cache_cuda.json")
        ],
    )


def norm() -> list[str]:
    """Norms and rotary in one launch."""
    names = ("copy", "mrrope", "mrrope in place", "apart", "transformers")
    return table(
        ["tokens x q/k heads, norm over", *names],
        [
            [row["name"].replace("_", " ").replace(" bfloat16", "")]
            + [microseconds(row["seconds"][name]) if name in row["seconds"] else "" for name in names]
            for row in rows_of("qk_norm_rotary_cuda.json")
        ],
    )


def model(way: str) -> list[str]:
    """A patched model beside the stock one, run in one way."""
    rows = [row for row in rows_of("model_cuda.json") if f", {way}" in row["name"]]
    stock, *others = (kind for kind in MODEL_KINDS if any(kind in row["seconds"] for row in rows))

    def shown(values: Row, kind: str, form: Callable[[float], str]) -> str:
        return form(values[kind]) if kind in values else ""

    return table(
        ["", f"{stock}, ms", *others, *(f"{kind} / {stock}" for kind in others), "peak GB, of each"],
        [
            [
                row["name"],
                *(shown(row["seconds"], kind, lambda time: f"{time * 1e3:.2f}") for kind in (stock, *others)),
                *(shown(row["ratios"], kind, lambda ratio: f"{ratio:.3f}") for kind in others),
                ", ".join(
                    f"{row['peak_bytes'][kind] / 1e9:.2f}" for kind in (stock, *others) if kind in row["seconds"]
                ),
            ]
            for row in rows
        ],
    )


def rescale() -> list[str]:
    """A cache turned."""
    return table(
        ["cached tokens", "copy of its keys", "turning them", "asking, with nothing to turn"],
        [
            [str(row["tokens"])]
            + [f"{microseconds(row['seconds'][what])} us" for what in ("copy", "turn", "nothing to turn")]
            for row in rows_of("rescale_cache_cuda.json")
        ],
    )


def projection() -> list[str]:
    """The projection that rotates, beside cuBLAS; every kernel by its best way through the tiles."""
    kernels = ("halves", "halves transposed")

    def best(row: Row, kernel: str, to: str) -> float:
        values: dict[str, float] = row[to]
        return min(value for plan, value in values.items() if plan.split(",")[0] == kernel)

    rows = [row for row in rows_of("qkv_rotary_plans.json") if row["rows"] >= FEWEST_ROWS]
    return table(
        [
            "rows x outputs x inputs",
            "cuBLAS, us",
            "then rotary",
            "tiles of 128 tokens",
            "of 160",
            "best / cuBLAS",
            "best / then rotary",
        ],
        [
            [
                f"{row['name']} ({row['geometry']})",
                *(microseconds(row["seconds"][name]) for name in ("cuBLAS", "cuBLAS, then rotary")),
                *(microseconds(best(row, kernel, "seconds")) for kernel in kernels),
                *(f"{min(best(row, kernel, to) for kernel in kernels):.3f}" for to in ("to cuBLAS", "to apart")),
            ]
            for row in sorted(rows, key=lambda one: (one["geometry"], one["rows"]))
        ],
    )


def projection_op() -> list[str]:
    """The op as it is, by its own plan."""
    return table(
        ["rows x outputs x inputs", "cuBLAS, us", "then rotary", "`qkv_rotary`", "/ cuBLAS", "/ then rotary", "error"],
        [
            [
                f"{row['name']} ({row['geometry']})",
                *(microseconds(row["seconds"][name]) for name in ("cuBLAS", "cuBLAS, then rotary", "mrrope")),
                *(f"{row[to]:.3f}" for to in ("op / cuBLAS", "op / apart")),
                f"{row['errors']['mrrope']:.2e}".replace("e-0", "e-"),
            ]
            for row in sorted(rows_of("qkv_rotary_cuda.json"), key=lambda one: (one["geometry"], one["rows"]))
        ],
    )


def most_copies() -> str:
    """How many copies the rotation takes at most, of all there is to rotate and as projections give it; rounded up."""
    rows = [
        row["seconds"]
        for row in rows_of("rotary_cuda.json")
        if row["head_dim"] == row["rotary_dim"] == 128 and row["layout"] != "bhsd"
    ]
    most = max(seconds[name] / seconds["copy"] for seconds in rows for name in ("mrrope", "mrrope in place"))
    return f"{math.ceil(100 * most) / 100:.2f}"


def index_costs(tokens: Callable[[int], bool]) -> list[tuple[float, float]]:
    """The rotation in place, and what table_index adds to it, where so many tokens are measured with it."""
    index = "mrrope by table_index"
    return [
        (row["seconds"]["mrrope in place"], row["seconds"][index] - row["seconds"]["mrrope in place"])
        for row in rows_of("rotary_cuda.json")
        if index in row["seconds"] and tokens(row["tokens"])
    ]


def index_cost_of_prefill() -> str:
    """At most, of the rotation's time."""
    return f"{100 * max(cost / time for time, cost in index_costs(lambda tokens: tokens >= FEWEST_OF_PREFILL)):.1f} %"


def index_cost_between() -> str:
    """Of the rotation's time."""
    between = index_costs(lambda tokens: MOST_DECODED < tokens < FEWEST_OF_PREFILL)
    return f"{100 * max(cost / time for time, cost in between):.1f} %"


def index_cost_of_decoding() -> str:
    """At most."""
    return f"{1e6 * max(cost for _, cost in index_costs(lambda tokens: tokens <= MOST_DECODED)):.2f} us"


def prefill_gain(tokens: int, kind: str) -> str:
    """By how much less time a patched model reads a text eagerly."""
    ratio = next(row["ratios"][kind] for row in rows_of("model_cuda.json") if f"prefill {tokens}, e" in row["name"])
    return f"{100 * (1 - ratio):.0f} %"


def projection_at_once(rows: int) -> str:
    """So many times cuBLAS's product alone, on a GPU that was idle just before; the geometries in their order."""
    ratios = [row["op / cuBLAS"] for row in rows_of("qkv_rotary_at_once_cuda.json") if row["rows"] == rows]
    *first, last = (f"{ratio:.2f}" for ratio in ratios)
    return f"{', '.join(first)} and {last}"


TABLES: dict[str, Callable[[], list[str]]] = {
    **{
        function.__name__: function
        for function in (rotary, rotary_ratios, host, cache, norm, rescale, projection, projection_op)
    },
    **{f"model_{way}": partial(model, way) for way in ("eager", "compiled")},
}
QUOTED: dict[str, Callable[[], str]] = {
    **{
        function.__name__: function
        for function in (most_copies, index_cost_of_prefill, index_cost_between, index_cost_of_decoding)
    },
    **{f"projection_at_once_{rows}": partial(projection_at_once, rows) for rows in (2048, 8192, 32768)},
    **{f"prefill_gain_{tokens}": partial(prefill_gain, tokens, "patched") for tokens in (8192, 32768)},
    **{f"rotation_gain_{tokens}": partial(prefill_gain, tokens, "rotation alone") for tokens in (8192, 32768)},
}
