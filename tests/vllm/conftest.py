"""Prepares vLLM for tests of the plugin: no network, no usage statistics, a GPU where there is none."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # tests register the plugin themselves
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import hopper_platform

hopper_platform.pretend()

from mrrope.vllm import plugin

plugin.register()
