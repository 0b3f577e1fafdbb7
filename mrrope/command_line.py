"""The command ``mrrope``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from mrrope import demo
from mrrope.benchmark import command as benchmark_command
from mrrope.calibration import command as calibration_command
from mrrope.evaluation import command as evaluation_command
from mrrope.evaluation.results import EvaluationStoppedError
from mrrope.export import ENGINES, export_config
from mrrope.gguf_export import export_gguf
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
    add_table_options(table)
    table.add_argument("--json", action="store_true", help="print the table as JSON")
    table.add_argument("--save", metavar="FILE", help="write the table's JSON to a file")
    table.set_defaults(run=run_table)

    export = commands.add_parser("export", help="write a model's configuration, or its GGUF, for an engine")
    export.add_argument("model", metavar="MODEL", help="a model's folder, its config.json, or a .gguf file")
    chosen = export.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--method", choices=METHODS)
    chosen.add_argument("--table", metavar="FILE", help="a table's JSON, instead of a method")
    export.add_argument("--engine", choices=(*ENGINES, "llama.cpp"), required=True, help="who is to read it")
    export.add_argument("--original-max-position", type=float, metavar="N", help="the trained length, for llama.cpp")
    add_table_options(export)
    export.add_argument("--output", metavar="FILE", help="where to write it (default: print the configuration)")
    export.add_argument("--json", action="store_true", help="print the configuration, or the GGUF's table, as JSON")
    export.set_defaults(run=run_export)

    evaluation = commands.add_parser("eval", help="compare methods on a model: perplexity by length, retrieval tasks")
    evaluation_command.add_options(evaluation)
    evaluation.set_defaults(run=evaluation_command.run)

    benchmark = commands.add_parser("bench", help="time the rotation here, beside a copy, transformers and its peers")
    benchmark_command.add_options(benchmark)
    benchmark.set_defaults(run=benchmark_command.run)

    calibration = commands.add_parser("calibrate", help="find the table that suits a model, on a text of yours")
    calibration_command.add_options(calibration)
    calibration.set_defaults(run=calibration_command.run)

    shown = commands.add_parser("demo", help="show the tables and the rotation at work")
    shown.set_defaults(run=lambda _: demo.run())
    return top


def add_table_options(command: argparse.ArgumentParser) -> None:
    """The options that shape a table; those not given are left to the method."""
    command.add_argument("--scale", type=float, default=1.0, help="by how much to extend it (default: %(default)s)")
    command.add_argument("--alpha", type=float, help="slow bound in rotations (default: 1)")
    command.add_argument("--beta", type=float, help="fast bound in rotations (default: 32)")
    command.add_argument("--bounds", type=int, nargs=2, metavar=("D_L", "D_H"), help="bounds as pair indices")
    command.add_argument("--power", type=float, help="for mrrope_pow")
    command.add_argument("--factors", type=float, nargs="+", metavar="F", help="for radix and longrope")
    command.add_argument("--attention-factor", type=float, metavar="F", help="instead of the method's own")


def table_options(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of :func:`add_table_options`, but for the scale."""
    names = ("alpha", "beta", "bounds", "power", "factors", "attention_factor")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def run_table(options: argparse.Namespace) -> None:
    """``mrrope table``."""
    table = frequency_table(
        options.method,
        rotary_dim=options.rotary_dim,
        base=options.base,
        original_max_position=options.original_max_position,
        scale=options.scale,
        **table_options(options),
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


def run_export(options: argparse.Namespace) -> None:
    """``mrrope export``."""
    method = Path(options.table) if options.table else options.method
    given = {"scale": options.scale, **table_options(options)}
    if options.original_max_position is not None:
        if options.engine != "llama.cpp":
            raise ValueError("--original-max-position is for llama.cpp; configurations have a place for it")
        given["original_max_position"] = options.original_max_position
    if options.engine == "llama.cpp":
        if not options.output:
            raise ValueError("--engine llama.cpp needs --output FILE")
        if Path(options.model).suffix != ".gguf":
            raise ValueError(f"--engine llama.cpp needs a .gguf file, got {options.model}")
        exported = export_gguf(options.model, options.output, method, **given).to_dict()
    else:
        if Path(options.model).suffix == ".gguf":
            raise ValueError(f"--engine {options.engine} needs a model's folder or config.json, got {options.model}")
        exported = export_config(options.model, method, engine=options.engine, **given)
        if options.output:
            write_config(exported, Path(options.output), Path(options.model))
    if options.json or not options.output:
        print(json.dumps(exported, indent=2))
    else:
        print(f"{options.output}: for {options.engine}")


def write_config(config: dict[str, Any], output: Path, source: Path) -> None:
    """Writes a configuration to a file or into a folder, but not over the one it comes from."""
    output, source = (path / "config.json" if path.is_dir() else path for path in (output, source))
    if output.exists() and output.samefile(source):
        raise ValueError(f"--output must be another file than the model's own {output}")
    output.write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors in the input are one line, not a traceback."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError, ImportError, EvaluationStoppedError) as error:
        print(f"mrrope {options.command}: {error}", file=sys.stderr)
        return 2
    return 0
