"""The command ``mrrope``."""

from __future__ import annotations

import argparse
import json
import math
import sys

from mrrope import demo
from mrrope.tables import METHODS, FrequencyTable, frequency_table


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(prog="mrrope", description="Mixed-radix rotary position embeddings.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    table = commands.add_parser("table", help="build a frequency table and print or save it")
    table.add_argument("method", choices=METHODS)
    table.add_argument("--rotary-dim", type=int, required=True, metavar="N", help="components of a head that rotate")
    table.add_argument("--base", type=float, required=True, help="RoPE's theta")
    table.add_argument("--original-max-position", type=float, required=True, metavar="N", help="the trained length")
    table.add_argument("--scale", type=float, default=1.0, help="by how much to extend it (default: %(default)s)")
    table.add_argument("--alpha", type=float, default=1.0, help="slow bound in rotations (default: %(default)s)")
    table.add_argument("--beta", type=float, default=32.0, help="fast bound in rotations (default: %(default)s)")
    table.add_argument("--bounds", type=int, nargs=2, metavar=("D_L", "D_H"), help="bounds as pair indices")
    table.add_argument("--power", type=float, help="for mrrope_pow")
    table.add_argument("--factors", type=float, nargs="+", metavar="F", help="for radix and longrope")
    table.add_argument("--attention-factor", type=float, metavar="F", help="instead of the method's own")
    table.add_argument("--json", action="store_true", help="print the table as JSON")
    table.add_argument("--save", metavar="FILE", help="write the table's JSON to a file")
    table.set_defaults(run=run_table)

    shown = commands.add_parser("demo", help="show the tables and the rotation at work")
    shown.set_defaults(run=lambda _: demo.run())
    return top


def run_table(options: argparse.Namespace) -> None:
    """``mrrope table``."""
    table = frequency_table(
        options.method,
        rotary_dim=options.rotary_dim,
        base=options.base,
        original_max_position=options.original_max_position,
        scale=options.scale,
        alpha=options.alpha,
        beta=options.beta,
        bounds=options.bounds,
        power=options.power,
        factors=options.factors,
        attention_factor=options.attention_factor,
    )
    if options.save:
        table.save(options.save)
    if options.json:
        print(json.dumps(table.to_dict()))
    else:
        print_table(table)


def print_table(table: FrequencyTable) -> None:
    """One row a pair."""
    print(table)
    print(f"{'pair':>5}{'inv_freq':>26}{'wavelength':>16}{'cumulative scale':>19}{'radix factor':>15}")
    factors = [*table.radix_factors.tolist(), None]
    rows = zip(table.inv_freq.tolist(), table.cumulative_scale.tolist(), factors, strict=True)
    for pair, (frequency, scale, factor) in enumerate(rows):
        wavelength = math.tau / frequency
        last = "" if factor is None else f"{factor:15.6f}"
        print(f"{pair:>5}{frequency:26.17g}{wavelength:16.2f}{scale:19.6f}{last}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors in the input are one line, not a traceback."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError) as error:
        print(f"mrrope {options.command}: {error}", file=sys.stderr)
        return 2
    return 0
