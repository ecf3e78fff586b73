"""The reference: one client at a time, nothing padded, nothing batched.

It runs models that vmap cannot, and an exception names the client, the round and the stage.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.client import Client, Clock
from ..core.paired import Answers
from ..core.task import Task
from ..core.tree import Tree
from ..errors import CoterieError, EngineError
from ..training.guard import Reply, admit
from .base import (
    Evaluation,
    Form,
    Predicted,
    Replies,
    answers,
    blocks_of,
    judge,
    kept,
    outcomes,
    outputs,
    shape_of,
    state_device,
)

T = TypeVar("T")


def together(
    replies: Sequence[Reply],
    round: Round,
    stacked: Callable[[Sequence[Reply]], tuple[Tree, Tree]],
) -> Replies:
    """Separate messages as rows of one, those left out that cannot be."""
    admitted, rejected = admit(replies, round)
    clients = torch.tensor([reply.client for reply in admitted], dtype=torch.int64)
    if not admitted:
        return Replies((), (), clients.to(round.clients.device), rejected)
    return Replies(*stacked(admitted), clients.to(round.clients.device), rejected)


class LoopEngine:
    """One client at a time."""

    def __init__(self, task: Task, *, state: str = "device", threads: int | None = None) -> None:
        self.task, self.state, self.threads = task, state, threads

    @property
    def state_device(self) -> torch.device:
        """Where the clients' state is kept between rounds."""
        return state_device(self.state, self.task)

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved."""
        return {
            "engine": "loop",
            "state": self.state,
            "threads": self.threads or torch.get_num_threads(),
        }

    @property
    def forms(self) -> tuple[Form, ...]:
        """None: every call is done as it is written."""
        return ()

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, a row a client."""
        return self._stacked(list(self._replies(algorithm, received, states, round)))

    def exchange(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Replies:
        """Uploads and new states of those whose messages have the form of the others'."""
        replies = list(self._replies(algorithm, received, states, round))
        return together(replies, round, self._stacked)

    def _replies(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Iterator[Reply]:
        for client, message, state in self._clients(received, states, round):
            result = self._named(algorithm.local, client, message, state)
            yield Reply(int(client.id), round.index, *result)

    def _stacked(self, replies: Sequence[Reply]) -> tuple[Tree, Tree]:
        uploads = tree.stack([reply.upload for reply in replies])
        states = tree.stack([reply.state for reply in replies])
        return uploads, tree.move(states, self.state_device)

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
        table, mixtures = [], []
        said: dict[int, Answers] = {}
        for client, message, state in self._clients(served, states, round):
            mixture = self._named(algorithm.predictor, client, message, state)
            table.append(self._judged(mixture, int(client.id), metric, said if keep else None))
            mixtures.append(kept(mixture, keep))
        test, test_loss, val, val_loss = np.array(table).T
        evaluation = Evaluation(test, val, test_loss, val_loss)
        return Predicted(evaluation, tree.stack(mixtures), outcomes(said, round))

    def _judged(
        self, mixture: Mixture, client: int, metric: str, said: dict[int, Answers] | None
    ) -> list[float]:
        """Scores and losses of one predictor; its answers go into ``said`` where that is given."""
        task, row = self.task, []
        for name in ("test", "val"):
            split = tree.row(task.splits[name].rows([client]), 0)
            blocks = [
                outputs(task.model, mixture, task.inputs(block), task.regression)
                for block in blocks_of(split)
            ]
            predicted = torch.cat(blocks).unsqueeze(0)
            score, loss = judge(task, metric, [client], name, predicted)
            if name == "test" and said is not None:
                said |= answers(task, metric, [client], predicted)
            row += [float(score[0]), float(loss[0])]
        return row

    def _clients(
        self, message: Tree, states: Tree, round: Round
    ) -> Iterator[tuple[Client, Tree, Tree]]:
        for position, client in enumerate(round.clients.tolist()):
            view = tree.row(self.task.views([client], round.index), 0)
            shape = shape_of(self.task, [client], batched=False)
            row = tree.move(tree.row(message, position), self.task.device)
            state = tree.move(tree.row(states, position), self.task.device)
            clock = Clock(round.index, round.horizon)
            yield Client(self.task, view, shape, clock), row, state

    def _named(
        self, stage: Callable[[Client, Tree, Tree], T], client: Client, message: Tree, state: Tree
    ) -> T:
        """Run one client's code; what goes wrong in it says where."""
        try:
            return stage(client, message, state)
        except CoterieError:
            raise
        except Exception as error:
            name = self.task.federation.clients[int(client.id)]
            where = f"{stage.__name__}() of round {client.round}"
            raise EngineError(f"client '{name}' failed in {where}: {error}") from error
