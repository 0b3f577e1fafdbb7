"""The command line ``mrrope``: ``table`` and ``export`` here, all other commands in their packages."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mrrope import __version__
from mrrope.evaluation.results import EvaluationStoppedError
from mrrope.export.gguf import export_gguf
from mrrope.export.hf_config import ENGINES, export_config
from mrrope.reporting.options import add_original_max_position
from mrrope.tables.frequency_table import METHODS, FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.lookup import ModelTables, is_saved_table, load_tables, needs_scale, unknown_method
from mrrope.tables.table_set import TableSet

SHOWN_PAIRS = 8
"""Number of pairs of which ``mrrope table`` shows the cumulative scale in every layer and head."""

FACTORS_PER_LINE = 8
"""Number of query factors in a line of ``mrrope table``."""

PACKAGE_COMMANDS = (
    ("eval", "evaluation", "compare methods on a model: perplexity by length, retrieval tasks"),
    ("bench", "benchmark", "time the rotary op beside a copy, transformers and installed peers"),
    ("calibrate", "calibration", "search for the best table for a model, on your text"),
    ("plot", "theory", "draw the theory of the methods' tables, and of a model's heads"),
    ("demo", "demo", "extend a real model past its native length, with several methods"),
    ("env", "environment", "report versions, build, kernels and GPU, and what to fix: for bug reports"),
)
"""Name, package and help text of every command that is a package; its module ``command`` has ``add_options`` and
``run``."""


class PackageParser(argparse.ArgumentParser):
    """The parser of a command that is a package, which is imported when it parses."""

    package: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Import the package, add its options once, and parse."""
        if self.package is not None:
            command = importlib.import_module(f"mrrope.{self.package}.command")
            self.package = None
            command.add_options(self)
            self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="mrrope", description="Mixed-radix rotary position embeddings.")
    top.add_argument("--version", action="version", version=f"mrrope {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=PackageParser)

    table = commands.add_parser("table", help="build or read a frequency table or a set, and print or save it")
    table.add_argument(
        "method",
        metavar="METHOD|FILE",
        help=f"one of {', '.join(METHODS)}; or the JSON or the shipped name of a table, head tables or a table set",
    )
    table.add_argument("--rotary-dim", type=int, metavar="N", help="components of a head that rotate")
    table.add_argument("--base", type=float, help="RoPE's theta")
    table.add_argument("--original-max-position", type=float, metavar="N", help="the trained length")
    add_table_options(table)
    table.add_argument("--json", action="store_true", help="print the table as JSON")
    table.add_argument("--save", metavar="FILE", help="write the table's JSON to a file")
    table.set_defaults(run=run_table)

    export = commands.add_parser("export", help="write a model's configuration, or its GGUF, for an engine")
    export.add_argument("model", metavar="MODEL", help="a model's folder, its config.json, or a .gguf file")
    chosen = export.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--method", choices=METHODS)
    chosen.add_argument(
        "--table", metavar="FILE", help="the JSON or shipped name of a table or a set, instead of a method"
    )
    export.add_argument("--engine", choices=(*ENGINES, "llama.cpp"), required=True, help="the engine that reads it")
    add_original_max_position(export)
    export.add_argument("--local-layers", action="store_true", help="extend sliding-window layers too")
    add_table_options(export)
    export.add_argument("--output", metavar="FILE", help="where to write it (default: print the configuration)")
    export.add_argument("--json", action="store_true", help="print the configuration, or the GGUF's table, as JSON")
    export.set_defaults(run=run_export)

    for name, package, summary in PACKAGE_COMMANDS:
        commands.add_parser(name, help=summary).package = package
    return top


def add_table_options(command: argparse.ArgumentParser) -> None:
    """Add the options that shape a table; the method has a default for each."""
    command.add_argument("--scale", type=float, help="factor of the extension; methods need it, but for rope")
    command.add_argument("--alpha", type=float, help="slow bound in rotations (default: 1)")
    command.add_argument("--beta", type=float, help="fast bound in rotations (default: 32)")
    command.add_argument("--bounds", type=int, nargs=2, metavar=("D_L", "D_H"), help="bounds as pair indices")
    command.add_argument("--power", type=float, help="for mrrope_pow")
    command.add_argument("--factors", type=float, nargs="+", metavar="F", help="for radix and longrope")
    command.add_argument("--attention-factor", type=float, metavar="F", help="replaces the method's own")


def table_options(options: argparse.Namespace) -> dict[str, Any]:
    """The given options of :func:`add_table_options`, without the scale."""
    names = ("alpha", "beta", "bounds", "power", "factors", "attention_factor")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def run_table(options: argparse.Namespace) -> None:
    """Run ``mrrope table``."""
    tables = chosen_tables(options)
    if options.save:
        tables.save(options.save)
    if options.json:
        print(json.dumps(tables.to_dict()))
    elif isinstance(tables, FrequencyTable):
        print_table(tables)
    else:
        print_tables(tables)


def chosen_tables(options: argparse.Namespace) -> ModelTables:
    """The tables of a file, or the table that the options describe."""
    names = ("rotary_dim", "base", "original_max_position")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chosen = table_options(options)
    if is_saved_table(options.method):
        if unused := [*given, *chosen, *(["scale"] if options.scale is not None else [])]:
            raise ValueError(f"{options.method} is a ready table, which leaves no room for {', '.join(unused)}")
        return load_tables(options.method)
    if options.method not in METHODS:
        raise ValueError(unknown_method(options.method))
    missing = [f"--{name.replace('_', '-')}" for name in names if name not in given]
    missing += ["--scale"] if options.scale is None and needs_scale(options.method) else []
    if missing:
        raise ValueError(f"a method needs {', '.join(missing)}")
    scale = {} if options.scale is None else {"scale": options.scale}
    return frequency_table(options.method, **scale, **given, **chosen)


def print_table(table: FrequencyTable) -> None:
    """Print one row per pair."""
    print(table)
    print(f"{'pair':>5}{'inv_freq':>26}{'wavelength':>16}{'cumulative scale':>19}{'radix factor':>15}")
    factors = [*table.radix_factors.tolist(), None]
    rows = zip(table.inv_freq.tolist(), table.cumulative_scale.tolist(), factors, strict=True)
    for pair, (frequency, scale, factor) in enumerate(rows):
        wavelength = math.tau / frequency
        last = "" if factor is None else f"{factor:15.6f}"
        print(f"{pair:>5}{frequency:26.17g}{wavelength:16.2f}{scale:19.6f}{last}")


def print_tables(tables: HeadTables | TableSet) -> None:
    """Print a row per layer and key head: attention factor and the cumulative scales of some pairs; query factors."""
    print(tables)
    pairs = tables.rotary_dim // 2
    shown = sorted({round(i * (pairs - 1) / (SHOWN_PAIRS - 1)) for i in range(SHOWN_PAIRS)})
    print("layer  head  attention factor  cumulative scale of pair" + "".join(f"{pair:>9}" for pair in shown))
    for number, layer in enumerate(tables if isinstance(tables, TableSet) else [tables]):
        own = list(layer) if isinstance(layer, HeadTables) else [layer]
        rows = [("all", own[0])] if layer.key_heads is None else enumerate(own)
        for head, table in rows:
            scales = table.cumulative_scale.tolist() or [math.nan] * pairs
            numbers = "".join(f"{scales[pair]:9.3f}" for pair in shown)
            place = f"{number:>5}" if isinstance(tables, TableSet) else f"{'all':>5}"
            print(f"{place}{head:>6}{table.attention_factor:18.6f}{'':>26}{numbers}")
    if tables.query_heads is not None:
        print_query_factors(tables)


def print_query_factors(tables: HeadTables | TableSet) -> None:
    """Print the factors of all query heads, in the layers that have them."""
    print("layer  query heads  query factors")
    for number, layer in enumerate(tables if isinstance(tables, TableSet) else [tables]):
        factors = layer.query_factors or ()
        place = number if isinstance(tables, TableSet) else "all"
        for first in range(0, len(factors), FACTORS_PER_LINE):
            shown = factors[first : first + FACTORS_PER_LINE]
            heads = f"{first} to {first + len(shown) - 1}"
            print(f"{place:>5}{heads:>13}  {''.join(f'{factor:10.6f}' for factor in shown).lstrip()}")


def run_export(options: argparse.Namespace) -> None:
    """Run ``mrrope export``."""
    method = load_tables(options.table) if options.table else options.method
    given = {"scale": options.scale, **table_options(options)}
    if options.original_max_position is not None:
        given["original_max_position"] = options.original_max_position
    if options.engine == "llama.cpp":
        if options.local_layers:
            raise ValueError("--local-layers is for configurations; the llama architecture has no such layers")
        if not options.output:
            raise ValueError("--engine llama.cpp needs --output FILE")
        if Path(options.model).suffix != ".gguf":
            raise ValueError(f"--engine llama.cpp needs a .gguf file, got {options.model}")
        exported = export_gguf(options.model, options.output, method, **given).to_dict()
    else:
        if Path(options.model).suffix == ".gguf":
            raise ValueError(f"--engine {options.engine} needs a model's folder or config.json, got {options.model}")
        exported = export_config(
            options.model, method, engine=options.engine, local_layers=options.local_layers, **given
        )
        if options.output:
            write_config(exported, Path(options.output), Path(options.model))
    if options.json or not options.output:
        print(json.dumps(exported, indent=2, allow_nan=False))
    else:
        print(f"{options.output}: for {options.engine}")


def write_config(config: dict[str, Any], output: Path, source: Path) -> None:
    """Write a configuration to a file or folder; overwriting its source is an error."""
    output, source = (path / "config.json" if path.is_dir() else path for path in (output, source))
    if output.exists() and output.samefile(source):
        raise ValueError(f"--output must be another file than the model's own {output}")
    output.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")


def run_command(arguments: list[str] | None) -> int:
    """Parse and run; input errors and Ctrl-C print one line instead of a traceback."""
    name = "mrrope"
    try:
        options = parser().parse_args(arguments)
        name = f"mrrope {options.command}"
        options.run(options)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, EvaluationStoppedError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"{name}:", "; ".join(["interrupted", *interrupt.args]), file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; return the exit status."""
    try:
        try:
            return run_command(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe, such as head, has closed it. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
