"""Times the first rounds of each method, for an honest estimate of a run's time and memory."""

import resource
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from ..training.guard import Guard
from ..training.rounds import train
from .config.methods import Method
from .execute import opened
from .plan import Cell
from .setting import Setting

BUDGET = 20.0  # seconds that timing all methods may take, as far as that is known before
ENOUGH, MOST = 1.0, 7  # seconds, or rounds, after which the rounds of one method suffice
ENGINES = ("auto", "loop", "vmap")  # others start processes or a cluster


def timings(setting: Setting, methods: Sequence[Method], expected: float) -> list[float]:
    """The seconds of each method's whole run, extrapolated from its first rounds.

    Methods are timed as long as the budget lasts, where ``expected`` is a guess of a round's
    seconds; so the first is skipped only if it alone would exceed the budget.
    """
    if setting.config.engine.name not in ENGINES:
        return []
    found, began = list[float](), time.perf_counter()
    for method in methods:
        spent = time.perf_counter() - began
        if spent + _rounds(setting) * expected > BUDGET:
            break
        found.append(_timed(setting, method))
    return found


def _rounds(setting: Setting) -> int:
    """The fewest rounds to be timed: one to warm up, one with and one without evaluation."""
    run = setting.config.run
    return min(run.rounds, 2 if run.evaluate_every == 1 else 3)


def _timed(setting: Setting, method: Method) -> float:
    """Train the first rounds of a run in memory, as the run itself would."""
    began = time.perf_counter()
    run = setting.config.run
    with opened(setting, Cell(setting.config, method, setting.config.seeds[0], None)) as made:
        rounds = train(
            made.algorithm,
            made.on.problem,
            made.engine,
            run.rounds,
            participation=run.participation,
            evaluate_every=min(run.evaluate_every, 2),
            metric=made.asked.run.metric,
            guard=Guard(**made.asked.guard.model_dump()),
        )
        seconds = list[float]()
        for count, _ in enumerate(rounds, 1):
            seconds.append(time.perf_counter() - began - sum(seconds))
            if count >= _rounds(setting) and (count >= MOST or sum(seconds) > ENOUGH):
                break
    return extrapolated(seconds, run.rounds, run.evaluate_every)


def extrapolated(seconds: list[float], rounds: int, every: int) -> float:
    """The time of all rounds; every second one was evaluated, or all if ``every`` is 1."""
    first, rest = seconds[0], seconds[1:] or seconds
    evaluated = median(rest if every == 1 else rest[0::2])
    later = evaluated / every + median(rest[1::2] or rest) * (1 - 1 / every)
    return first + later * (rounds - 1)


def peak_mib(device: torch.device) -> tuple[float, float | None]:
    """The most memory that this process has used so far, in MiB: in RAM, and on the GPU if any."""
    gpu = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10), gpu
