"""A newcomer's labelled samples, read by the schema of the run's data.

Columns, categories, shapes and classes are checked as for new samples without targets; units and
times decide how the samples can be split.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.data_schema import Schema
from ..data.datasets import file_source
from ..data.federation import Dataset
from ..data.site_data import recoded
from ..data.sources import sheets
from ..data.sources.sheets import InputColumn, Sheet, TargetColumn, sheet_of
from ..data.sources.tables import OpenTable, TableOptions, encode_table
from ..errors import DataError
from ..exporting.new_samples import (
    Reading,
    Source,
    array_samples,
    check_cells,
    input_sheet,
    table_of,
)

ROLES = "split", "unit", "time", "subgroup"  # options: a column that says how rows are split


def read_labelled(
    source: Source,
    schema: Schema,
    options: Mapping[str, Any],
    codes: str | Path | None = None,
    *,
    strict: bool = False,
) -> Dataset:
    """The samples and targets of a file, or of a table in memory, as the schema encodes them.

    ``options`` are those of the run's ``[data]``: its columns for clients, units, times and splits
    need not be there, and are no inputs if they are. Further columns are ignored.
    """
    if schema.kind == "table":
        delimiter, encoding = options.get("delimiter"), options.get("encoding", "utf-8")
        return _labelled_rows(
            source, schema, options, Reading((), codes, strict, delimiter, encoding)
        )
    if codes is not None:
        raise DataError(f"--codes: this model takes {schema.kind}, which have no columns")
    if not isinstance(source, str | Path):
        raise DataError(f"found {type(source).__name__}; expected a file of {schema.kind}")
    found = file_source(str(source)).read()
    if found.regression != schema.regression:
        raise DataError(
            f"{found.name}: found targets that are {'numbers' if found.regression else 'classes'};"
            f" expected {'numbers' if schema.regression else 'classes'}, as in the run"
        )
    x = array_samples(found.x.numpy(), schema)
    return replace(recoded(replace(found, x=x), schema), superclass=None, owners=None)


def _labelled_rows(
    source: Source, schema: Schema, options: Mapping[str, Any], how: Reading
) -> Dataset:
    path, table = table_of(source, schema, how)
    found, target = table.column_names, schema.target
    if target.name not in found:
        raise DataError(
            f"{path}: has no column '{target.name}', which the model predicts; expected labelled "
            "rows; add it with the known outcomes"
        )
    roles: dict[str, Any] = {
        role: str(options[role]) for role in ROLES if options.get(role) in found
    }
    sheet = input_sheet(table, path, schema, how)
    others = dict.fromkeys((target.name, *roles.values()))
    more = sheet_of(table, others, path, (options["time"],) if options.get("time") else ())
    for name in others:
        if name not in sheet.table.column_names:
            sheet = sheet._replace(table=sheet.table.append_column(name, more.table.column(name)))
    _check_targets(sheet, target)
    read = OpenTable(path, sheet, TableOptions(target=target.name, **roles), target, None, ())
    return encode_table(read, schema.columns, target)


def _check_targets(sheet: Sheet, target: TargetColumn) -> None:
    """Refuse empty cells, classes that the run does not know, and texts where numbers belong."""
    cells = sheets.column(sheet, target.name, "target")
    if target.kind != "texts":
        check_cells(sheet, InputColumn(target.name, "numbers"))
    if target.kind == "quantity":
        return
    if target.kind == "integers":
        cells = cells.cast("float64")
    known = {*target.classes}
    for row, name in enumerate(sheets.texts(cells)):
        if name not in known:
            raise DataError(
                f"{sheet.where(row)}: found the class '{name}' in column '{target.name}'; expected "
                f"one of {', '.join(target.classes)}, the classes of the run; spell it as there, "
                "or leave the row out: the models know nothing of it"
            )
