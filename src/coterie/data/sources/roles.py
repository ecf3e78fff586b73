"""Reads the columns of a table that are no inputs: each row's unit, time, part and subgroup."""

from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ...errors import DataError
from ..arrays import TEST, TRAIN, VALIDATION
from . import columns
from .sheets import Sheet

_PARTS = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VALIDATION,
    "valid": VALIDATION,
    "validation": VALIDATION,
    "dev": VALIDATION,
    "test": TEST,
    "testing": TEST,
}

MOST_SUBGROUPS = 20

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def units(sheet: Sheet, name: str, owners: Ints | None) -> tuple[Ints, tuple[str, ...]]:
    """The unit of every row and the name of every unit, in order of first appearance.

    The same name at two clients means two units, because sites often number patients from 1.
    """
    written = columns.texts(columns.column(sheet, name, "unit"))
    whose = [0] * len(written) if owners is None else owners.tolist()
    number: dict[tuple[int, str], int] = {}
    found = [number.setdefault(pair, len(number)) for pair in zip(whose, written, strict=True)]
    return np.array(found, np.int64), tuple(unit for _, unit in number)


def refuse_divided(sheet: Sheet, unit: str, split: str, of_rows: Ints, part: Ints) -> None:
    """Refuse a split column that puts rows of the same unit into two parts."""
    first = np.zeros(of_rows.max() + 1, np.int64)
    first[of_rows[::-1]] = part[::-1]  # the part of the unit's first row
    for row in np.flatnonzero(part != first[of_rows]):
        value = columns.texts(sheet.table.column(unit).slice(int(row), 1))[0]
        raise DataError(
            f"{sheet.where(int(row))}: unit '{value}' (column '{unit}', data.unit) is in two parts "
            f"of column '{split}' (data.split); rows of one unit must be in one part"
        )


def subgroups(sheet: Sheet, name: str) -> tuple[Ints, tuple[str, ...]]:
    """The subgroup of every row and the names of all subgroups, sorted; empty cells are one."""
    cells = columns.existing(sheet, name, "subgroup")
    texts, known = columns.texts(cells), cells.is_valid().to_pylist()
    written = [
        text if is_there else columns.NO_CELL for text, is_there in zip(texts, known, strict=True)
    ]
    names = sorted(set(written))
    if len(names) > MOST_SUBGROUPS:
        raise DataError(
            f"column '{name}' (data.subgroup) holds {len(names)} different values ('{names[0]}', "
            f"'{names[1]}', …); expected at most {MOST_SUBGROUPS}; add a column of groups, such as "
            "ages from 18 to 40, and name that one"
        )
    place = {text: number for number, text in enumerate(names)}
    return np.array([place[text] for text in written], np.int64), tuple(names)


def times(sheet: Sheet, name: str) -> Floats:
    """A column of numbers or ISO dates as numbers that increase with time."""
    found = columns.column(sheet, name, "time")
    text = pa.types.is_string(found.type)
    if not text or pc.all(pc.match_substring_regex(found, columns.NUMBER)).as_py():
        numbers = np.array(found.cast(pa.float64()).to_numpy(), np.float64)
        for at in np.flatnonzero(~np.isfinite(numbers)):
            raise DataError(
                f"{sheet.where(int(at))}: column '{name}' (data.time) is {numbers[at]}; expected "
                "a finite number"
            )
        return numbers
    moments = [_moment(sheet, name, row, text) for row, text in enumerate(found.to_pylist())]
    zoned = [moment.tzinfo is not None for moment in moments]
    if any(zoned) and not all(zoned):
        row = zoned.index(not zoned[0])
        raise DataError(
            f"{sheet.where(row)}: column '{name}' (data.time) has times with and without a time "
            "zone; write all of them one way"
        )
    return np.array([m.replace(tzinfo=m.tzinfo or UTC).timestamp() for m in moments])


def _moment(sheet: Sheet, name: str, row: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise DataError(
            f"{sheet.where(row)}: found '{text}' in column '{name}' (data.time); expected numbers "
            "in every row, or dates in every row as 2026-05-31 or 2026-05-31T14:30"
        ) from None


def parts(sheet: Sheet, split: str) -> torch.Tensor:
    """The part of every row, from a column of the words train, val and test."""
    words = columns.texts(columns.column(sheet, split, "split"))
    for row, word in enumerate(words):
        if word.lower() not in _PARTS:
            raise DataError(
                f"{sheet.where(row)}: found '{word}' in column '{split}' (data.split); expected "
                "train, val or test"
            )
    return torch.tensor([_PARTS[word.lower()] for word in words], dtype=torch.int8)
