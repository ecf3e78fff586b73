"""Gradient steps outside the optimiser, bounded so that a step does not pass the line's minimum.

On the line w − tg a quadratic loss of curvature κ = g·Hg / g·g is smallest at t = 1/κ. The
curvature is estimated from a second gradient, a short way along the line. Cross-entropy and
distillation losses flatten further out, so that the curvature near w is the one that limits a step.
"""

import torch
from torch import Tensor

from .batches import Batch, Loss, SplitName
from .client import Client

PROBE = 1e-2  # how far along the line the second gradient is taken, relative to the length of w


def descend(client: Client, w: Tensor, g: Tensor, rate: Tensor | float) -> Tensor:
    """``w − rate · g`` for the parameters; batch-norm statistics in ``w`` stay unchanged."""
    moved = client.trainable(w) - rate * client.trainable(g)
    return torch.cat([moved, w[len(moved) :]])


def step_share(g: Tensor, ahead: Tensor, probe: Tensor | float, rate: Tensor | float) -> Tensor:
    """The share of a step ``rate · g``, at most 1, that ends at the smallest loss on its line.

    ``g`` is the gradient at w and ``ahead`` the gradient at w − probe · g.

    >>> step_share(torch.tensor([1.0, 0.0]), torch.tensor([0.6, 5.0]), 0.1, 1.0)
    tensor(0.2500)
    """
    square = g @ g
    bend = (square - g @ ahead) * rate  # probe · rate · g·Hg
    return torch.where(bend > probe * square, probe * square / bend, 1.0)


def bounded_gradient(
    client: Client,
    w: Tensor,
    on: Batch | SplitName,
    rate: Tensor | float,
    loss: Loss | None = None,
) -> Tensor:
    """The gradient, shortened where a step of this rate along it would pass the line's minimum."""
    g = client.gradient(w, on, loss)
    length, reach = (client.trainable(v).norm() for v in (g, PROBE * w))
    probe = reach.clamp(min=PROBE) / length.clamp(min=torch.finfo(w.dtype).tiny)
    ahead = client.gradient(descend(client, w, g, probe), on, loss)
    return g * step_share(client.trainable(g), client.trainable(ahead), probe, rate)
