"""Describes the columns of a sheet: numbers, categories, missing cells, classes.

A description says how cells become numbers: which columns are numbers, with or without missing
cells, which are categories with which levels, and what the target's classes are. One file describes
its own columns; several sites agree on one description (:mod:`coterie.data.data_schema`). A sheet
is encoded by a description in :mod:`coterie.data.sources.tables`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError
from ..arrays import Array
from ..untrusted import STRICT
from .sheets import Sheet

MOST_LEVELS = 100  # categories of one column; more is likely an identifier or free text
MOST_CLASSES = 20  # a target with more different integers is treated as a quantity
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
NO_CELL = "(missing)"  # the level of cells without a value

Floats = npt.NDArray[np.float64]
InputKind = Literal["numbers", "levels", "empty"]
TargetKind = Literal["texts", "integers", "quantity"]


@dataclass(frozen=True)
class InputColumn:
    """How one column becomes features; a column without any value in the file is ``empty``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    kind: InputKind
    missing: bool = False  # whether cells of a number column are missing
    levels: tuple[str, ...] = ()  # the categories of a column of levels, sorted

    @property
    def titles(self) -> tuple[str, ...]:
        """The names of the features that the column becomes."""
        if self.kind == "levels":
            return tuple(f"{self.name} = {level}" for level in self.levels)
        return (self.name, f"{self.name} is missing") if self.missing else (self.name,)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each feature, whether it is a number to be filled in and standardised."""
        if self.kind == "levels":
            return (False,) * len(self.levels)
        return (True, False) if self.missing else (True,)


@dataclass(frozen=True)
class TargetColumn:
    """How the target becomes class numbers, by text or by whole number, or is a quantity."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    kind: TargetKind
    classes: tuple[str, ...] = ()  # their names, in the order of their numbers


def column(sheet: Sheet, name: str, option: str) -> pa.ChunkedArray:
    """A column that the configuration names; refuses missing cells."""
    found = existing(sheet, name, option)
    if found.null_count:
        row = int(np.flatnonzero(found.is_null().to_numpy())[0])
        raise DataError(
            f"{sheet.where(row)}: column '{name}' (data.{option}) is empty, as in "
            f"{found.null_count} of {len(found)} rows; fill or remove those rows"
        )
    return found


def existing(sheet: Sheet, name: str, option: str) -> pa.ChunkedArray:
    """A column that the configuration names; its cells may be missing."""
    known = sheet.table.column_names
    if name not in known:
        raise DataError(
            f"{sheet.files[0]}: has no column '{name}' (data.{option}); it has: {', '.join(known)}"
        )
    return sheet.table.column(name)


def texts(values: pa.ChunkedArray | pa.Array) -> list[str]:
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
        found = floats(values)
        refuse_infinite(sheet, name, found)
        return found
    looks = pc.match_substring_regex(values, NUMBER)
    share = pc.mean(looks).as_py() or 0.0
    if share == 1.0:
        found = floats(values)
        refuse_infinite(sheet, name, found)
        return found
    if share > 0.5:
        row = int(np.flatnonzero(~pc.fill_null(looks, True).to_numpy())[0])
        raise DataError(
            f"{sheet.where(row)}: found '{values[row].as_py()}' in column '{name}', where "
            f"{share:.0%} of the cells are numbers; correct the cell, leave it empty, or add the "
            f"column to data.categories"
        )
    return None


def refuse_infinite(sheet: Sheet, name: str, values: Floats) -> None:
    """Refuse numbers that are infinite, in the file or after conversion to float32."""
    for row in np.flatnonzero(np.abs(values) > np.finfo(np.float32).max):
        raise DataError(
            f"{sheet.where(int(row))}: column '{name}' holds {values[row]:g}; expected a number of "
            "at most 3e38; correct the cell"
        )


def floats(values: pa.ChunkedArray) -> Floats:
    """Cells as float64, NaN where missing."""
    return np.asarray(values.cast(pa.float64()).to_numpy(), np.float64)


def describe(sheet: Sheet, name: str, category: bool) -> InputColumn:
    """Describe one input column; ``category`` treats numbers as categories, too."""
    values = None if category else numbers(sheet, name)
    if values is not None:
        missing = np.isnan(values)
        kind: InputKind = "empty" if missing.all() else "numbers"
        return InputColumn(name, kind, bool(missing.any()))
    if sheet.table.column(name).null_count == sheet.table.num_rows:
        return InputColumn(name, "empty", True)
    levels = np.unique(np.array(pc.unique(categories(sheet, name)).to_pylist()))
    if len(levels) > MOST_LEVELS:
        raise DataError(
            f"column '{name}' holds {len(levels)} different texts ('{levels[0]}', '{levels[1]}', …)"
            f"; more than {MOST_LEVELS} is no category: leave it out with data.drop = ['{name}']"
            + _decimal_commas(levels)
        )
    return InputColumn(name, "levels", levels=tuple(levels.tolist()))


def filled(column: InputColumn) -> InputColumn:
    """The column; refuses one without any value."""
    if column.kind == "empty":
        raise DataError(
            f"column '{column.name}' is empty in every row; leave it out with data.drop = "
            f"['{column.name}']"
        )
    return column


def categories(sheet: Sheet, name: str) -> pa.ChunkedArray:
    """The cells of a column as categories; missing cells are a category of their own."""
    return pc.fill_null(sheet.table.column(name).cast(pa.string()), NO_CELL)


def _decimal_commas(levels: Array) -> str:
    commas = sum(level.replace(",", "", 1).lstrip("-").isdigit() for level in levels.tolist())
    return "; or write its numbers with a decimal point" if commas > len(levels) / 2 else ""


def describe_target(sheet: Sheet, name: str, task: str) -> TargetColumn:
    """Describe the target column: classes, or a quantity for a regression.

    ``auto`` treats text, and integers with up to twenty different values, as classes.
    """
    found = column(sheet, name, "target")
    values = None if task == "classification" else numbers(sheet, name)
    if task == "regression" and values is None:
        raise DataError(f"column '{name}' (data.target) is text; a regression needs numbers")
    if values is not None and (task == "regression" or _is_quantity(values)):
        return TargetColumn(name, "quantity")
    distinct = pc.unique(found if values is None else pa.array(values))
    classes = tuple(np.unique(np.array(texts(distinct))).tolist())
    return TargetColumn(name, "texts" if values is None else "integers", classes)


def _is_quantity(values: Floats) -> bool:
    return bool((values != np.round(values)).any()) or len(np.unique(values)) > MOST_CLASSES


def refuse_one_class(sheet: Sheet, target: TargetColumn) -> None:
    """Refuse a target with one class in every row."""
    if len(target.classes) == 1:
        raise DataError(
            f"{sheet.files[0]}: every row has '{target.classes[0]}' in column '{target.name}' "
            "(data.target); one class leaves nothing to learn"
        )
