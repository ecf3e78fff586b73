"""Reads CSV and parquet files as one sheet of columns; errors name the file and the line.

A CSV file is read as text, and the types are found here, so that one bad cell is reported by file
and line instead of changing the type of its column.
"""

import csv
import io
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ...errors import DataError

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
            raise DataError(f"data.drop: {files[0]} has no column '{name}'; {_has(tables[0])}")
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


def sheet_of(table: pa.Table, names: list[str], source: Path) -> Sheet:
    """Some columns of a table in memory as a sheet; ``source`` names it in messages."""
    columns = {name: _unified([table.column(name)], name) for name in names}
    return Sheet(pa.table(columns), (source,), (table.num_rows,))


def _dates_as_text(table: pa.Table, dates: tuple[str, ...]) -> pa.Table:
    for name in dates:
        if name in table.column_names and pa.types.is_temporal(table.column(name).type):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(name).cast(pa.string()))
    return table


def _has(table: pa.Table) -> str:
    return f"it has: {', '.join(table.column_names)}"


def read_rows(
    file: Path, delimiter: str | None = None, encoding: str = "utf-8", fewest: int = 2
) -> pa.Table:
    """The rows of one file, as they are written: cells of a CSV file are text.

    A CSV file with fewer columns than ``fewest`` is refused: most likely the delimiter is another.
    """
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty; expected a line of column names, then rows")
    is_text = file.suffix != ".parquet"
    table = _csv(file, delimiter, encoding, fewest) if is_text else _read_parquet(file)
    if table.num_rows == 0:
        raise DataError(f"{file}: found column names but no rows")
    return table


def _read_parquet(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a parquet file that can be read ({error})") from error


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
        return pa.chunked_array([c for part in parts for c in _floats(part).chunks], pa.float64())
    chunks = [c for part in parts for c in part.cast(pa.string()).chunks]
    text = pc.utf8_trim_whitespace(pa.chunked_array(chunks, pa.string()))
    return pc.if_else(pc.is_in(text, pa.array(MISSING)), pa.scalar(None, pa.string()), text)


def _floats(part: pa.ChunkedArray) -> pa.ChunkedArray:
    return (
        part.cast(pa.int8()).cast(pa.float64())
        if pa.types.is_boolean(part.type)
        else (part.cast(pa.float64(), safe=False))
    )
