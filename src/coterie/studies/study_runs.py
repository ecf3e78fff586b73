"""A study and its results: runs what has no record yet, in one process or in several."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..runs import interrupt
from ..runs.assemble import assemble
from ..runs.comparison_folder import place
from ..runs.config.loading import config_hash
from ..runs.config.schema import Config
from ..runs.execute import execute
from ..runs.listeners import Watch
from ..runs.plan import Cell, Plan
from ..storage import files
from .card_text import markdown
from .outcome import StudyOutcome
from .records import (
    CellRecord,
    publish,
    read_published,
    read_records,
    record_for,
    record_of,
    record_path,
)
from .study import Study, StudyCell
from .study_page import study_page

RECORDS = "records"
RUNS = "runs"


@dataclass(frozen=True)
class StudyWork:
    """A study that can be run as far as it is missing, and where its results are."""

    study: Study  # what is asked for: perhaps fewer columns, methods or seeds of the whole
    whole: Study  # what may be published
    command: str  # that repeats it
    name: str  # of the files with its results: card or sweep
    out: Path | None  # without it, runs stay in memory
    published: Path | None = None  # the file of its published records, beside those of others
    waits: str | None = None  # why it cannot be run yet

    def known(self) -> dict[str, CellRecord]:
        """The records of finished runs: published ones, and those of the folder."""
        found = {} if self.published is None else read_published(self.published.parent)
        return found if self.out is None else found | read_records(self.out / RECORDS)

    def outcome(self) -> StudyOutcome:
        """The table from what was run so far."""
        return StudyOutcome(self.study, self.known())

    def missing(self) -> int:
        """The number of runs that are missing."""
        return len(missing(self.study, self.known()))

    def run(
        self, listeners: Sequence[Watch] = (), *, keep: bool = False, wait: bool = True
    ) -> StudyOutcome:
        """Run what is missing, and write the table and its page.

        Runs that other processes have taken are waited for, unless ``wait`` is False.
        """
        if self.waits:
            raise ConfigError(f"{self.study.name} cannot be run yet: {self.waits}")
        todo = missing(self.study, self.known())
        with interrupt.held(self.out, self.command):
            made = {r.key: r for r in run_each(todo, self.out, listeners, keep=keep, wait=wait)}
        return self.write(made)

    def write(self, made: Mapping[str, CellRecord] | None = None) -> StudyOutcome:
        """Write the table and its page, and publish if asked to; returns what was asked for.

        Runs with other settings (``--set``) are not those of the whole and are not published.
        """
        known = {**self.known(), **(made or {})}
        outcome = StudyOutcome(self.study, known)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            files.write_text(self.out / f"{self.name}.md", markdown(outcome, self.command))
            files.write_text(self.out / f"{self.name}.html", study_page(outcome, self.command))
        if self.published is not None:
            found = [record_for(cell, known) for cell in self.whole.cells()]
            drawn = self.whole.figure == "matrices"
            publish([one for one in found if one is not None], self.published, matrices=drawn)
        return outcome


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
