"""Many clients at once: ``torch.func.vmap`` around one client's code.

Clients of alike length are computed together, in chunks that fit the memory budget, so that little
is padding and weights stay in cache.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from .. import tree
from ..algorithm import AnyAlgorithm, Mixture, Round
from ..client import Client, Shape
from ..task import Task, View
from ..tree import Tree
from .base import Evaluation, Replies, blocks_of, judge, outputs, shape_of

Chunk = list[int]  # positions among the round's clients


class VmapEngine:
    """The engine for one CPU or GPU."""

    def __init__(self, task: Task, *, chunk: int = 20, state: str = "device") -> None:
        self.task, self.chunk, self.state = task, chunk, state

    @property
    def state_device(self) -> torch.device:
        """Where the clients' state is kept between rounds."""
        return torch.device("cpu") if self.state == "host" else self.task.device

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved."""
        return {
            "engine": "vmap",
            "chunk": self.chunk,
            "state": self.state,
            "threads": torch.get_num_threads(),
        }

    def chunks(self, ids: list[int]) -> list[Chunk]:
        """Positions of clients of alike size, at most ``chunk`` together."""
        sizes = self.task.splits["train"].sizes
        order = sorted(range(len(ids)), key=lambda position: sizes[ids[position]])
        return [order[i : i + self.chunk] for i in range(0, len(order), self.chunk)]

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, a row a client."""

        def one(shape: Shape) -> Callable[[View, Tree, Tree], Tree]:
            def call(view: View, message: Tree, state: Tree) -> Tree:
                client = Client(self.task, view, shape, round.index, round.horizon)
                return algorithm.local(client, message, state)

            return call

        def finish(result: Tree, ids: list[int]) -> Tree:
            uploads, new = result
            return uploads, tree.move(new, self.state_device)

        uploads, new = self._each(one, finish, received, states, round)
        return uploads, new

    def exchange(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Replies:
        """Everybody: rows of one tensor have one form."""
        return Replies(*self.local(algorithm, received, states, round), round.clients)

    def predict(
        self, algorithm: AnyAlgorithm, served: Tree, states: Tree, round: Round, metric: str
    ) -> tuple[Evaluation, Mixture]:
        """How good the predictors are, and the predictors on the CPU."""
        task, cpu = self.task, torch.device("cpu")

        def one(shape: Shape) -> Callable[[View, Tree, Tree], Tree]:
            def call(view: View, message: Tree, state: Tree) -> Tree:
                client = Client(task, view, shape, round.index, round.horizon)
                return algorithm.predictor(client, message, state)

            return call

        def predicted(mixture: Mixture, ids: list[int], name: str) -> Tensor:
            def answer(mixture: Mixture, index: Tensor) -> Tensor:
                return outputs(task.model, mixture, task.inputs(index), task.regression)

            blocks = blocks_of(task.splits[name].rows(ids))
            return torch.cat([vmap(answer)(mixture, block) for block in blocks], 1)

        def finish(mixture: Mixture, ids: list[int]) -> Tree:
            both = [
                judge(task, metric, ids, name, predicted(mixture, ids, name))
                for name in ("test", "val")
            ]
            columns = [column for pair in both for column in pair]
            return torch.from_numpy(np.stack(columns, 1)), tree.move(mixture, cpu)

        table, mixture = self._each(one, finish, served, states, round)
        test, test_loss, val, val_loss = table.numpy().T
        return Evaluation(test, val, test_loss, val_loss), mixture

    def _each(
        self,
        one: Callable[[Shape], Callable[[View, Tree, Tree], Tree]],
        finish: Callable[[Tree, list[int]], Tree],
        message: Tree,
        states: Tree,
        round: Round,
    ) -> Tree:
        """Map one client's code over all clients chunk by chunk, rows in the round's order."""
        everyone, parts, order = round.clients.tolist(), [], []
        for chunk in self.chunks(everyone):
            ids, at = [everyone[i] for i in chunk], torch.tensor(chunk)
            view = self.task.views(ids, round.index)
            row = tree.move(tree.take(message, at), self.task.device)
            state = tree.move(tree.take(states, at), self.task.device)
            call = one(shape_of(self.task, ids, batched=True))
            result = vmap(call, in_dims=(0, tree.dims(row), 0))(view, row, state)
            parts.append(finish(result, ids))
            order += chunk
        back = torch.tensor(order).argsort()
        return tree.take(tree.concat(parts), back)
