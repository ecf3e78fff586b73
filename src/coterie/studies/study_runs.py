"""Runs the cells of a study that have no record yet, in one process or in several."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..runs.assemble import assemble
from ..runs.comparison_folder import place
from ..runs.config.loading import config_hash
from ..runs.config.schema import Config
from ..runs.execute import execute
from ..runs.listeners import Watch
from ..runs.plan import Cell, Plan
from ..storage import files
from .records import CellRecord, record_for, record_of, record_path
from .study import Study, StudyCell

RECORDS = "records"
RUNS = "runs"


def missing(study: Study, known: Mapping[str, CellRecord]) -> list[StudyCell]:
    """The cells that have no record, or one of another experiment."""
    return [cell for cell in study.cells() if record_for(cell, known) is None]


def run_each(
    wanted: Iterable[StudyCell],
    out: Path | None,
    listeners: Sequence[Watch] = (),
    *,
    keep: bool = False,
    wait: bool = True,
) -> Iterator[CellRecord]:
    """Run these cells, and write and give the record of each run when it is finished.

    Runs are written below ``out`` while they are computed, so that a killed one is continued; a
    finished run's folder is removed unless ``keep``. Without ``out`` runs stay in memory. Several
    processes may run the same cells in the same folder; runs that others have taken are waited for
    in the end, unless ``wait`` is False.
    """
    configs: dict[str, Config] = {}  # equal configs are one, so that their data is read once
    asked: dict[tuple[int, tuple[str, int]], StudyCell] = {}
    cells, others = list[Cell](), list[CellRecord]()
    for one in wanted:
        config = configs.setdefault(config_hash(one.column.config), one.column.config)
        cell = Cell(config, one.method, one.seed, folder_of(out, one), keep)
        cells.append(cell)
        asked[id(config), cell.name] = one

    def recorded(cell: Cell) -> bool:
        """Whether another process has written the record meanwhile."""
        record = _recorded(asked[id(cell.config), cell.name], out)
        others.extend([] if record is None else [record])
        return record is not None

    plan = Plan(tuple(cells), out, shared=out is not None, wait=wait)
    for cell, run in execute(plan, lambda c: contextlib.closing(assemble(c)), listeners, recorded):
        one = asked[id(cell.config), cell.name]
        record = CellRecord.of(one, run, cell.config.train.precision)
        if out is not None:
            record.write(out / RECORDS)
        yield record
    yield from others


def folder_of(out: Path | None, cell: StudyCell) -> Path | None:
    """The folder of a run: the same whichever other methods and seeds are asked for.

    So a run that was killed is continued also by a command that asks for other ones beside it.
    """
    if out is None:
        return None
    config = cell.column.config
    anyhow = config.model_copy(
        update={"run": config.run.model_copy(update={"methods": None, "seeds": ()})}
    )
    name = f"{Path(config.data.name).stem}-{config_hash(anyhow)[:12]}"
    return place(out / RUNS / name, cell.method.label, cell.seed)


def _recorded(cell: StudyCell, out: Path | None) -> CellRecord | None:
    path = None if out is None else record_path(out / RECORDS, cell.key)
    if path is None or not path.exists():
        return None
    return record_for(cell, {cell.key: record_of(files.read_json(path), path)})
