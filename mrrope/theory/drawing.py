"""Draws the figures from their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrrope.reporting import plotting
from mrrope.reporting.output import with_ending
from mrrope.theory import table_set_figure

Data = dict[str, Any]


def setting_title(data: Data) -> str:
    """The setting, as a title."""
    setting = data["setting"]
    return (
        f"rotary_dim {setting['rotary_dim']}, base {setting['base']:g}, "
        f"{setting['original_max_position']} native tokens, scale {setting['scale']:g}"
    )


PAIRS = "pair (shaded: the middle ones)"


def shade_middle(axes: Any, data: Data) -> None:
    """Shade the pairs between d_l and d_h."""
    axes.axvspan(*data["bounds"], color="gray", alpha=0.12, linewidth=0)


def mark_native(axes: Any, setting: Data) -> None:
    """Mark the trained length."""
    native = setting["original_max_position"]
    axes.axvline(native, color="gray", linewidth=1, linestyle=":")
    axes.annotate("native", (native, 0.98), xycoords=("data", "axes fraction"), xytext=(3, 0),
                  textcoords="offset points", va="top", color="dimgray", fontsize="small")  # fmt: skip


def draw_scale(figure: Any, data: Data) -> None:
    """Plot the cumulative scale of every pair."""
    figure.set_size_inches(10, 4)
    for axes, (scale, by_method) in zip(figure.subplots(1, 2), data["scale"].items(), strict=True):
        shade_middle(axes, data)
        for method, values in by_method.items():
            axes.plot(values, linewidth=1.8, **plotting.line(method))
        axes.set_yscale("log", base=2)
        axes.set_yticks([2**i for i in range(int(float(scale)).bit_length())])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=f"scale {scale}", xlabel=PAIRS, ylabel="cumulative scale $s_i$")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)


def draw_radix(figure: Any, data: Data) -> None:
    """Plot the radix factor of every pair."""
    figure.set_size_inches(8, 4)
    axes = figure.subplots()
    shade_middle(axes, data)
    for method, found in data["radix"].items():
        style = plotting.line(method)
        style["label"] = f"{method}: {found['trend']}"
        axes.plot(found["factors"], marker=".", linewidth=1.5, **style)
    axes.set(title=setting_title(data), xlabel=PAIRS, ylabel=r"radix factor $\lambda_i = s_{i+1} / s_i$")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_digits(figure: Any, data: Data) -> None:
    """Plot m-hat, the number that the phases spell."""
    from matplotlib import colormaps

    figure.set_size_inches(10.5, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    positions = data["digits"]["positions"]
    bases = data["digits"]["by_base"]
    for i, (base, values) in enumerate(bases.items()):
        left.plot(positions, values, color=colormaps["viridis"](i / len(bases)), label=f"base {float(base):,.0f}")
    left.set(title="plain RoPE, by base", ylabel=r"$\hat m$ / number of pairs")
    for method, values in data["digits"]["by_method"].items():
        right.plot(positions, values, **plotting.line(method))
    right.set(title=f"by method, scale {data['setting']['scale']:g}")
    for axes in (left, right):
        axes.plot(positions, positions, color="lightgray", linewidth=1, zorder=0, label="$m$ itself")
        axes.set(xlabel="position $m$ (tokens)")
        axes.set_xticks(*ticks(data))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


def ticks(data: Data) -> tuple[list[int], list[str]]:
    """Ticks at every quarter of the extended context."""
    reach = int(data["setting"]["original_max_position"] * data["setting"]["scale"])
    places = [reach * i // 4 for i in range(5)]
    return places, [plotting.thousands(place) if place else "0" for place in places]


def draw_similarity(figure: Any, data: Data) -> None:
    """Plot the minima of B(m) and mark its first zeros."""
    figure.set_size_inches(11.5, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    distances = data["similarity"]["distances"]
    for axes, (name, title) in zip(panels, (("all", "all pairs"), ("middle", "middle pairs")), strict=True):
        axes.axhline(0, color="gray", linewidth=1)
        for method, found in data["similarity"][name].items():
            zero, style = found["first_zero"], plotting.line(method)
            style["label"] = f"{method}: {'none' if zero is None else f'{zero:,}'}"
            axes.plot(distances, found["dips"], linewidth=1.5, **style)
            if zero is not None:
                axes.plot(
                    [zero], [0], marker="o", markersize=7, markeredgecolor="white", color=style["color"], zorder=5
                )
        mark_native(axes, data["setting"])
        axes.set(xscale="log", xlabel="distance $m$ (tokens)", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="lower left", title="first zero at", title_fontsize="small")
    panels[0].set_ylabel("lowest $B(m)$ nearby / number of pairs")


def draw_attention(figure: Any, data: Data) -> None:
    """Plot the middle-pair scores of a real model."""
    figure.set_size_inches(10.5, 4.2)
    found = data["attention"]
    titles = {"mean": "mean score of the middle pairs", "wavering": "its deviation within a bin of distances"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for method, curves in found["methods"].items():
            axes.plot(found["distances"], curves[name], linewidth=1.5, **plotting.line(method))
        mark_native(axes, found["setting"])
        axes.set(xscale="log", xlabel="distance (tokens)", title=title)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")
    figure.suptitle(f"{found['model']}, scale {found['setting']['scale']:g}; {found['layers']}")


FIGURES: dict[str, Callable[[Any, Data], None]] = {
    "scale": draw_scale,
    "radix": draw_radix,
    "digits": draw_digits,
    "similarity": draw_similarity,
    "attention": draw_attention,
    "heads": table_set_figure.draw,
}
"""Drawing functions by name, which is also the key of their data."""


def draw(data: Data, stem: Path) -> list[Path]:
    """Draw every figure that has data, and return the paths."""
    paths = []
    for name in (name for name in FIGURES if name in data):
        figure = plotting.new_figure()
        FIGURES[name](figure, data)
        paths.append(plotting.save(figure, with_ending(stem, f"{name}.png")))
    return paths
