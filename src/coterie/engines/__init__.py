"""Who runs the clients: ``vmap``, ``loop``, ``wire``, or whichever ``auto`` finds fastest."""

from collections.abc import Mapping

import torch

from ..core.task import Task
from ..errors import ConfigError, did_you_mean
from .base import Engine, Evaluation

__all__ = ["ENGINES", "Engine", "Evaluation", "make_engine"]

ENGINES = {
    "auto": "measures the others on the real model and takes the fastest for the run",
    "vmap": "many clients at once, on one CPU or GPU",
    "loop": "one client at a time: the reference",
    "wire": "one client at a time, every message and state through bytes",
}


def make_engine(
    name: str,
    task: Task,
    *,
    chunk: int | None = None,
    memory_mib: int | None = None,
    state: str = "device",
    threads: int | None = None,
    play: bool | None = None,
    compiled: bool | None = None,
    rounds: int = 1,
    participation: float = 1.0,
    runs: int = 1,
    before: Mapping[str, str] | None = None,
) -> Engine:
    """The engine of a configuration. ``auto`` measures; the others take what they are given.

    ``play`` traces calls and replays them (``coterie.compiled``), ``compiled`` replaces the loops
    of a trace by C++ on a CPU; None does it where a run of this many ``rounds`` with this
    ``participation`` repays it. ``runs`` of a comparison share what ``auto`` measures. ``before``
    says how each form of a call (``Form.id``) was executed before a run was stopped.
    Nothing is set for the process: ``process.settings`` does that around a run.
    """
    from . import auto
    from .candidates import Length
    from .loop import LoopEngine
    from .vmap import VmapEngine
    from .wire import WireEngine

    if name == "auto":
        asked = auto.Asked(chunk, memory_mib, threads, play, compiled)
        return auto.pick(task, Length(rounds, participation, runs), asked, state=state)
    if name == "vmap":
        how = auto.repaid(task, rounds, play=play, compiled=compiled)
        chunk = auto.fitting(task, chunk, memory_mib)
        threads = threads or torch.get_num_threads()
        return VmapEngine(
            task, chunk=chunk, state=state, threads=threads, before=before, **how._asdict()
        )
    if name == "loop":
        return LoopEngine(task, state=state, threads=threads)
    if name == "wire":
        return WireEngine(task, state=state, threads=threads)
    raise ConfigError(f"engine '{name}' is unknown; {did_you_mean(name, ENGINES)}")
