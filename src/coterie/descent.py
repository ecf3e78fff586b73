"""Gradient steps outside the optimiser, and how long one may be before the loss rises again.

Along a step from w to w − ηg the loss falls as long as its gradient still points along g. Where
the gradient at the end of the step, g', points back (g·g' < 0), the step has passed the minimum
along its line. A quadratic is at that minimum after the share g·g / (g·g − g·g') of the step.
"""

import torch
from torch import Tensor

from .client import Batch, Client, Loss, SplitName


def descend(client: Client, w: Tensor, g: Tensor, rate: Tensor | float) -> Tensor:
    """``w − rate · g``; batch-norm statistics stay, whatever the gradient says of them."""
    moved = client.trainable(w) - rate * client.trainable(g)
    return torch.cat([moved, w[len(moved) :]])


def step_share(g: Tensor, ahead: Tensor) -> Tensor:
    """The share of a step, at most 1, that ends where a quadratic loss is smallest on its line.

    ``g`` is the gradient before the step and ``ahead`` the gradient after the whole step.

    >>> step_share(torch.tensor([1.0, 0.0]), torch.tensor([-3.0, 5.0]))
    tensor(0.2500)
    """
    square, along = g @ g, g @ ahead
    return torch.where(along < 0, square / (square - along), 1.0)


def bounded_gradient(
    client: Client,
    w: Tensor,
    on: Batch | SplitName,
    rate: Tensor | float,
    loss: Loss | None = None,
) -> Tensor:
    """The gradient, shortened where a step of this rate along it would pass the line's minimum.

    Costs a second gradient, at the end of the step.
    """
    g = client.gradient(w, on, loss)
    ahead = client.gradient(descend(client, w, g, rate), on, loss)
    return g * step_share(client.trainable(g), client.trainable(ahead))
