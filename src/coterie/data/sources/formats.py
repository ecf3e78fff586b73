"""The registry of file formats, and the detection of a path's format by its file names."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import DataError
from ..federation import Dataset
from . import cifar, containers, images, sheets
from .idx import is_idx, read_idx
from .leaf import read_leaf
from .npz import read_npz
from .tables import read_table
from .text import read_text


class Format(NamedTuple):
    """The reader of a format, and one line about it."""

    reader: Callable[..., Dataset]  # (path, *, name, …)
    about: str


FORMATS: dict[str, Format] = {
    "table": Format(read_table, "CSV, TSV or parquet with a client column, or a file a client"),
    "npz": Format(read_npz, "numpy arrays x, y (or x_train, …), optionally client"),
    "leaf": Format(read_leaf, "LEAF's json files"),
    "images": Format(images.read_images, "images in CLIENT/CLASS/"),
    "text": Format(read_text, "a folder with a .txt file a client"),
    "idx": Format(read_idx, "MNIST's idx files, plain, gzipped or in an archive"),
    "cifar": Format(cifar.read_cifar, "CIFAR's original pickles, unpacked or in their archive"),
    "mosaic": Format(cifar.read_mosaic, "CIFAR-10 as PNG mosaics"),
}

_BY_SUFFIX = {".npz": "npz", ".json": "leaf", **dict.fromkeys(sheets.SUFFIXES, "table")}


def detect(path: Path) -> str:
    """Detect the format of a file or folder; returns the format's name."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; check data.name")
    if path.is_file() and path.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix.lower()]
    if path.is_dir() or containers.is_archive(path):
        found = _by_contents(path)
        if found is not None:
            return found
    known = "; ".join(f"{name}: {entry.about}" for name, entry in FORMATS.items())
    raise DataError(f"{path}: the format was not recognised. Known formats: {known}")


def _by_contents(path: Path) -> str | None:
    names = containers.names(path)
    if any(is_idx(name) for name in names):
        return "idx"
    if cifar.is_mosaic(names):
        return "mosaic"
    if cifar.is_pickled(names):
        return "cifar"
    if not path.is_dir():
        return None
    endings = {Path(name).suffix.lower() for name in names}
    for format_name, suffixes in (
        ("table", sheets.SUFFIXES),
        ("images", images.SUFFIXES),
        ("leaf", (".json",)),
        ("text", (".txt",)),
    ):
        if endings.intersection(suffixes):
            return format_name
    return None
