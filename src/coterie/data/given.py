"""Data that a Python program passes in place of a name: arrays, tables, sites, torch Datasets."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import DataError
from .arrays import TRAIN, Array, Names, Piece, assemble, refuse_one_class
from .federation import Dataset
from .sources.tables import read_table
from .streamed import Streamed, is_streamed, streamed

NAME = "data"
EXPECTED = (
    "expected a coterie.data.Dataset, a DataFrame, a pair (X, y), a torch Dataset of such pairs, "
    "or a dict of site → (X, y), torch Dataset or coterie.data.Streamed(Dataset) for all"
)


class Frame(NamedTuple):
    """A pandas DataFrame; the fields of ``[data]`` say what its columns are, as for a file."""

    table: Any

    def read(self, **options: Any) -> Dataset:
        """The dataset, read as from a file."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{NAME}.parquet"
            self.table.to_parquet(path, index=False)
            return read_table(path, name=NAME, **options)


def dataset_of(given: Any) -> Dataset | Frame:
    """The dataset of what a program passed; a DataFrame is read when its columns are known."""
    if isinstance(given, Dataset):
        return given
    if hasattr(given, "to_parquet"):  # pandas is imported only by those who use it
        return Frame(given)
    whole = given if isinstance(given, Mapping) else {"": given}
    lazy = {str(site): data for site, data in whole.items() if isinstance(data, Streamed)}
    if lazy and len(lazy) == len(whole):
        return streamed(NAME, [*lazy.items()], owned=isinstance(given, Mapping))
    pairs = {str(site): _pair(site, data) for site, data in whole.items()}
    pieces = [
        Piece(x, y, TRAIN, np.full(len(x), number) if isinstance(given, Mapping) else None)
        for number, (x, y) in enumerate(_one_kind(list(pairs.values())))
    ]
    names = Names(owners=tuple(pairs) if isinstance(given, Mapping) else ())
    if not pieces:
        raise DataError(f"data: found no site; {EXPECTED}")
    return refuse_one_class(assemble(NAME, pieces, names))


def digest(found: Dataset | Frame) -> str:
    """Eight hex digits of the data: runs in a folder are continued with the same data only."""
    made = hashlib.sha256()
    if isinstance(found, Frame):
        made.update(found.table.to_csv().encode())
    else:
        x = found.x[:: max(1, len(found.x) - 1)] if is_streamed(found) else found.x
        for part in (x, found.y, found.owners, found.fixed):
            made.update(b"-" if part is None else part.contiguous().numpy().data)
        made.update(repr((found.owner_names, found.class_names)).encode())
    return made.hexdigest()[:8]


def _pair(site: Any, data: Any) -> tuple[Array, Array]:
    """The samples and targets of one site as arrays."""
    of = f"data of site '{site}'" if site else "data"
    if isinstance(data, Streamed):
        raise DataError(f"{of}: found a Streamed Dataset beside others; stream those of all sites")
    if isinstance(data, torch.utils.data.Dataset):
        if not len(data):  # type: ignore[arg-type]
            raise DataError(f"{of}: found an empty Dataset; {EXPECTED}")
        rows = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        data = [np.stack([np.asarray(row[part]) for row in rows]) for part in (0, 1)]
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError(f"{of}: found a {type(data).__name__}; {EXPECTED}")
    x, y = (np.asarray(part) for part in data)
    if len(x.shape) < 2 or len(y.shape) != 1 or len(x) != len(y):
        raise DataError(
            f"{of}: found X of shape {list(x.shape)} and y of shape {list(y.shape)}; expected one "
            "row of X and one entry of y per sample"
        )
    return x, y.astype(str) if y.dtype.kind == "O" else y


def _one_kind(pairs: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """The pairs with targets of one dtype, so that a site with whole numbers is no other task."""
    kinds = {y.dtype.kind in "US" for _, y in pairs}
    if len(kinds) > 1:
        raise DataError("data: found texts as targets of one site and numbers of another")
    dtype = np.result_type(*(y.dtype for _, y in pairs)) if pairs else None
    return [(x, y.astype(dtype)) for x, y in pairs]
