"""Reads the idx format of MNIST, Fashion-MNIST and EMNIST, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..arrays import TEST, TRAIN, Array, Names, Piece, assemble
from ..federation import Dataset
from . import containers

_KINDS = ("images", "labels")
_PARTS = {"train": TRAIN, "t10k": TEST, "test": TEST}
_LETTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def is_idx(name: str) -> bool:
    """Whether a file name is that of an idx file."""
    return "idx" in name and "ubyte" in name


def read_idx(path: Path, *, name: str = "", subset: str = "byclass") -> Dataset:
    """Read a folder or archive with the four files ``train-images-idx3-ubyte`` and so on.

    EMNIST's images are stored transposed and are transposed back here.

    subset: the subset of EMNIST: ``byclass``, ``balanced``, ``letters``, …
    """
    found = containers.read(path, lambda file: is_idx(file) and _of_subset(file, subset))
    arrays = {_key(file): _parse(file, content) for file, content in found.items()}
    parts = [part for part in _PARTS if (part, "images") in arrays and (part, "labels") in arrays]
    if "train" not in parts:
        raise DataError(
            f"{path}: found {sorted(found) or 'no idx files'}, expected train-images-idx3-ubyte "
            "and train-labels-idx1-ubyte (or .gz), and the same for t10k or test"
        )
    emnist = any(file.startswith("emnist") for file in found)
    pieces = [_piece(arrays, part, emnist) for part in parts]
    classes = _LETTERS if emnist and subset == "byclass" else ()
    return assemble(name or ("emnist" if emnist else path.name), pieces, Names(classes))


def _of_subset(file: str, subset: str) -> bool:
    return not file.startswith("emnist") or file.startswith(f"emnist-{subset}-")


def _key(file: str) -> tuple[str, str]:
    part = next((part for part in _PARTS if part in file), file)
    return part, next((kind for kind in _KINDS if kind in file), file)


def _piece(arrays: dict[tuple[str, str], Array], part: str, emnist: bool) -> Piece:
    x, y = arrays[part, "images"], arrays[part, "labels"].astype(np.int64)
    if emnist:
        x, y = x.transpose(0, 2, 1), y - (1 if y.min() == 1 else 0)  # 'letters' counts from one
    return Piece(x, y, _PARTS[part])


def _parse(file: str, content: bytes) -> Array:
    """Parse one idx file of unsigned bytes into an array."""
    try:
        raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: broken gzip file ({error}); fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{file}: not an idx file of bytes (it starts with {raw[:4].hex()})")
    rank = raw[3]
    if len(raw) < 4 + 4 * rank:
        raise DataError(f"{file}: the idx header is cut short; fetch the file again")
    shape = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    if len(raw) - 4 - 4 * rank != math.prod(shape):
        raise DataError(
            f"{file}: the header promises {shape}, that is {math.prod(shape)} bytes, but "
            f"{len(raw) - 4 - 4 * rank} follow; fetch the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
