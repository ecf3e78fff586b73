"""Caches arrays that are slow to make in the user's cache folder, by the hash of their source."""

import contextlib
import hashlib
from collections.abc import Callable

import numpy as np

from ..errors import StoreError
from ..storage.archives import read_npz
from ..storage.cache import folder
from ..storage.files import whole
from .arrays import Array

Arrays = dict[str, Array]


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
        with whole(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **made)
    return made
