"""Many clients at once: ``torch.func.vmap`` around one client's code.

Clients of alike length are computed together, in chunks that fit the memory budget, so that little
is padding and weights stay in cache. On a CPU the chunks are shared out among threads, which never
wait for each other.
"""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from ..compiled.executor import Player
from ..compiled.kernels import native
from ..compiled.memory import keep_freed_memory, roomy
from ..compiled.trace import Room
from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.batches import View, shape_of, views
from ..core.client import Client, Clock
from ..core.paired import Answers
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from .base import Computed, Evaluation, Form, Predicted, Scores, state_device
from .evaluation import answers, blocks_of, judge, kept, outcomes, outputs

Chunk = list[int]  # positions among the round's clients


class VmapBackend:
    """Many clients at once on one CPU or GPU; new states are moved to where ``state`` says."""

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        chunk: int = 20,
        state: str = "device",
        threads: int = 1,
        play: bool = True,
        compiled: bool = False,
        before: Mapping[str, str] | None = None,
    ) -> None:
        _refuse_recurrent(problem)
        self.problem, self.shards, self.chunk = problem, shards, chunk
        self._state_device = state_device(state, problem.device)
        on_gpu = problem.device.type == "cuda"
        self.threads = threads if play and not on_gpu else 1
        self.compiled = compiled and play and not on_gpu and native.compiler() is not None
        self._batched = on_gpu or chunk > 1  # else its models are large: one at a time, too
        layers = [slot.shape.numel() for slot in problem.model.slots]
        self._player = (
            Player(capture=on_gpu, compiled=self.compiled, layers=layers, before=before)
            if play
            else None
        )
        if play and not on_gpu:
            keep_freed_memory()

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved."""
        return {
            "engine": "vmap",
            "chunk": self.chunk,
            "play": self._player is not None,
            "compiled": self.compiled,
            "compiler": native.version() if self.compiled else None,
            "kernels": native.sources(),
            "threads": self.threads,
        }

    @property
    def forms(self) -> tuple[Form, ...]:
        """How each form of a call was done so far."""
        return () if self._player is None else self._player.forms

    def chunks(self, ids: list[int]) -> list[Chunk]:
        """Positions of clients of alike size, at most ``chunk`` together, evenly for all threads.

        With batch norm their sizes are equal: padding would enter the statistics of a batch.
        """
        sizes = self.shards.splits["train"].sizes
        turns = -(-len(ids) // (self.chunk * self.threads))
        most = -(-len(ids) // max(1, turns * self.threads))
        order = sorted(range(len(ids)), key=lambda position: sizes[ids[position]])
        parts = [order]
        if self.problem.model.coupled:
            parts = [list(same) for _, same in groupby(order, key=lambda at: sizes[ids[at]])]
        return [p[i : i + most] for p in parts for i in range(0, len(p), max(1, most))]

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, a row a client."""

        def finish(result: Tree, ids: list[int]) -> Tree:
            uploads, new = result
            return uploads, tree.move(new, self._state_device)

        chapter = algorithm.chapter(round.index, round.horizon)
        stage = _Stage(algorithm.local, chapter, finish, as_it_is=self.problem.device.type == "cpu")
        uploads, new = self._each(stage, received, states, round)
        return uploads, new

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """Everybody: rows of one tensor have one layout."""
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
        """How good the predictors are, and the predictors on the CPU."""
        model, shards, regression = self.problem.model, self.shards, self.problem.regression
        said: dict[int, Answers] = {}

        def predicted(mixture: Mixture, ids: list[int], name: str) -> Tensor:
            def answer(mixture: Mixture, index: Tensor) -> Tensor:
                return outputs(model, mixture, shards.inputs(index), regression)

            blocks = blocks_of(shards.splits[name].rows(ids))
            call = vmap(answer)
            return torch.cat([self._run("answer", call, (mixture, b)) for b in blocks], 1)

        def finish(mixture: Mixture, ids: list[int]) -> Tree:
            columns: list[Scores] = []
            for name in ("test", "val"):
                found = predicted(mixture, ids, name)
                columns += judge(shards, metric, ids, name, found)
                if name == "test" and keep:
                    said.update(answers(shards, metric, ids, found))
            return torch.from_numpy(np.stack(columns, 1)), kept(mixture, keep)

        chapter = algorithm.chapter(round.index, round.horizon)
        stage = _Stage(algorithm.predictor, chapter, finish, as_it_is=False)
        table, mixture = self._each(stage, served, states, round)
        test, test_loss, val, val_loss = table.numpy().T
        evaluation = Evaluation(test, val, test_loss, val_loss)
        return Predicted(evaluation, mixture, outcomes(said, round))

    def _each(self, stage: "_Stage", message: Tree, states: Tree, round: Round) -> Tree:
        """Map one client's code over all clients chunk by chunk, rows in the round's order."""
        everyone = round.clients.tolist()

        def done(chunk: Chunk) -> None:
            ids = [everyone[i] for i in chunk]
            view = views(self.problem, self.shards, ids, round.index)
            row = tree.move(_rows(message, chunk), self.problem.device)
            state = tree.move(_rows(states, chunk), self.problem.device)
            rooms = gathered.rooms(chunk) if stage.as_it_is else None
            made = self._mapped(stage, ids, (view, row, state), round, rooms)
            gathered.put(chunk, stage.finish(made, ids))

        gathered = _Gathered(len(everyone))
        self._share_out(done, self.chunks(everyone))
        return gathered.rows

    def _share_out(self, done: Callable[[Chunk], None], chunks: list[Chunk]) -> None:
        """All chunks, by threads that compute alone: together they would wait for each other."""
        if self.problem.device.type != "cpu":
            for chunk in chunks:
                done(chunk)
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(min(self.threads, len(chunks))) as pool:
                list(pool.map(done, chunks))
        finally:
            torch.set_num_threads(before)

    def _mapped(
        self,
        stage: "_Stage",
        ids: list[int],
        inputs: tuple[View, Tree, Tree],
        round: Round,
        rooms: Callable[[int], Room] | None,
    ) -> Tree:
        """One stage of the method for a chunk of clients."""
        shape = shape_of(self.shards, ids, batched=self._batched)
        clock = Clock(round.index, round.horizon)

        def one(view: View, message: Tree, state: Tree) -> Tree:
            return stage.code(Client(self.problem, self.shards, view, shape, clock), message, state)

        call = _explained(vmap(one, in_dims=(0, tree.dims(inputs[1]), 0)))
        smallest = shape.smallest if self.problem.recipe.steps else None  # else nothing reads it
        key = stage.code, stage.chapter, smallest, *shape.even.items()
        return self._run(key, call, inputs, clock if stage.chapter is None else None, rooms)

    def _run(
        self,
        key: Hashable,
        call: Callable[..., Tree],
        inputs: tuple[Tree, ...],
        clock: Clock | None = None,
        rooms: Callable[[int], Room] | None = None,
    ) -> Tree:
        if self._player is None:
            return call(*inputs)
        return self._player(key, call, inputs, clock, rooms)


class _Stage(NamedTuple):
    """What is done for every client."""

    code: Callable[[Client, Tree, Tree], Tree]  # ``local`` or ``predictor`` of a method
    chapter: Hashable | None
    finish: Callable[[Tree, list[int]], Tree]
    as_it_is: bool  # whether ``finish`` leaves the tensors as they are


class _Gathered:
    """Rows of all clients, put together as they come."""

    def __init__(self, count: int) -> None:
        self._count, self._making = count, Lock()
        self._rooms: dict[int, Tensor] = {}  # of each tensor that is made, by its number
        self._rows: dict[int, Tensor] = {}  # of each leaf that was put, which may be in a room
        self._like: Tree = None

    @property
    def rows(self) -> Tree:
        """Everything that was put here."""
        leaves = iter(range(len(self._rows)))
        return tree.map_leaves(lambda _: self._rows[next(leaves)], self._like)

    def rooms(self, chunk: Chunk) -> Callable[[int], Room] | None:
        """Where the leaves of a chunk will lie, so that they need not be copied there."""
        if not _in_order(chunk):
            return None

        def room(at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            with self._making:
                if at not in self._rooms:
                    self._rooms[at] = self._empty(shape, dtype, torch.device("cpu"))
            return self._rooms[at][_span(chunk)]

        return lambda at: partial(room, at)

    def put(self, chunk: Chunk, part: Tree) -> None:
        """The rows of some positions."""
        self._like = part
        for at, leaf in enumerate(tree.leaves(part)):
            if _in_order(chunk) and len(chunk) == self._count:
                self._rows[at] = leaf
                continue
            with self._making:
                if at not in self._rows:
                    self._rows[at] = self._place(at, leaf)
            _put(self._rows[at], chunk, leaf)

    def _place(self, at: int, leaf: Tensor) -> Tensor:
        """The room that was made for it, if it is that; or else another."""
        made = self._rooms.get(at)
        if made is not None and (made.shape[1:], made.dtype) == (leaf.shape[1:], leaf.dtype):
            return made
        return self._empty(leaf.shape, leaf.dtype, leaf.device)

    def _empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return roomy(torch.Size((self._count, *shape[1:])), dtype, device)


def _put(rows: Tensor, chunk: Chunk, leaf: Tensor) -> None:
    if not _in_order(chunk):
        rows.index_copy_(0, torch.tensor(chunk, device=rows.device), leaf)
        return
    place = rows[_span(chunk)]
    if place.data_ptr() != leaf.data_ptr() or not leaf.is_contiguous():
        place.copy_(leaf)


def _span(chunk: Chunk) -> slice:
    return slice(chunk[0], chunk[-1] + 1)


def _rows(rows: Tree, chunk: Chunk) -> Tree:
    """The rows of a chunk; neighbours as they lie."""
    if _in_order(chunk):
        return tree.map_leaves(lambda leaf: leaf[_span(chunk)], rows)
    return tree.take(rows, torch.tensor(chunk))


def _in_order(positions: Chunk) -> bool:
    return positions == list(range(positions[0], positions[0] + len(positions)))


def _refuse_recurrent(problem: Problem) -> None:
    layers = [m for m in problem.model.module.modules() if isinstance(m, nn.RNNBase)]
    if layers:
        raise EngineError(
            f"engine.name: 'vmap' computes many clients at once, and torch cannot do that with "
            f"{type(layers[0]).__name__} layers; use engine.name = 'loop' (or 'auto')"
        )


def _explained(call: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same call; an operation that torch cannot batch over clients says what to do."""

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
