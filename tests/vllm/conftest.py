"""Prepares vLLM for tests of the plugin: no network, no usage statistics, a GPU where there is none."""

import os
import warnings

import hopper_platform
import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # tests register the plugin themselves
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, before test files import vLLM."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller runs no tests: importing vLLM takes 8 s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, used on import
        hopper_platform.pretend()
        from mrrope.vllm import plugin, worker_hooks

        plugin.register()
        worker_hooks.install()  # as the first worker of a served model does
