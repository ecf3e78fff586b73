"""Runs a config whose fields list several values, and shows the numbers of all of them.

import coterie
found = coterie.sweep("ablation.toml", out="runs/ablation")
print(found)          # one table per value of a shared field, one row per method and variant
found.rows()          # the same as a list of dictionaries, for pandas.DataFrame
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

from ..api import Options, Source, changes_of, listeners_of
from ..core.imports import Code
from ..errors import ConfigError
from ..runs import interrupt
from ..runs.config.loading import Config, merge, tables_of
from ..runs.config.sweeps import with_variants
from ..runs.listeners import Watch
from ..storage import files
from .card_text import markdown
from .outcome import StudyOutcome
from .records import read_records
from .study import Study, study_of
from .study_page import study_page
from .study_runs import RECORDS, missing, run_each

TEXT, PAGE = "sweep.md", "sweep.html"


class Sweep(NamedTuple):
    """A sweep that can be run: its study, and the folder of its results."""

    study: Study
    out: Path | None
    command: str

    def missing(self) -> int:
        """The number of runs that have no record yet."""
        known = {} if self.out is None else read_records(self.out / RECORDS)
        return len(missing(self.study, known))

    def run(self, listeners: Sequence[Watch] = (), *, keep: bool = True) -> StudyOutcome:
        """Run what is missing, and write the table and the page."""
        out = self.out
        known = {} if out is None else read_records(out / RECORDS)
        with interrupt.held(out, self.command):
            todo = missing(self.study, known)
            known |= {r.key: r for r in run_each(todo, out, listeners, keep=keep)}
        outcome = StudyOutcome(self.study, known)
        if out is not None:
            files.write_text(out / TEXT, markdown(outcome, self.command))
            files.write_text(out / PAGE, study_page(outcome, self.command))
        return outcome


def sweep(
    source: Source = None,
    *,
    number: str | None = None,
    progress: Watch | None = None,
    **options: Unpack[Options],
) -> StudyOutcome:
    """Run every combination of a config's sweeps, and return the table.

    ``number`` is the field of ``summary.json`` that the table shows; without it, the mean over
    clients in the last round.
    """
    return sweep_of(source, number, **options).run(listeners_of(progress))


def sweep_of(source: Source, number: str | None = None, **options: Unpack[Options]) -> Sweep:
    """What a config sweeps; nothing is run yet."""
    if isinstance(source, Config):
        raise ConfigError("a checked config lists no values any more; expected a file or tables")
    changes, code = changes_of(options), options.get("code")
    tables = with_variants(merge(tables_of(source, changes), changes))
    run = dict(tables.get("run", {}))
    out = run.pop("out", None)
    name = Path(str(source)).stem if isinstance(source, str | Path) else "sweep"
    study = study_of(
        {**tables, "run": run}, Code.of(code, installed=True), name=name, number=number
    )
    command = f"coterie sweep {source}" if isinstance(source, str | Path) else "coterie.sweep(...)"
    return Sweep(study, None if out is None else Path(out), command)


def default_folder(found: Sweep) -> Sweep:
    """The sweep with a folder for its results; if none was given, one named after its runs."""
    if found.out is not None:
        return found
    keys = json.dumps(sorted(cell.key for cell in found.study.cells()))
    digest = hashlib.sha256(keys.encode()).hexdigest()[:8]
    return found._replace(out=Path("runs") / f"{found.study.name}-{digest}")
