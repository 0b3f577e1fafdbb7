"""The version of vLLM under test: releases differ in where things are."""

import re

import vllm

_major, _minor = re.match(r"(\d+)\.(\d+)", vllm.__version__).groups()
VERSION = int(_major), int(_minor)
