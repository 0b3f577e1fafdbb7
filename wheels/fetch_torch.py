"""Fetches what compiling and linking needs of every torch in torch-versions.txt: headers and three libraries.

    python wheels/fetch_torch.py FOLDER

gives FOLDER/2.11.0 and so on. A wheel of torch for aarch64 is 430 MB; 320 MB are kept, and the download is deleted. C++
is compatible within a minor version, so that one version of each minor is listed, its first.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

VERSIONS = (Path(__file__).parent / "torch-versions.txt").read_text().split()
WANTED = (
    "torch/include/",
    "torch/lib/libc10.so",
    "torch/lib/libtorch.so",
    "torch/lib/libtorch_cpu.so",
    "torch/version.py",
)
ANY_PYTHON = "3.12"
"""A version that every torch of the list has wheels for."""


def fetch(version: str, folder: Path) -> None:
    """Put the wanted files of a version of torch into a new folder."""
    with TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        # Headers and libraries are the same for every Python, and not every torch has a wheel for the one in use.
        command += ["--only-binary", ":all:", "--python-version", ANY_PYTHON, "--dest", temporary]
        subprocess.run([*command, f"torch=={version}"], check=True)
        (downloaded,) = Path(temporary).glob("torch-*.whl")
        with zipfile.ZipFile(downloaded) as wheel:
            wheel.extractall(temporary, [name for name in wheel.namelist() if name.startswith(WANTED)])
        (Path(temporary) / "torch").rename(folder)  # complete, or not there


def main() -> None:
    """Fetch the versions that the folder does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        if not (folder / version).exists():
            fetch(version, folder / version)


if __name__ == "__main__":
    main()
