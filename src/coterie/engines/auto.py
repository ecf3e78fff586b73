"""Which engine finishes a run first: measured on the real model, within a small part of the run.

The loop is timed first, on a few steps of one client, which gives the length of the run. Another
engine is tried only if the try costs little beside that. Once one is faster than the loop, a larger
chunk is tried only if it could save more than the try costs. Tracing and compiling count: engines
are compared by the estimate of the whole run, not of a round.

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
from .candidates import PROBE_STEPS, Candidate, Tracing
from .loop import LoopBackend
from .process import settings
from .remembered import key_of, recall, remember
from .settings import Asked, Length
from .vmap import VmapBackend, can_trace, compiler, kernels_cached

CHUNKS = {"cpu": (1, 5, 10, 20, 50), "cuda": (100, 1000)}
DEFAULT_CHUNK = {"cpu": 20, "cuda": 1000}
REPAID_AFTER = 10  # rounds: the vmap engine traces a run of this many
COMPILED_AFTER = 50  # rounds: a compiler takes some seconds, the first time
_TURNS = 3  # of each candidate; the first warms up, or traces
_SHARE = 0.015  # of the estimated run of the loop: what tries may cost before one is faster
_HOPED = 0.6  # of the seconds of a step: what a larger chunk may bring them to
_MARGIN = 0.9  # of the loop's estimate: another engine has to be below it
_FEWER_THREADS = 0.97  # one thread is preferred unless all of them take less than this share
_TRACED, _TRACED_MORE = 10, 30  # loop steps that tracing a probe costs, and more for each client
_IMPORT, _COMPILE = 0.1, 3.0  # seconds
_KERNELS = 4.0  # seconds of compiling the kernels of one convolution and its pool, once
_KERNELS_SHARE = 0.1  # of the estimated run of the loop: what compiling kernels may take
_DEFAULT_CPU_MIB, _GPU_SHARE = 4096, 0.5


class How(NamedTuple):
    """What the vmap engine does before the first round to make the others faster."""

    play: bool  # trace calls and replay them
    compiled: bool  # with C++ in place of their loops


def repaid(on: Work, rounds: int, *, play: bool | None = None, compiled: bool | None = None) -> How:
    """What repays itself for the vmap engine in a run of this many rounds, unless it was said."""
    on_gpu = on.problem.device.type == "cuda"
    if play is None:
        play = (on_gpu or rounds >= REPAID_AFTER) and can_trace()
    if compiled is None:
        compiled = play and not on_gpu and rounds >= COMPILED_AFTER and compiler() is not None
    return How(play, compiled)


def how_of(on: Work, length: Length, asked: Asked) -> How:
    """Whether candidates are traced and compiled; a run that is too short will not try them."""
    play = can_trace() if asked.play is None else asked.play
    return repaid(on, length.rounds, play=play, compiled=asked.compiled)


def pick(on: Work, length: Length, asked: Asked, *, state: str) -> Backend:
    """The engine that is expected to finish this run first."""
    key = key_of(on, length.bucket(on), asked)
    found = recall(key, max(_sizes(on, asked)))
    if found is None:
        found = resolve(on, length, asked)
        remember(key, found)
    if found["engine"] == "loop":
        return LoopBackend(*on, threads=found["threads"])
    chosen = {name: found[name] for name in ("chunk", "threads", "play", "compiled")}
    return VmapBackend(*on, state=state, **chosen)


def resolve(on: Work, length: Length, asked: Asked) -> dict[str, Any]:
    """The choice for a run: the fastest of a loop and of chunks, by steps of real clients.

    Its ``seconds`` are those of ``PROBE_STEPS`` steps of one client.
    """
    recipe = replace(on.problem.recipe, steps=PROBE_STEPS)
    probe = on._replace(problem=replace(on.problem, recipe=recipe))
    search = _Search(on, length, _looped(probe, asked.threads))
    if search.affords_any():
        how = how_of(on, length, asked)
        with settings(keep_memory=how.play and on.problem.device.type == "cpu"):
            for other in _batched(probe, how, _sizes(on, asked), asked):
                if not search.affords(other) or not search.faster(other):
                    break
    best = search.batched or search.loop
    if search.batched is None and asked.threads is None:
        best = search.with_threads(_looped(probe, 1, turns=0))
    return {**best.choice, "seconds": best.seconds}


class _Search:
    """What has been measured so far, and what the run would take with it."""

    def __init__(self, on: Work, length: Length, loop: Candidate) -> None:
        self.on, self.length, self.loop = on, length, loop
        self.batched: Candidate | None = None  # the fastest so far, if faster than the loop
        self._last: Candidate | None = None
        self._spent = 2 * loop.seconds  # its first turn warms up what the run needs anyway

    def affords_any(self) -> bool:
        """Whether the run is long enough for the cheapest try: one client, not traced."""
        if self.on.problem.device.type == "cuda":
            return True
        run = self.loop.total(self.on, self.length) * self.length.runs
        return self._spent + _TURNS * self.loop.seconds + _IMPORT <= _SHARE * run

    def affords(self, other: Candidate) -> bool:
        """Whether a try of this engine costs little beside the run."""
        if self.on.problem.device.type == "cuda":
            return True
        cost = self._cost(other)
        if self.batched is None:
            run = self.loop.total(self.on, self.length) * self.length.runs
            kernels = _kernels(self.on) if other.choice["play"] else 0.0
            return self._spent + cost <= _SHARE * run and kernels <= _KERNELS_SHARE * run
        hoped = self._hoped(other, self.batched) + cost / self.length.runs
        return hoped < self.batched.total(self.on, self.length)

    def faster(self, other: Candidate) -> bool:
        """Try an engine in turns with the best chunk so far; whether larger ones may be faster."""
        began, before = time.perf_counter(), self._last
        _in_turns(before, other)
        self._spent += time.perf_counter() - began
        self._last = other
        if before is not None and other.seconds >= before.seconds:
            self._last = before
            return False
        run, most = (one.total(self.on, self.length) for one in (other, self.batched or self.loop))
        if run < (_MARGIN if self.batched is None else 1.0) * most:
            self.batched = other
        return True

    def with_threads(self, one: Candidate) -> Candidate:
        """The loop with one thread or with all of them, if there is time to compare.

        One is preferred where all of them are hardly faster: it leaves the other cores to others,
        and a second job slows threads that wait for each other many times over.
        """
        all_of, run = self.loop, self.loop.total(self.on, self.length)
        cost = 2 * all_of.seconds * (1 + all_of.choice["threads"])
        if all_of.choice["threads"] == 1 or self._spent + cost > _SHARE * run * self.length.runs:
            return all_of
        _in_turns(one, all_of, turns=2)
        return all_of if all_of.seconds < _FEWER_THREADS * one.seconds else one

    def _hoped(self, other: Candidate, best: Candidate) -> float:
        """The seconds of a run with a larger chunk if its steps are as fast as can be hoped."""
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
        if not other.choice["play"]:
            return Tracing(_IMPORT, 0.0)
        if self._last is not None and self._last.engine.forms:
            fixed, a_step = self._last.tracing
            return Tracing(fixed, a_step * other.together / self._last.together)
        steps = _TRACED + _TRACED_MORE * other.together
        fixed = _IMPORT + (_COMPILE if other.choice["compiled"] else 0.0)
        return Tracing(fixed, steps * self.loop.step / PROBE_STEPS)


def _kernels(on: Work) -> float:
    """An estimate of the seconds of compiling a model's kernels, where none are in the cache."""
    layers = sum(isinstance(module, nn.Conv2d) for module in on.problem.model.module.modules())
    return 0.0 if kernels_cached() else _KERNELS * layers


def _sizes(on: Work, asked: Asked) -> tuple[int, ...]:
    return (asked.chunk,) if asked.chunk else CHUNKS[on.problem.device.type]


def _looped(probe: Work, threads: int | None, *, turns: int = 2) -> Candidate:
    """The loop with so many threads, or all of them; the first turn warms up."""
    count = threads or torch.get_num_threads()
    made = Candidate(LoopBackend(*probe), {"engine": "loop", "threads": count}, count, 1)
    _in_turns(made, turns=turns)
    return made


def _batched(probe: Work, how: How, sizes: tuple[int, ...], asked: Asked) -> Iterator[Candidate]:
    """Chunks of these sizes, small ones first; not two that come to the same here."""
    many, tried = asked.threads or torch.get_num_threads(), set[int]()
    for size in sizes:
        most = fitting(probe, min(size, probe.problem.population), asked.memory_mib)
        try:
            engine = VmapBackend(*probe, chunk=most, threads=many, **how._asdict())
        except CoterieError:  # not for this model
            return
        together = max(map(len, engine.chunks(list(range(probe.problem.population)))))
        if together not in tried:
            tried.add(together)
            resolved = {name: engine.choice[name] for name in ("threads", "play", "compiled")}
            choice = {"engine": "vmap", "chunk": most, **resolved}
            yield Candidate(engine, choice, many, together * engine.threads)


def _in_turns(*candidates: Candidate | None, turns: int = _TURNS) -> None:
    """Time them in turns, for a machine may be busy with something else for a moment."""
    for _ in range(turns):
        for one in candidates:
            if one is not None:
                one.turn()


def fitting(on: Work, wanted: int | None, memory_mib: int | None) -> int:
    """How many clients may be computed together: as many as wanted, if they fit the memory."""
    if wanted is None:
        wanted = DEFAULT_CHUNK[on.problem.device.type]
    if memory_mib is None:
        memory_mib = _budget(on.problem.device)
    return max(1, min(wanted, int(memory_mib * 2**20 / footprint(on))))


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE / 2**20)
    return _DEFAULT_CPU_MIB


def footprint(on: Work) -> int:
    """Bytes one client takes while it trains: vectors of its model, and activations of a batch."""
    activations = 0

    def count(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal activations
        for part in output if isinstance(output, tuple) else (output,):
            activations += part.numel() if isinstance(part, torch.Tensor) else 0

    hooks = [m.register_forward_hook(count) for m in on.problem.model.module.modules()]
    try:
        samples = min(on.problem.recipe.batch, max(1, int(on.problem.sizes.max())))
        with torch.no_grad():
            on.problem.model.module(on.problem.blank(samples))
    finally:
        for hook in hooks:
            hook.remove()
    vectors = 8 if on.problem.recipe.optimizer == "adam" else 6
    return (vectors * on.problem.model.size + 3 * activations) * on.problem.start.element_size()
