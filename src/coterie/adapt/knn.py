"""kNN-Per: the client's own nearest neighbours answer beside the model (Marfoq et al., ICML 2022).

    p(y | x) = λ Σ_{i near x} 1{y_i = y} e^{−d_i} / Σ_{i near x} e^{−d_i} + (1 − λ) h(x)

d_i is the distance of x to training sample i in the features that enter the model's last layer, and
the k nearest count. λ is chosen among 0, 0.1, …, 1 by the client's own validation data.

Travels: nothing; the training samples' features stay with the client that predicts.

Notes:
    λ has the smallest loss of the mixture on validation data, the smaller one of equals; where a
    client has no validation data of its own, or no training data, λ = 0: the model alone.
    In a regression the neighbours' answer is the weighted mean of their targets.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.batches import Batch
from ..core.client import Client
from ..core.flat import FlatModel
from ..core.problem import Problem
from ..core.ranges import Auto, Count, Share
from ..core.tree import Tree
from ..errors import ConfigError
from .base import Adaptation
from .ft import top_layer

STEPS = 11  # candidates for λ


class Datastore(NamedTuple):
    """What one client's neighbours are looked up in."""

    features: Tensor  # [n, d]
    values: Tensor  # [n, C] one-hot classes, or targets [n, 1]
    held: Tensor  # [n] 1, and 0 for padding
    nearest: Tensor  # [] k
    share: Tensor  # [] λ


def said(memory: Datastore, features: Tensor) -> Tensor:
    """The neighbours' answer ``[B, C]``: zero where there are none.

    >>> held = torch.ones(2)
    >>> one = Datastore(torch.tensor([[0.0], [1.0]]), torch.eye(2), held, held[0], held[0])
    >>> said(one, torch.tensor([[0.2]]))
    tensor([[1., 0.]])
    """
    apart = torch.cdist(features, memory.features)
    apart = torch.where(memory.held > 0, apart, torch.inf)
    near, order = apart.sort(-1)
    inside = (torch.arange(near.shape[-1], device=near.device) < memory.nearest) & near.isfinite()
    weight = torch.where(inside, (near[:, :1] - near).nan_to_num(0.0).exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    return (weight[..., None] * memory.values[order]).sum(1) / total.clamp(min=1e-30)


def answered(model: FlatModel, w: Tensor, x: Tensor, memory: Datastore, regression: bool) -> Tensor:
    """What the model and the neighbours answer together ``[B, C]``; values ``[B, 1]``."""
    output, entering = model.entering(top_layer(model), w, x)
    output = output if regression else output.softmax(-1)
    return output + memory.share * (said(memory, entering.flatten(1)) - output)


@dataclass(frozen=True)
class NearestNeighbours(Adaptation):
    """Nearest neighbours (knn): the client's own samples answer beside the model.

    Fields:
        k: how many neighbours answer.
        share: λ, the share of the neighbours' answer; ``auto`` chooses by validation data, 0 is
            the model alone.
    """

    k: Count = 10
    share: Share | Auto = "auto"

    @property
    def remembers(self) -> bool:
        return True

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Refuse a network whose last layer does not have rows of features as input."""
        model, whole = (
            problem.model,
            problem.model.joined(problem.start[: problem.model.parameters], problem.statistics),
        )
        entering = model.entering(top_layer(model), whole, problem.blank(2))[1]
        if entering.shape[0] != 2:
            raise ConfigError(
                f"adapt: knn reads the input of the layer '{top_layer(model)}', which has shape "
                f"{list(entering.shape)} for two samples; expected one row for each"
            )

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        return w

    def memory(self, client: Client, w: Tensor) -> Datastore:
        """The client's training samples, and the share that its validation data prefers."""
        kept = [self._read(client, w, block) for block in client.blocks("train")]
        features, _, values, held = (torch.cat(part) for part in zip(*kept, strict=True))
        count = torch.zeros_like(client.lr) + self.k
        found = Datastore(features, values, held, count, torch.zeros_like(client.lr))
        return found._replace(share=self._share(client, w, found))

    def _read(
        self, client: Client, w: Tensor, block: Batch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features, answers and targets of a block, and which of its samples are no padding."""
        output, entering = client.entering(top_layer(client.model), w, block)
        if block.y.dim() > 1:
            raise ConfigError("adapt: knn needs one target per sample; use another adaptation")
        held = torch.ones_like(output[:, 0]) if block.mask is None else block.mask
        if not client.classes:
            return entering.flatten(1), output, block.y[:, None].to(output.dtype), held
        one_hot = block.y[:, None] == torch.arange(client.classes, device=block.y.device)
        return entering.flatten(1), output.softmax(-1), one_hot.to(output.dtype), held.to(w.dtype)

    def _share(self, client: Client, w: Tensor, memory: Datastore) -> Tensor:
        """λ, as given or with the smallest loss on validation data."""
        if self.share != "auto":
            return torch.where(client.size > 0, memory.share + self.share, memory.share)
        grid = torch.linspace(0, 1, STEPS, dtype=w.dtype, device=w.device)
        total = torch.zeros_like(grid)
        for block in client.blocks("val"):
            features, output, values, held = self._read(client, w, block)
            mixed = output + grid[:, None, None] * (said(memory, features) - output)
            if client.classes:
                losses = -(mixed * values).sum(-1).clamp(min=1e-7).log()
            else:
                losses = ((mixed - values) ** 2).sum(-1)
            total = total + (losses * held).sum(-1)
        best = grid[total.argmin()]
        return torch.where(client.validated & (client.size > 0), best, 0.0)
