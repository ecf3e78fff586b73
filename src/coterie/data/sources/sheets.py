"""Reads CSV and parquet files as one sheet, and describes its columns.

A CSV file is read as text, and the types are found here, so that one bad cell is reported by file
and line instead of changing the type of its column.

A description says how cells become numbers: which columns are numbers, with or without missing
cells, which are categories with which levels, and what the target's classes are. One file describes
its own columns; several sites agree on one description (:mod:`coterie.data.data_schema`). A sheet
is encoded by a description in :mod:`coterie.data.sources.tables`.
"""

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ...errors import CoterieWarning, DataError, few
from ...storage.files import strict
from ..arrays import Floats

MOST_COLUMNS = 100_000  # columns are processed one by one
SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = ("", "NA", "N/A", "na", "n/a", "NaN", "nan", "NULL", "null", "None", "?")

_NUMERIC = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary, pa.types.is_null)


class Sheet(NamedTuple):
    """All rows of one or several files. Columns are float64 or text, and may contain nulls."""

    table: pa.Table
    files: tuple[Path, ...]
    rows: tuple[int, ...]  # the number of rows of each file

    def where(self, row: int) -> str:
        """The file and the line of a row, for messages."""
        for file, count in zip(self.files, self.rows, strict=True):
            if row < count:
                text = file.suffix in (".csv", ".tsv")  # rows follow a line of column names
                return f"{file.name} {'line' if text else 'row'} {row + (2 if text else 1)}"
            row -= count
        raise IndexError(row)


def read_sheet(
    files: list[Path],
    delimiter: str | None,
    encoding: str,
    drop: list[str],
    dates: tuple[str, ...] = (),
) -> Sheet:
    """Read files and concatenate their rows; all files must have the same columns.

    Dates of a parquet file become text in the columns ``dates``, and are refused in other columns.
    """
    tables = [read_rows(file, delimiter, encoding) for file in files]
    names = [name for name in tables[0].column_names if name not in drop]
    for name in drop:
        if not any(name in table.column_names for table in tables):
            raise DataError(
                f"data.drop: {files[0]} has no column '{name}'; it has: "
                f"{', '.join(tables[0].column_names)}"
            )
    for file, table in zip(files, tables, strict=True):
        odd = {*table.column_names}.difference(drop).symmetric_difference(names)
        for name in sorted(odd):
            raise DataError(
                f"{file}: column '{name}' is {'missing' if name in names else 'only'} here, beside "
                f"{files[0].name}; all files need the same columns (data.drop leaves columns out)"
            )
    tables = [_dates_as_text(table, dates) for table in tables]
    columns = {name: _unified([t.column(name) for t in tables], name) for name in names}
    return Sheet(pa.table(columns), tuple(files), tuple(table.num_rows for table in tables))


def sheet_of(
    table: pa.Table, names: Iterable[str], source: Path, dates: tuple[str, ...] = ()
) -> Sheet:
    """Some columns of a table in memory as a sheet; ``source`` names it in messages."""
    table = _dates_as_text(table, dates)
    columns = {name: _unified([table.column(name)], name) for name in names}
    return Sheet(pa.table(columns), (source,), (table.num_rows,))


def _dates_as_text(table: pa.Table, dates: tuple[str, ...]) -> pa.Table:
    for name in dates:
        if name in table.column_names and pa.types.is_temporal(table.column(name).type):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(name).cast(pa.string()))
    return table


def read_rows(
    file: Path, delimiter: str | None = None, encoding: str = "utf-8", fewest: int = 2
) -> pa.Table:
    """The rows of one file, as they are written: cells of a CSV file are text.

    A CSV file with fewer columns than ``fewest`` is refused: most likely the delimiter is another.
    """
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty; expected a line of column names, then rows")
    if file.suffix != ".parquet":
        table = _csv(file, delimiter, encoding, fewest)
    else:
        try:
            table = pq.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a parquet file that can be read ({error})") from error
    if table.num_rows == 0:
        raise DataError(f"{file}: found column names but no rows")
    return table


def _csv(file: Path, delimiter: str | None, encoding: str, fewest: int) -> pa.Table:
    delimiter = delimiter or ("\t" if file.suffix == ".tsv" else ",")
    try:
        content = file.read_bytes().decode(encoding).removeprefix("\ufeff").encode()
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}); expected a file that this user "
            "may read"
        ) from error
    except (UnicodeDecodeError, LookupError) as error:
        raise DataError(
            f"{file}: not {encoding} text ({error}); save it as UTF-8 or name its encoding, "
            "for example data.encoding = 'latin-1'"
        ) from error
    names = _header(file, content, delimiter, fewest)
    try:
        return pacsv.read_csv(
            io.BytesIO(content),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
            read_options=pacsv.ReadOptions(use_threads=False),
        )
    except pa.ArrowException as error:
        raise DataError(f"{file}: {str(error).splitlines()[0]}") from error


def _header(file: Path, content: bytes, delimiter: str, fewest: int) -> list[str]:
    """The column names, after checking them for mistakes."""
    first = content.split(b"\n", 1)[0].decode().rstrip("\r")
    names = next(csv.reader([first], delimiter=delimiter), [])
    if len(names) < fewest:
        other = next((d for d in (";", "\t", "|", ",") if d != delimiter and d in first), None)
        hint = f"it looks separated by {other!r}: set data.delimiter = {other!r}" if other else ""
        raise DataError(
            f"{file}: found one column ({first[:60]!r}) when separated by {delimiter!r}; "
            f"{hint or 'expected a line of column names, then rows'}"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{file}: two columns are called '{twice[0]}'; rename one")
    if len(names) > MOST_COLUMNS:
        raise DataError(
            f"{file}: found {len(names):,} columns; expected at most {MOST_COLUMNS:,}; keep those "
            "that predict, or use an npz file"
        )
    return names


def _unified(parts: list[pa.ChunkedArray], name: str) -> pa.ChunkedArray:
    """One column of all files: float64 if all cells are numbers, else text stripped of blanks."""
    kinds = [part.type for part in parts]
    for kind in kinds:
        if not any(test(kind) for test in (*_NUMERIC, *_TEXT)):
            raise DataError(
                f"column '{name}' holds {kind}; expected numbers or text: convert it, or leave it "
                f"out with data.drop = ['{name}']"
            )
    number = all(any(test(kind) for test in _NUMERIC) or pa.types.is_null(kind) for kind in kinds)
    if number and not all(pa.types.is_null(kind) for kind in kinds):
        whole = (p.cast(pa.int8()) if pa.types.is_boolean(p.type) else p for p in parts)
        chunks = [c for part in whole for c in part.cast(pa.float64(), safe=False).chunks]
        return pa.chunked_array(chunks, pa.float64())
    chunks = [c for part in parts for c in part.cast(pa.string()).chunks]
    text = pc.utf8_trim_whitespace(pa.chunked_array(chunks, pa.string()))
    return pc.if_else(pc.is_in(text, pa.array(MISSING)), pa.scalar(None, pa.string()), text)


# ---- descriptions of columns --------------------------------------------------------------------

MOST_LEVELS = 100  # categories of one column; more is likely an identifier or free text
MOST_CLASSES = 20  # a target with more different integers is treated as a quantity
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
NO_CELL = "(missing)"  # the level of cells without a value

InputKind = Literal["numbers", "levels", "empty"]
TargetKind = Literal["texts", "integers", "quantity"]


@strict
class InputColumn:
    """How one column becomes features; a column without any value in the file is ``empty``."""

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


@strict
class TargetColumn:
    """How the target becomes class numbers, by text or by whole number, or is a quantity."""

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
    share = 1.0
    if pa.types.is_string(values.type):
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
        if all(DATE.match(level) for level in levels.tolist() if level != NO_CELL):
            raise DataError(
                f"column '{name}' holds {len(levels)} different dates ('{levels[0]}', …): say "
                f"data.time = '{name}', so that later rows test what was learnt from earlier "
                f"ones; or leave it out with data.drop = ['{name}']"
            )
        commas = sum(one.replace(",", "", 1).lstrip("-").isdigit() for one in levels.tolist())
        raise DataError(
            f"column '{name}' holds {len(levels)} different texts ('{levels[0]}', '{levels[1]}', …)"
            f"; more than {MOST_LEVELS} is no category: {_unit_or_drop(name)}"
            + "; or write its numbers with a decimal point"
            * (2 * commas > len(levels))
        )
    return InputColumn(name, "levels", levels=tuple(levels.tolist()))


ID = re.compile(r"(?:^|_|\b)(?:id|nr|mrn|patient|person|subject|case|admission)(?:$|_|\b)", re.I)
DATE = re.compile(r"\d{4}-\d\d-\d\d")
FEWEST_OF_ID = 20  # different values


def warn_of_id(sheet: Sheet, name: str) -> None:
    """Warn of an input that looks like an id: whole numbers or texts, and called so."""
    cells = sheet.table.column(name)
    values, rows = pc.unique(cells.drop_null()), len(cells) - cells.null_count
    if not ID.search(name) or len(values) < max(FEWEST_OF_ID, rows / 10):
        return
    told = "a different one in each row"
    if len(values) < rows:
        told = (
            f"{len(values)} values in {rows} rows; rows of one of them may train and test a model"
        )
    warnings.warn(
        CoterieWarning(f"column '{name}' looks like an id ({told}); {_unit_or_drop(name)}"),
        stacklevel=3,
    )


def _unit_or_drop(name: str) -> str:
    return (
        f"if it names patients (or other units), say data.unit = '{name}', which keeps their rows "
        f"in one split; else leave it out with data.drop = ['{name}']"
    )


def with_codes(sheet: Sheet, codes: Path) -> Sheet:
    """The sheet with a site's own codes replaced by the categories that a CSV file gives them.

    The file has the columns ``column``, ``code`` and ``means``, and one row for each code.
    """
    rows = read_rows(codes, fewest=3)
    if {*rows.column_names} != {"column", "code", "means"}:
        raise DataError(
            f"{codes}: found the columns {', '.join(rows.column_names)}; expected column, code and "
            "means: a row for each code of this site"
        )
    table, meanings = sheet.table, dict[str, dict[str, str]]()
    for row in rows.to_pylist():
        meanings.setdefault(row["column"].strip(), {})[row["code"].strip()] = row["means"].strip()
    for name, known in meanings.items():
        if name not in table.column_names:
            raise DataError(f"{codes}: {sheet.files[0]} has no column '{name}' among the inputs")
        missing = table.column(name).is_null().to_pylist()
        cells = [
            None if gone else known.get(text, text)
            for gone, text in zip(missing, texts(table.column(name)), strict=True)
        ]
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.chunked_array([cells], pa.string()))
    return sheet._replace(table=table)


def warn_unknown(source: str, column: InputColumn, found: Sequence[str], rows: str = "") -> None:
    """Tell of categories that are none of the column's levels."""
    warnings.warn(
        CoterieWarning(
            f"{source}: column '{column.name}' holds {some(found)}{rows}, which training did not "
            f"know (it knew {some(column.levels)}); taken as unknown; if only the spelling differs,"
            " write it as there"
        ),
        stacklevel=4,
    )


MOST_SHOWN = 8  # names that a message lists


def some(names: Sequence[str]) -> str:
    """The first names in quotes, and how many more there are."""
    return few([f"'{name}'" for name in names], MOST_SHOWN)


def categories(sheet: Sheet, name: str) -> pa.ChunkedArray:
    """The cells of a column as categories; missing cells are a category of their own."""
    return pc.fill_null(sheet.table.column(name).cast(pa.string()), NO_CELL)


def describe_target(sheet: Sheet, name: str, task: str) -> TargetColumn:
    """Describe the target column: classes, or a quantity for a regression.

    ``auto`` treats text, and integers with up to twenty different values, as classes.
    """
    found = column(sheet, name, "target")
    values = None if task == "classification" else numbers(sheet, name)
    if task == "regression" and values is None:
        raise DataError(f"column '{name}' (data.target) is text; a regression needs numbers")
    if values is not None:
        fractions = bool((values != np.round(values)).any())
        if task == "regression" or fractions or len(np.unique(values)) > MOST_CLASSES:
            return TargetColumn(name, "quantity")
    distinct = pc.unique(found if values is None else pa.array(values))
    classes = tuple(np.unique(np.array(texts(distinct))).tolist())
    return TargetColumn(name, "texts" if values is None else "integers", classes)
