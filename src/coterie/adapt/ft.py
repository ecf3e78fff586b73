"""Fine-tuning: each client continues to train the model, or its top layer, on its own data."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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


class Freed(NamedTuple):
    """The entries of a model's vector that may change."""

    mask: Tensor  # [P]
    statistics: bool  # whether all batch-norm statistics may change too


@lru_cache(maxsize=8)
def freed(model: FlatModel, names: tuple[str, ...], freeze_bn_stats: bool) -> Freed:
    """The entries of the named layers, and all statistics unless they are frozen."""
    mask = torch.zeros(model.size, dtype=torch.bool)
    mask[model.positions(names)] = True
    if not freeze_bn_stats:
        mask[model.parameters :] = True
    device = next(model.module.parameters()).device
    return Freed(mask.to(device), bool(mask[model.parameters :].all()))


@dataclass(frozen=True)
class FreezeBase(Retraining):
    """Freezebase (fb): train only the top layer of a copy of the model.

    Fields:
        fb_trainable: names of the layers that are trained; empty means the last layer.
        freeze_bn_stats: keep the batch-norm statistics of frozen layers.

    Notes:
        Public code freezes a number of tensors, which leaves most of an LSTM trainable, and lets
        the batch-norm statistics change (reading P3-6); here layers are frozen by name, and the
        statistics of frozen layers stay. Where some statistics stay, the network runs in evaluation
        mode while its head is trained: its batch norm uses the stored statistics.
    """

    fb_trainable: tuple[str, ...] = ()
    freeze_bn_stats: bool = True

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        apart = client.model.apart  # then statistics are one set: all of them change, or none
        client = client.tuned(epochs=self.epochs, lr=self.lr, still=self.freeze_bn_stats)
        names = self.fb_trainable or (top_layer(client.model),)
        free, moves = freed(client.model, names, self.freeze_bn_stats)
        fixed = not moves or (apart and self.freeze_bn_stats)

        def as_evaluated(w: Tensor, batch: Batch) -> Tensor:
            return mean(client.losses_of(client.outputs(w, batch), batch), batch.mask)

        return client.train(w, only=free, loss=as_evaluated if fixed else None)

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        problem.model.positions(self.fb_trainable)
