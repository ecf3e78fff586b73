"""Runs the cells of a study that have no record yet, in one process or in several.

A run that was killed is continued.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import InUseError
from ..runs import cells
from ..runs.assemble import assemble, check_methods
from ..runs.config.loading import config_hash
from ..runs.config.schema import Config
from ..runs.interrupt import Stop
from ..runs.run import History
from ..runs.runner import Progress, Watch
from ..runs.setting import Setting
from ..storage import files, lock
from ..views.page import run_page
from .records import CellRecord, record_for, record_of, record_path
from .study import Study, StudyCell

RECORDS = "records"
RUNS = "runs"
POLL = 1.0  # seconds between two looks at the runs of other processes


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
    wait: bool = True,
) -> Iterator[CellRecord]:
    """Run what is missing of a study, as :func:`run_each` does."""
    wanted = missing(study, known)
    yield from run_each(wanted, out, stop=stop, progress=progress, keep=keep, wait=wait)


def run_each(
    wanted: Iterable[StudyCell],
    out: Path | None,
    *,
    stop: Stop,
    progress: Watch | None = None,
    keep: bool = False,
    wait: bool = True,
) -> Iterator[CellRecord]:
    """Run these cells, and give the record of each run when it is finished.

    Runs are written below ``out`` while they are computed, so that a killed one is continued; a
    finished run's folder is removed unless ``keep``. Without ``out`` runs stay in memory.

    Several processes may run the same cells in the same folder: each takes what no other one is
    running, and in the end waits for the others, unless ``wait`` is False. The caller writes a
    record into the folder RECORDS before it takes the next one.
    """
    waiting, told = list(wanted), list[StudyCell]()
    while waiting:
        columns: dict[str, list[StudyCell]] = {}
        for cell in waiting:
            columns.setdefault(config_hash(cell.column.config), []).append(cell)
        taken: list[StudyCell] = []  # by other processes
        for todo in columns.values():
            with _Column(todo, out, stop, progress, keep) as column:
                yield from column.runs(taken)
        if not wait:
            return
        if len(taken) == len(waiting):
            if progress is not None and taken != told:
                progress(_awaited(taken[0]))
                told = taken
            time.sleep(POLL)
        waiting = taken


def _awaited(cell: StudyCell) -> Progress:
    """What a watcher is told about a run of another process."""
    rounds = cell.column.config.run.rounds
    return Progress(cell.method.label, cell.seed, 0, rounds, None, more=0, waits=True)


def _folder_name(config: Config) -> str:
    """The folder of a column's runs: the same whichever methods and seeds are asked for.

    So a run that was killed is continued also by a command that asks for other ones beside it.
    """
    anyhow = config.model_copy(
        update={"run": config.run.model_copy(update={"methods": None, "seeds": ()})}
    )
    return f"{Path(config.data.name).stem}-{config_hash(anyhow)[:12]}"


class _Column(contextlib.ExitStack):
    """The runs of one comparison, Local and FedAvg before the others of their seed."""

    def __init__(
        self,
        todo: list[StudyCell],
        out: Path | None,
        stop: Stop,
        progress: Watch | None,
        keep: bool,
    ) -> None:
        super().__init__()
        self._todo, self._out, self._stop, self._progress = todo, out, stop, progress
        self._render = run_page if keep else None
        self._setting: Setting | None = None
        name = _folder_name(todo[0].column.config)
        self._folder = None if out is None else out / RUNS / name

    def runs(self, taken: list[StudyCell]) -> Iterator[CellRecord]:
        """The record of every cell; what another process is running is put into ``taken``."""
        for seed in dict.fromkeys(cell.seed for cell in self._todo):
            known: dict[str, History] = {}
            of_seed = {cell.method.label: cell for cell in self._todo if cell.seed == seed}
            for method in cells.in_turn([cell.method for cell in of_seed.values()]):
                self._stop.here()
                try:
                    with self._claimed(of_seed[method.label]):
                        yield from self._run(of_seed[method.label], known)
                except InUseError:
                    taken.append(of_seed[method.label])

    def _claimed(self, cell: StudyCell) -> contextlib.AbstractContextManager[None]:
        """The right to run a cell until its record is written; InUseError if another has it."""
        if self._folder is None:
            return contextlib.nullcontext()
        return lock.held(self._folder / f"{cell.method.label}-seed-{cell.seed}-taken")

    def _run(self, cell: StudyCell, known: dict[str, History]) -> Iterator[CellRecord]:
        """Run a cell, unless another process has finished it by now."""
        found = self._finished(cell)
        if found is not None:
            yield found
            return
        setting = self._assembled()
        data = cells.run_cell(
            *(setting, cell.method, cell.seed, self._folder),
            *(self._stop, known, self._progress, self._render),
        )
        if cell.method.label in cells.FIRST:
            known[cell.method.label] = data.history
        yield CellRecord.of(cell, data, setting.config.train.precision)
        if data.path is not None and self._render is None:
            shutil.rmtree(data.path)

    def _finished(self, cell: StudyCell) -> CellRecord | None:
        path = None if self._out is None else record_path(self._out / RECORDS, cell.key)
        if path is None or not path.exists():
            return None
        return record_for(cell, {cell.key: record_of(files.read_json(path), path)})

    def _assembled(self) -> Setting:
        """The setting of the comparison, made when its first run begins."""
        if self._setting is None:
            self._setting = self.enter_context(
                contextlib.closing(assemble(self._todo[0].column.config))
            )
            check_methods(self._setting, {c.method.label: c.method for c in self._todo}.values())
        return self._setting
