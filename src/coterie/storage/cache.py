"""The user's cache folder for measurements, datasets and compiled code that are slow to make.

The folder is ``$COTERIE_CACHE``, else ``$XDG_CACHE_HOME/coterie``, else ``~/.cache/coterie``. It
may be deleted at any time. For a user without a home folder (in many containers) it is a temporary
folder of this process, which is removed when the process ends: a folder with a fixed name in
``/tmp`` could belong to another user.

Machine code from the cache is executed, so a file is trusted only if no other user can have written
it: :func:`private` makes a folder that only this user can write to, :func:`put` moves a file there
with its sha256 in a second file, and :func:`flaw` says why a file is not the one that was put
there.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..errors import StoreError
from . import files
from .archives import Array, read_npz

Arrays = dict[str, Array]

SEAL = ".sha256"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path:
    """The path of the cache folder, which need not exist."""
    if own := os.environ.get("COTERIE_CACHE"):
        return files.expanded(own)
    if Path(shared := os.environ.get("XDG_CACHE_HOME", "")).is_absolute():
        return Path(shared) / "coterie"
    try:
        return Path.home() / ".cache" / "coterie"
    except RuntimeError:
        return _of_this_process()


@functools.cache
def _of_this_process() -> Path:
    made = tempfile.mkdtemp(prefix="coterie-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def private(path: Path) -> Path:
    """Make a folder that only this user can write to; PermissionError if that is not possible.

    If the folder exists, belongs to this user and others can write to it, their access is removed.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path}: is a link, or a folder of user {found.st_uid}; expected a folder of user "
            f"{os.geteuid()}; delete it, or name another with COTERIE_CACHE"
        )
    if found.st_mode & _OTHERS_WRITE:
        path.chmod(0o700)
    return path


def put(made: Path, path: Path) -> None:
    """Move a file to ``path``, with its sha256 in a second file; both survive a power cut."""
    seal = made.with_name(made.name + SEAL)
    seal.write_text(files.describe(made)["sha256"], encoding="ascii")
    for part, place in ((seal, _seal(path)), (made, path)):
        part.chmod(0o600)
        files.install(part, place)


def flaw(path: Path) -> str | None:
    """Why a file cannot be trusted to be as :func:`put` left it; None if it can."""
    try:
        for part in (path, _seal(path)):
            found = part.lstat()
            if not stat.S_ISREG(found.st_mode):
                return f"{part.name} is no plain file"
            if found.st_uid != os.geteuid():
                return f"{part.name} belongs to user {found.st_uid}"
            if found.st_mode & _OTHERS_WRITE:
                return f"other users can write to {part.name}"
        said = _seal(path).read_text(encoding="ascii", errors="replace")
        right = said == files.describe(path)["sha256"]
        return None if right else "its bytes do not have their sha256"
    except (OSError, StoreError) as error:
        return str(error)


def _seal(path: Path) -> Path:
    return path.with_name(path.name + SEAL)


# ---- arrays that are slow to make, by the hash of their source ----------------------------------


def key(*sources: str | Array) -> str:
    """The cache key of arrays that are made from these sources."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        if isinstance(source, str):
            digest.update(source.encode())
        else:
            digest.update(f"|{source.shape}|{source.dtype}|".encode())
            digest.update(np.ascontiguousarray(source).data)
    return digest.hexdigest()


def remember(name: str, make: Callable[[], Arrays]) -> Arrays:
    """The cached arrays of this name; they are made if they are missing or unreadable."""
    file = folder() / f"{name}.npz"
    if file.exists():
        with contextlib.suppress(ValueError, OSError):
            return read_npz(file)
    made = make()
    with contextlib.suppress(OSError, StoreError):  # an unwritable cache only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        with files.whole(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **made)
    return made
