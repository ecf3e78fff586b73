"""Which engine is fastest here: a short measurement on the real model, remembered.

The answer is kept in the user's cache for each (version, model, shapes, recipe, device), so that a
second run resolves to the same engine and hence to the same digest.
"""

import copy
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..algorithms.local import Local
from ..core.algorithm import round_of
from ..core.task import Task
from ..errors import CoterieError
from ..storage.cache import folder
from .base import MOST_THREADS, Engine
from .loop import LoopEngine
from .process import settings
from .vmap import VmapEngine, compiler, tracing

CHUNKS = {"cpu": (1, 5, 10, 20, 50), "cuda": (100, 1000)}
DEFAULT_CHUNK = {"cpu": 20, "cuda": 1000}
PROBE_STEPS = 4
TURNS = 4  # of each candidate: in the first it warms up and is written down, which takes longest
_A_TRY = 25  # local steps of each client in a chunk: what it takes to write it down and to time it
_SHARE = 0.02  # of all steps of a run: what the try of one size may take,
_MOMENT = 3.0  # or so many seconds, if that is more
REPAID_AFTER = 10  # rounds: writing one down costs about as much as five rounds without
COMPILED_AFTER = 50  # rounds: a compiler takes some seconds, the first time
CORES = torch.get_num_threads()  # what torch would use if nobody chose
_METHOD = Local(keep="last")  # one and the same: what is played is known by its method
_MOST_BYTES = 1 << 20  # of the file of measurements; a larger one is not ours
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
        play = (on_gpu or rounds >= REPAID_AFTER) and tracing() is not None
    if compiled is None:
        compiled = play and not on_gpu and rounds >= COMPILED_AFTER and compiler() is not None
    return How(play, compiled)


def pick(
    task: Task,
    how: How,
    rounds: int,
    *,
    chunk: int | None,
    memory_mib: int | None,
    threads: int | None,
    state: str,
) -> Engine:
    """The fastest local engine for this task; a loop with the process set to its threads."""
    tries = tries_of(task, rounds, chunk)
    key = _key(task, tries, memory_mib, threads, how)
    found: Any = _read().get(key)
    if not _fits(found, tries):
        found = measure(task, how, tries, memory_mib, threads)
        _write(key, found)
    if found["engine"] == "loop":
        return LoopEngine(task, state=state, threads=found["threads"])
    size, threads = found["chunk"], found["threads"]
    return VmapEngine(task, chunk=size, state=state, threads=threads, **how._asdict())


def steps(task: Task) -> int:
    """Local steps of all clients together, in a round with everybody."""
    return sum(task.recipe.count(size, task.least) for size in task.splits["train"].sizes)


class Tries(NamedTuple):
    """Chunks to try, small ones first."""

    sizes: tuple[int, ...]
    most: int  # larger ones only if that takes but a moment


def tries_of(task: Task, rounds: int, chunk: int | None) -> Tries:
    """What is worth a try in a run of so many rounds; on a CPU large chunks take long to try."""
    sizes = (chunk,) if chunk else CHUNKS[task.device.type]
    if task.device.type == "cuda":
        return Tries(sizes, sizes[-1])
    most = _SHARE * rounds * steps(task) / _A_TRY
    return Tries(sizes, max((size for size in sizes if size <= most), default=sizes[0]))


def measure(
    task: Task, how: How, tries: Tries, memory_mib: int | None, threads: int | None
) -> dict[str, Any]:
    """The fastest of a loop and of chunks, by a few steps of real clients.

    Larger chunks are tried as long as they are faster. Its ``seconds`` are a client's.
    """
    probe = copy.copy(task)
    probe.recipe = replace(task.recipe, steps=PROBE_STEPS)
    best = _loop(probe, threads)
    most = max(tries.most, _MOMENT / _A_TRY * PROBE_STEPS / best.seconds)
    worth = [size for size in tries.sizes if size <= most]
    batched = None
    for other in _batched(probe, how, worth, memory_mib, threads):
        _in_turns(batched, other)
        if batched is not None and other.seconds >= batched.seconds:
            break
        batched = other
    if batched is not None:
        _in_turns(best, batched)
        best = min(best, batched, key=lambda one: one.seconds)
    return {**best.choice, "seconds": best.seconds}


def _loop(probe: Task, threads: int | None) -> "_Candidate":
    """One client at a time, with one thread or all.

    One is preferred where all of them are hardly faster: it leaves the other cores to others, and a
    second job slows threads that wait for each other many times over.
    """
    clients = min(3, probe.population)
    one, *more = [
        _Candidate(LoopEngine(probe), {"engine": "loop", "threads": count}, count, clients)
        for count in (sorted({1, CORES}) if threads is None else [threads])
    ]
    _in_turns(one, *more)
    return next((many for many in more if many.seconds < 0.93 * one.seconds), one)


def _batched(
    probe: Task, how: How, sizes: list[int], memory_mib: int | None, threads: int | None
) -> Iterator["_Candidate"]:
    """Chunks of these sizes, small ones first; not two that come to the same here."""
    many, tried = threads or CORES, set[int]()
    for size in sizes:
        most = fitting(probe, min(size, probe.population), memory_mib)
        try:
            engine = VmapEngine(probe, chunk=most, threads=many, **how._asdict())
        except CoterieError:  # not for this model
            return
        together = max(map(len, engine.chunks(list(range(probe.population)))))
        if together not in tried:
            tried.add(together)
            choice = {"engine": "vmap", "chunk": most, "threads": engine.threads}
            yield _Candidate(engine, choice, many, together * engine.threads)


def _in_turns(*candidates: "_Candidate | None") -> None:
    """Time them in turns, for a machine may be busy with something else for a moment."""
    for _ in range(TURNS):
        for one in candidates:
            if one is not None:
                one.turn()


class _Candidate:
    """An engine, and the fewest seconds that a few local steps of a client took so far."""

    def __init__(self, engine: Engine, choice: dict[str, Any], threads: int, clients: int) -> None:
        self.choice, self.seconds = choice, float("inf")
        self._engine, self._threads, self._failed = engine, threads, False
        self._able = (engine.task.sizes > 0).nonzero().flatten()[:clients]

    def turn(self) -> None:
        """Once more, unless it failed before."""
        if self._failed:
            return
        try:
            with settings(threads=self._threads):
                self.seconds = min(self.seconds, self._timed() / len(self._able))
        except (RuntimeError, CoterieError):  # too large, or an operation that vmap cannot batch
            self._failed, self.seconds = True, float("inf")

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


def _key(task: Task, tries: Tries, memory_mib: int | None, threads: int | None, how: How) -> str:
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
        tries,
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
        path = cache_file()
        found = json.loads(path.read_text()) if path.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fits(found: Any, tries: Tries) -> bool:
    """Whether what was remembered is what :func:`measure` gives; anything else is ignored."""
    if not isinstance(found, dict) or found.get("engine") not in ("loop", "vmap"):
        return False
    numbers = {"threads": MOST_THREADS}
    if found["engine"] == "vmap":
        numbers["chunk"] = max(tries.sizes)
    return all(
        type(found.get(name)) is int and 1 <= found[name] <= most for name, most in numbers.items()
    )


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
