"""Encodes a sheet as features and targets by the description of its columns.

The description must hold for the sheet: every cell of a number column is a number, every category
is among the levels.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError
from ..arrays import Array
from .columns import InputColumn, TargetColumn, categories, floats, texts
from .sheets import Sheet


class Features(NamedTuple):
    """Model input, before missing numbers are filled in and numbers are standardised."""

    x: npt.NDArray[np.float32]  # [N, D], NaN where a number is missing
    numeric: npt.NDArray[np.bool_]  # [D]
    names: tuple[str, ...]  # [D]


def encode(sheet: Sheet, columns: tuple[InputColumn, ...]) -> Features:
    """Encode the described columns of a sheet as features, in the order of the description."""
    if not columns:
        raise DataError(f"{sheet.files[0]}: no columns are left to predict from")
    return Features(
        np.concatenate([_block(sheet, column) for column in columns], axis=1),
        np.array([numeric for column in columns for numeric in column.numeric]),
        tuple(title for column in columns for title in column.titles),
    )


def _block(sheet: Sheet, column: InputColumn) -> npt.NDArray[np.float32]:
    """The features of one column: one-hot levels, or numbers and whether they are missing."""
    if column.kind == "levels":
        place = _places(categories(sheet, column.name), column.levels)
        hot = np.zeros((len(place), len(column.levels)), np.float32)
        hot[np.arange(len(place)), place] = 1
        return hot
    values = floats(sheet.table.column(column.name))
    if not column.missing:
        return values[:, None].astype(np.float32)
    return np.stack([values, np.isnan(values)], axis=1).astype(np.float32)


def encode_target(sheet: Sheet, target: TargetColumn) -> Array:
    """Encode the target column: class numbers, or float64 for a quantity."""
    found = sheet.table.column(target.name)
    if target.kind == "texts":
        return _places(found, target.classes)
    values = floats(found)
    if target.kind == "quantity":
        return values
    return _places(pa.chunked_array([pa.array(values)]), target.classes)


def _places(cells: pa.ChunkedArray, names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """The place of every cell's text among the sorted names."""
    distinct = pc.unique(cells)
    place = np.searchsorted(np.array(names), np.array(texts(distinct)))
    found: npt.NDArray[np.int64] = place[pc.index_in(cells, value_set=distinct).to_numpy()]
    return found
