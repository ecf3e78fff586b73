"""Who runs the clients: ``vmap``, ``loop``, ``wire``, or whichever ``auto`` finds fastest."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.problem import Problem
from ..core.shards import Shards
from ..errors import ConfigError, did_you_mean
from .base import Backend, Engine, Evaluation
from .simulator import Simulator

__all__ = ["ENGINES", "Engine", "Evaluation", "make_backend", "make_engine"]

ENGINES = {
    "auto": "measures the others on the real model and takes the fastest",
    "vmap": "many clients at once, on one CPU or GPU",
    "loop": "one client at a time: the reference",
    "wire": "each client in another process, with its own shard file and state file",
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
    play: bool | None = None,
    compiled: bool | None = None,
    rounds: int = 1,
    before: Mapping[str, str] | None = None,
    scratch: Path | None = None,
) -> Engine:
    """The engine of a configuration. ``auto`` measures; the others take what they are given.

    ``play`` traces rounds and replays them (``compiled/executor.py``), ``compiled`` puts C++ in the
    place of their loops on a CPU; None does it where so many ``rounds`` repay it. ``before`` says
    how each form of a call (``Form.id``) was done before a run was stopped. Files of states lie in
    the folder ``scratch``, or where temporary files go.
    """
    if name == "wire":
        from .wire import WireEngine

        if threads is not None:
            torch.set_num_threads(threads)
        return WireEngine(shards)
    backend = make_backend(
        name,
        problem,
        shards,
        chunk=chunk,
        memory_mib=memory_mib,
        state=state,
        threads=threads,
        play=play,
        compiled=compiled,
        rounds=rounds,
        before=before,
    )
    return Simulator(backend, state=state, scratch=scratch)


def make_backend(
    name: str,
    problem: Problem,
    shards: Shards,
    *,
    chunk: int | None = None,
    memory_mib: int | None = None,
    state: str = "device",
    threads: int | None = None,
    play: bool | None = None,
    compiled: bool | None = None,
    rounds: int = 1,
    before: Mapping[str, str] | None = None,
) -> Backend:
    """What computes the client half in this process."""
    from . import auto
    from .loop import LoopBackend
    from .vmap import VmapBackend

    how = auto.repaid(problem, rounds, play=play, compiled=compiled)
    if name == "auto":
        return auto.pick(
            problem,
            shards,
            how,
            rounds,
            chunk=chunk,
            memory_mib=memory_mib,
            threads=threads,
            state=state,
        )
    if name == "vmap":
        chunk, threads = auto.fitting(problem, chunk, memory_mib), threads or auto.CORES
        return VmapBackend(
            problem,
            shards,
            chunk=chunk,
            state=state,
            threads=threads,
            before=before,
            **how._asdict(),
        )
    if threads is not None:
        torch.set_num_threads(threads)
    if name == "loop":
        return LoopBackend(problem, shards)
    raise ConfigError(f"engine '{name}' is unknown; {did_you_mean(name, ENGINES)}")
