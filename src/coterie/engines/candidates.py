"""Engines that ``auto`` compares: each is timed on a few steps, and its whole run estimated."""

import time
from typing import Any, NamedTuple

import torch

from ..algorithms.local import Local
from ..core.algorithm import round_of
from ..core.batches import shape_of, views
from ..errors import CoterieError
from .base import Backend, Work
from .process import settings
from .settings import Length
from .vmap import VmapBackend

PROBE_STEPS = 4  # local steps of each client that are timed
_SIMULATED = 20  # rounds whose chunks are looked at where not everybody takes part
_BESIDE = 1.3  # evaluation is traced too, which costs a part of what training does
_METHOD = Local(keep="last")  # one object for all: the executor knows a call by its method


class Tracing(NamedTuple):
    """Seconds that tracing one form of a call takes."""

    fixed: float
    a_step: float  # for every step of the form, of checking it


class Candidate:
    """An engine, and the fewest seconds that a few local steps of a client took so far."""

    def __init__(self, engine: Backend, choice: dict[str, Any], threads: int, clients: int) -> None:
        self.engine, self.choice, self.seconds = engine, choice, float("inf")
        self._threads, self._failed = threads, False
        self.clients = (engine.problem.sizes > 0).nonzero().flatten()[:clients]

    def turn(self) -> None:
        """Time it once more, unless it failed before."""
        if self._failed:
            return
        try:
            with settings(threads=self._threads):
                self.seconds = min(self.seconds, self._timed() / len(self.clients))
        except (RuntimeError, CoterieError):  # too large, or an operation that vmap cannot batch
            self._failed, self.seconds = True, float("inf")

    def _timed(self) -> float:
        problem = self.engine.problem
        round = round_of(problem, 0, 1, self.clients)
        _, states = _METHOD.init(problem)
        rows = states._replace(w=states.w[self.clients])
        began = time.perf_counter()
        self.engine.local(_METHOD, (), rows, round)
        if problem.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    @property
    def step(self) -> float:
        """Seconds of one local step of one client."""
        return self.seconds / PROBE_STEPS

    @property
    def together(self) -> int:
        """Clients that one thread computes at once."""
        return -(-len(self.clients) // int(self.choice["threads"]))

    @property
    def tracing(self) -> Tracing:
        """What tracing the probe took, for one form."""
        forms = self.engine.forms
        count = max(1, len(forms))
        checking = sum(form.checking for form in forms) / count
        return Tracing(sum(form.tracing for form in forms) / count, checking / PROBE_STEPS)

    def total(self, on: Work, length: Length) -> float:
        """Seconds of a whole run of a on: tracing it, and all its local steps."""
        return self.step * length.steps(on) + self.setup(on, length, self.tracing)

    def setup(self, on: Work, length: Length, traced: Tracing) -> float:
        """Seconds of tracing all forms of a run, given those of one form."""
        if not isinstance(self.engine, VmapBackend) or not self.engine.play:
            return 0.0
        most = on.problem.recipe.count(max(on.shards.splits["train"].sizes), on.problem.least)
        each = traced.fixed + most * traced.a_step
        return _BESIDE * forms(self.engine, on, length) * each


def forms(engine: VmapBackend, on: Work, length: Length) -> int:
    """How many forms of the training call a run has: each of them is traced."""
    able = (on.problem.sizes > 0).nonzero().flatten()
    count = max(1, round(length.participation * len(able)))
    everybody = count == len(able)
    luck = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(1 if everybody else min(length.rounds, _SIMULATED)):
        drawn = able if everybody else able[torch.randperm(len(able), generator=luck)[:count]]
        ids = drawn.sort().values.tolist()
        seen |= {_form(on, [ids[at] for at in chunk]) for chunk in engine.chunks(ids)}
    return len(seen)


def _form(on: Work, ids: list[int]) -> tuple[object, ...]:
    """What a call for these clients has in common with others of its form."""
    view, shape = views(*on, ids, 0), shape_of(on.shards, ids, batched=True)
    smallest = shape.smallest if on.problem.recipe.steps else None
    return view.train.samples.shape, view.val.samples.shape, smallest, *shape.even.items()
