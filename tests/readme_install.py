"""Run README's install lines in a fresh environment, as printed but for the origin of the clone.

``make install-test`` calls it: a clone of this checkout's last commit, a new virtual environment, and the newest torch.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install_lines() -> list[str]:
    """Return the shell lines of README's section Install."""
    section = (ROOT / "README.md").read_text().partition("\n## Install\n")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    if block is None:
        raise SystemExit("README.md must have a section Install with a code block")
    return block[1].strip().splitlines()


def main() -> None:
    """Run the lines in one shell, and then import what they installed from a folder without sources."""
    clone, *lines = install_lines()
    words = shlex.split(clone)
    address = words[words.index("clone") + 1]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "environment"), with_pip=True)
        environment = os.environ | {"PATH": f"{folder}/environment/bin:{os.environ['PATH']}"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        script = "\n".join(["set -eux", clone.replace(address, shlex.quote(str(ROOT))), *lines])
        start = time.perf_counter()
        # git names the clone of a folder after the folder.
        script = script.replace("&& cd mrrope", f"&& cd {shlex.quote(ROOT.name)}")
        subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True)
        minutes = (time.perf_counter() - start) / 60
        rotates = (
            "import mrrope, torch; t = mrrope.frequency_table('mrrope_uni', rotary_dim=8, base=1e4, "
            "original_max_position=64, scale=4.0); q = torch.randn(1, 1, 3, 8); "
            "assert not torch.equal(mrrope.rotary(q, None, torch.arange(3), t)[0], q)"
        )
        subprocess.run(["python", "-c", rotates], cwd=folder, env=environment, check=True)
    print(f"README's install lines ran in {minutes:.1f} minutes, with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
