"""Exit codes common to all commands, and ``mrrope table``."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import MRROPE
from layer_tables import random_heads, random_set

import mrrope
from mrrope import cli
from mrrope.tables import shipped
from mrrope.tables.lookup import load_tables

TABLE = ["table", "mrrope_pro", "--scale", "4", "--base", "10000", "--original-max-position", "64", "--rotary-dim"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"mrrope {mrrope.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", mrrope.__version__)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], [*TABLE, "8"], [*TABLE, "16384"], [*TABLE, "16384", "--json"]],
    ids=["help", "one buffer", "many buffers", "one long line"],
)
def test_a_closed_pipe_is_no_error(arguments: list[str], tmp_path: Path) -> None:
    """As with ``| head``: the rest of the output is dropped without a message."""
    reader, writer = os.pipe()
    # argparse ignores write errors, and unbuffered output would raise them inside it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*MRROPE, *arguments], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    os.close(writer)
    os.close(reader)
    _, stderr = process.communicate(timeout=120)
    assert stderr == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("module", ["mrrope", "mrrope.cli"])
def test_python_runs_the_command_line(module: str, tmp_path: Path) -> None:
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False, cwd=tmp_path)
    done = run([sys.executable, "-m", module, "--version"])
    assert (done.returncode, done.stdout) == (0, f"mrrope {mrrope.__version__}\n"), done.stderr
    done = run([sys.executable, "-m", module, "table", "yarnn"])
    assert done.returncode == 2
    assert done.stderr.startswith("mrrope table: method must be one of")


def test_a_table_of_plain_rope_needs_no_scale(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--rotary-dim", "8", "--base", "1e4", "--original-max-position", "64"]
    assert cli.main(["table", "rope", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scale"] == 1.0


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "frequency_table", interrupt)
    assert cli.main([*TABLE, "8"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "mrrope table: interrupted\n"


HELP = """
import sys
from mrrope import cli
before = set(sys.modules)
try:
    cli.main(["--help"])
except SystemExit:
    pass
imported = {name for name in set(sys.modules) - before if name.startswith(("mrrope", "torch"))}
assert not imported, imported
for name in ("benchmark", "calibration", "demo", "environment.report", "theory"):
    assert f"mrrope.{name}" not in sys.modules, name
"""


def test_help_imports_no_command(tmp_path: Path) -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for name in ("table", "export", "eval", "bench", "calibrate", "plot", "demo", "env"):
        assert re.search(rf"^ +{name}\b", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["eval", "bench", "calibrate", "plot", "demo", "env"])
def test_every_command_has_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["env"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "mrrope: interrupted\n"


SET = random_set(2, 3)
FACTORED = mrrope.TableSet([random_heads(3, 0, 9), SET[0][0], mrrope.HeadTables([SET[1][0]], [1.5] * 9)])
KINDS = {
    "set": SET,
    "per layer": mrrope.TableSet([SET[0][0], SET[1][0]]),
    "heads": SET[0],
    "table": SET[0][0],
    "factors": FACTORED,
}


@pytest.mark.parametrize("kind", KINDS)
def test_table_reads_files_and_shipped_names(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = KINDS[kind]
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    tables.save(tmp_path / "tiny.json")
    for source in ("tiny", str(tmp_path / "tiny.json")):
        assert cli.main(["table", source, "--save", str(tmp_path / "copy.json")]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(repr(tables))
        assert load_tables(tmp_path / "copy.json") == tables
        assert cli.main(["table", source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == tables.to_dict()


@pytest.mark.parametrize("kind", ["set", "per layer", "heads"])
def test_table_prints_every_layer_and_head(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = KINDS[kind]
    tables.save(tmp_path / "t.json")
    assert cli.main(["table", str(tmp_path / "t.json")]) == 0
    _, header, *rows = capsys.readouterr().out.splitlines()
    pairs = [int(word) for word in header.split() if word.isdigit()]
    assert pairs == list(range(8))
    layers = list(tables) if isinstance(tables, mrrope.TableSet) else [tables]
    expected = []
    for number, layer in enumerate(layers):
        place = str(number) if isinstance(tables, mrrope.TableSet) else "all"
        heads = enumerate(layer) if isinstance(layer, mrrope.HeadTables) else [("all", layer)]
        expected += [[place, str(head), table] for head, table in heads]
    assert len(rows) == len(expected)
    for row, (place, head, table) in zip(rows, expected, strict=True):
        words = row.split()
        assert words[:2] == [place, head]
        assert float(words[2]) == pytest.approx(table.attention_factor, abs=1e-6)
        assert [float(word) for word in words[3:]] == pytest.approx(table.cumulative_scale.tolist(), abs=1e-3)


@pytest.mark.parametrize("tables", [FACTORED, FACTORED[0]], ids=["set", "heads"])
def test_table_prints_query_factors(
    tables: mrrope.TableSet | mrrope.HeadTables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.save(tmp_path / "t.json")
    assert cli.main(["table", str(tmp_path / "t.json")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    header = lines.index(["layer", "query", "heads", "query", "factors"])
    rows, of_factors = lines[:header], lines[header + 1 :]
    layers = {"0": tables[0], "2": tables[2]} if isinstance(tables, mrrope.TableSet) else {"all": tables}
    place = next(iter(layers))
    assert [row[:2] for row in rows[:3]] == [[place, "0"], [place, "1"], [place, "2"]]
    assert [row[:2] for row in rows[3:]] == ([["1", "all"], ["2", "all"]] if len(layers) == 2 else [])
    for layer, first, second in zip(layers, of_factors[::2], of_factors[1::2], strict=True):
        assert (first[:4], second[:4]) == ([layer, "0", "to", "7"], [layer, "8", "to", "8"])
        shown = [float(word) for word in (*first[4:], *second[4:])]
        assert shown == pytest.approx(layers[layer].query_factors, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["yarn", "--base", "1e4"], "a method needs --rotary-dim, --original-max-position"),
        (["yarn", "--rotary-dim", "8", "--base", "1e4", "--original-max-position", "64"], "a method needs --scale"),
        (["yarnn"], "method must be one of rope, pi, "),
        (["yarnn"], "got 'yarnn': the nearest is 'yarn'"),
        (["{file}", "--scale", "4"], "is a ready table, which leaves no room for scale"),
        (["{file}", "--scale", "1"], "is a ready table, which leaves no room for scale"),
        (["{file}", "--base", "1e4", "--bounds", "1", "2"], "is a ready table, which leaves no room for base, bounds"),
        (["{folder}/none.json"], "none.json"),
    ],
)
def test_bad_input_of_table(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SET.save(tmp_path / "t.json")
    given = [argument.format(file=tmp_path / "t.json", folder=tmp_path) for argument in arguments]
    assert cli.main(["table", *given]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mrrope table: ")
    assert message in printed
    assert printed.count("\n") == 1
