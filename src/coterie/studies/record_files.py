"""Reads and writes records of runs as JSON; what came from outside is checked before it is used."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StoreError
from ..experiment.config.methods import TAG
from ..results import kinds, summary
from ..storage import files
from .cell_record import FORMAT, CellRecord

LATER = ("validation", "curves")  # tables that old records do not have


def records_text(records: Sequence[CellRecord]) -> str:
    """Several records as one JSON text, one line per record."""
    tables = [{"format": FORMAT, **asdict(record)} for record in records]
    lines = [json.dumps(table, separators=(",", ":")) for table in tables]
    return '{"records":[\n' + ",\n".join(lines) + "\n]}\n"


def read_records(folder: Path) -> dict[str, CellRecord]:
    """All records of a folder, by key."""
    found = (record_of(files.read_json(path), path) for path in sorted(folder.glob("*.json")))
    return {record.key: record for record in found}


def record_of(found: Any, where: object) -> CellRecord:
    """The record of a JSON value that came from outside; anything else is refused."""
    names = [one.name for one in fields(CellRecord) if one.name not in LATER]
    try:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"found format {_format(found)}; expected {FORMAT}")
        given = {name: found[name] for name in names}
        record = CellRecord(**given, **{name: found.get(name, {}) for name in LATER})
        _check(record)
        return record
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{where}: is no record of a run ({error}); expected a file that 'coterie reproduce', "
            "'coterie sweep' or 'coterie tune' wrote; remove it to run this again"
        ) from error


def _format(found: Any) -> object:
    return found.get("format") if isinstance(found, dict) else type(found).__name__


def _check(record: CellRecord) -> None:
    summary.checked(record.summary)
    method, _, tag = record.method.partition("@")
    if not method.isidentifier() or (tag and not TAG.fullmatch(tag)):
        raise ValueError(f"method: found {kinds.shown(record.method)}; expected a label")
    if not isinstance(record.key, str) or not isinstance(record.seed, int):
        raise ValueError("key or seed is of another kind")
    lists: tuple[Any, ...] = record.curve, record.last, record.best, record.best_of_rounds
    for values in (*lists, record.rounds, record.n_test):
        if not isinstance(values, list) or not all(v is None or _real(v) for v in values):
            raise ValueError("found something else; expected lists of numbers")
    tables: tuple[Any, ...] = record.environment, record.matrices, record.config
    if not all(isinstance(table, dict) for table in (*tables, record.validation, record.curves)):
        raise ValueError("environment, matrices, config, validation or curves is no table")
    for curve in record.curves.values():
        numbers = isinstance(curve, list) and all(v is None or _real(v) for v in curve)
        if not numbers or len(curve) != len(record.rounds):
            raise ValueError("found something else; expected a curve with a score for each round")
    for values in record.validation.values():
        if not isinstance(values, list) or not all(
            v is None or v in ("inf", "-inf") or _real(v) for v in values
        ):
            raise ValueError("found something else; expected lists of validation scores")
    for matrix in record.matrices.values():
        if np.array(matrix, dtype=np.float64).shape != (len(record.last),) * 2:
            raise ValueError("a matrix is not square over the clients")


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
