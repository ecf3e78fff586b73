"""The engines that run the clients: ``vmap``, ``loop``, ``wire``, ``ray``, and ``auto``."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.problem import Problem
from ..core.shards import Shards
from ..errors import ConfigError, did_you_mean
from .base import Backend, Engine, Evaluation, Work
from .settings import NOTHING_ASKED, ONE_ROUND, Asked, Length
from .simulator import Simulator

__all__ = ["ENGINES", "Engine", "Evaluation", "make_backend", "make_engine"]

ENGINES = {
    "auto": "measures the others on the real model and takes the fastest for the run",
    "vmap": "many clients at once, on one CPU or GPU",
    "loop": "one client at a time: the reference",
    "wire": "each client in another process, with its own shard file and state file",
    "remote": "the sites of a federation (--federation FOLDER), each with its own data",
    "ray": "as loop, on the CPUs of a Ray cluster; needs coterie[ray]",
}


def make_engine(
    name: str,
    problem: Problem,
    shards: Shards,
    *,
    chunk: int | None = None,
    memory_mib: int | None = None,
    state: str = "device",
    threads: int | None = None,
    trace: bool | None = None,
    compiled: bool | None = None,
    rounds: int = 1,
    participation: float = 1.0,
    runs: int = 1,
    before: Mapping[str, str] | None = None,
    scratch: Path | None = None,
) -> Engine:
    """Make the engine of a configuration. ``auto`` measures; the others use the given settings.

    ``trace`` traces calls and replays them (``coterie.compiled``), ``compiled`` replaces the loops
    of a trace by C++ on a CPU. With None, each is done if a run of this many ``rounds`` with this
    ``participation`` is long enough to repay its cost. ``runs`` is the number of runs of a
    comparison that share the measurement of ``auto``. ``before`` maps each form of a call
    (``Form.id``) to the way it was executed before the run was stopped. With ``state="disk"`` the
    state files are in the folder ``scratch``, by default the system's folder for temporary files.
    This function changes no setting of the process: ``process.settings`` does that around a run.
    """
    if name == "remote":
        raise ConfigError(
            "engine.name: 'remote' runs at the sites of a federation; name its folder with "
            "--federation (run.federation)"
        )
    if name == "wire":
        from .wire import WireEngine

        return WireEngine(shards, threads=threads)
    backend = make_backend(
        name,
        Work(problem, shards),
        Length(rounds, participation, runs),
        Asked(chunk, memory_mib, threads, trace, compiled),
        state=state,
        before=before,
    )
    return Simulator(backend, state=state, scratch=scratch)


def make_backend(
    name: str,
    on: Work,
    length: Length = ONE_ROUND,
    asked: Asked = NOTHING_ASKED,
    *,
    state: str = "device",
    before: Mapping[str, str] | None = None,
) -> Backend:
    """Make the backend that computes the client half of a method."""
    from . import auto
    from .loop import LoopBackend
    from .process import fitting
    from .vmap import VmapBackend

    if name == "auto":
        return auto.pick(on, length, asked, state=state)
    if name == "vmap":
        how = auto.repaid(on, length.rounds, trace=asked.trace, compiled=asked.compiled)
        return VmapBackend(
            *on,
            chunk=fitting(on, asked.chunk, asked.memory_mib),
            state=state,
            threads=asked.threads or torch.get_num_threads(),
            before=before,
            **how._asdict(),
        )
    if name == "loop":
        return LoopBackend(*on, threads=asked.threads)
    if name == "ray":
        from .cluster import RayBackend

        return RayBackend(*on, threads=asked.threads)
    raise ConfigError(f"engine '{name}' is unknown; {did_you_mean(name, ENGINES)}")
