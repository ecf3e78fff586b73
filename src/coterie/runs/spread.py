"""Spreads the runs of a comparison over a Ray cluster: one task per method and seed.

A run needs the histories of Local and FedAvg with its seed, so these two come first. A run in a
task holds the lock of its folder and writes it, as a run of this process would: the folder must be
on a disk that all nodes share. If a worker is lost, Ray starts its task again, and the run goes on
from its last checkpoint. If this process is killed, its tasks end with it; their folders can be
resumed. After every round a run reports to the :class:`Board` and learns whether it has to stop.
"""

import contextlib
import pickle
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engines import process
from ..engines.cluster import Told, connected, failure
from ..errors import ConfigError, EngineError, StoppedError
from ..storage import faults
from .board import Board
from .cells import FIRST, in_turn, run_cell
from .comparison_folder import COMPARE, place
from .config.methods import Method
from .config.schema import EngineTable
from .interrupt import Stop
from .run_folder import Render, RunData
from .runner import Progress, Watch
from .setting import Setting

RETRIES = 3  # how often Ray starts a run again whose worker was lost
POLL = 0.2  # seconds between two looks at the board

Key = tuple[str, int]  # label of the method, seed


def run_spread(
    setting: Setting,
    methods: Sequence[Method],
    out: Path | None,
    *,
    stop: Stop,
    progress: Watch | None,
    render: Render,
) -> list[RunData]:
    """Execute all runs; they are returned by method and, for each method, by seed."""
    if out is None and setting.config.engine.name == "wire":
        raise ConfigError(
            "run.spread: the engine 'wire' keeps its clients' files in the folder of a run; name "
            "one with --out, or use another engine"
        )
    ray = connected()
    board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
    home, by_label = out and out.resolve(), {method.label: method for method in methods}
    told = ray.put(Told.of((setting, by_label, home, render)))
    task = ray.remote(max_retries=RETRIES, **resources(setting.config.engine))(_run)
    tasks: dict[Any, Key] = {}
    for seed in setting.config.seeds:
        known: list[Any] = []
        for method in in_turn(methods):
            key = method.label, seed
            run = task.remote(told, board, *key, *known)
            tasks[run] = key
            if method.label in FIRST:
                known.append(run)
    done = _followed(ray, board, tasks, stop, progress)
    if out is not None:  # the path as the user gave it
        done = {key: replace(data, path=place(out, *key)) for key, data in done.items()}
    return [done[method.label, seed] for method in methods for seed in setting.config.seeds]


def resources(engine: EngineTable) -> dict[str, int]:
    """What a run takes of the cluster: ``engine.threads`` CPUs (by default one), or also a GPU."""
    return {"num_cpus": engine.threads or 1, "num_gpus": int(engine.device != "cpu")}


def _followed(
    ray: Any, board: Any, tasks: dict[Any, Key], stop: Stop, progress: Watch | None
) -> dict[Key, RunData]:
    """Wait for all runs; after a failure or a signal, all stop after their current round."""
    done: dict[Key, Any] = {}
    failed: Exception | None = None
    pending = list(tasks)
    while pending:
        ready, pending = ray.wait(pending, timeout=POLL)
        for task in ready:
            try:
                done[tasks[task]] = ray.get(task)
                faults.at("compare.cell")
            except ray.exceptions.RayError as error:
                failed = failed or _named(ray, error, *tasks[task])
        asked = stop.asked if failed is None else signal.SIGTERM
        with contextlib.suppress(ray.exceptions.RayError):  # the board is started again
            for report in ray.get(board.take.remote(asked)):
                if progress is not None:
                    progress(pickle.loads(report))
    if failed is not None:
        raise failed
    if None in done.values():  # a signal after the last round of the last run stops nothing
        stop.here()
    return done


def _named(ray: Any, error: Any, label: str, seed: int) -> Exception:
    if isinstance(error, ray.exceptions.RayTaskError):
        return failure(error)
    return EngineError(
        f"the run of '{label}' with seed {seed} was lost {RETRIES + 1} times: its Ray worker ended "
        f"({type(error).__name__}); see Ray's logs on the cluster's nodes; 'coterie resume' goes "
        "on from its last checkpoint"
    )


# ---- in a worker ---------------------------------------------------------------------------------


def _run(told: Told, board: Any, label: str, seed: int, *known: RunData | None) -> RunData | None:
    """The task: one run, which refers to those in ``known``; None if it was stopped."""
    ray = connected()
    setting, methods, out, render = told.load()
    if out is not None and not (out / COMPARE).is_file():
        raise EngineError(
            f"{out}: is not on this node of the Ray cluster; expected a folder (--out) on a disk "
            "that all nodes share, or no folder"
        )
    stop = Stop(f"coterie resume {out}", ray.get(board.asked.remote()))

    def watch(step: Progress) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            stop.asked = ray.get(board.tell.remote(pickle.dumps(step)))

    references = {run.history.method: run.history for run in known if run is not None}
    with process.settings(threads=resources(setting.config.engine)["num_cpus"]):
        try:
            stop.here()
            return run_cell(setting, methods[label], seed, out, stop, references, watch, render)
        except StoppedError:
            return None
