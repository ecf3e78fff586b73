"""Times the engines that ``auto`` compares on a few steps, and estimates their whole runs."""

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
from .vmap import VmapBackend, tracing

PROBE_STEPS = 4  # local steps of each client that are timed
_SIMULATED = 20  # rounds that are simulated to count forms under partial participation
_BESIDE = 1.3  # factor for tracing the evaluation too, which costs less than tracing training
_METHOD = Local(keep="last")  # one object for all: the executor identifies a call by its method


class Tracing(NamedTuple):
    """Seconds that tracing one form of a call takes."""

    fixed: float
    a_step: float  # seconds of checking the trace, per step of the form


class Candidate:
    """An engine, and its fastest time so far for a few local steps of one client."""

    def __init__(self, engine: Backend, choice: dict[str, Any], threads: int, clients: int) -> None:
        self.engine, self.choice, self.seconds = engine, choice, float("inf")
        self._threads, self._failed = threads, False
        self.clients = (engine.problem.sizes > 0).nonzero().flatten()[:clients]

    def turn(self) -> None:
        """Time the engine once more, unless it failed before."""
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
        """The seconds of one local step of one client."""
        return self.seconds / PROBE_STEPS

    @property
    def together(self) -> int:
        """The number of clients that one thread computes at once."""
        return -(-len(self.clients) // int(self.choice["threads"]))

    @property
    def tracing(self) -> Tracing:
        """The mean time of tracing one form of the probe."""
        forms = self.engine.forms
        count = max(1, len(forms))
        checking = sum(form.checking for form in forms) / count
        return Tracing(sum(form.tracing for form in forms) / count, checking / PROBE_STEPS)

    def total(self, on: Work, length: Length) -> float:
        """The estimated seconds of a whole run: tracing, and all local steps."""
        return self.step * length.steps(on) + self.setup(on, length, self.tracing)

    def setup(self, on: Work, length: Length, traced: Tracing) -> float:
        """The estimated seconds of tracing all forms of a run, given the time for one form."""
        if not isinstance(self.engine, VmapBackend) or not self.engine.trace:
            return 0.0
        most = on.problem.recipe.count(max(on.shards.splits["train"].sizes), on.problem.least)
        each = traced.fixed + _checked(most) * traced.a_step
        return _BESIDE * forms(self.engine, on, length) * each


def warmed(engine: VmapBackend, choice: dict[str, Any], threads: int) -> VmapBackend:
    """The engine; on a GPU an equal one, after the kernels that all forms share were compiled.

    Compiling them once would count as tracing, which every form of the run has to pay for.
    """
    if engine.problem.device.type != "cuda":
        return engine
    Candidate(engine, choice, threads, engine.chunk).turn()
    return VmapBackend(
        engine.problem,
        engine.shards,
        chunk=engine.chunk,
        threads=threads,
        trace=engine.trace,
        compiled=engine.compiled,
    )


def _checked(steps: int) -> int:
    """How many steps of a form are computed again to check its trace."""
    package = tracing()
    return steps if package is None else min(steps, package.CHECKED_STEPS)


def forms(engine: VmapBackend, on: Work, length: Length) -> int:
    """The estimated number of forms of a run's training call, each of which is traced."""
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
    """The form of the training call for these clients: calls of equal forms share a trace."""
    view, shape = views(*on, ids, 0), shape_of(on.shards, ids, batched=True)
    smallest = shape.smallest if on.problem.recipe.steps else None
    return view.train.samples.shape, view.val.samples.shape, smallest, *shape.even.items()
