"""Exit codes common to all commands."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from command_line import MRROPE

import mrrope
from mrrope import cli

TABLE = ["table", "mrrope_pro", "--base", "10000", "--original-max-position", "64", "--rotary-dim"]


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


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "frequency_table", interrupt)
    assert cli.main([*TABLE, "8"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "mrrope table: interrupted\n"
