"""The engines that run the clients, each made from the settings that name it."""

from collections.abc import Mapping

import torch

from ..core.problem import Problem
from ..core.shards import Shards
from ..errors import ConfigError, did_you_mean
from .base import Backend, Engine, Evaluation, Work
from .settings import ENGINES, ONE_ROUND, EngineSettings, Length
from .simulator import Simulator

__all__ = [
    "ENGINES",
    "Engine",
    "EngineSettings",
    "Evaluation",
    "Length",
    "make_backend",
    "make_engine",
]


def make_engine(
    settings: EngineSettings,
    problem: Problem,
    shards: Shards,
    length: Length = ONE_ROUND,
    *,
    before: Mapping[str, str] | None = None,
) -> Engine:
    """Make the engine that the settings ask for; ``auto`` measures which is the fastest.

    ``before`` maps each form of a call (``Form.id``) to the way it was executed before the run was
    stopped. No setting of the process is changed: ``process.settings`` does that around a run.
    """
    if settings.name == "remote":
        raise ConfigError(
            "engine.name: 'remote' runs at the sites of a federation; name its folder with "
            "--federation (run.federation)"
        )
    if settings.name == "wire":
        from .wire import WireEngine

        return WireEngine(shards, threads=settings.threads)
    backend = make_backend(settings, Work(problem, shards), length, before=before)
    return Simulator(backend)


def make_backend(
    settings: EngineSettings,
    on: Work,
    length: Length = ONE_ROUND,
    *,
    before: Mapping[str, str] | None = None,
) -> Backend:
    """Make the backend that computes the client half of a method.

    Whether ``vmap`` traces and compiles its calls, if that is not set, depends on whether a run of
    this length repays its cost.
    """
    from . import auto
    from .loop import LoopBackend
    from .process import fitting
    from .vmap import VmapBackend

    if settings.name == "auto":
        settings = auto.pick(settings, on, length)
    name = settings.name
    if name == "vmap":
        settings = auto.repaid(settings, on, length.rounds)
        return VmapBackend(
            *on,
            chunk=fitting(settings, on),
            threads=settings.threads or torch.get_num_threads(),
            trace=bool(settings.trace),
            compiled=bool(settings.compiled),
            before=before,
        )
    if name == "loop":
        return LoopBackend(*on, threads=settings.threads)
    raise ConfigError(f"engine '{name}' is unknown; {did_you_mean(name, ENGINES)}")
