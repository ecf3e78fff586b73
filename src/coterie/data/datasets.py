"""The registry of datasets by name, and :func:`load`, which also reads a user's own files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..core.fields import checked, fields
from ..core.imports import INSTALLED_ONLY, Code, names_class
from ..errors import ConfigError, did_you_mean
from ..storage.files import expanded
from . import toys
from .arrays import TEST, VALIDATION, Scale, refuse_one_class, scaled
from .federation import Dataset
from .own_dataset import read_own, reader_class
from .sources import formats, locate


class DatasetEntry(NamedTuple):
    """The loader of a dataset, and one line about it."""

    loader: Callable[..., Dataset]
    about: str


def _stored(name: str) -> Callable[..., Dataset]:
    """A loader for a dataset that is on disk in one of several formats."""

    def loader(*, path: str | None = None, part: str = "all", **options: Any) -> Dataset:
        found = locate.find(name, path)
        reader = formats.FORMATS[formats.detect(found)].reader
        read = reader(found, name=name, **read_options(name, options, reader))
        return only(refuse_one_class(read), part)

    return loader


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(toys.digits, "1,797 grey 8x8 digits, bundled with scikit-learn"),
    "plays": DatasetEntry(toys.plays, "lines of eight of Shakespeare's characters, next character"),
    "regression_groups": DatasetEntry(
        toys.regression_groups, "two groups of linear-regression clients, opposite coefficients"
    ),
    "sine": DatasetEntry(toys.sine, "P2's Figure 1: clients on intervals of a noisy sine curve"),
    "mnist": DatasetEntry(_stored("mnist"), "60,000 + 10,000 grey 28x28 digits"),
    "fashion_mnist": DatasetEntry(
        _stored("fashion_mnist"), "60,000 + 10,000 grey 28x28 pictures of clothes"
    ),
    "emnist": DatasetEntry(_stored("emnist"), "grey 28x28 digits and letters, 62 classes"),
    "cifar10": DatasetEntry(_stored("cifar10"), "50,000 + 10,000 colour 32x32 pictures"),
    "cifar100": DatasetEntry(
        _stored("cifar100"), "50,000 + 10,000 colour 32x32 pictures, 100 classes in 20 superclasses"
    ),
    "femnist": DatasetEntry(_stored("femnist"), "LEAF's digits and letters by writer, 62 classes"),
    "shakespeare": DatasetEntry(_stored("shakespeare"), "lines of 777 speakers, next character"),
    "tinyshakespeare": DatasetEntry(_stored("tinyshakespeare"), "1.1M characters, to partition"),
}


def load(
    name: str, *, scale: Scale = "auto", code: Code = INSTALLED_ONLY, **options: Any
) -> Dataset:
    """Load a dataset by its name, by its class (``package.module:Class``), or from a path.

    The format of a path is recognised by its file names; ``format`` overrides that. ``part =
    "train"`` leaves out the source's own test part, so that test data is drawn from each client's
    samples; ``part = "pooled"`` keeps all samples and draws test data from all of them. ``scale``
    is the pixel scale of images: from 0 to 1 (``unit``), or of mean 0 and deviation 1
    (``standard``).
    """
    return scaled(_load(name, code, options), scale)


def _load(name: str, code: Code, options: dict[str, Any]) -> Dataset:
    if name in DATASETS:
        return _load_named(name, options)
    if names_class(name):
        kind = reader_class(name, code)
        return refuse_one_class(read_own(kind(**checked(options, fields(kind), "data", name))))
    source = file_source(name, **options)
    return only(refuse_one_class(source.read()), source.part)


def _load_named(name: str, options: dict[str, Any]) -> Dataset:
    entry = DATASETS[name]
    known = fields(entry.loader)
    own = {field.name: options[field.name] for field in known if field.name in options}
    if name not in locate.SOURCES:
        own = options  # the reader of a file gets them
    return entry.loader(**{**options, **checked(own, known, "data", name)})


class FileSource(NamedTuple):
    """A file or folder that a config names, its format, and the checked options of its reader."""

    path: Path
    format: str
    part: str
    options: dict[str, Any]

    def read(self) -> Dataset:
        """All samples; they may be of one class."""
        return formats.FORMATS[self.format].reader(self.path, **self.options)


def file_source(
    name: str,
    *,
    format: str | None = None,  # noqa: A002  the option's name
    part: str = "all",
    **options: Any,
) -> FileSource:
    """Find the file or folder at a path, and check the options to read it with."""
    path = expanded(name)
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        raise ConfigError(
            f"data.name: no dataset and no file is called '{name}'; {did_you_mean(name, DATASETS)}"
        )
    own = [field for field in fields(file_source) if field.name != "name"]
    checked({"format": format, "part": part}, own, "data", path.name)
    chosen = format or formats.detect(path)
    if chosen not in formats.FORMATS:
        raise ConfigError(f"data.format: '{chosen}'; {did_you_mean(chosen, formats.FORMATS)}")
    if not path.exists():
        formats.detect(path)  # raises an error if the path does not exist
    reader = formats.FORMATS[chosen].reader
    return FileSource(path, chosen, part, read_options(path.name, options, reader))


def only(dataset: Dataset, part: str) -> Dataset:
    """The whole dataset, or without the test part of its source."""
    left = kept_part(dataset, part)
    if part == "all" or left.fixed is None or bool((left.fixed == VALIDATION).any()):
        return left
    return replace(left, fixed=None)


def kept_part(dataset: Dataset, part: str) -> Dataset:
    """Like :func:`only`; what the source says of each sample's part stays as it is."""
    if part == "all" or dataset.fixed is None:
        return dataset
    if part == "pooled":
        return replace(dataset, fixed=None)
    if part != "train":
        raise ConfigError(f"data.part: found '{part}', expected 'all', 'train' or 'pooled'")
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


def read_options(
    name: str, options: dict[str, Any], reader: Callable[..., Dataset]
) -> dict[str, Any]:
    """The options of a file's reader with defaults; refuses a wrong name, type or number."""
    known = (field for field in fields(reader) if field.name not in ("path", "name"))
    return checked(options, known, "data", name)
