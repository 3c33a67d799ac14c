"""The torch_npu wheel that fits the installed torch, unpacked in a cache folder.

Never in site-packages: there, with no CANN, the wheel's entry point makes every `import torch` fail.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Releases of torch_npu for a torch where the newest differs from torch's own number.
RELEASES = {"2.10.0": "2.10.0.post4"}


def fitting_version() -> str:
    """The torch_npu release made for the installed torch, as "2.13.0". Raises RuntimeError where there is no torch."""
    try:
        torch_version = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("torch is not installed. Install it: python -m pip install torch==2.13.0") from None
    return RELEASES.get(torch_version, torch_version)


def cache_folder() -> Path:
    """Where wheels and compiled stand-ins are kept: $FATTN_CACHE, else fattn in the user's cache folder."""
    named = os.environ.get("FATTN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fattn"


def installed() -> Path | None:
    """The folder that holds an installed torch_npu package (an Ascend host's own), or None."""
    spec = importlib.util.find_spec("torch_npu")
    return Path(spec.submodule_search_locations[0]).parent if spec and spec.submodule_search_locations else None


def fetch(version: str) -> Path:
    """The folder to put on sys.path so that `import torch_npu` finds this release; downloaded once, safe with parallel processes.

    Raises RuntimeError that names what to install where pip or the release is missing.
    """
    folder = cache_folder() / f"torch_npu-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
        _download(version, scratch)
        wheels = list(Path(scratch).glob("torch_npu-*.whl"))
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as archive:
            # The entry points would make an `import torch` in any child process import torch_npu, and fail.
            archive.extractall(unpacked, [name for name in archive.namelist() if not name.endswith("entry_points.txt")])
        settle(unpacked, folder)
    return folder


def settle(made: Path, folder: Path):
    """Moves a finished folder to its place in one step; a process that was faster wins, and its folder is kept."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)


def _download(version, scratch):
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"fetching torch_npu {version} needs pip, which {sys.executable} lacks. Install it: python -m ensurepip")
    print(f"fetching torch_npu {version} into {cache_folder()}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    # pip's progress goes to standard error, and standard output stays the caller's
    ended = subprocess.run([*command, "--dest", scratch, f"torch_npu=={version}"], stdout=2)
    if ended.returncode:
        raise RuntimeError(
            f"pip could not download torch_npu=={version} for this Python ({sys.version.split()[0]}); its message is above. "
            "Check the network and the package index, or install a torch that torch_npu supports: python -m pip install torch==2.13.0"
        )
