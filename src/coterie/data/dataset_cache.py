"""Arrays that are slow to make, kept in the user's cache folder under the hash of their source."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..storage.archives import read_npz
from ..storage.cache import folder
from .arrays import Array

Arrays = dict[str, Array]


def key(*sources: str | Array) -> str:
    """A name for what is made from these sources."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        if isinstance(source, str):
            digest.update(source.encode())
        else:
            digest.update(f"|{source.shape}|{source.dtype}|".encode())
            digest.update(np.ascontiguousarray(source).data)
    return digest.hexdigest()


def remember(name: str, make: Callable[[], Arrays]) -> Arrays:
    """The cached arrays of that name, made now if they are not there or cannot be read."""
    file = folder() / f"{name}.npz"
    if file.exists():
        with contextlib.suppress(ValueError, OSError):
            return read_npz(file)
    made = make()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        _write(file, made)
    return made


def _write(file: Path, arrays: Arrays) -> None:
    """All of it or nothing, whoever else writes the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        Path(name).replace(file)
    finally:
        Path(name).unlink(missing_ok=True)
