"""Which engine is fastest here: a short measurement on the real model, remembered.

The answer is kept in the user's cache for each (version, model, shapes, recipe, device), so that a
second run resolves to the same engine and hence to the same digest.
"""

import copy
import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..algorithm import round_of
from ..algorithms.local import Local
from ..cache import folder
from ..errors import CoterieError
from ..kernels.native import compiler
from ..task import Task
from .base import Engine
from .loop import LoopEngine
from .vmap import VmapEngine

CHUNKS = {"cpu": (1, 5, 10, 20, 50), "cuda": (100, 1000)}
DEFAULT_CHUNK = {"cpu": 20, "cuda": 1000}
PROBE_STEPS = 4
TURNS = 3  # of each candidate, after one to warm up
REPAID_AFTER = 10  # rounds: writing one down costs about as much as five rounds without
COMPILED_AFTER = 50  # rounds: a compiler takes some seconds, the first time
CORES = torch.get_num_threads()  # what torch would use if nobody chose
_METHOD = Local()  # one and the same: what is played is known by its method
_DEFAULT_CPU_MIB, _GPU_SHARE = 4096, 0.5


class How(NamedTuple):
    """What is done before the first round to make the others faster."""

    play: bool  # write rounds down
    compiled: bool  # with C++ in the place of their loops


def repaid(
    task: Task, rounds: int, *, play: bool | None = None, compiled: bool | None = None
) -> How:
    """What makes a run of so many rounds faster, unless it was said."""
    on_gpu = task.device.type == "cuda"
    if play is None:
        play = on_gpu or rounds >= REPAID_AFTER
    if compiled is None:
        compiled = play and not on_gpu and rounds >= COMPILED_AFTER and compiler() is not None
    return How(play, compiled)


def pick(
    task: Task,
    how: How,
    *,
    chunk: int | None,
    memory_mib: int | None,
    threads: int | None,
    state: str,
) -> Engine:
    """The fastest local engine for this task; a loop with the process set to its threads."""
    key = _key(task, chunk, memory_mib, threads, how)
    found = _read().get(key)
    if found is None:
        found = measure(task, how, chunk, memory_mib, threads)
        _write(key, found)
    if found["engine"] == "loop":
        torch.set_num_threads(found["threads"])
        return LoopEngine(task, state=state)
    size, threads = found["chunk"], found["threads"]
    return VmapEngine(task, chunk=size, state=state, threads=threads, **how._asdict())


def measure(
    task: Task, how: How, chunk: int | None, memory_mib: int | None, threads: int | None
) -> dict[str, Any]:
    """Time a few steps of every candidate on real clients, in turns; seconds are a client's.

    In turns, for a machine may be busy with something else for a moment. A loop with one thread is
    preferred where all of them are hardly faster: it leaves the other cores to others, and a second
    job slows threads that wait for each other many times over.
    """
    probe = copy.copy(task)
    probe.recipe = replace(task.recipe, steps=PROBE_STEPS)
    loops, others = _loops(probe, threads), _batched(probe, how, chunk, memory_mib, threads)
    field = [*loops, *others]
    for turn in range(1 + TURNS):
        for one in field:
            one.turn(counts=turn > 0)
    best = loops[0]
    for loop in loops[1:]:
        best = loop if loop.seconds < 0.93 * best.seconds else best
    best = min([best, *others], key=lambda one: one.seconds)
    return {**best.choice, "seconds": best.seconds}


def _loops(probe: Task, threads: int | None) -> list["_Candidate"]:
    counts = sorted({1, CORES}) if threads is None else [threads]
    clients = min(3, probe.population)
    return [
        _Candidate(LoopEngine(probe), {"engine": "loop", "threads": count}, count, clients)
        for count in counts
    ]


def _batched(
    probe: Task, how: How, chunk: int | None, memory_mib: int | None, threads: int | None
) -> list["_Candidate"]:
    many, wanted = threads or CORES, [chunk] if chunk else CHUNKS[probe.device.type]
    sizes = {fitting(probe, min(size, probe.population), memory_mib) for size in wanted}
    found = []
    for size in sorted(sizes):
        try:
            engine = VmapEngine(probe, chunk=size, threads=many, **how._asdict())
        except CoterieError:  # not for this model
            continue
        choice = {"engine": "vmap", "chunk": size, "threads": engine.threads}
        found.append(_Candidate(engine, choice, many, size * engine.threads))
    return found


class _Candidate:
    """An engine, and the fewest seconds that a few local steps of a client took so far."""

    def __init__(self, engine: Engine, choice: dict[str, Any], threads: int, clients: int) -> None:
        self.choice, self.seconds = choice, float("inf")
        self._engine, self._threads, self._failed = engine, threads, False
        self._able = (engine.task.sizes > 0).nonzero().flatten()[:clients]

    def turn(self, *, counts: bool) -> None:
        """Once more, unless it failed before; the first time only warms it up."""
        if self._failed:
            return
        torch.set_num_threads(self._threads)
        try:
            seconds = self._timed()
        except (RuntimeError, CoterieError):  # too large, or an operation that vmap cannot batch
            self._failed, self.seconds = True, float("inf")
            return
        if counts:
            self.seconds = min(self.seconds, seconds / len(self._able))

    def _timed(self) -> float:
        task = self._engine.task
        round = round_of(task, 0, 1, self._able)
        _, states = _METHOD.init(task)
        rows = states._replace(w=states.w[self._able])
        began = time.perf_counter()
        self._engine.local(_METHOD, (), rows, round)
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def fitting(task: Task, wanted: int | None, memory_mib: int | None) -> int:
    """How many clients may be computed together: as many as wanted, if they fit the memory."""
    if wanted is None:
        wanted = DEFAULT_CHUNK[task.device.type]
    if memory_mib is None:
        memory_mib = _budget(task.device)
    return max(1, min(wanted, int(memory_mib * 2**20 / footprint(task))))


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE / 2**20)
    return _DEFAULT_CPU_MIB


def footprint(task: Task) -> int:
    """Bytes one client takes while it trains: vectors of its model, and activations of a batch."""
    activations = 0

    def count(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal activations
        for part in output if isinstance(output, tuple) else (output,):
            activations += part.numel() if isinstance(part, torch.Tensor) else 0

    hooks = [m.register_forward_hook(count) for m in task.model.module.modules()]
    try:
        samples = min(task.recipe.batch, max(1, int(task.sizes.max())))
        with torch.no_grad():
            task.model.module(task.inputs(torch.zeros(samples, dtype=torch.int64)))
    finally:
        for hook in hooks:
            hook.remove()
    vectors = 8 if task.recipe.optimizer == "adam" else 6
    return (vectors * task.model.size + 3 * activations) * task.start.element_size()


# ---- memory of earlier measurements ------------------------------------------------------------


def cache_file() -> Path:
    """Where measurements are remembered."""
    return folder() / "engines.json"


def _key(
    task: Task, chunk: int | None, memory_mib: int | None, threads: int | None, how: How
) -> str:
    parts = (
        repr(task.model.module),
        tuple(task.x.shape[1:]),
        task.recipe,
        min(task.population, 50),
        str(task.dtype),
        _device_name(task.device),
        CORES,
        torch.__version__,
        __version__,
        chunk,
        memory_mib,
        threads,
        how,
        compiler(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(key: str, choice: dict[str, Any]) -> None:
    """Remember; a cache that cannot be written is no reason to stop."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({**_read(), key: choice}, indent=1))
        temporary.replace(path)
    except OSError:
        return
