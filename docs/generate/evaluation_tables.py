"""Tables of reading on, of the demo, and of the theory."""

from __future__ import annotations

from collections.abc import Callable

from measurements import NOT_MEASURED, beside_figure, perplexity, result, rows_of, table

from mrrope.demo.report import short
from mrrope.reporting.plotting import thousands
from mrrope.theory.command import wavering_past_native


def long_reading() -> list[str]:
    """A large model that reads as ``mrrope eval`` does."""
    if not rows_of("long_reading.json"):
        return NOT_MEASURED
    return table(
        ["", "seconds", "weights, GB", "peak, GB"],
        [
            [
                row["name"],
                f"{row['seconds']:.1f}",
                *(f"{row[part] / 1e9:.1f}" for part in ("weights_bytes", "peak_bytes")),
            ]
            for row in rows_of("long_reading.json")
        ],
    )


def following() -> list[str]:
    """The scale that follows the text, beside every fixed one."""
    by_scale = result("auto_scale_lengths.json")["perplexity"]
    lengths = sorted(by_scale["auto"], key=int)

    def cells(scale: str) -> list[str]:
        return [scale, *(perplexity(by_scale[scale][length]["second half"]) for length in lengths)]

    return table(
        ["", *(thousands(int(length)) for length in lengths)],
        [[f"**{cell}**" for cell in cells(scale)] if scale == "auto" else cells(scale) for scale in by_scale],
    )


def demo() -> list[str]:
    """What the demo read, and what it answered."""
    data = beside_figure("demo.json")
    first = next(iter(data["readings"].values()))
    spans = [" to ".join(short(int(edge)) for edge in span.split("-")) for span in first["perplexity"]]
    asked = [f"pass key of {short(data['pass_key_at'])}, asked at {short(int(stop))}" for stop in first["pass_key"]]
    return table(
        ["", f"perplexity, {spans[0]}", *spans[1:], *asked],
        [
            [f"`{method}`", *(f"{value:.2f}" for value in reading["perplexity"].values())]
            + ["found" if answer["found"] else "lost" for answer in reading["pass_key"].values()]
            for method, reading in data["readings"].items()
        ],
    )


def numerics() -> list[str]:
    """Errors near and far, as the demo measured them."""
    names = ("mrrope", "plain PyTorch")
    by_place: dict[int, list[float]] = {}
    for row in beside_figure("demo.json")["rotation"]:
        by_place.setdefault(row["positions near"], []).extend(row[name] for name in names)

    def place(end: int) -> str:
        power = end.bit_length() - 1
        return f"2^{power}" if end == 2**power and power > 20 else str(end)

    return table(
        ["positions near", "float32: mrrope", names[1], "bfloat16: mrrope", names[1]],
        [[place(end), *(f"{error:.1e}".replace("e-0", "e-") for error in by_place[end])] for end in by_place],
    )


def zeros() -> list[str]:
    """Where B(m) is first not positive."""
    similarity = beside_figure("theory.json")["similarity"]
    methods = [method for method in similarity["all"] if method != "pi"]
    return table(
        ["", *methods],
        [
            [name, *(str(similarity[pairs][method]["first_zero"]) for method in methods)]
            for name, pairs in (("all pairs", "all"), ("middle pairs alone", "middle"))
        ],
    )


def zeros_by_scale() -> list[str]:
    """The same for other scales, of the methods that a scale makes a difference to."""
    by_scale = beside_figure("theory.json")["similarity"]["first_zero_by_scale"]
    methods = [method for method in next(iter(by_scale.values())) if method not in ("rope", "pi")]
    return table(
        ["scale", *methods],
        [[scale, *(str(zeros[method]) for method in methods)] for scale, zeros in by_scale.items()],
    )


def wavering() -> list[str]:
    """How steady the middle pairs' scores are in a real model."""
    by_method = wavering_past_native(beside_figure("theory.json")["attention"])
    return table(by_method, [[f"{value:.2f}" for value in by_method.values()]])


def demo_seconds() -> str:
    """What all of the demo's reading took."""
    return f"{beside_figure('demo.json')['seconds']:.0f}"


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function
    for function in (long_reading, following, demo, numerics, zeros, zeros_by_scale, wavering)
}
QUOTED: dict[str, Callable[[], str]] = {"demo_seconds": demo_seconds}
