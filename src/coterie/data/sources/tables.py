"""Reads tables: a CSV or parquet file with a client column, or a folder of one file per client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ...core.fields import Checked
from ...errors import ConfigError, DataError
from ..arrays import TEST, TRAIN, VALIDATION, Array, Floats, Ints, labels
from ..federation import Dataset
from . import sheets
from .sheets import (
    SUFFIXES,
    InputColumn,
    Sheet,
    TargetColumn,
    categories,
    floats,
    read_sheet,
    texts,
)

# ---- columns that are no inputs: each row's unit, time, part and subgroup ------------------------

_PARTS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
MOST_SUBGROUPS = 20


def units(sheet: Sheet, name: str, owners: Ints | None) -> tuple[Ints, tuple[str, ...]]:
    """The unit of every row and the name of every unit, in order of first appearance.

    The same name at two clients means two units, because sites often number patients from 1.
    """
    written = sheets.texts(sheets.column(sheet, name, "unit"))
    whose = [0] * len(written) if owners is None else owners.tolist()
    number: dict[tuple[int, str], int] = {}
    found = [number.setdefault(pair, len(number)) for pair in zip(whose, written, strict=True)]
    return np.array(found, np.int64), tuple(unit for _, unit in number)


def refuse_divided(sheet: Sheet, unit: str, split: str, of_rows: Ints, part: Ints) -> None:
    """Refuse a split column that puts rows of the same unit into two parts."""
    first = np.zeros(of_rows.max() + 1, np.int64)
    first[of_rows[::-1]] = part[::-1]  # the part of the unit's first row
    for row in np.flatnonzero(part != first[of_rows]):
        value = sheets.texts(sheet.table.column(unit).slice(int(row), 1))[0]
        raise DataError(
            f"{sheet.where(int(row))}: unit '{value}' (column '{unit}', data.unit) is in two parts "
            f"of column '{split}' (data.split); rows of one unit must be in one part"
        )


def subgroups(sheet: Sheet, name: str) -> tuple[Ints, tuple[str, ...]]:
    """The subgroup of every row and the names of all subgroups, sorted; empty cells are one."""
    cells = sheets.existing(sheet, name, "subgroup")
    known = cells.is_valid().to_pylist()
    written = [
        text if there else sheets.NO_CELL for text, there in zip(texts(cells), known, strict=True)
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
    found = sheets.column(sheet, name, "time")
    text = pa.types.is_string(found.type)
    if not text or pc.all(pc.match_substring_regex(found, sheets.NUMBER)).as_py():
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
    words = sheets.texts(sheets.column(sheet, split, "split"))
    for row, word in enumerate(words):
        if word.lower() not in _PARTS:
            raise DataError(
                f"{sheet.where(row)}: found '{word}' in column '{split}' (data.split); expected "
                "train, val or test"
            )
    return torch.tensor([_PARTS[word.lower()] for word in words], dtype=torch.int8)


# ---- features and targets ------------------------------------------------------------------------

# The description must hold for the sheet: every cell of a number column is a number.


def encode(sheet: Sheet, columns: tuple[InputColumn, ...]) -> torch.Tensor:
    """The described columns of a sheet as features ``[N, D]``, NaN where a number is missing."""
    if not columns:
        raise DataError(f"{sheet.files[0]}: no columns are left to predict from")
    return torch.from_numpy(np.concatenate([_block(sheet, column) for column in columns], axis=1))


def _block(sheet: Sheet, column: InputColumn) -> npt.NDArray[np.float32]:
    """The features of one column: one-hot levels, or numbers and whether they are missing.

    A category that is none of the levels is zero in all of them: unknown.
    """
    if column.kind == "levels":
        place = _places(categories(sheet, column.name), column.levels)
        return np.equal.outer(place, np.arange(len(column.levels))).astype(np.float32)
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


def _places(cells: pa.ChunkedArray, names: tuple[str, ...]) -> Ints:
    """The place of every cell's text among the names; -1 where it is none of them."""
    distinct, place = pc.unique(cells), {name: at for at, name in enumerate(names)}
    found = np.array([place.get(text, -1) for text in texts(distinct)], np.int64)
    places: Ints = found[pc.index_in(cells, value_set=distinct).to_numpy()]
    return places


# ---- a whole table -------------------------------------------------------------------------------

FEWEST_ROWS = 10
Task = Literal["auto", "classification", "regression"]


@dataclass(frozen=True)
class TableOptions(Checked):
    """The options of :func:`read_table`.

    client: the column with the client of each row; in a folder, the file names are used
    target: the column to predict
    split: a column with train, val or test; without it the splits are drawn at random
    unit: a column such as the patient's number; rows of one unit stay in one split
    time: a column of numbers or ISO dates; each client's test data is then its latest rows,
        validation data the latest of the rest
    subgroup: a column of categories, such as sex: results are also reported for each of them. It
        is an input like other columns, unless ``drop`` names it
    task: classification, regression, or auto to decide by the target column
    categories: number columns to be treated as categories
    drop: columns to leave out
    delimiter: the character that separates the cells of a CSV file
    encoding: the text encoding of a CSV file
    """

    client: str | None = None
    target: str | None = None
    split: str | None = None
    unit: str | None = None
    time: str | None = None
    subgroup: str | None = None
    task: Task = "auto"
    categories: Sequence[str] = ()
    drop: Sequence[str] = ()
    delimiter: str | None = None
    encoding: str = "utf-8"

    @property
    def roles(self) -> dict[str, str | None]:
        """The columns that are no input, by the option that names them."""
        return {role: getattr(self, role) for role in ("client", "target", "split", "unit", "time")}


class OpenTable(NamedTuple):
    """A table that was read but not yet encoded."""

    path: Path
    sheet: Sheet
    options: TableOptions
    target: TargetColumn
    owners: Ints | None  # the client of each row
    owner_names: tuple[str, ...]

    @property
    def fixed(self) -> torch.Tensor | None:
        """The part of each row, if there is a column that says it."""
        return None if self.options.split is None else parts(self.sheet, self.options.split)


def read_table(path: Path, *, name: str = "", **options: Any) -> Dataset:
    """Read a CSV, TSV or parquet file, or a folder with one file per client, as a dataset.

    ``options`` are those of :class:`TableOptions`.
    """
    table = open_table(path, TableOptions(**options), FEWEST_ROWS)
    if len(table.target.classes) == 1:
        raise DataError(
            f"{table.sheet.files[0]}: every row has '{table.target.classes[0]}' in column "
            f"'{table.target.name}' (data.target); one class leaves nothing to learn"
        )
    inputs = tuple(describe_inputs(table))
    for column in inputs:
        if column.kind == "empty":
            raise DataError(
                f"column '{column.name}' is empty in every row; leave it out with data.drop = "
                f"['{column.name}']"
            )
    found = encode_table(table, inputs, table.target, name)
    if found.fixed is not None and not bool((found.fixed == TRAIN).any()):
        raise DataError(f"column '{table.options.split}' (data.split) marks no row as train")
    return found


def open_table(path: Path, options: TableOptions, fewest: int) -> OpenTable:
    """Read the files of a table and describe its target; refuses fewer rows than ``fewest``."""
    if options.time is not None and options.split is not None:
        raise ConfigError(
            f"data.time, data.split: found '{options.time}' and '{options.split}'; both divide a "
            "client's rows: name one of them"
        )
    dates = () if options.time is None else (options.time,)
    drop = [name for name in options.drop if name != options.subgroup]
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in SUFFIXES)
    if not files:
        raise DataError(f"{path}: found no {', '.join(SUFFIXES)} files")
    sheet = read_sheet(files, options.delimiter, options.encoding, drop, dates)
    if options.target is None:
        known = ", ".join(sheet.table.column_names)
        raise ConfigError(f"data.target: name the column to predict; {path.name} has: {known}")
    if sheet.table.num_rows < fewest:
        raise DataError(
            f"{path}: found {sheet.table.num_rows} rows; at least {fewest} are needed to "
            "train, validate and test anything"
        )
    owners, owner_names = _owners(sheet, options.client, is_folder=path.is_dir())
    target = sheets.describe_target(sheet, options.target, options.task)
    _refuse_two_roles(options.roles)
    return OpenTable(path, sheet, options, target, owners, owner_names)


def describe_inputs(table: OpenTable) -> Iterator[InputColumn]:
    """Describe the input columns one after another, in the order of the first file."""
    for name in table.sheet.table.column_names:
        if name not in (*table.options.roles.values(), *table.options.drop):
            column = sheets.describe(table.sheet, name, name in table.options.categories)
            sheets.warn_of_id(table.sheet, name)
            yield column


def encode_table(
    table: OpenTable, inputs: tuple[InputColumn, ...], target: TargetColumn, name: str = ""
) -> Dataset:
    """Encode a table by the description of its inputs and its target."""
    path, sheet, options, _, owners, owner_names = table
    y, class_names = labels(path.name, encode_target(sheet, target), target.classes)
    return Dataset(
        name=name or path.stem,
        x=encode(sheet, inputs),
        y=y,
        classes=len(class_names),
        owners=None if owners is None else torch.from_numpy(owners),
        owner_names=owner_names,
        class_names=class_names,
        numeric=torch.tensor([numeric for column in inputs for numeric in column.numeric]),
        feature_names=tuple(title for column in inputs for title in column.titles),
        columns=inputs,
        target=target,
        **_divided(sheet, options, owners),
    )


def _divided(sheet: Sheet, options: TableOptions, owners: Ints | None) -> dict[str, Any]:
    """The fields of a dataset that say how each client's rows are split, and their subgroups."""
    split, unit, time = options.split, options.unit, options.time
    found: dict[str, Any] = {}
    if split is not None:
        found["fixed"] = parts(sheet, split)
    if unit is not None:
        numbers, found["unit_names"] = units(sheet, unit, owners)
        found["units"] = torch.from_numpy(numbers)
        if split is not None:
            refuse_divided(sheet, unit, split, numbers, found["fixed"].numpy())
    if time is not None:
        found["times"] = torch.from_numpy(times(sheet, time))
    if options.subgroup is not None:
        codes, found["subgroup_names"] = subgroups(sheet, options.subgroup)
        found |= {"subgroups": torch.from_numpy(codes), "subgroup_column": options.subgroup}
    return found


def _refuse_two_roles(roles_of: dict[str, str | None]) -> None:
    """Refuse a column that is named for two roles."""
    named: dict[str, str] = {}
    for role, column in roles_of.items():
        if column is not None and named.setdefault(column, role) != role:
            raise ConfigError(
                f"data.{role}: column '{column}' is data.{named[column]} already; name another "
                "column, or leave one of the two out"
            )


def _owners(
    sheet: Sheet, client: str | None, *, is_folder: bool
) -> tuple[Ints | None, tuple[str, ...]]:
    """The client of each row, and the clients' names in order of first appearance."""
    if client is not None:
        names = sheets.texts(sheets.column(sheet, client, "client"))
    elif is_folder:
        names = [f.stem for f, n in zip(sheet.files, sheet.rows, strict=True) for _ in range(n)]
        _refuse_alike([file.stem for file in sheet.files])
    else:
        return None, ()
    distinct = list(dict.fromkeys(names))
    _refuse_alike(distinct)
    number = {name: i for i, name in enumerate(distinct)}
    return np.array([number[name] for name in names], np.int64), tuple(distinct)


def _refuse_alike(names: list[str]) -> None:
    """Refuse client names that differ only in case or blanks: most likely one client, misspelt."""
    seen: dict[str, str] = {}
    for name in names:
        plain = " ".join(name.casefold().split())
        if plain in seen:
            raise DataError(
                f"duplicate client names '{seen[plain]}' and '{name}'; spell a client one way, and "
                "give different clients different names"
            )
        seen[plain] = name
