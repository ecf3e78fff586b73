"""Reads numpy's npz and npy files: a user's arrays, and packed versions of the papers' datasets.

Keys: ``x_train, y_train`` with optional ``x_val, y_val, x_test, y_test``, or plain ``x, y``; client
numbers as ``client_train`` (or ``writer_train``, ``client``) with ``client_names``; optionally
``class_names`` and ``fine_to_coarse``. Images may be JPEG XL mosaics (``x_train_jxl_0``, …). Text
is ``text_train`` with ``offset_train``. Nothing pickled is read.
"""

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...storage import cache
from ...storage.archives import read_npz as read_arrays
from ..arrays import TEST, TRAIN, VALIDATION, Array, Names, Piece, assemble
from ..federation import Dataset
from .images import decode
from .text import Cut, Passage, windows

_PARTS = (("_train", TRAIN), ("_val", VALIDATION), ("_test", TEST), ("", TRAIN))
_OWNERS = ("client", "writer", "owner")
MOST_OWNERS = 100_000  # client numbers, or the number of samples if larger; gaps are allowed


def read_npz(path: Path, *, name: str = "", **options: Any) -> Dataset:
    """Read an npz file of arrays or texts, or a folder with a npy file for each array.

    The arrays of a folder stay on disk: the system reads and drops their pages as it needs. So do
    samples of rank 3 and more, as uint8 with their channels first or as float32. ``options`` are
    those of :class:`Cut`, for texts.
    """
    try:
        arrays = _mapped(path) if path.is_dir() else read_arrays(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not an npz file of plain arrays ({error})") from error
    name = name or path.stem
    if any(f"text{suffix}" in arrays for suffix, _ in _PARTS):
        return windows(name, _passages(path, arrays), Cut(**options))
    pieces = [piece for suffix, part in _PARTS if (piece := _piece(arrays, suffix, part))]
    if not pieces:
        raise DataError(
            f"{path}: found the keys {', '.join(sorted(arrays)) or '(none)'}; expected x_train and "
            "y_train (and x_test, y_test), or x and y"
        )
    class_names = tuple(str(c) for c in arrays.get("class_names", ()))
    names = Names(class_names, _owner_names(path, arrays, pieces))
    return assemble(name, pieces, names, arrays.get("fine_to_coarse"))


def _mapped(path: Path) -> cache.Arrays:
    """The arrays of a folder, mapped into memory; a change of a copy never reaches the files."""
    files = sorted(path.glob("*.npy"))
    return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files}


def _piece(arrays: cache.Arrays, suffix: str, part: int) -> Piece | None:
    x = _images(arrays, suffix)
    if x is None or f"y{suffix}" not in arrays:
        return None
    y = arrays[f"y{suffix}"]
    owners = next((arrays[key] for o in _OWNERS if (key := o + suffix) in arrays), None)
    if owners is not None:
        _check_owners(owners, len(y))
    repeated = arrays.get(f"{suffix[1:]}_also_in_train")
    if repeated is not None:  # a training sample must not be a test sample
        x, y = x[~repeated], y[~repeated]
        owners = None if owners is None else owners[~repeated]
    return Piece(x, y, part, owners)


def _check_owners(owners: Array, count: int) -> None:
    """Refuse client numbers that are not one non-negative integer per sample."""
    if owners.dtype.kind not in "iu" or owners.shape != (count,):
        raise DataError(
            f"client: found {owners.dtype} of shape {list(owners.shape)}; expected one whole "
            f"number for each of the {count} samples (names go into client_names)"
        )
    most = max(MOST_OWNERS, count)
    if len(owners) and not 0 <= int(owners.min()) <= int(owners.max()) < most:
        raise DataError(
            f"client: found numbers from {owners.min()} to {owners.max()}; expected numbers from 0 "
            f"to below {most:,}; number the clients from 0"
        )


def _images(arrays: cache.Arrays, suffix: str) -> Array | None:
    if f"x{suffix}" in arrays:
        return arrays[f"x{suffix}"]
    prefix = f"x{suffix}_jxl_"
    mosaics = sorted(
        (key for key in arrays if key.startswith(prefix)), key=lambda key: int(key[len(prefix) :])
    )
    if not mosaics:
        return None
    name = cache.key("mosaics", *(arrays[key] for key in mosaics))
    made = cache.remember(  # decoding takes half a minute, reading the cache does not
        f"images-{name}",
        lambda: {"x": np.concatenate([_tiles(decode(arrays[k].tobytes(), k)) for k in mosaics])},
    )
    return made["x"]


def _tiles(mosaic: Array, side: int = 32) -> Array:
    height, width = mosaic.shape[0] // side, mosaic.shape[1] // side
    tiles = mosaic.reshape(height, side, width, side, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(-1, side, side, 3)


def _owner_names(path: Path, arrays: cache.Arrays, pieces: list[Piece]) -> tuple[str, ...]:
    held = [piece.owners for piece in pieces if piece.owners is not None]
    if not held:
        return ()
    if len(held) != len(pieces):
        raise DataError(
            f"{path}: some parts name their clients and others do not; name them in all"
        )
    highest = int(max(owners.max(initial=0) for owners in held))
    known = next((arrays[key] for o in _OWNERS if (key := f"{o}_names") in arrays), None)
    names = tuple(f"client{i}" for i in range(highest + 1)) if known is None else known.tolist()
    if highest >= len(names) or len(set(names)) != len(names):
        raise DataError(
            f"{path}: found client number {highest} and {len(names)} names; expected a different "
            "name for every number"
        )
    return tuple(str(name) for name in names)


def _passages(path: Path, arrays: cache.Arrays) -> list[Passage]:
    """The texts of all clients."""
    names = [str(name) for name in arrays.get("client_names", ())]
    found = []
    for suffix, part in _PARTS:
        if f"text{suffix}" in arrays:
            text = arrays[f"text{suffix}"].tobytes().decode("latin-1")
            cuts = arrays.get(f"offset{suffix}", np.zeros(0)).tolist()
            if len(cuts) != len(names) + 1:
                raise DataError(
                    f"{path}: text{suffix} is of {len(names)} client_names and has {len(cuts)} "
                    f"numbers in offset{suffix}; expected one more than names: where each begins, "
                    "and the end"
                )
            for name, start, end in zip(names, cuts[:-1], cuts[1:], strict=True):
                found.append(Passage(name, text[start:end], part))
    return found
