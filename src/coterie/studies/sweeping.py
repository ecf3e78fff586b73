"""Runs a config whose fields list several values, and shows the numbers of all of them.

import coterie
found = coterie.sweep("ablation.toml", out="runs/ablation")
print(found)          # one table per value of a shared field, one row per method and variant
found.rows()          # the same as a list of dictionaries, for pandas.DataFrame
"""

import hashlib
import json
from pathlib import Path
from typing import Unpack

from ..api import Options, Source, changes_of, listeners_of
from ..core.imports import Code
from ..errors import ConfigError
from ..runs.config.loading import Config, merge, tables_of
from ..runs.config.sweeps import with_variants
from ..runs.listeners import Watch
from .outcome import StudyOutcome
from .study import study_of
from .study_runs import StudyWork


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
    return sweep_of(source, number, **options).run(listeners_of(progress), keep=True)


def sweep_of(source: Source, number: str | None = None, **options: Unpack[Options]) -> StudyWork:
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
    return StudyWork(study, study, command, "sweep", None if out is None else Path(out))


def default_folder(found: StudyWork) -> Path:
    """The folder of a sweep that was given none: named after its runs."""
    keys = json.dumps(sorted(cell.key for cell in found.study.cells()))
    digest = hashlib.sha256(keys.encode()).hexdigest()[:8]
    return Path("runs") / f"{found.study.name}-{digest}"
