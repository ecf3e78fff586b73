"""Runs the cells of a study that have no record yet; a run that was killed is continued."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..experiment import cells
from ..experiment.assemble import assemble, check_methods
from ..experiment.config.loading import config_hash
from ..experiment.config.schema import Config
from ..experiment.interrupt import Stop
from ..experiment.runner import Watch
from ..experiment.setting import Setting
from ..report.run_page import run_page
from ..results.history import History
from .cell_record import CellRecord, record_for
from .study import Study, StudyCell

RECORDS = "records"
RUNS = "runs"


def missing(study: Study, known: Mapping[str, CellRecord]) -> list[StudyCell]:
    """The cells that have no record, or one of another experiment."""
    return [cell for cell in study.cells() if record_for(cell, known) is None]


def run_missing(
    study: Study,
    known: Mapping[str, CellRecord],
    out: Path | None,
    *,
    stop: Stop,
    progress: Watch | None = None,
    keep: bool = False,
) -> Iterator[CellRecord]:
    """Run what is missing of a study, as :func:`run_each` does."""
    yield from run_each(missing(study, known), out, stop=stop, progress=progress, keep=keep)


def run_each(
    wanted: Iterable[StudyCell],
    out: Path | None,
    *,
    stop: Stop,
    progress: Watch | None = None,
    keep: bool = False,
) -> Iterator[CellRecord]:
    """Run these cells, and give the record of each run when it is finished.

    Runs are written below ``out`` while they are computed, so that a killed one is continued; a
    finished run's folder is removed unless ``keep``. Without ``out`` runs stay in memory.
    """
    todo: dict[str, list[StudyCell]] = {}
    for cell in wanted:
        todo.setdefault(config_hash(cell.column.config), []).append(cell)
    for cells_of in todo.values():
        config = cells_of[0].column.config
        with contextlib.closing(assemble(config)) as setting:
            check_methods(setting, {c.method.label: c.method for c in cells_of}.values())
            folder = None if out is None else out / RUNS / _folder_name(config)
            yield from _column_runs(setting, cells_of, folder, stop, progress, keep)


def _folder_name(config: Config) -> str:
    """The folder of a column's runs: the same whichever methods and seeds are asked for.

    So a run that was killed is continued also by a command that asks for other ones beside it.
    """
    anyhow = config.model_copy(
        update={"run": config.run.model_copy(update={"methods": None, "seeds": ()})}
    )
    return f"{Path(config.data.name).stem}-{config_hash(anyhow)[:12]}"


def _column_runs(
    setting: Setting,
    todo: list[StudyCell],
    folder: Path | None,
    stop: Stop,
    progress: Watch | None,
    keep: bool,
) -> Iterator[CellRecord]:
    """The runs of one comparison, Local and FedAvg before the others of their seed."""
    for seed in dict.fromkeys(cell.seed for cell in todo):
        known: dict[str, History] = {}
        of_seed = {cell.method.label: cell for cell in todo if cell.seed == seed}
        for method in cells.in_turn([cell.method for cell in of_seed.values()]):
            stop.here()
            data = cells.run_cell(
                setting, method, seed, folder, stop, known, progress, run_page if keep else None
            )
            if method.label in cells.FIRST:
                known[method.label] = data.history
            precision = setting.config.train.precision
            yield CellRecord.of(of_seed[method.label], data, precision)
            if data.path is not None and not keep:
                shutil.rmtree(data.path)
