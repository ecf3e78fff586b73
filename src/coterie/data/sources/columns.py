"""Converts the columns of a sheet to features and targets: numbers, categories, missing values."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError
from ..arrays import Array
from .sheets import Sheet

MOST_LEVELS = 100  # categories of one column; more is likely an identifier or free text
MOST_CLASSES = 20  # a target with more different integers is treated as a quantity
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"

Floats = npt.NDArray[np.float64]


class Features(NamedTuple):
    """Model input, before missing numbers are filled in and numbers are standardised."""

    x: npt.NDArray[np.float32]  # [N, D], NaN where a number is missing
    numeric: npt.NDArray[np.bool_]  # [D]
    names: tuple[str, ...]  # [D]


def column(sheet: Sheet, name: str, option: str) -> pa.ChunkedArray:
    """A column that the configuration names; refuses missing cells."""
    known = sheet.table.column_names
    if name not in known:
        raise DataError(
            f"{sheet.files[0]}: has no column '{name}' (data.{option}); it has: {', '.join(known)}"
        )
    found = sheet.table.column(name)
    if found.null_count:
        row = int(np.flatnonzero(found.is_null().to_numpy())[0])
        raise DataError(
            f"{sheet.where(row)}: column '{name}' (data.{option}) is empty, as in "
            f"{found.null_count} of {len(found)} rows; fill or remove those rows"
        )
    return found


def texts(values: pa.ChunkedArray) -> list[str]:
    """Cells as text; integers are written without a fraction."""
    return [
        str(int(v)) if isinstance(v, float) and v.is_integer() else str(v)
        for v in values.to_pylist()
    ]


def numbers(sheet: Sheet, name: str) -> Floats | None:
    """A column as numbers, NaN where missing; None if the column is text.

    Text in a column that is mostly numbers is refused: it is a mistake in the file.
    """
    values = sheet.table.column(name)
    if not pa.types.is_string(values.type):
        found = np.asarray(values.to_numpy(), np.float64)
        _refuse_infinite(sheet, name, found)
        return found
    looks = pc.match_substring_regex(values, NUMBER)
    share = pc.mean(looks).as_py() or 0.0
    if share == 1.0:
        found = np.asarray(values.cast(pa.float64()).to_numpy(), np.float64)
        _refuse_infinite(sheet, name, found)
        return found
    if share > 0.5:
        row = int(np.flatnonzero(~pc.fill_null(looks, True).to_numpy())[0])
        raise DataError(
            f"{sheet.where(row)}: found '{values[row].as_py()}' in column '{name}', where "
            f"{share:.0%} of the cells are numbers; correct the cell, leave it empty, or add the "
            f"column to data.categories"
        )
    return None


def _refuse_infinite(sheet: Sheet, name: str, values: Floats) -> None:
    """Refuse numbers that are infinite, in the file or after conversion to float32."""
    for row in np.flatnonzero(np.abs(values) > np.finfo(np.float32).max):
        raise DataError(
            f"{sheet.where(int(row))}: column '{name}' holds {values[row]:g}; expected a number of "
            "at most 3e38; correct the cell"
        )


def features(sheet: Sheet, names: list[str], categories: list[str]) -> Features:
    """Convert all columns to features, with one schema for all clients."""
    blocks, numeric, labels = [], [], []
    for name in names:
        values = None if name in categories else numbers(sheet, name)
        block, titles = _levels(sheet, name) if values is None else _measured(name, values)
        blocks.append(block)
        labels += titles
        numeric += [values is not None and title == name for title in titles]
    if not blocks:
        raise DataError(f"{sheet.files[0]}: no columns are left to predict from")
    return Features(np.concatenate(blocks, axis=1), np.array(numeric), tuple(labels))


def _measured(name: str, values: Floats) -> tuple[npt.NDArray[np.float32], list[str]]:
    """A number column and, if cells are missing, an indicator column for them."""
    missing = np.isnan(values)
    if missing.all():
        raise DataError(_empty(name))
    if not missing.any():
        return values[:, None].astype(np.float32), [name]
    return np.stack([values, missing], axis=1).astype(np.float32), [name, f"{name} is missing"]


def _empty(name: str) -> str:
    return f"column '{name}' is empty in every row; leave it out with data.drop = ['{name}']"


def _levels(sheet: Sheet, name: str) -> tuple[npt.NDArray[np.float32], list[str]]:
    """One-hot columns, one per category; missing values are a category of their own."""
    if sheet.table.column(name).null_count == sheet.table.num_rows:
        raise DataError(_empty(name))
    raw = pc.fill_null(sheet.table.column(name).cast(pa.string()), "(missing)")
    levels, place = np.unique(np.array(raw.to_pylist()), return_inverse=True)
    if len(levels) > MOST_LEVELS:
        raise DataError(
            f"column '{name}' holds {len(levels)} different texts ('{levels[0]}', '{levels[1]}', …)"
            f"; more than {MOST_LEVELS} is no category: leave it out with data.drop = ['{name}']"
            + _decimal_commas(levels)
        )
    hot = np.zeros((len(place), len(levels)), np.float32)
    hot[np.arange(len(place)), place] = 1
    return hot, [f"{name} = {level}" for level in levels]


def _decimal_commas(levels: Array) -> str:
    commas = sum(level.replace(",", "", 1).lstrip("-").isdigit() for level in levels.tolist())
    return "; or write its numbers with a decimal point" if commas > len(levels) / 2 else ""


def targets(sheet: Sheet, name: str, task: str) -> Array:
    """The target column: class names as text, or numbers for a regression.

    ``auto`` treats text, and integers with up to twenty different values, as classes.
    """
    found = column(sheet, name, "target")
    values = None if task == "classification" else numbers(sheet, name)
    if task == "regression" and values is None:
        raise DataError(f"column '{name}' (data.target) is text; a regression needs numbers")
    if values is not None and (task == "regression" or _is_quantity(values)):
        return values
    classes = np.array(texts(found if values is None else pa.chunked_array([values])))
    if len(set(classes.tolist())) < 2:
        raise DataError(
            f"{sheet.files[0]}: every row has '{classes[0]}' in column '{name}' (data.target); one "
            "class leaves nothing to learn"
        )
    return classes


def _is_quantity(values: Floats) -> bool:
    return bool((values != np.round(values)).any()) or len(np.unique(values)) > MOST_CLASSES
