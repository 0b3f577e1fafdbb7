"""``python -m mrrope``: the command line."""

import sys

from mrrope.cli import main

if __name__ == "__main__":  # not where a process pool imports it again
    sys.exit(main())
