"""Datasets that a class of the user's own makes or reads."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..core.fields import Checked
from ..core.imports import Code, imported_dataclass
from ..core.locations import located, place_of
from ..errors import DataError
from .federation import Dataset


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
