"""What a run was computed with: the code (a fingerprint, a git commit), versions, device, threads.

No program is run for this. git would read the configuration of whatever repository it finds, which
can name programs; so the commit is read from git's own files, and only if coterie itself lies in a
checkout (``CHECKOUT/src/coterie``), never from the current directory.
"""

import functools
import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

HOME = Path(__file__).parents[1]
SUFFIXES = (".py", ".cpp", ".h")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_REF = re.compile(r"refs(/[\w-][\w.+@-]*)+")
_MOST = 1 << 22  # at most so many bytes of one of git's files are read


@functools.cache
def fingerprint() -> str:
    """A hash of coterie's own code, which, unlike the version, changes with every edit."""
    total = hashlib.sha256()
    for path in sorted(path for suffix in SUFFIXES for path in HOME.rglob(f"*{suffix}")):
        total.update(path.relative_to(HOME).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]


def commit(home: Path = HOME) -> str | None:
    """The commit of the checkout in which coterie lies; None if it does not lie in one.

    Files may have been edited since that commit: :func:`fingerprint` tells.
    """
    checkout = home.parent.parent
    if home != checkout / "src" / "coterie":
        return None
    git = _git_folder(checkout)
    head = _text(git / "HEAD")
    name = head.removeprefix("ref: ")
    if name == head:
        return head if _COMMIT.fullmatch(head) else None
    if not _REF.fullmatch(name):
        return None
    shared = (git / (_text(git / "commondir") or ".")).resolve()  # has the branches of a worktree
    found = _text(git / name) or _text(shared / name) or _packed(shared, name)
    return found if _COMMIT.fullmatch(found) else None


def _git_folder(checkout: Path) -> Path:
    """The folder ``.git``; in a worktree, the folder that the file ``.git`` names."""
    plain = checkout / ".git"
    return plain if plain.is_dir() else checkout / _text(plain).removeprefix("gitdir: ")


def _packed(git: Path, name: str) -> str:
    """The commit of a branch that git has packed with others into the file ``packed-refs``."""
    lines = (line.partition(" ") for line in _text(git / "packed-refs").splitlines())
    return next((value for value, _, key in lines if key == name), "")


def _text(path: Path) -> str:
    """The text of a short file; empty if it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_MOST).decode().strip()
    except (OSError, ValueError):
        return ""


# ---- the environment -----------------------------------------------------------------------------

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "safetensors")


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """The contents of ``environment.json``: whatever may change the last bits, and the command."""
    device = torch.device(device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "coterie": __version__,
        "source": fingerprint(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git_commit": commit(),
        "argv": list(sys.argv),
    }
