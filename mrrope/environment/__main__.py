"""``python FOLDER/mrrope/environment``: the report of ``mrrope env`` where ``import mrrope`` fails."""

import argparse
import signal
import sys
from pathlib import Path
from types import ModuleType

if "mrrope" not in sys.modules:  # Python runs this folder by its path, so that the package is not imported.
    package = ModuleType("mrrope")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["mrrope"] = package
    del sys.path[0]  # Python put this folder there, whose modules would hide others of the same names.

try:
    from mrrope.environment import command

    parser = argparse.ArgumentParser(description="Report versions, build, kernels and GPU, and what to fix.")
    command.add_options(parser)
    command.run(parser.parse_args())
except KeyboardInterrupt:  # importing torch takes seconds
    print("mrrope env: interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
