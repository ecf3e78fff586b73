"""Fine-tuning: each client continues to train the model, or its top layer, on its own data.

    w_i ← LocalTrain(w)           all of w (ft), or its last layer with the others as they are (fb)

Travels: nothing.

Notes:
    The optimiser begins anew, and trains as in a round unless ``epochs`` or ``lr`` say otherwise.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.flat import FlatModel
from ..core.problem import Problem
from ..core.tree import Tree
from .base import Retraining


@dataclass(frozen=True)
class FineTune(Retraining):
    """Fine-tuning (ft): train a copy of the model on the client's own data."""

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        return self.tuned(client).train(w)


def top_layer(model: FlatModel) -> str:
    """The last module that owns a trainable parameter, tied parameters included."""
    last = [slot for slot in model.ordered() if slot.start < model.parameters][-1]
    return model.owner(last) or last.name


@lru_cache(maxsize=8)
def freed(model: FlatModel, names: tuple[str, ...]) -> tuple[Tensor, bool]:
    """Which entries ``[P]`` belong to the named layers, and whether all statistics do."""
    mask = torch.zeros(model.size, dtype=torch.bool)
    mask[model.positions(names)] = True
    device = next(model.module.parameters()).device
    return mask.to(device), bool(mask[model.parameters :].all())


@dataclass(frozen=True)
class FreezeBase(Retraining):
    """Freezebase (fb): train only the top layer of a copy of the model.

    Fields:
        fb_trainable: names of the layers that are trained; empty means the last layer.

    Notes:
        Public code freezes a number of tensors, which leaves most of an LSTM trainable, and lets
        the batch-norm statistics change (reading P3-6); here layers are frozen by name, and the
        statistics of frozen layers stay. Where some statistics stay, the network runs in evaluation
        mode while its head is trained: its batch norm uses the stored statistics.
    """

    fb_trainable: tuple[str, ...] = ()

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        client = client.tuned(epochs=self.epochs, lr=self.lr, still=True)
        free, moves = freed(client.model, self.fb_trainable or (top_layer(client.model),))
        fixed = client.model.apart or not moves  # apart, statistics are one set, which stays

        def as_evaluated(w: Tensor, batch: Batch) -> Tensor:
            return mean(client.losses_of(client.outputs(w, batch), batch), batch.mask)

        return client.train(w, only=free, loss=as_evaluated if fixed else None)

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        problem.model.positions(self.fb_trainable)
