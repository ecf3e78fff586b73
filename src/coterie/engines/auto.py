"""Chooses the engine that finishes a run first, by a short measurement on the real model.

The loop is timed first, on a few steps of one client, which gives an estimate of the whole run.
Another engine is tried only if the try costs little compared with that. Once an engine is faster
than the loop, a larger chunk is tried only if it could save more than the try costs. Engines are
compared by the estimated time of the whole run, including tracing and compiling, not of a round.

The choice is kept in the user's cache, so that a second run resolves to the same engine and hence
to the same digest.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import nn

from .. import __version__
from ..algorithms.local import Local
from ..core.algorithm import round_of
from ..core.batches import shape_of, views
from ..core.ranges import fitted
from ..errors import CoterieError, StoreError
from ..storage import files
from ..storage.cache import folder
from .base import Backend, Work
from .loop import LoopBackend
from .process import at_most, settings
from .settings import EngineSettings, Length
from .vmap import VmapBackend, can_trace, compiler, kernels_cached, tracing

CHUNKS = {"cpu": (1, 5, 10, 20, 50), "cuda": (100, 1000)}
REPAID_AFTER = 10  # rounds from which the vmap engine traces a run
COMPILED_AFTER = 50  # rounds from which it compiles: the first time that takes some seconds
PROBE_STEPS = 4  # local steps of each client that are timed
_TURNS = 3  # timings of each candidate; the first one warms up, or traces
_SHARE = 0.015  # of the loop's estimated run: what tries may cost until one beats the loop
_HOPED = 0.6  # of the seconds of a step: the best that a larger chunk is expected to reach
_MARGIN = 0.9  # of the loop's estimate: another engine has to be below it
_NOISE = 1.15  # a chunk that is slower by less than this factor does not end the search
_FEWER_THREADS = 0.97  # one thread is preferred unless all threads take less than this share
_SIMULATED = 20  # rounds that are simulated to count forms under partial participation
_BESIDE = 1.3  # factor for tracing the evaluation too, which costs less than tracing training
_TRACED, _TRACED_MORE = 10, 30  # cost of tracing a probe in loop steps: fixed, and per client
_IMPORT, _COMPILE = 0.1, 3.0  # seconds
_KERNELS = 4.0  # seconds of compiling the kernels of one convolution and its pool, once
_KERNELS_SHARE = 0.1  # of the loop's estimated run: what compiling kernels may take
_MOST_BYTES = 1 << 20  # of the cache file; a larger file was not written by coterie
_METHOD = Local(keep="last")  # one object for all: the executor identifies a call by its method


def repaid(asked: EngineSettings, on: Work, rounds: int) -> EngineSettings:
    """The settings with ``trace`` and ``compiled``, if not set, as they repay in so many rounds."""
    on_gpu, trace, compiled = on.problem.device.type == "cuda", asked.trace, asked.compiled
    if trace is None:
        trace = (on_gpu or rounds >= REPAID_AFTER) and can_trace()
    if compiled is None:
        compiled = trace and not on_gpu and rounds >= COMPILED_AFTER and compiler() is not None
    return replace(asked, trace=trace, compiled=compiled)


def pick(asked: EngineSettings, on: Work, length: Length) -> EngineSettings:
    """The settings of the engine that is expected to finish this run first, cached or measured."""
    fixed = asked.chunk, asked.threads, asked.trace, asked.compiled
    key = _key(on, length.bucket(on), fixed)
    found = _recalled(key, max(_sizes(asked, on)))
    if found is None:
        found = resolve(asked, on, length).chosen
        _remember(key, found)
    chosen = {name: getattr(found, name) for name in _CHOSEN}
    return replace(asked, **chosen)


def resolve(asked: EngineSettings, on: Work, length: Length) -> "Candidate":
    """The fastest of the loop and of several chunk sizes, timed on a few steps of real clients."""
    recipe = replace(on.problem.recipe, steps=PROBE_STEPS)
    probe = on._replace(problem=replace(on.problem, recipe=recipe))
    one = None if asked.threads else _looped(replace(asked, threads=1), probe, turns=0)
    others = _batched(asked, probe, length.rounds)
    return fastest(on, length, _looped(asked, probe), others, one)


def fastest(
    on: Work,
    length: Length,
    loop: "Candidate",
    others: Iterable["Candidate"],
    one: "Candidate | None" = None,
) -> "Candidate":
    """The candidate that is expected to finish a run first: the loop, which was timed, or another.

    The others are timed here, in their order, as long as that may pay. ``one`` is the loop with one
    thread.
    """
    search = _Search(on, length, loop)
    if search.affords_any():
        for other in others:
            if not search.affords(other) or not search.faster(other):
                break
    if search.batched is None and one is not None:
        return search.with_threads(one)
    return search.batched or loop


# ---- candidates ---------------------------------------------------------------------------------


class Tracing(NamedTuple):
    """Seconds that tracing one form of a call takes."""

    fixed: float
    a_step: float  # seconds of checking the trace, per step of the form


class Candidate:
    """An engine, and its fastest time so far for a few local steps of one client."""

    def __init__(self, engine: Backend, chosen: EngineSettings, threads: int, clients: int) -> None:
        self.engine, self.chosen, self.seconds = engine, chosen, float("inf")
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
        return self.seconds / PROBE_STEPS

    @property
    def together(self) -> int:
        """The number of clients that one thread computes at once."""
        return -(-len(self.clients) // (self.chosen.threads or 1))

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


def _sizes(asked: EngineSettings, on: Work) -> tuple[int, ...]:
    return (asked.chunk,) if asked.chunk else CHUNKS[on.problem.device.type]


def _looped(asked: EngineSettings, probe: Work, *, turns: int = 2) -> Candidate:
    """The timed loop with the threads that are asked for, by default all; one turn warms up."""
    threads = asked.threads or torch.get_num_threads()
    made = Candidate(LoopBackend(*probe), EngineSettings("loop", threads=threads), threads, 1)
    _in_turns(made, turns=turns)
    return made


def _batched(asked: EngineSettings, probe: Work, rounds: int) -> Iterator["Candidate"]:
    """Candidates with chunks of several sizes, small ones first, without equivalent ones."""
    # a run that is too short to repay tracing affords no candidate that is traced
    trace = can_trace() if asked.trace is None else asked.trace
    traced = repaid(replace(asked, trace=trace), probe, rounds)
    many, tried = asked.threads or torch.get_num_threads(), set[int]()
    population, on_gpu = probe.problem.population, probe.problem.device.type == "cuda"
    for size in _sizes(asked, probe):
        most = at_most(min(size, population), probe)
        try:
            engine = _vmapped(probe, most, many, traced)
        except CoterieError:  # vmap cannot compute this model
            return
        together = max(map(len, engine.chunks(list(range(population)))))
        if together in tried:
            continue
        tried.add(together)
        if on_gpu:  # else compiling the kernels that all forms share would count as tracing
            Candidate(engine, traced, many, most).turn()
            engine = _vmapped(probe, most, many, traced)
        yield Candidate(engine, _chosen(engine), many, together * engine.threads)


def _chosen(engine: VmapBackend) -> EngineSettings:
    return EngineSettings(
        "vmap",
        chunk=engine.chunk,
        threads=engine.threads,
        trace=engine.trace,
        compiled=engine.compiled,
    )


def _vmapped(probe: Work, chunk: int, threads: int, traced: EngineSettings) -> VmapBackend:
    trace, compiled = bool(traced.trace), bool(traced.compiled)
    return VmapBackend(*probe, chunk=chunk, threads=threads, trace=trace, compiled=compiled)


def _in_turns(*candidates: Candidate | None, turns: int = _TURNS) -> None:
    """Time candidates in turns, because the machine may be busy with other work for a moment."""
    for _ in range(turns):
        for one in candidates:
            if one is not None:
                one.turn()


# ---- the search ---------------------------------------------------------------------------------


class _Search:
    """The fastest candidates measured so far, and the time that measuring has taken."""

    def __init__(self, on: Work, length: Length, loop: Candidate) -> None:
        self.on, self.length, self.loop = on, length, loop
        self.batched: Candidate | None = None  # the fastest so far, if faster than the loop
        self._last: Candidate | None = None
        self._spent = 2 * loop.seconds  # warming up is not counted: the run needs it anyway

    def affords_any(self) -> bool:
        """Whether the run is long enough for the cheapest try: one untraced client."""
        if self.on.problem.device.type == "cuda":
            return True
        run = self.loop.total(self.on, self.length) * self.length.runs
        return self._spent + _TURNS * self.loop.seconds + _IMPORT <= _SHARE * run

    def affords(self, other: Candidate) -> bool:
        """Whether a try of this engine costs little compared with the run."""
        if self.on.problem.device.type == "cuda":
            return True
        cost = self._cost(other)
        if self.batched is None:
            run = self.loop.total(self.on, self.length) * self.length.runs
            kernels = _kernels(self.on) if other.chosen.trace else 0.0
            return self._spent + cost <= _SHARE * run and kernels <= _KERNELS_SHARE * run
        hoped = self._hoped(other, self.batched) + cost / self.length.runs
        return hoped < self.batched.total(self.on, self.length)

    def faster(self, other: Candidate) -> bool:
        """Time an engine in turns with the best chunk so far; True if larger ones may be faster."""
        began, before = time.perf_counter(), self._last
        _in_turns(before, other)
        self._spent += time.perf_counter() - began
        self._last = other
        if before is not None and other.seconds >= before.seconds:
            self._last = before
            return other.seconds < _NOISE * before.seconds
        run, most = (one.total(self.on, self.length) for one in (other, self.batched or self.loop))
        if run < (_MARGIN if self.batched is None else 1.0) * most:
            self.batched = other
        return True

    def with_threads(self, one: Candidate) -> Candidate:
        """The faster of the loop with one thread and with all threads, if there is time to compare.

        One thread is preferred if all threads are hardly faster: it leaves the other cores free,
        and threads that wait for each other become many times slower beside a second job.
        """
        all_of, run = self.loop, self.loop.total(self.on, self.length)
        threads = all_of.chosen.threads or 1
        cost = 2 * all_of.seconds * (1 + threads)
        if threads == 1 or self._spent + cost > _SHARE * run * self.length.runs:
            return all_of
        _in_turns(one, all_of, turns=2)
        return all_of if all_of.seconds < _FEWER_THREADS * one.seconds else one

    def _hoped(self, other: Candidate, best: Candidate) -> float:
        """The seconds of a run with a larger chunk, by an optimistic estimate of its steps."""
        setup = other.setup(self.on, self.length, self._traced(other))
        return setup + _HOPED * best.step * self.length.steps(self.on)

    def _cost(self, other: Candidate) -> float:
        """An estimate of the seconds that a try takes."""
        turns = _TURNS * other.together * self.loop.seconds
        traced = self._traced(other)
        return turns + traced.fixed + traced.a_step * PROBE_STEPS

    def _traced(self, other: Candidate) -> Tracing:
        """An estimate of what tracing a form of this engine costs."""
        if not other.chosen.trace:
            return Tracing(_IMPORT, 0.0)
        if self._last is not None and self._last.engine.forms:
            fixed, a_step = self._last.tracing
            return Tracing(fixed, a_step * other.together / self._last.together)
        steps = _TRACED + _TRACED_MORE * other.together
        fixed = _IMPORT + (_COMPILE if other.chosen.compiled else 0.0)
        return Tracing(fixed, steps * self.loop.step / PROBE_STEPS)


def _kernels(on: Work) -> float:
    """An estimate of the seconds to compile a model's kernels; 0 if some are in the cache."""
    layers = sum(isinstance(module, nn.Conv2d) for module in on.problem.model.module.modules())
    return 0.0 if kernels_cached() else _KERNELS * layers


# ---- the cache ----------------------------------------------------------------------------------

_CHOSEN = ("name", "chunk", "threads", "trace", "compiled")  # the settings that are chosen


def cache_file() -> Path:
    return folder() / "engines.json"


def _key(on: Work, *asked: object) -> str:
    """The key of a choice: a hash of all that affects an engine's speed, and of ``asked``."""
    problem, on_gpu = on.problem, on.problem.device.type == "cuda"
    parts = (
        repr(problem.model.module),
        tuple(problem.shape),
        problem.recipe,
        min(problem.population, 50),
        str(problem.dtype),
        torch.cuda.get_device_name(problem.device) if on_gpu else "cpu",
        torch.get_num_threads(),
        torch.__version__,
        __version__,
        can_trace() and shutil.which(os.environ.get("CXX", "c++")),
        *asked,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _recalled(key: str, most_clients: int) -> EngineSettings | None:
    """The cached choice for a key; None if there is none that is complete and in range."""
    stored: Any = _read().get(key)
    kinds = get_type_hints(EngineSettings, include_extras=True)
    try:
        found = EngineSettings(**{name: fitted(stored[name], kinds[name]) for name in _CHOSEN})
    except (TypeError, KeyError, ValueError, RecursionError):
        return None
    needed = {"loop": ("threads",), "vmap": _CHOSEN}.get(found.name)
    if needed is None or any(getattr(found, name) is None for name in needed):
        return None
    return found if (found.chunk or 1) <= most_clients else None


def _remember(key: str, chosen: EngineSettings) -> None:
    """Store a choice in the cache; a cache that cannot be written is ignored."""
    path, values = cache_file(), {name: getattr(chosen, name) for name in _CHOSEN}
    with contextlib.suppress(OSError, StoreError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps({**_read(), key: values}, indent=1))


def _read() -> dict[str, Any]:
    try:
        path = cache_file()
        found = json.loads(path.read_text()) if path.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
