"""The features of a client's samples: what enters the head of its network."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.batches import Batch
from ..core.client import Client
from ..core.flat import FlatModel
from ..errors import ConfigError
from .lgfedavg import Layers


class Entrance(NamedTuple):
    """The first layer of a head, a linear one, and its places in a model's vector."""

    layer: str
    width: int  # d, of the features
    weight: slice
    bias: slice

    def features(self, client: Client, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's outputs for a batch, and its features ``[B, d]``: a mean over positions."""
        output, entering = client.entering(self.layer, w, batch)
        return output, entering.flatten(1, -2).mean(1) if entering.dim() > 2 else entering

    def shifted(self, w: Tensor, m: Tensor) -> Tensor:
        """The model ``h(f(x) + m)``: its bias is that of ``h`` plus the weight times ``m``."""
        weight, bias = w[self.weight].view(-1, self.width), w[self.bias]
        return torch.cat([w[: self.bias.start], bias + weight @ m, w[self.bias.stop :]])

    def mean(self, features: Tensor, batch: Batch) -> Tensor:
        """The mean of a batch's features ``[d]``."""
        if batch.mask is None:
            return features.mean(0)
        return (features * batch.mask[:, None]).sum(0) / batch.mask.sum().clamp(min=1)


@lru_cache(maxsize=8)
def entrance(model: FlatModel, head: Layers, field: str) -> Entrance:
    """Where a head begins; refuses one whose first layer is not linear with a bias."""
    names = model.layers()
    named = (
        names[max(0, len(names) - head) :]
        if isinstance(head, int)
        else [name for name in names if any(f"{name}.".startswith(f"{part}.") for part in head)]
    )
    model.positions(() if isinstance(head, int) else head)  # refuses layers that do not exist
    layer = model.module.get_submodule(named[0]) if named else None
    slots = {slot.name: slot for slot in model.slots}
    prefix = f"{named[0]}." if named and named[0] else ""
    if type(layer) is not nn.Linear or not {f"{prefix}weight", f"{prefix}bias"} <= slots.keys():
        found = f"begins with '{named[0]}', a {type(layer).__name__}" if named else "has no layer"
        raise ConfigError(
            f"{field}: the head {found}; expected nn.Linear with a bias and weights of its own: "
            "name other layers, or take another network"
        )
    weight, bias = slots[f"{prefix}weight"], slots[f"{prefix}bias"]
    return Entrance(
        named[0], layer.in_features, slice(weight.start, weight.stop), slice(bias.start, bias.stop)
    )


def class_shares(client: Client, batch: Batch, count: int, dtype: torch.dtype) -> Tensor:
    """The share of each class in a sample's targets ``[B, count]``; a regression has one class."""
    y = batch.y if client.classes else torch.zeros_like(batch.y, dtype=torch.int64)
    each = (y[..., None] == torch.arange(count, device=y.device)).to(dtype)
    return each.flatten(1, -2).mean(1) if each.dim() > 2 else each


def average_of(client: Client, of: Callable[[Batch], Tensor]) -> Tensor:
    """The mean of ``of(batch) [B, d]`` over the client's training samples; zero without any."""
    total, count = client.size.new_zeros(()).to(client.lr.dtype), client.lr.new_zeros(())
    for block in client.blocks("train"):
        found = of(block)
        inside = torch.ones_like(found[:, 0]) if block.mask is None else block.mask
        total, count = total + (found * inside[:, None]).sum(0), count + inside.sum()
    return total / count.clamp(min=1)
