"""The runs of a comparison, one per method and seed: each is read, continued or started."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__
from ..storage import faults, lock
from . import comparison_folder, run_folder
from .config.loading import config_hash
from .config.methods import Method
from .interrupt import Stop
from .resume import UnfinishedRun, unfinished_run
from .run import History
from .run_folder import Render, RunData
from .runner import Progress, Watch, execute
from .setting import Cell, Setting

FIRST = ("local", "fedavg")  # run before the others, whose alarms and gains refer to them


def check_cells(setting: Setting, methods: Sequence[Method], out: Path) -> None:
    """Before training, refuse a folder in which a run can neither be started nor continued."""
    for method in methods:
        for seed in setting.config.seeds:
            _found(setting, method, seed, comparison_folder.place(out, method.label, seed))


def run_cells(
    setting: Setting,
    methods: Sequence[Method],
    out: Path | None,
    *,
    stop: Stop,
    progress: Watch | None,
    render: Render,
) -> list[RunData]:
    """Execute all runs; they are returned by method and, for each method, by seed."""
    if setting.config.run.spread is not None:
        from .spread import run_spread

        return run_spread(setting, methods, out, stop=stop, progress=progress, render=render)
    done: dict[tuple[str, int], RunData] = {}
    for seed in setting.config.seeds:
        known: dict[str, History] = {}
        for method in in_turn(methods):
            stop.here()
            data = run_cell(setting, method, seed, out, stop, known, progress, render)
            faults.at("compare.cell")
            done[method.label, seed] = data
            if method.label in FIRST:
                known[method.label] = data.history
    return [done[method.label, seed] for method in methods for seed in setting.config.seeds]


def all_cells(setting: Setting, methods: Sequence[Method], out: Path | None) -> list[Cell]:
    """The runs of a comparison."""
    return [
        Cell(
            method, seed, None if out is None else comparison_folder.place(out, method.label, seed)
        )
        for method in methods
        for seed in setting.config.seeds
    ]


def references_beside(path: Path) -> dict[str, History]:
    """The histories of finished runs of Local and FedAvg next to a run of a comparison."""
    home = path.resolve().parent.parent
    places = {name: home / name / path.resolve().name for name in FIRST}
    if not (home / comparison_folder.COMPARE).is_file():
        return {}
    found = {name: place for name, place in places.items() if run_folder.finished(place)}
    return {name: run_folder.read(place).history for name, place in found.items()}


def in_turn(methods: Sequence[Method]) -> list[Method]:
    """The methods in the order in which they are run: those of FIRST before the others."""
    return sorted(methods, key=lambda method: (*FIRST, method.label).index(method.label))


def run_cell(
    setting: Setting,
    method: Method,
    seed: int,
    out: Path | None,
    stop: Stop,
    known: Mapping[str, History],
    progress: Watch | None,
    render: Render | None,
) -> RunData:
    """One run of a comparison."""
    place = None if out is None else comparison_folder.place(out, method.label, seed)
    found = _found(setting, method, seed, place)
    if isinstance(found, RunData):
        if progress is not None:
            turns = setting.config.run.rounds
            progress(Progress(method.label, seed, turns, turns, None, reused=True, more=turns))
        return found
    with contextlib.nullcontext() if place is None else lock.held(place):
        found = _found(setting, method, seed, place)  # again: now no other process writes into it
        if isinstance(found, RunData):
            return found
        return execute(
            setting,
            Cell(method, seed, place),
            stop=stop,
            references=known,
            progress=progress,
            left=found,
            render=render,
        )


def _found(
    setting: Setting, method: Method, seed: int, place: Path | None
) -> RunData | UnfinishedRun | None:
    """The run of the same config in this folder, finished or not; any other run is refused."""
    if place is None:
        return None
    asked = config_hash(setting.config.single(method, seed))
    if run_folder.finished(place):
        found = run_folder.read(place)
        same = found.config.get("hash") == asked
        if same and found.environment.get("coterie") == __version__:
            run_folder.refuse_other_data(place, setting.identity(seed))
            return found
    unfinished = unfinished_run(place)
    if unfinished is not None:
        unfinished.refuse_other(asked)
        run_folder.refuse_other_data(place, setting.identity(seed))
        return unfinished
    run_folder.refuse_used(place)
    return None
