"""Fixtures of the tests over HTTP: a model on disk, and servers whose output failing tests show."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from http_server import Server

LOG_LINES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the module."""
    # Ends every server, also where one does not end in time.
    with contextlib.ExitStack() as servers:

        def start_server(*args: Any, **kwargs: Any) -> Server:
            log = tmp_path_factory.mktemp("server") / "log.txt"
            return servers.enter_context(Server(args[0], log, *args[1:], **kwargs))

        yield start_server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of the output of every server that a failed test used."""
    report = yield
    servers = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Server)]
    if report.failed:
        for server in servers:
            lines = server.log.read_text().splitlines()[-LOG_LINES:]
            report.sections.append((f"output of the server at {server.url}", "\n".join(lines)))
    return report
