"""Tables of time: README.md, docs/speed.md, and the pages of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from measurements import NOT_MEASURED, Row, keys_in_order, microseconds, result, rows_of, short_exponent, table

README_ROWS = tuple(f"{tokens} x 32/8" for tokens in (1, 1024, 8192, 131072))
README_PEERS = {
    "Liger": "liger_kernel",
    "FlashInfer": "flashinfer",
    "transformers, compiled": "transformers compiled",
    "transformers": "transformers eager",
}
COLUMN_TITLES = {
    "apart": "unfused",
    "turn": "re-rotate",
    "nothing to turn": "nothing to re-rotate",
    "copy": "copy of the bytes",
    "apart, compiled": "unfused, compiled",
    # Kinds of a patched model. Norms are fused where `patch` is asked to; compiled models keep their own.
    "rotation alone": "patched",
    "patched": "with `fuse_norms=True`",
}
LLAMA = "model_cuda.json"


def time_and_error(row: Row, name: str) -> str:
    """Format one contender's time and error; empty where it was not measured."""
    if name not in row["seconds"]:
        return ""
    time, error = microseconds(row["seconds"][name]), row["errors"][name]
    # At position 0 the rotation is the identity, and the error is zero.
    return short_exponent(f"{time} · {error:.1e}") if error else time


def rotary() -> list[str]:
    """Return time and error of the most common shapes."""
    measured = {row["name"]: row for row in rows_of("rotary_cuda.json")}
    rows = [measured[name] for name in README_ROWS if name in measured]
    if not rows:
        return NOT_MEASURED
    return table(
        ["tokens x q/k heads", "copy of the bytes", "**mrrope**", *README_PEERS],
        [
            [row["name"], microseconds(row["seconds"]["copy"]), f"**{time_and_error(row, 'mrrope')}**"]
            + [time_and_error(row, name) for name in README_PEERS.values()]
            for row in rows
        ],
    )


def rotary_ratios() -> list[str]:
    """Return all rows, as multiples of the copy's time."""
    rows = rows_of("rotary_cuda.json")
    names = [name for name in keys_in_order(row["seconds"] for row in rows) if name != "copy"]

    def ratio(row: Row, name: str) -> str:
        if name not in row["seconds"]:
            return "fails" if name in row.get("failures", {}) else ""
        return f"{row['seconds'][name] / row['seconds']['copy']:.2f}"

    return table(
        ["tokens x q/k heads", "copy, us", *names],
        [[row["name"], microseconds(row["seconds"]["copy"]), *(ratio(row, name) for name in names)] for row in rows],
    )


def host() -> list[str]:
    """Return the host time of one call."""
    seconds = result("rotary_cuda.json").get("host_seconds", {})
    return table(list(seconds), [[microseconds(value) for value in seconds.values()]]) if seconds else NOT_MEASURED


def times(
    file: str,
    first_column: str,
    row_name: Callable[[Row], str],
    takes: Callable[[Row], bool] = lambda row: True,
    names: Sequence[str] = (),
) -> list[str]:
    """Return the times of a results file's contenders, by default all, in microseconds."""
    rows = [row for row in rows_of(file) if takes(row)]
    if not rows:
        return NOT_MEASURED
    names = names or keys_in_order(row["seconds"] for row in rows)

    def cells(row: Row) -> list[str]:
        return [microseconds(row["seconds"][name]) if name in row["seconds"] else "" for name in names]

    return table(
        [first_column, *(COLUMN_TITLES.get(name, name) for name in names)],
        [[row_name(row), *cells(row)] for row in rows],
    )


def rotary_and_cache() -> list[str]:
    """Return the times of rotary_and_cache_ and of a rotation followed by a scatter."""
    return times("rotary_and_cache_cuda.json", "tokens, cache", lambda row: row["name"].replace("1 tokens", "1 token"))


def mla_rotary_and_cache() -> list[str]:
    """Return the times of mla_rotary_and_cache_ and of a rotation followed by a concatenation and a scatter."""
    return times("mla_rotary_and_cache_cuda.json", "tokens x q heads, cache", lambda row: row["name"])


def mla_rotary() -> list[str]:
    """Return the times of mla_rotary and of a rotation followed by concatenations."""
    return times("mla_rotary_cuda.json", "tokens x heads", lambda row: row["name"])


def axis_tables() -> list[str]:
    """Return the times of the rotation by several positions per token."""
    return times("axis_tables_cuda.json", "model, tokens x q/k heads", lambda row: row["name"])


def qk_norm_rotary() -> list[str]:
    """Return the times of qk_norm_rotary and of norms followed by a rotation."""
    return times(
        "qk_norm_rotary_cuda.json",
        "tokens x q/k heads, norm over",
        lambda row: row["name"].replace("_", " ").replace(" bfloat16", ""),
    )


def qk_norm_rotary_and_cache() -> list[str]:
    """Return the times of qk_norm_rotary_and_cache_ and of the ops it fuses."""
    return times("qk_norm_rotary_and_cache_cuda.json", "tokens, shape, cache, q", lambda row: row["name"])


def learnable_rotary() -> list[str]:
    """Return the times of learnable_rotary and of the rotation in PyTorch."""
    return times("learnable_rotary_cuda.json", "tokens x q/k heads x head_dim", lambda row: row["name"])


def head_tables() -> list[str]:
    """Return the times in place with one table and with a table for each key head."""
    rows = [row for row in rows_of("rotary_cuda.json") if "mrrope by head" in row["seconds"] and row["k_heads"] > 1]
    if not rows:
        return NOT_MEASURED

    def cells(row: Row) -> list[str]:
        copy, one, by_head = (row["seconds"][name] for name in ("copy", "mrrope in place", "mrrope by head"))
        extra = f"{(by_head - one) * 1e6:+.2f} us, {by_head / one - 1:+.1%}"
        return [row["name"], microseconds(copy), microseconds(one), microseconds(by_head), extra]

    return table(["tokens x q/k heads", "copy, us", "one table", "head tables", "more"], [cells(row) for row in rows])


def rotary_cos_sin() -> list[str]:
    """Return the times of rotary_cos_sin beside those of the kernel that transformers would load."""
    others = ("mrrope by cos/sin", "stock kernel's algorithm")
    return times(
        "rotary_cuda.json",
        "tokens x q/k heads",
        lambda row: row["name"],
        takes=lambda row: row["head_dim"] == 128 and row["q_heads"] == 32,
        names=("copy", *others),
    )


def rescale_cache() -> list[str]:
    """Return the times of re-rotating a cache."""
    return times("rescale_cache_cuda.json", "cached tokens", lambda row: str(row["tokens"]))


def qkv_rotary() -> list[str]:
    """Return the times of qkv_rotary, of cuBLAS, and of cuBLAS followed by a rotation."""
    return table(
        ["rows x outputs x inputs", "cuBLAS, us", "then rotary", "`qkv_rotary`", "/ cuBLAS", "/ then rotary", "error"],
        [
            [
                f"{row['name']} ({row['geometry']})",
                *(microseconds(row["seconds"][name]) for name in ("cuBLAS", "cuBLAS, then rotary", "mrrope")),
                *(f"{row[ratio]:.3f}" for ratio in ("op / cuBLAS", "op / apart")),
                short_exponent(f"{row['errors']['mrrope']:.2e}"),
            ]
            for row in sorted(rows_of("qkv_rotary_cuda.json"), key=lambda one: (one["geometry"], one["rows"]))
        ],
    )


def model(file: str, mode: str) -> list[str]:
    """Return the times of a patched model and of the stock one, eager or compiled."""
    rows = [row for row in rows_of(file) if f", {mode}" in row["name"]]
    if not rows:
        return NOT_MEASURED
    others = [kind for kind in keys_in_order(row["seconds"] for row in rows) if kind != "stock"]
    kinds = ["stock", *others]
    # Inductor fuses the norms of compiled models whatever fuse_norms is, so they have one row.
    titles = [COLUMN_TITLES.get(kind, kind) if len(others) > 1 else "patched" for kind in others]

    def shown(values: Row, kind: str, form: str) -> str:
        return format(values[kind], form) if kind in values else ""

    return table(
        ["", "stock, ms", *titles, *(f"{title} / stock" for title in titles), "peak GB, of each"],
        [
            [
                row["name"],
                *(shown({kind: 1e3 * time for kind, time in row["seconds"].items()}, kind, ".2f") for kind in kinds),
                *(shown(row["ratios"], kind, ".3f") for kind in others),
                ", ".join(f"{row['peak_bytes'][kind] / 1e9:.2f}" for kind in kinds if kind in row["peak_bytes"]),
            ]
            for row in rows
        ],
    )


def build_times() -> list[str]:
    """Return how long mrrope takes to compile."""
    found = result("build_times.json")
    if not found:
        return NOT_MEASURED

    def taken(row: Row) -> str:
        return f"{row['seconds']:.0f} s" if "seconds" in row else f"{row['cpu_seconds'] / 60:.0f} CPU-minutes"

    header = [f"build, on {found['machine']} ({found['measured']})", "takes"]
    return table(header, [[row["name"], taken(row)] for row in found["rows"]])


def serving() -> list[str]:
    """Return time and throughput of stock vLLM, and the throughput of the others relative to it."""
    rows = rows_of("serving_cuda.json")
    if not rows:
        return NOT_MEASURED
    others = [name for name in keys_in_order(row["seconds"] for row in rows) if name != "stock"]
    return table(
        ["", "stock, ms", "stock, tokens/s", *(f"{name} / stock" for name in others)],
        [
            [
                f"{row['shape']}, {row['name']}",
                f"{1e3 * row['seconds']['stock']:.2f}",
                f"{row['tokens'] / row['seconds']['stock']:.0f}",
                *(f"{row['throughput_of_stock'][name]:.3f}" for name in others),
            ]
            for row in rows
        ],
    )


def end_to_end() -> list[str]:
    """Return the time of a patched model relative to the stock one, in transformers and in vLLM."""
    models = {row["name"]: row["ratios"] for row in rows_of(LLAMA)}
    engines = rows_of("serving_cuda.json")
    if not models or not engines:
        return NOT_MEASURED

    def span(values: Sequence[float]) -> str:
        low, high = (f"{value:.2f}" for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    def eager(name: str, *rows: str) -> list[str]:
        ratios = [[models[row][kind] for row in rows] for kind in ("rotation alone", "patched")]
        return [name, *map(span, ratios)]

    compiled = [ratio["patched"] for row, ratio in models.items() if ", compiled" in row]
    of_engine = [1 / row["throughput_of_stock"][kind] for row in engines for kind in ("mrrope", "mrrope auto")]
    batches = [f"decode batch {size}, eager, 32 layers" for size in (1, 16, 64)]
    prefills = [f"prefill {tokens}, eager, 32 layers" for tokens in (8192, 32768)]
    return table(
        ["time / stock, medians of ratios", "patched", "and `fuse_norms=True`"],
        [
            eager("transformers, eager, prefill of 8K and 32K", *prefills),
            eager("transformers, eager, decode, batch 1 to 64", *batches),
            ["transformers, `torch.compile`, prefill and decode", span(compiled), "the same"],
            ["vLLM, prefill and decode", span(of_engine), "not applicable"],
        ],
    )


def gradient_step() -> list[str]:
    """Return time and memory of a step of calibration by gradient."""
    rows = rows_of("gradient_step_cuda.json")
    if not rows:
        return NOT_MEASURED
    return table(
        ["shape, tokens", "seconds", "peak, GB", "layers recomputed"],
        [
            [
                row["name"],
                f"{row['seconds']:.1f}",
                f"{row['peak_bytes'] / 1e9:.0f}",
                f"{row['recomputed_layers']} of {row['layers']}",
            ]
            for row in rows
        ],
    )


def fused_qk_norm() -> list[str]:
    """Return what `qk_norm_rotary` saves beside class-swapped RMSNorms, by times and by ratios within a round."""
    rows = rows_of("fused_qk_norm_cuda.json")
    if not rows:
        return NOT_MEASURED

    def saved(values: Row) -> str:
        # Compiled models run their own norms.
        norms = "fused RMSNorms" if "rotation, fused RMSNorms" in values else "stock norms"
        return f"{1 - values[f'fused QK-norm, {norms}'] / values[f'rotation, {norms}']:+.1%}".replace("%", " %")

    return table(
        ["", "saved, by median times", "saved, by medians of ratios to stock"],
        [[row["name"], saved(row["seconds"]), saved(row["ratios"])] for row in rows],
    )


OF_OPS = (
    rotary,
    rotary_ratios,
    host,
    rotary_and_cache,
    mla_rotary_and_cache,
    mla_rotary,
    axis_tables,
    qk_norm_rotary,
    qk_norm_rotary_and_cache,
    qkv_rotary,
    learnable_rotary,
    rotary_cos_sin,
    head_tables,
    rescale_cache,
)

TABLES: dict[str, Callable[[], list[str]]] = {
    **{
        function.__name__: function
        for function in (*OF_OPS, build_times, serving, end_to_end, fused_qk_norm, gradient_step)
    },
    **{
        f"{name}_{mode}": partial(model, f"{name}_cuda.json", mode)
        for name in ("model", "model_qwen3", "model_deepseek", "model_gemma3")
        for mode in ("eager", "compiled")
    },
}
