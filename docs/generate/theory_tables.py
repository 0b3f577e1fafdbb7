"""Tables of docs/theory.md."""

from __future__ import annotations

from collections.abc import Callable

from measurements import figure_data, table

from mrrope.theory.command import wavering_past_native


def zeros() -> list[str]:
    """Return the first distance where B(m) is not positive."""
    similarity = figure_data("theory.json")["similarity"]
    methods = list(similarity["all"])
    return table(
        ["", *methods],
        [
            [name, *(str(similarity[pairs][method]["first_zero"]) for method in methods)]
            for name, pairs in (("all pairs", "all"), ("middle pairs alone", "middle"))
        ],
    )


def zeros_by_scale() -> list[str]:
    """Return the same for other scales, of the methods that depend on the scale."""
    by_scale = figure_data("theory.json")["similarity"]["first_zero_by_scale"]
    methods = [method for method in next(iter(by_scale.values())) if method not in ("rope", "pi")]
    return table(
        ["scale", *methods],
        [[scale, *(str(zeros[method]) for method in methods)] for scale, zeros in by_scale.items()],
    )


def wavering() -> list[str]:
    """Return the standard deviation of the middle pairs' scores in a real model."""
    by_method = wavering_past_native(figure_data("theory.json")["attention"])
    return table(by_method, [[f"{value:.2f}" for value in by_method.values()]])


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (zeros, zeros_by_scale, wavering)
}
