"""Reads new samples by the schema of the training data, in their order.

A category that training did not know is unknown, columns that the model does not use are ignored,
missing columns are empty, and cells that cannot be read are refused.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from ..data.arrays import Array, samples
from ..data.data_schema import Schema
from ..data.sources import sheets
from ..data.sources.sheets import (
    NUMBER,
    SUFFIXES,
    InputColumn,
    Sheet,
    categories,
    floats,
    read_rows,
    refuse_infinite,
    sheet_of,
    some,
)
from ..data.sources.tables import encode, encode_target
from ..errors import CoterieWarning, DataError
from ..storage.archives import read_npz

Source = Any  # a path, an array or tensor, or whatever pyarrow makes a table of


class NewSamples(NamedTuple):
    """Encoded samples, what the source says of their targets, and columns that are copied."""

    x: Tensor  # [n, ...]
    kept: dict[str, list[str]]
    truth: Array | None = None  # [n] class numbers, -1 unknown; or numbers; None without a column
    ignored: tuple[str, ...] = ()  # columns


class Reading(NamedTuple):
    """How a new table is read."""

    keep: Sequence[str] = ()  # columns that are copied to the answers
    codes: str | Path | None = None  # a file that says what a site's own codes mean
    strict: bool = False  # refuse unknown categories and missing columns
    delimiter: str | None = None
    encoding: str = "utf-8"


def read_new(source: Source, schema: Schema, how: Reading) -> NewSamples:
    """Samples of a file, of an array, or of a table in memory, in their order.

    A table is a CSV, TSV or parquet file, or anything that ``pyarrow.table`` takes, as a dict of
    columns. Other samples are an array, or an npz file with one (or one called ``x``).
    """
    if schema.kind == "table":
        return _read_table(source, schema, how)
    if how.keep or how.codes is not None:
        raise DataError(f"--keep, --codes: this model takes {schema.kind}, which have no columns")
    if isinstance(source, str | Path):
        source = _array_of(Path(source), schema)
    array = source.numpy() if isinstance(source, Tensor) else np.asarray(source)
    return NewSamples(array_samples(array, schema), {})


def _read_table(source: Source, schema: Schema, how: Reading) -> NewSamples:
    path, table = table_of(source, schema, how)
    found, target = table.column_names, schema.target
    for name in how.keep:
        if name not in found:
            raise DataError(f"--keep: {path} has no column '{name}'; it has {some(found)}")
    inputs = {column.name for column in schema.columns}
    ignored = [name for name in found if name not in (*inputs, *how.keep, target.name)]
    sheet, truth = input_sheet(table, path, schema, how), None
    if target.name in found and target.name not in how.keep:
        try:
            truth = encode_target(sheet_of(table, [target.name], path), target)
        except pa.ArrowInvalid:  # texts where the model gives numbers: nothing to compare
            ignored.append(target.name)
    kept = {
        name: ["" if cell is None else str(cell) for cell in table.column(name).to_pylist()]
        for name in how.keep
    }
    return NewSamples(encode(sheet, schema.columns), kept, truth, tuple(ignored))


def table_of(source: Source, schema: Schema, how: Reading) -> tuple[Path, pa.Table]:
    """The cells of a file, or of what ``pyarrow.table`` makes a table of, and its name."""
    names = [column.name for column in schema.columns]
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix not in SUFFIXES or not path.is_file():
            raise DataError(
                f"{path}: is no file that can be read as a table; expected one of "
                f"{', '.join(SUFFIXES)} with the columns {some(names)}"
            )
        return path, read_rows(path, how.delimiter, how.encoding, min(2, len(names)))
    try:
        return Path("table"), source if isinstance(source, pa.Table) else pa.table(source)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"found {type(source).__name__}, which is no table ({error}); expected columns by "
            f"name: {some(names)}"
        ) from error


def input_sheet(table: pa.Table, path: Path, schema: Schema, how: Reading) -> Sheet:
    """The model's columns of a table: own codes replaced, missing columns empty, cells checked."""
    there = [column for column in schema.columns if column.name in table.column_names]
    missing = [column for column in schema.columns if column not in there]
    if missing:
        _tell_missing(path, [column.name for column in missing], table, schema, how.strict)
    sheet = sheet_of(table, [column.name for column in there], path)
    if how.codes is not None:
        sheet = sheets.with_codes(sheet, Path(how.codes))
    for column in there:
        check_cells(sheet, column, strict=how.strict)
    cells = sheet.table
    for column in missing:
        cells = cells.append_column(column.name, pa.nulls(len(table), pa.string()))
    return sheet._replace(table=cells)


def _tell_missing(
    path: Path, missing: list[str], table: pa.Table, schema: Schema, strict: bool
) -> None:
    """Warn of columns that are not there; refuse a table that lacks more than half of them."""
    wanted = [column.name for column in schema.columns]
    extra = [name for name in table.column_names if name not in (*wanted, schema.target.name)]
    also = f", and has others: {some(extra)}" if extra else ""
    told = f"{path}: lacks {len(missing)} of the model's {len(wanted)} columns: {some(missing)}"
    if strict or 2 * len(missing) > len(wanted):
        raise DataError(
            f"{told}{also}; expected {some(wanted)}; add or rename them (cells may be empty)"
        )
    warnings.warn(
        CoterieWarning(
            f"{told}{also}. EVERY ANSWER IS MADE WITHOUT THEM: numbers are taken as the mean of "
            "the training data, categories as unknown; rename a column if only its name differs"
        ),
        stacklevel=5,
    )


def check_cells(sheet: Sheet, column: InputColumn, *, strict: bool = False) -> None:
    """Refuse cells that the column's description does not allow; warn of what is new."""
    if column.kind == "levels":
        _tell_unknown(sheet, column, strict)
        return
    cells = sheet.table.column(column.name)
    if pa.types.is_string(cells.type):
        looks = pc.fill_null(pc.match_substring_regex(cells, NUMBER), True).to_numpy()
        for row in np.flatnonzero(~looks):
            raise DataError(
                f"{sheet.where(int(row))}: found '{cells[int(row)].as_py()}' in column "
                f"'{column.name}'; expected a number, as in training; correct the cell or leave it "
                "empty"
            )
    refuse_infinite(sheet, column.name, floats(cells))
    if cells.null_count and not column.missing:
        warnings.warn(
            CoterieWarning(
                f"{sheet.files[0].name}: column '{column.name}' has {cells.null_count} empty cells "
                "and had none in training; they are filled with the mean of the training data"
            ),
            stacklevel=4,
        )


def _tell_unknown(sheet: Sheet, column: InputColumn, strict: bool) -> None:
    cells = categories(sheet, column.name)
    known = pc.is_in(cells, value_set=pa.array(column.levels)).to_numpy()
    unknown, count = cells.filter(pa.array(~known)).unique().to_pylist(), int((~known).sum())
    if not unknown:
        return
    rows = f" in {count} of {len(known)} rows"
    if strict:
        raise DataError(
            f"{sheet.where(int(np.flatnonzero(~known)[0]))}: found {some(unknown)} in column "
            f"'{column.name}',{rows}; expected one of {some(column.levels)}, the categories of the "
            "training data; spell it as there, or leave --strict out: it then counts as unknown"
        )
    sheets.warn_unknown(sheet.files[0].name, column, unknown, rows)


def _array_of(path: Path, schema: Schema) -> Array:
    try:
        if path.suffix != ".npz":
            raise ValueError(f"its name ends in '{path.suffix}'")
        arrays = read_npz(path)
        if "x" not in arrays and len(arrays) != 1:
            raise ValueError(f"it holds {some(sorted(arrays))}")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as {schema.kind} ({error}); expected an npz file with one "
            f"array, or one called x, of samples of shape {list(schema.shape)}"
        ) from error
    return arrays["x"] if "x" in arrays else next(iter(arrays.values()))


def array_samples(array: Array, schema: Schema) -> Tensor:
    """The array as samples of the schema; grey images become RGB if the model's have colour."""
    kinds = {"images": "u", "tokens": "iu", "features": "fiub"}[schema.kind]
    if array.dtype.kind not in kinds or (schema.kind == "images" and array.dtype != np.uint8):
        raise DataError(f"found numbers of type {array.dtype} as {schema.kind}; {_wants(schema)}")
    x = samples(array, schema.kind == "tokens")
    if schema.kind == "images" and x.shape[1:2] == (1,) and x.ndim == 4:
        x = x.expand(len(x), schema.shape[0], *x.shape[2:])
    if tuple(x.shape[1:]) != schema.shape or not len(x):
        raise DataError(f"found an array of shape {list(array.shape)}; {_wants(schema)}")
    if schema.kind == "tokens" and not 0 <= int(x.min()) <= int(x.max()) < schema.tokens:
        raise DataError(f"found tokens from {x.min()} to {x.max()}; {_wants(schema)}")
    return x


def _wants(schema: Schema) -> str:
    kind = {"images": "uint8 pixels", "tokens": f"tokens below {schema.tokens}"}
    shape = ["samples", *schema.shape]
    return f"expected {kind.get(schema.kind, 'numbers')} of shape [{', '.join(map(str, shape))}]"
