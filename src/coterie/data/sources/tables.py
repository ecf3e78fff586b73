"""Reads tables: a CSV or parquet file with a client column, or a folder of one file per client."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ConfigError, DataError, did_you_mean
from ..arrays import TRAIN, labels
from ..federation import Dataset
from . import columns, encoding, roles
from .sheets import SUFFIXES, Sheet, read_sheet

FEWEST_ROWS = 10
TASKS = ("auto", "classification", "regression")


class TableOptions(NamedTuple):
    """The options of :func:`read_table`, checked."""

    client: str | None
    target: str | None
    split: str | None
    unit: str | None
    time: str | None
    subgroup: str | None
    task: str
    categories: Sequence[str]
    drop: Sequence[str]
    delimiter: str | None
    encoding: str

    @property
    def roles(self) -> dict[str, str | None]:
        """The columns that are no input, by the option that names them."""
        return {role: getattr(self, role) for role in ("client", "target", "split", "unit", "time")}


class OpenTable(NamedTuple):
    """A table that was read but not yet encoded."""

    path: Path
    sheet: Sheet
    options: TableOptions
    target: columns.TargetColumn
    owners: npt.NDArray[np.int64] | None  # the client of each row
    owner_names: tuple[str, ...]

    @property
    def fixed(self) -> torch.Tensor | None:
        """The part of each row, if there is a column that says it."""
        return None if self.options.split is None else roles.parts(self.sheet, self.options.split)


def read_table(
    path: Path,
    *,
    name: str = "",
    client: str | None = None,
    target: str | None = None,
    split: str | None = None,
    unit: str | None = None,
    time: str | None = None,
    subgroup: str | None = None,
    task: str = "auto",
    categories: Sequence[str] = (),
    drop: Sequence[str] = (),
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Dataset:
    """Read a table as a dataset.

    Args:
        path: a CSV, TSV or parquet file, or a folder with one file per client.
        name: the name of the dataset; the file's name by default.
        client: the column with the client of each row; in a folder, the file names are used.
        target: the column to predict.
        split: a column with train, val or test; without it the splits are drawn at random.
        unit: a column such as the patient's number; rows of one unit stay in one split.
        time: a column of numbers or ISO dates; each client's test data is then its latest rows,
            validation data the latest of the rest.
        subgroup: a column of categories, such as sex: results are also reported for each of them.
            It is an input like other columns, unless ``drop`` names it.
        task: classification, regression, or auto to decide by the target column.
        categories: number columns to be treated as categories.
        drop: columns to leave out.
        delimiter: the character that separates the cells of a CSV file.
        encoding: the text encoding of a CSV file.
    """
    options = TableOptions(
        *(client, target, split, unit, time, subgroup),
        *(task, categories, drop, delimiter, encoding),
    )
    table = open_table(path, options, FEWEST_ROWS)
    columns.refuse_one_class(table.sheet, table.target)
    inputs = tuple(columns.filled(column) for column in describe_inputs(table))
    found = encode_table(table, inputs, table.target, name)
    if found.fixed is not None and not bool((found.fixed == TRAIN).any()):
        raise DataError(f"column '{split}' (data.split) marks no row as train")
    return found


def open_table(path: Path, options: TableOptions, fewest: int) -> OpenTable:
    """Read the files of a table and describe its target; refuses fewer rows than ``fewest``."""
    _check_options(options.task, options.time, options.split)
    dates = () if options.time is None else (options.time,)
    drop = [name for name in options.drop if name != options.subgroup]
    sheet = read_sheet(_files(path), options.delimiter, options.encoding, drop, dates)
    if options.target is None:
        known = ", ".join(sheet.table.column_names)
        raise ConfigError(f"data.target: name the column to predict; {path.name} has: {known}")
    _check_rows(path, sheet, fewest)
    owners, owner_names = _owners(sheet, options.client, is_folder=path.is_dir())
    target = columns.describe_target(sheet, options.target, options.task)
    _refuse_two_roles(options.roles)
    return OpenTable(path, sheet, options, target, owners, owner_names)


def describe_inputs(table: OpenTable) -> Iterator[columns.InputColumn]:
    """Describe the input columns one after another, in the order of the first file."""
    for name in table.sheet.table.column_names:
        if name not in (*table.options.roles.values(), *table.options.drop):
            yield columns.describe(table.sheet, name, name in table.options.categories)


def encode_table(
    table: OpenTable,
    inputs: tuple[columns.InputColumn, ...],
    target: columns.TargetColumn,
    name: str = "",
) -> Dataset:
    """Encode a table by the description of its inputs and its target."""
    path, sheet, options, _, owners, owner_names = table
    found = encoding.encode(sheet, inputs)
    y, class_names = labels(path.name, encoding.encode_target(sheet, target), target.classes)
    return Dataset(
        name=name or path.stem,
        x=torch.from_numpy(found.x),
        y=y,
        classes=len(class_names),
        owners=None if owners is None else torch.from_numpy(owners),
        owner_names=owner_names,
        class_names=class_names,
        numeric=torch.from_numpy(found.numeric),
        feature_names=found.names,
        columns=inputs,
        target=target,
        **_divided(sheet, options, owners),
    )


def _check_options(task: str, time: str | None, split: str | None) -> None:
    """Refuse an unknown task, and both ``time`` and ``split`` at once."""
    if task not in TASKS:
        raise ConfigError(f"data.task: found '{task}'; {did_you_mean(task, TASKS)}")
    if time is not None and split is not None:
        raise ConfigError(
            f"data.time, data.split: found '{time}' and '{split}'; both divide a client's rows: "
            "name one of them"
        )


def _divided(
    sheet: Sheet, options: TableOptions, owners: npt.NDArray[np.int64] | None
) -> dict[str, Any]:
    """The fields of a dataset that say how each client's rows are split, and their subgroups."""
    split, unit, time = options.split, options.unit, options.time
    found: dict[str, Any] = {}
    if split is not None:
        found["fixed"] = roles.parts(sheet, split)
    if unit is not None:
        units, found["unit_names"] = roles.units(sheet, unit, owners)
        found["units"] = torch.from_numpy(units)
        if split is not None:
            roles.refuse_divided(sheet, unit, split, units, found["fixed"].numpy())
    if time is not None:
        found["times"] = torch.from_numpy(roles.times(sheet, time))
    if options.subgroup is not None:
        codes, found["subgroup_names"] = roles.subgroups(sheet, options.subgroup)
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


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not found:
        raise DataError(f"{path}: found no {', '.join(SUFFIXES)} files")
    return found


def _check_rows(path: Path, sheet: Sheet, fewest: int) -> None:
    if sheet.table.num_rows < fewest:
        raise DataError(
            f"{path}: found {sheet.table.num_rows} rows; at least {fewest} are needed to "
            "train, validate and test anything"
        )


def _owners(
    sheet: Sheet, client: str | None, *, is_folder: bool
) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...]]:
    """The client of each row, and the clients' names in order of first appearance."""
    if client is not None:
        names = columns.texts(columns.column(sheet, client, "client"))
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
