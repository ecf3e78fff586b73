"""Spreads the runs of a comparison over a Ray cluster: one task per method and seed.

A run needs the histories of Local and FedAvg with its seed, so these two come first. A run in a
task holds the lock of its folder and writes it, as a run of this process would: the folder must be
on a disk that all nodes share. If a worker is lost, Ray starts its task again, and the run goes on
from its last checkpoint. If this process is killed, its tasks end with it; their folders can be
resumed. After every round a run reports to the board and learns whether it has to stop.

The cluster is the one that ``ray.init()`` finds: the environment's RAY_ADDRESS, else a cluster that
runs on this machine, else one that is started here and ends with this process.
"""

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..engines import EngineSettings, process
from ..errors import ConfigError, CoterieError, EngineError, StoppedError
from ..storage import faults
from . import interrupt
from .comparison_folder import COMPARE
from .execute import run_cell
from .interrupt import Stop, told_by
from .listeners import Progress, Watch
from .plan import FIRST, Cell
from .run import Run
from .setting import Setting

ADDRESS = "RAY_ADDRESS"  # the variable of the environment that Ray's users set
RETRIES = 3  # how often Ray starts a run again whose worker was lost
POLL = 0.2  # seconds between two looks at the board


# ---- the cluster --------------------------------------------------------------------------------


def package() -> Any:
    """The package ray; without it, the error names the extra that brings it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "run.spread is 'ray', but the package ray is not installed; install it with: "
            "pip install 'coterie[ray]', or leave run.spread out, which gives the same numbers"
        ) from error
    return ray


def connected() -> Any:
    """The package ray, connected to a cluster; the signal handlers stay as they are."""
    ray = package()
    if ray.is_initialized():
        return ray
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise EngineError(
            f"no Ray cluster could be reached ({error}); RAY_ADDRESS is "
            f"{os.environ.get(ADDRESS, 'not set')}; expected the address of a cluster that runs, "
            "or no RAY_ADDRESS to start one here"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init sets its own
    return ray


def described() -> str:
    """The version of Ray, and the cluster that a run would use."""
    address = os.environ.get(ADDRESS)
    where = "the cluster on this machine, or one that is started for the run"
    return f"ray {package().__version__}, {f'RAY_ADDRESS={address}' if address else where}"


def failure(error: Any) -> Exception:
    """The exception that a task raised, as it would have been raised in this process."""
    if isinstance(error.cause, CoterieError):
        return error.cause
    return EngineError(f"a Ray worker failed: {error}")


# Everything is pickled: a Ray cluster is one trust domain, and who can reach it can run code on it.


class Told(NamedTuple):
    """What several tasks have in common, pickled once."""

    path: list[str]  # sys.path of this process
    argv: list[str]  # the command, which the folder of a run names
    pickled: bytes

    @classmethod
    def of(cls, values: Any) -> "Told":
        """Pickle the values; classes that are not in a module that can be imported go with them."""
        try:
            return cls(list(sys.path), list(sys.argv), package().cloudpickle.dumps(values))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EngineError(
                "Ray computes in other processes, which cannot be told of this method or network "
                f"({error}); let it hold nothing but numbers, tensors and modules, or leave "
                "run.spread out"
            ) from error

    def load(self) -> Any:
        """The values, in a task; modules are also looked for where the sender found them."""
        sys.path += [place for place in self.path if place not in sys.path]
        sys.argv[:] = self.argv
        try:
            return pickle.loads(self.pickled)
        except (ImportError, AttributeError) as error:
            raise EngineError(
                f"a Ray worker cannot load what it was sent ({error}); the same coterie, and the "
                "modules of your own methods and networks, must be importable on every node"
            ) from error


# ---- the runs -----------------------------------------------------------------------------------


def spread(
    setting: Setting, cells: Sequence[Cell], listeners: Sequence[Watch]
) -> Iterator[tuple[Cell, Run]]:
    """Execute the cells of one config; all of them have run when the first is given."""
    ray = connected()
    board = ray.remote(num_cpus=0, max_restarts=-1)(board_class()).remote()
    told = ray.put(Told.of(setting))
    task = ray.remote(max_retries=RETRIES, **resources(setting.config.engine))(_run)
    tasks: dict[Any, Cell] = {}
    known: dict[int, list[Any]] = {}
    for cell in cells:
        run = task.remote(told, board, ray.put(Told.of(_resolved(cell))), *known.get(cell.seed, ()))
        tasks[run] = cell
        if cell.method.label in FIRST:
            known.setdefault(cell.seed, []).append(run)
    done = _followed(ray, board, tasks, listeners)
    for cell in cells:
        run = done[cell.name]
        yield cell, run if cell.out is None else replace(run, path=cell.out)  # as the user gave it


def _resolved(cell: Cell) -> Cell:
    return cell._replace(out=None if cell.out is None else cell.out.resolve())


def board_class() -> type:
    """The class of the actor through which runs report and learn that they have to stop.

    It is made in a function so that it travels by value: its process imports nothing of coterie,
    holds reports as bytes, starts quickly and stays small.
    """

    class Board:
        """Holds the reports of runs until they are taken, and the signal that asked to stop."""

        def __init__(self) -> None:
            self._reports: list[bytes] = []
            self._asked: int | None = None

        def tell(self, report: bytes) -> int | None:
            """Report a round; the reply is the signal that asked to stop, or None."""
            self._reports.append(report)
            return self._asked

        def asked(self) -> int | None:
            """The signal that asked to stop, or None."""
            return self._asked

        def take(self, asked: int | None) -> list[bytes]:
            """The reports since the last call; ``asked`` is what the runs learn from now on."""
            self._asked, reports, self._reports = asked, self._reports, []
            return reports

    return Board


def resources(engine: EngineSettings) -> dict[str, int]:
    """What a run takes of the cluster: ``engine.threads`` CPUs (by default one), or also a GPU."""
    return {"num_cpus": engine.threads or 1, "num_gpus": int(engine.device != "cpu")}


def _followed(
    ray: Any, board: Any, tasks: dict[Any, Cell], listeners: Sequence[Watch]
) -> dict[tuple[str, int], Run]:
    """Wait for all runs; after a failure or a signal, all stop after their current round."""
    done: dict[tuple[str, int], Any] = {}
    failed: Exception | None = None
    pending = list(tasks)
    while pending:
        ready, pending = ray.wait(pending, timeout=POLL)
        for task in ready:
            try:
                done[tasks[task].name] = ray.get(task)
                faults.at("compare.cell")
            except ray.exceptions.RayError as error:
                failed = failed or _named(ray, error, tasks[task])
        asked = interrupt.asked() if failed is None else signal.SIGTERM
        with contextlib.suppress(ray.exceptions.RayError):  # the board is started again
            for report in ray.get(board.take.remote(asked)):
                for watch in listeners:
                    watch(pickle.loads(report))
    if failed is not None:
        raise failed
    if None in done.values():  # a signal after the last round of the last run stops nothing
        interrupt.here()
    return done


def _named(ray: Any, error: Any, cell: Cell) -> Exception:
    if isinstance(error, ray.exceptions.RayTaskError):
        return failure(error)
    return EngineError(
        f"the run of '{cell.method.label}' with seed {cell.seed} was lost {RETRIES + 1} times: its "
        f"Ray worker ended ({type(error).__name__}); see Ray's logs on the cluster's nodes; "
        "'coterie resume' goes on from its last checkpoint"
    )


# ---- in a worker ---------------------------------------------------------------------------------


def _run(told: Told, board: Any, asked: Told, *known: Run | None) -> Run | None:
    """The task: one run, which refers to those in ``known``; None if it was stopped."""
    ray = connected()
    setting, cell = told.load(), asked.load()
    out = None if cell.out is None else cell.out.parents[1]
    if out is not None and not (out / COMPARE).is_file():
        raise EngineError(
            f"{out}: is not on this node of the Ray cluster; expected a folder (--out) on a disk "
            "that all nodes share, or no folder"
        )
    stop = Stop(f"coterie resume {out}", ray.get(board.asked.remote()))

    def watch(step: Progress) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            stop.asked = ray.get(board.tell.remote(pickle.dumps(step)))

    references = {run.method: run for run in known if run is not None}
    threads = resources(setting.config.engine)["num_cpus"]
    with process.settings(threads=threads), told_by(stop):
        try:
            interrupt.here()
            return run_cell(setting, cell, [watch], references)
        except StoppedError:
            return None
