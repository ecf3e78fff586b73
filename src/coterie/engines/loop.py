"""The reference backend: computes one client at a time, without padding and without vmap.

It runs models that vmap cannot, and an exception names the client, the round and the stage.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Predictor, Round
from ..core.answers import Answers
from ..core.batches import shape_of, views
from ..core.calls import Clock, Form
from ..core.client import Client
from ..core.locations import checked_stage
from ..core.messages import Reply, admit
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import CoterieError, EngineError
from .base import JUDGED, Computed, Evaluation, Predicted
from .evaluation import answers, blocks_of, judge, kept, outcomes, outputs

T = TypeVar("T")


def together(
    replies: Sequence[Reply], round: Round, stacked: Callable[[Sequence[Reply]], tuple[Tree, Tree]]
) -> Computed:
    """Stack separate replies into rows; replies without the most common layout are rejected."""
    admitted, rejected = admit(replies, round)
    clients = torch.tensor([reply.client for reply in admitted], dtype=torch.int64)
    clients = clients.to(round.clients.device)
    if not admitted:
        return Computed((), (), clients, rejected)
    return Computed(*stacked(admitted), clients, rejected)


class LoopBackend:
    """Computes one client at a time."""

    forms: tuple[Form, ...] = ()  # every call is executed as it is written

    def __init__(self, problem: Problem, shards: Shards, *, threads: int | None = None) -> None:
        self.problem, self.shards, self.threads = problem, shards, threads

    @property
    def choice(self) -> dict[str, Any]:
        return {"engine": "loop", "threads": self.threads or torch.get_num_threads()}

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        return stacked(list(self.replies(algorithm, received, states, round)))

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        replies = list(self.replies(algorithm, received, states, round))
        return together(replies, round, stacked)

    def replies(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Iterator[Reply]:
        """The reply of each client of the round, whatever its layout."""
        for client, message, state in self._clients(received, states, round):
            result = self._named(algorithm.local, client, message, state)
            yield Reply(int(client.id), round.index, *result)

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
        table, mixtures = [], []
        said: dict[int, Answers] = {}
        for client, message, state in self._clients(served, states, round):
            mixture = self._named(algorithm.predictor, client, message, state)
            table.append(self.judged(mixture, int(client.id), metric, said if keep else None))
            mixtures.append(kept(mixture, keep))
        evaluation = Evaluation.of(np.array(table))
        return Predicted(evaluation, tree.stack(mixtures), outcomes(said, round))

    def judged(
        self, mixture: Predictor, client: int, metric: str, said: dict[int, Answers] | None
    ) -> list[float]:
        """Scores and losses of one predictor; its answers are added to ``said`` if given."""
        shards, model, row = self.shards, self.problem.model, []
        for name in JUDGED:
            split = tree.row(shards.splits[name].rows([client]), 0)
            predicted, at = None, 0  # one tensor: small ones between blocks fragment the memory
            for block in blocks_of(split):
                found = outputs(model, mixture, shards.inputs(block), self.problem.regression)
                if predicted is None:
                    predicted = found.new_empty(1, len(split.samples), *found.shape[1:])
                predicted[0, at : (at := at + len(found))] = found
            assert predicted is not None
            score, loss = judge(shards, metric, [client], name, predicted)
            if name == "test" and said is not None:
                said |= answers(shards, metric, [client], predicted)
            row += [float(score[0]), float(loss[0])]
        return row

    def _clients(
        self, message: Tree, states: Tree, round: Round
    ) -> Iterator[tuple[Client, Tree, Tree]]:
        problem, shards, clock = self.problem, self.shards, Clock(round.index, round.horizon)
        for position, client in enumerate(round.clients.tolist()):
            view = tree.row(views(problem, shards, [client], round.index), 0)
            shape = shape_of(shards, [client], batched=False)
            row = tree.move(tree.row(message, position), problem.device)
            state = tree.move(tree.row(states, position), problem.device)
            yield Client(problem, shards, view, shape, clock), row, state

    def _named(
        self, stage: Callable[[Client, Tree, Tree], T], client: Client, message: Tree, state: Tree
    ) -> T:
        """Run one client's code; an error names the client, the stage and the round."""
        try:
            made = stage(client, message, state)
            return checked_stage(stage, made, state, self.problem.model.whole)  # type: ignore[no-any-return]
        except CoterieError:
            raise
        except Exception as error:
            name = self.problem.clients[int(client.id)]
            where = f"{stage.__name__}() of round {client.round}"
            raise EngineError(f"client '{name}' failed in {where}: {error}") from error


def stacked(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    """The uploads and the new states of replies of one layout, one row per client."""
    uploads = tree.stack([reply.upload for reply in replies])
    return uploads, tree.stack([reply.state for reply in replies])
