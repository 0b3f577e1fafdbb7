"""The command line in a process of its own, and options as its arguments."""

import sys

# Run outside the checkout, whose package need not be compiled.
MRROPE = [sys.executable, "-c", "import sys; from mrrope.cli import main; sys.exit(main(sys.argv[1:]))"]


def as_arguments(options: dict[str, str]) -> list[str]:
    """Return ``["--name", "value", ...]``."""
    return [part for option in options.items() for part in option]
