"""Chooses the engine that finishes a run first, by a short measurement on the real model.

The loop is timed first, on a few steps of one client, which gives an estimate of the whole run.
Another engine is tried only if the try costs little compared with that. Once an engine is faster
than the loop, a larger chunk is tried only if it could save more than the try costs. Engines are
compared by the estimated time of the whole run, including tracing and compiling, not of a round.

The choice is kept in the user's cache, so that a second run resolves to the same engine and hence
to the same digest.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CoterieError
from .base import Backend, Work
from .candidates import PROBE_STEPS, Candidate, Tracing, warmed
from .capacity import fitting
from .loop import LoopBackend
from .process import settings
from .remembered import key_of, recall, remember
from .settings import Asked, Length
from .vmap import VmapBackend, can_trace, compiler, kernels_cached

CHUNKS = {"cpu": (1, 5, 10, 20, 50), "cuda": (100, 1000)}
REPAID_AFTER = 10  # rounds from which the vmap engine traces a run
COMPILED_AFTER = 50  # rounds from which it compiles: the first time that takes some seconds
_TURNS = 3  # timings of each candidate; the first one warms up, or traces
_SHARE = 0.015  # of the loop's estimated run: what tries may cost until one beats the loop
_HOPED = 0.6  # of the seconds of a step: the best that a larger chunk is expected to reach
_MARGIN = 0.9  # of the loop's estimate: another engine has to be below it
_NOISE = 1.15  # a chunk that is slower by less than this factor does not end the search
_FEWER_THREADS = 0.97  # one thread is preferred unless all threads take less than this share
_TRACED, _TRACED_MORE = 10, 30  # cost of tracing a probe in loop steps: fixed, and per client
_IMPORT, _COMPILE = 0.1, 3.0  # seconds
_KERNELS = 4.0  # seconds of compiling the kernels of one convolution and its pool, once
_KERNELS_SHARE = 0.1  # of the loop's estimated run: what compiling kernels may take


class How(NamedTuple):
    """Whether the vmap engine traces and compiles its calls."""

    trace: bool  # trace calls and replay them
    compiled: bool  # replace the loops of traces by C++


def repaid(
    on: Work, rounds: int, *, trace: bool | None = None, compiled: bool | None = None
) -> How:
    """Whether tracing and compiling repay themselves in so many rounds, unless it is given."""
    on_gpu = on.problem.device.type == "cuda"
    if trace is None:
        trace = (on_gpu or rounds >= REPAID_AFTER) and can_trace()
    if compiled is None:
        compiled = trace and not on_gpu and rounds >= COMPILED_AFTER and compiler() is not None
    return How(trace, compiled)


def how_of(on: Work, length: Length, asked: Asked) -> How:
    """Whether candidates are traced and compiled; a run that is too short tries none of them."""
    trace = can_trace() if asked.trace is None else asked.trace
    return repaid(on, length.rounds, trace=trace, compiled=asked.compiled)


def pick(on: Work, length: Length, asked: Asked, *, state: str) -> Backend:
    """Make the backend that is expected to finish this run first, as cached or as measured."""
    key = key_of(on, length.bucket(on), asked)
    found = recall(key, max(_sizes(on, asked)))
    if found is None:
        found = resolve(on, length, asked)
        remember(key, found)
    if found["engine"] == "loop":
        return LoopBackend(*on, threads=found["threads"])
    chosen = {name: found[name] for name in ("chunk", "threads", "trace", "compiled")}
    return VmapBackend(*on, state=state, **chosen)


def resolve(on: Work, length: Length, asked: Asked) -> dict[str, Any]:
    """Choose the fastest of the loop and of several chunk sizes, timed on steps of real clients.

    The choice's ``seconds`` are the time of ``PROBE_STEPS`` steps of one client.
    """
    recipe = replace(on.problem.recipe, steps=PROBE_STEPS)
    probe = on._replace(problem=replace(on.problem, recipe=recipe))
    search = _Search(on, length, _looped(probe, asked.threads))
    if search.affords_any():
        how = how_of(on, length, asked)
        with settings(keep_memory=how.trace and on.problem.device.type == "cpu"):
            for other in _batched(probe, how, _sizes(on, asked), asked):
                if not search.affords(other) or not search.faster(other):
                    break
    best = search.batched or search.loop
    if search.batched is None and asked.threads is None:
        best = search.with_threads(_looped(probe, 1, turns=0))
    return {**best.choice, "seconds": best.seconds}


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
            kernels = _kernels(self.on) if other.choice["trace"] else 0.0
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
        cost = 2 * all_of.seconds * (1 + all_of.choice["threads"])
        if all_of.choice["threads"] == 1 or self._spent + cost > _SHARE * run * self.length.runs:
            return all_of
        _in_turns(one, all_of, turns=2)
        return all_of if all_of.seconds < _FEWER_THREADS * one.seconds else one

    def _hoped(self, other: Candidate, best: Candidate) -> float:
        """The seconds of a run with a larger chunk, by an optimistic estimate of its steps."""
        traced = self._traced(other)
        setup = other.setup(self.on, self.length, traced)
        return setup + _HOPED * best.step * self.length.steps(self.on)

    def _cost(self, other: Candidate) -> float:
        """An estimate of the seconds that a try takes."""
        turns = _TURNS * other.together * self.loop.seconds
        traced = self._traced(other)
        return turns + traced.fixed + traced.a_step * PROBE_STEPS

    def _traced(self, other: Candidate) -> Tracing:
        """An estimate of what tracing a form of this engine costs."""
        if not other.choice["trace"]:
            return Tracing(_IMPORT, 0.0)
        if self._last is not None and self._last.engine.forms:
            fixed, a_step = self._last.tracing
            return Tracing(fixed, a_step * other.together / self._last.together)
        steps = _TRACED + _TRACED_MORE * other.together
        fixed = _IMPORT + (_COMPILE if other.choice["compiled"] else 0.0)
        return Tracing(fixed, steps * self.loop.step / PROBE_STEPS)


def _kernels(on: Work) -> float:
    """An estimate of the seconds to compile a model's kernels; 0 if some are in the cache."""
    layers = sum(isinstance(module, nn.Conv2d) for module in on.problem.model.module.modules())
    return 0.0 if kernels_cached() else _KERNELS * layers


def _sizes(on: Work, asked: Asked) -> tuple[int, ...]:
    return (asked.chunk,) if asked.chunk else CHUNKS[on.problem.device.type]


def _looped(probe: Work, threads: int | None, *, turns: int = 2) -> Candidate:
    """The timed loop with this many threads, by default all; its first turn warms up."""
    count = threads or torch.get_num_threads()
    made = Candidate(LoopBackend(*probe), {"engine": "loop", "threads": count}, count, 1)
    _in_turns(made, turns=turns)
    return made


def _batched(probe: Work, how: How, sizes: tuple[int, ...], asked: Asked) -> Iterator[Candidate]:
    """Candidates with chunks of these sizes, small ones first, without equivalent ones."""
    many, tried = asked.threads or torch.get_num_threads(), set[int]()
    for size in sizes:
        most = fitting(probe, min(size, probe.problem.population), asked.memory_mib)
        try:
            engine = VmapBackend(*probe, chunk=most, threads=many, **how._asdict())
        except CoterieError:  # vmap cannot compute this model
            return
        together = max(map(len, engine.chunks(list(range(probe.problem.population)))))
        if together not in tried:
            tried.add(together)
            choice = {"engine": "vmap", "chunk": most}
            choice |= {name: engine.choice[name] for name in ("threads", "trace", "compiled")}
            yield Candidate(warmed(engine, choice, many), choice, many, together * engine.threads)


def _in_turns(*candidates: Candidate | None, turns: int = _TURNS) -> None:
    """Time candidates in turns, because the machine may be busy with other work for a moment."""
    for _ in range(turns):
        for one in candidates:
            if one is not None:
                one.turn()
