"""The reference across a byte boundary: what a network engine does, in one process.

Every client receives its row as bytes, keeps its state as bytes and answers with bytes. It exists
to prove that no method leans on shared memory, and as the codec of engines on a real network.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ..core import paired, tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.task import Task
from ..core.tree import Bank, Tree
from ..training.guard import Reply
from .base import Evaluation, Form, Predicted, Replies
from .loop import LoopEngine, together


def pack(row: Tree) -> bytes:
    """One client's message as safetensors bytes. Of a Bank only the filled slots travel."""
    return save({str(i): leaf.clone().contiguous().cpu() for i, leaf in enumerate(_flat(row))})


def unpack(data: bytes, like: Tree) -> Tree:
    """The message back; ``like`` gives its structure, never its values."""
    named = load(data)
    return _build(like, iter([named[str(i)] for i in range(len(named))]))


def _flat(row: Tree) -> list[Tensor]:
    if isinstance(row, Tensor):
        return [row]
    if isinstance(row, Bank):
        return [row.models[row.slot[row.slot >= 0]], row.slot, row.owner]
    return [leaf for part in row for leaf in _flat(part)]


def _build(like: Tree, leaves: Iterator[Tensor]) -> Tree:
    if isinstance(like, Tensor):
        return next(leaves)
    if isinstance(like, Bank):
        models, slot, owner = next(leaves), next(leaves), next(leaves)
        filled = slot >= 0  # the sender's table did not travel: slots are numbered anew
        models = models if len(models) else models.new_zeros(1, models.shape[1])
        return Bank(models, torch.where(filled, filled.cumsum(-1) - 1, -1), owner)
    parts = [_build(part, leaves) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def _through(row: Tree) -> Tree:
    """A row after its journey, as rows of one client."""
    return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), unpack(pack(row), row))


class WireEngine:
    """One client at a time, everything it reads and writes through bytes."""

    def __init__(self, task: Task, *, state: str = "device", threads: int | None = None) -> None:
        self.task, self._loop = task, LoopEngine(task, state=state, threads=threads)

    @property
    def state_device(self) -> torch.device:
        """Where the clients' state is kept between rounds."""
        return self._loop.state_device

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved."""
        return {**self._loop.choice, "engine": "wire"}

    @property
    def forms(self) -> tuple[Form, ...]:
        """None: every call is done as it is written."""
        return ()

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, a row a client."""
        return _rows(list(self._replies(algorithm, received, states, round)))

    def exchange(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Replies:
        """Uploads and new states of those whose messages have the form of the others'."""
        return together(list(self._replies(algorithm, received, states, round)), round, _rows)

    def _replies(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Iterator[Reply]:
        for position, one in enumerate(_alone(round)):
            message, state = _through(tree.row(received, position)), tree.row(states, position)
            result = self._loop.local(algorithm, message, _through(state), one)
            upload, kept = (_through(tree.row(part, 0)) for part in result)
            yield Reply(int(one.clients), round.index, upload, kept)

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
        parts = []
        for position, one in enumerate(_alone(round)):
            message, state = (_through(tree.row(part, position)) for part in (served, states))
            parts.append(self._loop.predict(algorithm, message, state, one, metric, keep=keep))
        columns = zip(*(part.evaluation for part in parts), strict=True)
        evaluation = Evaluation(*(np.concatenate(column) for column in columns))
        said = [part.outcomes for part in parts if part.outcomes is not None]
        mixture = tree.concat([part.mixture for part in parts])
        return Predicted(evaluation, mixture, paired.join(said) if said else None)


def _rows(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    uploads = tree.concat([reply.upload for reply in replies])
    return uploads, tree.concat([reply.state for reply in replies])


def _alone(round: Round) -> Iterator[Round]:
    for client in round.clients:
        yield round._replace(clients=client.unsqueeze(0))
