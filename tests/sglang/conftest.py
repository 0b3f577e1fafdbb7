"""Prepares SGLang for tests of the plugin: a CPU without SGLang's kernels, no network, the plugin registered."""

import os
import sys
import warnings

import pytest
import tiny_server

os.environ |= tiny_server.environment(SGLANG_PLUGINS="mrrope")
sys.path.insert(0, str(tiny_server.STAND_IN))


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin as SGLang does, and install the hooks of a served model."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller runs no tests: importing SGLang takes 8 s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that a CPU does not have
        from sglang.srt.plugins import load_plugins

        from mrrope.sglang import hooks

        load_plugins()
        hooks.install()
