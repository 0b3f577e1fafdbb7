"""The figure of what the heads of a model chose: their cumulative scales and attention factors, layer by layer."""

from __future__ import annotations

from typing import Any

from mrrope.tables.head_tables import heads_of
from mrrope.tables.lookup import ModelTables
from mrrope.tables.table_set import TableSet, every_table

PANEL_WIDTH, PANEL_HEIGHT = 3.0, 4.2
MOST_PANELS_PER_ROW = 4

FACTORS = {"attention_factor": "key head", "query_factor": "query head"}
"""The kinds of factors, and the heads that have one each."""


def numbers(tables: ModelTables) -> dict[str, Any]:
    """The data of the figure.

    Returns:
        ``log2_cumulative_scale`` ``[key heads][layers][pairs]``, relative to plain RoPE, and ``attention_factor``
        ``[layers][key heads]``; with query factors also ``query_factor`` ``[layers][query heads]``, 1 in layers
        without.

    Raises:
        ValueError: a table has no cumulative scales.
    """
    if not all(table.cumulative_scale.numel() for table in every_table(tables)):
        raise ValueError(f"table must have cumulative scales, and {tables!r} has none")
    layers = list(tables) if isinstance(tables, TableSet) else [tables]
    heads = tables.key_heads or 1
    rows = [heads_of("table", layer, heads) for layer in layers]
    found = {
        "tables": repr(tables),
        "log2_cumulative_scale": [
            [row[head].cumulative_scale.log2().tolist() for row in rows] for head in range(heads)
        ],
        "attention_factor": [[table.attention_factor for table in row] for row in rows],
    }
    if tables.query_heads is not None:
        found["query_factor"] = [list(layer.query_factors or [1.0] * tables.query_heads) for layer in layers]
    return found


def summary(found: dict[str, Any]) -> list[str]:
    """The ranges of the figure's data."""
    scales = [2**value for head in found["log2_cumulative_scale"] for layer in head for value in layer]
    factors = [factor for layer in found["attention_factor"] for factor in layer]
    lines = [
        found["tables"],
        f"  cumulative scales  {min(scales):.4g} to {max(scales):.4g}",
        f"  attention factors  {min(factors):.4g} to {max(factors):.4g}",
    ]
    if "query_factor" in found:
        of_queries = [factor for layer in found["query_factor"] for factor in layer]
        lines.append(f"  query factors      {min(of_queries):.4g} to {max(of_queries):.4g}")
    return lines


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Draw a heat map of layers by pairs for every key head, and one of each kind of factors."""
    found = data["heads"]
    by_head = found["log2_cumulative_scale"]
    kinds = [kind for kind in FACTORS if kind in found]
    count = len(by_head) + len(kinds)
    columns = min(count, MOST_PANELS_PER_ROW)
    rows = -(-count // columns)
    figure.set_size_inches(PANEL_WIDTH * columns + 1.5, PANEL_HEIGHT * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    values = [value for head in by_head for layer in head for value in layer]
    # One range for all heads, so that panels compare.
    shared = {"vmin": min(values), "vmax": max(values), "cmap": "viridis"}
    of_heads, of_factors, unused = panels[: len(by_head)], panels[len(by_head) : count], panels[count:]
    for number, (axes, layers) in enumerate(zip(of_heads, by_head, strict=True)):
        image = axes.imshow(layers, aspect="auto", interpolation="nearest", **shared)
        axes.set(title=f"key head {number}" if len(by_head) > 1 else "all heads", xlabel="pair", ylabel="layer")
    figure.colorbar(image, ax=of_heads, label="$\\log_2$ cumulative scale (0: plain RoPE)")
    for kind, axes in zip(kinds, of_factors, strict=True):
        image = axes.imshow(found[kind], aspect="auto", interpolation="nearest", cmap="cividis")
        axes.set(title=kind.replace("_", " "), xlabel=FACTORS[kind], ylabel="layer")
        if kind == "attention_factor":
            axes.set_xticks(range(len(by_head)))
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes)
    for axes in (*of_heads, *of_factors):
        axes.yaxis.get_major_locator().set_params(integer=True)
    for axes in unused:
        axes.set_axis_off()
    figure.suptitle(found["tables"], fontsize="medium")
