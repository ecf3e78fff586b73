"""Computes many clients at once: ``torch.func.vmap`` around one client's code.

Clients of similar size are computed together, in chunks that fit the memory budget: there is little
padding and weights stay in the cache. A chunk takes as many steps as its longest client, and the
others are padded. On a CPU chunks are distributed over independent threads.

The package ``coterie.compiled`` traces the calls of this engine and replays them faster. It is
optional, and :func:`tracing` is the only place that imports it. Without it, or with
``trace=False``, calls are executed as they are written.
"""

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import groupby
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Predictor, Round
from ..core.answers import Answers
from ..core.batches import View, shape_of, views
from ..core.calls import WRITTEN, Clock, Destination, Form
from ..core.client import Client
from ..core.locations import checked_stage
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from .base import JUDGED, Computed, Evaluation, Predicted, Scores
from .evaluation import answers, blocks_of, judge, kept, outcomes, outputs
from .process import settings

if TYPE_CHECKING:
    from ..compiled import Executor

Run = tuple[int, int]  # the first client of a chunk, and the one after the last
Chunk = list[int]  # positions among the round's clients
Empty = Callable[[torch.Size, torch.dtype, torch.device], Tensor]  # allocates a tensor

# A step of ``n`` clients costs about as much as ``n + overhead`` (docs/results/speed.md has the
# measurements). On a CPU the overhead is that of a small perceptron. On a GPU any step takes as
# long as this many operations of a client; a bound keeps clients of small models together.
_CPU, _GPU_OPERATIONS, _GPU_MOST = 2, 20e9, 64
_PASSES = 3  # a step computes about three times the forward pass

COMPILED = f"{__package__.rpartition('.')[0]}.compiled"
MISSING = "the package coterie.compiled is not installed here"


def tracing() -> ModuleType | None:
    """The optional package that traces and compiles calls; None if its folder is missing."""
    try:
        return importlib.import_module(COMPILED)
    except ModuleNotFoundError as error:
        if error.name != COMPILED:
            raise
        return None


def can_trace() -> bool:
    """Whether :func:`tracing` would find the package, without importing it."""
    try:
        return find_spec(COMPILED) is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False


def compiler() -> str | None:
    """The C++ compiler that would be used; None without one or without ``coterie.compiled``."""
    package = tracing()
    found: str | None = None if package is None else package.native.compiler()
    return found


def kernels_cached() -> bool:
    """Whether no kernels need compiling: the user's cache has some, or there is no compiler."""
    package = tracing()
    return package is None or compiler() is None or bool(package.native.cached())


def compiler_version() -> str | None:
    """The version of :func:`compiler`."""
    package = tracing()
    found: str | None = None if package is None else package.native.version()
    return found


class VmapBackend:
    """Computes many clients at once on one CPU or GPU."""

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        chunk: int = 20,
        threads: int = 1,
        trace: bool = True,
        compiled: bool = False,
        before: Mapping[str, str] | None = None,
    ) -> None:
        _refuse_recurrent(problem)
        self.problem, self.shards, self.chunk = problem, shards, chunk
        self._able, on_gpu = int((problem.sizes > 0).sum()), problem.device.type == "cuda"
        self._overhead = overhead_of(problem)
        package = tracing() if trace else None
        self.trace = package is not None
        _refuse_untraced(package, before)
        self.threads = threads if package is not None and not on_gpu else 1
        self.compiled = compiled and package is not None and not on_gpu and bool(compiler())
        self.compiler = compiler_version() if self.compiled else None
        self._batched = on_gpu or chunk > 1  # chunks of one mean a large model: map each client
        layers = [slot.shape.numel() for slot in problem.model.slots]
        self._executor: Executor | _AsWritten = _AsWritten(MISSING if trace else "")
        self._empty: Empty = _empty
        if package is not None:
            options = {"capture": on_gpu, "compiled": self.compiled, "layers": layers}
            self._executor = package.Executor(**options, before=before)
            self._empty = package.Allocator().empty

    @property
    def choice(self) -> dict[str, Any]:
        return {
            "engine": "vmap",
            "chunk": self.chunk,
            "trace": self.trace,
            "compiled": self.compiled,
            "compiler": self.compiler,
            "threads": self.threads,
        }

    @property
    def forms(self) -> tuple[Form, ...]:
        return self._executor.forms

    def chunks(self, ids: list[int]) -> list[Chunk]:
        """Group the positions of clients of similar size into chunks, evenly for all threads.

        A chunk has at most ``chunk`` clients, equal ones with batch norm: padding would enter the
        statistics of a batch. Drawn clients are not cut by their steps: each form is traced.
        """
        sizes, problem = self.shards.splits["train"].sizes, self.problem
        turns = -(-len(ids) // (self.chunk * self.threads))
        most = -(-len(ids) // max(1, turns * self.threads))
        order = sorted(range(len(ids)), key=lambda position: sizes[ids[position]])
        if len(ids) == self._able > 0 and not problem.model.coupled:
            steps = [problem.recipe.count(sizes[ids[at]], problem.least) for at in order]
            return similar(order, steps, most, self._overhead)
        parts = [order]
        if problem.model.coupled:
            parts = [list(same) for _, same in groupby(order, key=lambda at: sizes[ids[at]])]
        return [p[i : i + most] for p in parts for i in range(0, len(p), max(1, most))]

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        key = algorithm.trace_key(round.index, round.horizon)
        stage = _Stage(
            algorithm.local, key, lambda made, _: made, in_place=self.problem.device.type == "cpu"
        )
        uploads, new = self._each(stage, received, states, round)
        return uploads, new

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """Like :meth:`local`: no client is rejected, since rows of one tensor share a layout."""
        return Computed(*self.local(algorithm, received, states, round), round.clients)

    def predict(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        states: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = True,
    ) -> Predicted:
        """The scores of the predictors, and the predictors on the CPU."""
        model, shards, regression = self.problem.model, self.shards, self.problem.regression
        said: dict[int, Answers] = {}

        def predicted(mixture: Predictor, ids: list[int], name: str) -> Tensor:
            def answer(mixture: Predictor, index: Tensor) -> Tensor:
                return outputs(model, mixture, shards.inputs(index), regression)

            blocks = blocks_of(shards.splits[name].rows(ids))
            call = vmap(answer)
            return torch.cat([self._executor("answer", call, (mixture, b)) for b in blocks], 1)

        def finish(mixture: Predictor, ids: list[int]) -> Tree:
            columns: list[Scores] = []
            for name in JUDGED:
                found = predicted(mixture, ids, name)
                columns += judge(shards, metric, ids, name, found)
                if name == "test" and keep:
                    said.update(answers(shards, metric, ids, found))
            return torch.from_numpy(np.stack(columns, 1)), kept(mixture, keep)

        key = algorithm.trace_key(round.index, round.horizon)
        stage = _Stage(algorithm.predictor, key, finish, in_place=False)
        table, mixture = self._each(stage, served, states, round)
        return Predicted(Evaluation.of(table.numpy()), mixture, outcomes(said, round))

    def _each(self, stage: "_Stage", message: Tree, states: Tree, round: Round) -> Tree:
        """Map one client's code over all clients, chunk by chunk; rows are in the round's order."""
        everyone = round.clients.tolist()

        def done(chunk: Chunk) -> None:
            ids = [everyone[i] for i in chunk]
            view = views(self.problem, self.shards, ids, round.index)
            row = tree.move(rows_of(message, chunk), self.problem.device)
            state = tree.move(rows_of(states, chunk), self.problem.device)
            where = gathered.destinations(chunk) if stage.in_place else None
            made = self._mapped(stage, ids, (view, row, state), round, where)
            gathered.put(chunk, stage.finish(made, ids))

        gathered = Gathered(len(everyone), self._empty)
        self._share_out(done, self.chunks(everyone))
        return gathered.rows

    def _share_out(self, done: Callable[[Chunk], None], chunks: list[Chunk]) -> None:
        """Compute all chunks in threads that use one core each and never wait for each other."""
        if self.problem.device.type != "cpu":
            for chunk in chunks:
                done(chunk)
            return
        with settings(threads=1), ThreadPoolExecutor(min(self.threads, len(chunks))) as pool:
            list(pool.map(done, chunks))

    def _mapped(
        self,
        stage: "_Stage",
        ids: list[int],
        inputs: tuple[View, Tree, Tree],
        round: Round,
        destinations: Callable[[int], Destination] | None,
    ) -> Tree:
        """Compute one stage of the method for a chunk of clients."""
        shape = shape_of(self.shards, ids, batched=self._batched)
        clock = Clock(round.index, round.horizon)

        def one(view: View, message: Tree, state: Tree) -> Tree:
            client = Client(self.problem, self.shards, view, shape, clock)
            made = stage.code(client, message, state)
            return checked_stage(stage.code, made, state, self.problem.model.whole)

        call = _explained(vmap(one, in_dims=(0, tree.dims(inputs[1]), 0)))
        # It is read only where the recipe fixes the number of steps.
        smallest = shape.smallest if self.problem.recipe.steps else None
        key = stage.code, stage.trace_key, smallest, *shape.even.items()
        asked = clock if stage.trace_key is None else None
        return self._executor(key, call, inputs, asked, destinations)


class _AsWritten:
    """Executes every call as it is written; ``why`` is the reason if tracing was asked for."""

    def __init__(self, why: str) -> None:
        self._why, self._seen = why, dict[str, Form]()

    @property
    def forms(self) -> tuple[Form, ...]:
        """One form per stage if there is a reason to report, else none."""
        return tuple(self._seen.values()) if self._why else ()

    def __call__(
        self,
        key: Hashable,
        call: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
        destinations: Callable[[int], Destination] | None = None,
    ) -> Tree:
        """Return ``call(*inputs)``."""
        code = key[0] if isinstance(key, tuple) else key
        stage = getattr(code, "__qualname__", str(code))
        form = self._seen.setdefault(stage, Form(stage, stage, WRITTEN, self._why))
        with form.timed():
            return call(*inputs)


class _Stage(NamedTuple):
    """A function of the method that is computed for every client, and what follows it."""

    code: Callable[[Client, Tree, Tree], Tree]  # ``local`` or ``predictor`` of a method
    trace_key: Hashable | None
    finish: Callable[[Tree, list[int]], Tree]
    in_place: bool  # whether ``finish`` returns the same tensors, so they may lie in buffers


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _refuse_untraced(package: ModuleType | None, before: Mapping[str, str] | None) -> None:
    """Refuse to resume without tracing a run that was traced: the last bits would differ."""
    ways = sorted({way for way in (before or {}).values() if way != WRITTEN})
    if ways and package is None:
        raise EngineError(
            f"engine.trace: calls were {' and '.join(ways)} when the run began, and now they would "
            f"be executed as written ({MISSING}, or engine.trace is false): the last bits of the "
            "results would differ; resume where the run began, or start a new run"
        )


def _refuse_recurrent(problem: Problem) -> None:
    layers = [m for m in problem.model.module.modules() if isinstance(m, nn.RNNBase)]
    if layers:
        raise EngineError(
            f"engine.name: 'vmap' computes many clients at once, and torch cannot do that with "
            f"{type(layers[0]).__name__} layers; use engine.name = 'loop' (or 'auto')"
        )


def _explained(call: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wrap a call: if torch cannot batch an operation over clients, the error says what to do."""

    def explained(*inputs: Tree) -> Tree:
        try:
            return call(*inputs)
        except RuntimeError as error:
            if "atching rule" not in str(error) and "vmap" not in str(error):
                raise
            raise EngineError(
                f"engine.name: 'vmap' cannot compute this model or method for many clients at "
                f"once ({error}); use engine.name = 'loop' (or 'auto')"
            ) from error

    return explained


# ---- cuts clients into chunks -------------------------------------------------------------------


def overhead_of(problem: Problem) -> int:
    """What a step of a chunk costs beside its clients' own work, as a number of clients."""
    if problem.device.type == "cpu":
        return _CPU
    return gpu_overhead(_PASSES * forward_operations(problem))


def gpu_overhead(operations: int) -> int:
    """The overhead on a GPU, where a client's step has so many floating-point operations."""
    return max(1, min(_GPU_MOST, round(_GPU_OPERATIONS / max(1, operations))))


def forward_operations(problem: Problem) -> int:
    """The floating-point operations of a model's forward pass over one batch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.model.module(problem.blank_batch())
    return int(counter.get_total_flops())


def similar(order: list[int], steps: Sequence[int], most: int, overhead: int) -> list[list[int]]:
    """Clients in the order of their steps, in chunks of :func:`runs_of_similar`, longest first.

    Threads that begin with the most work share the rest.
    """
    runs = runs_of_similar(tuple(steps), most, overhead)
    return [order[start:stop] for start, stop in reversed(runs)]


@lru_cache(maxsize=64)  # the same in every round
def runs_of_similar(steps: tuple[int, ...], most: int, overhead: int) -> tuple[Run, ...]:
    """Cut sorted numbers of steps into runs of at most ``most`` clients, at the lowest cost.

    Returns ``(start, stop)`` of each run. Clients of equally many steps are cut only where a run
    would be longer than ``most``; all pieces of such a run are about equally long.

    >>> runs_of_similar((10, 10, 10, 80), most=20, overhead=2)
    ((0, 3), (3, 4))
    >>> runs_of_similar((10, 10, 10, 80), most=20, overhead=64)
    ((0, 4),)
    """
    ends = [at for at in range(1, len(steps)) if steps[at - 1] != steps[at]] + [len(steps)]
    starts = [0, *ends[:-1]]
    best = [(0, 0)]  # cost of all clients before an end; where its run began
    for last, stop in enumerate(ends):
        tried = []
        for first in range(last + 1):
            clients = stop - starts[first]
            pieces = -(-clients // most)
            tried.append((best[first][0] + steps[stop - 1] * (overhead * pieces + clients), first))
        best.append(min(tried))
    found: list[Run] = []
    last = len(ends)
    while last:
        first = best[last][1]
        found = _pieces(starts[first], ends[last - 1], most) + found
        last = first
    return tuple(found)


def _pieces(start: int, stop: int, most: int) -> list[Run]:
    count = -(-(stop - start) // most)
    each = -(-(stop - start) // count)
    return [(at, min(at + each, stop)) for at in range(start, stop, each)]


# ---- collects the rows of chunks, if possible without copies ------------------------------------


class Gathered:
    """Collects the rows of all chunks in one tensor per leaf."""

    def __init__(self, count: int, empty: Empty) -> None:
        self._count, self._empty, self._making = count, empty, Lock()
        self._buffers: dict[int, Tensor] = {}  # by the index of a result: its preallocated buffer
        self._rows: dict[int, Tensor] = {}  # by the index of a leaf: its rows, maybe in a buffer
        self._like: Tree = None

    @property
    def rows(self) -> Tree:
        """The rows of all chunks."""
        leaves = iter(range(len(self._rows)))
        return tree.map_leaves(lambda _: self._rows[next(leaves)], self._like)

    def destinations(self, chunk: Chunk) -> Callable[[int], Destination] | None:
        """Slices of preallocated buffers for a chunk's results, so that they need no copy."""
        if not in_order(chunk):
            return None

        def destination(at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            with self._making:
                if at not in self._buffers:
                    self._buffers[at] = self._allocated(shape, dtype, torch.device("cpu"))
            return self._buffers[at][span(chunk)]

        return lambda at: partial(destination, at)

    def put(self, chunk: Chunk, part: Tree) -> None:
        """Store the rows of a chunk."""
        self._like = part
        for at, leaf in enumerate(tree.leaves(part)):
            if in_order(chunk) and len(chunk) == self._count:
                self._rows[at] = leaf
                continue
            with self._making:
                if at not in self._rows:
                    self._rows[at] = self._buffer(at, leaf)
            _put(self._rows[at], chunk, leaf)

    def _buffer(self, at: int, leaf: Tensor) -> Tensor:
        """The preallocated buffer if its shape and dtype match, else a new one."""
        made = self._buffers.get(at)
        if made is not None and (made.shape[1:], made.dtype) == (leaf.shape[1:], leaf.dtype):
            return made
        return self._allocated(leaf.shape, leaf.dtype, leaf.device)

    def _allocated(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._empty(torch.Size((self._count, *shape[1:])), dtype, device)


def _put(rows: Tensor, chunk: Chunk, leaf: Tensor) -> None:
    if not in_order(chunk):
        rows.index_copy_(0, torch.tensor(chunk, device=rows.device), leaf)
        return
    place = rows[span(chunk)]
    if place.data_ptr() != leaf.data_ptr() or not leaf.is_contiguous():
        place.copy_(leaf)


def span(chunk: Chunk) -> slice:
    """The slice of the rows of a chunk of consecutive positions."""
    return slice(chunk[0], chunk[-1] + 1)


def rows_of(rows: Tree, chunk: Chunk) -> Tree:
    """The rows of a chunk; a view if its positions are consecutive, else a copy."""
    if in_order(chunk):
        return tree.map_leaves(lambda leaf: leaf[span(chunk)], rows)
    return tree.take(rows, torch.tensor(chunk))


def in_order(positions: Chunk) -> bool:
    """Whether the positions are consecutive and ascending."""
    return positions == list(range(positions[0], positions[0] + len(positions)))
