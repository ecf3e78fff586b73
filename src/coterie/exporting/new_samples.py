"""Reads new samples, without targets, by the schema of the data that a model was trained on.

Rows keep their order. Whatever the schema does not describe is refused, with what was found, what
was expected and what to do: a column too many or too few, an unknown category, a text where a
number belongs.
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
)
from ..data.sources.tables import encode
from ..errors import CoterieWarning, DataError
from ..storage.archives import read_npz

MOST_SHOWN = 8  # names that a message lists
KEEP_OR_DROP = "copy a column to the answers with --keep '{0}', or ignore it with --drop '{0}'"
Source = Any  # a path, an array or tensor, or whatever pyarrow makes a table of


class NewSamples(NamedTuple):
    """Encoded samples, and the columns of the source that are copied to the answers."""

    x: Tensor  # [n, ...]
    kept: dict[str, list[str]]


class Others(NamedTuple):
    """Columns of a new table that are no inputs."""

    keep: Sequence[str] = ()  # copied to the answers
    drop: Sequence[str] = ()  # ignored
    delimiter: str | None = None
    encoding: str = "utf-8"


def read_new(source: Source, schema: Schema, others: Others) -> NewSamples:
    """Samples of a file, of an array, or of a table in memory, in their order.

    A table is a CSV, TSV or parquet file, or anything that ``pyarrow.table`` takes, as a dict of
    columns. Other samples are an array, or an npz file with one (or one called ``x``).
    """
    if schema.kind == "table":
        return _table(source, schema, others)
    if others.keep or others.drop:
        raise DataError(f"--keep, --drop: this model takes {schema.kind}, which have no columns")
    if isinstance(source, str | Path):
        source = _array_of(Path(source), schema)
    array = source.numpy() if isinstance(source, Tensor) else np.asarray(source)
    return NewSamples(array_samples(array, schema), {})


# ---- tables --------------------------------------------------------------------------------------


def _table(source: Source, schema: Schema, others: Others) -> NewSamples:
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix not in SUFFIXES or not path.is_file():
            raise DataError(
                f"{path}: is no file that can be read as a table; expected one of "
                f"{', '.join(SUFFIXES)} with the columns {_some([c.name for c in schema.columns])}"
            )
        table = read_rows(path, others.delimiter, others.encoding, min(2, len(schema.columns)))
    else:
        table, path = in_memory(source, schema), Path("table")
    check_names(path, table.column_names, schema, others, KEEP_OR_DROP)
    sheet = sheet_of(table, [column.name for column in schema.columns], path)
    for column in schema.columns:
        check_cells(sheet, column)
    x = encode(sheet, schema.columns)
    return NewSamples(x, {name: _as_text(table.column(name)) for name in others.keep})


def in_memory(source: Source, schema: Schema) -> pa.Table:
    """The table that ``pyarrow.table`` makes of the source."""
    try:
        return source if isinstance(source, pa.Table) else pa.table(source)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"found {type(source).__name__}, which is no table ({error}); expected columns by "
            f"name: {_some([column.name for column in schema.columns])}"
        ) from error


def check_names(path: Path, found: list[str], schema: Schema, others: Others, advice: str) -> None:
    """Refuse a table that lacks columns, or has columns that are not said to be kept or dropped.

    ``advice`` says what to do with a column ``{0}`` that the model does not know.
    """
    wanted = [column.name for column in schema.columns]
    for option, names in (("keep", others.keep), ("drop", others.drop)):
        for name in names:
            if name not in found:
                raise DataError(f"--{option}: {path} has no column '{name}'; it has {_some(found)}")
            if name in wanted and option == "drop":
                raise DataError(f"--drop: the model needs column '{name}'; leave it in")
    extra = [name for name in found if name not in (*wanted, *others.keep, *others.drop)]
    missing = [name for name in wanted if name not in found]
    if missing:
        also = f", and has others: {_some(extra)}" if extra else ""
        raise DataError(
            f"{path}: lacks {len(missing)} of the model's {len(wanted)} columns: {_some(missing)}"
            f"{also}; expected {_some(wanted)}; add or rename them (cells of numbers may be empty)"
        )
    if extra:
        target = schema.target.name
        told = f" ('{target}' is what the model predicts)" if target in extra else ""
        raise DataError(
            f"{path}: has columns that the model does not know: {_some(extra)}{told}; expected "
            f"{_some(wanted)}; {advice.format(extra[0])}"
        )


def check_cells(sheet: Sheet, column: InputColumn) -> None:
    """Refuse cells that the column's description does not allow; warn of new gaps."""
    if column.kind == "levels":
        _refuse_unknown(sheet, column)
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


def _refuse_unknown(sheet: Sheet, column: InputColumn) -> None:
    cells = categories(sheet, column.name)
    known = pc.is_in(cells, value_set=pa.array(column.levels)).to_numpy()
    for row in np.flatnonzero(~known):
        raise DataError(
            f"{sheet.where(int(row))}: found '{cells[int(row)].as_py()}' in column "
            f"'{column.name}', as in {int((~known).sum())} of {len(known)} rows; expected one of "
            f"{_some(column.levels)}, the categories of the training data; spell it as there, or "
            "leave the row out: the model knows nothing of it"
        )


def _as_text(column: pa.ChunkedArray) -> list[str]:
    return ["" if cell is None else str(cell) for cell in column.to_pylist()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_SHOWN]) + more


# ---- arrays --------------------------------------------------------------------------------------


def _array_of(path: Path, schema: Schema) -> Array:
    try:
        if path.suffix != ".npz":
            raise ValueError(f"its name ends in '{path.suffix}'")
        arrays = read_npz(path)
        if "x" not in arrays and len(arrays) != 1:
            raise ValueError(f"it holds {_some(sorted(arrays))}")
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
