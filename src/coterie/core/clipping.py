"""Clips vectors to a bounded norm, and adds noise to those that are shown to a peer."""

import math

import torch
from torch import Tensor


def clipped(vectors: Tensor, bound: Tensor | float) -> Tensor:
    """Clip each row to an L2 norm of at most ``bound``.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors * (bound / length.clamp(min=1e-30)).clamp(max=1)


def noised(vectors: Tensor, clip: float, noise: float, draws: Tensor) -> Tensor:
    """Clip each row to the norm ``clip`` and add ``noise * clip`` times the normal ``draws``."""
    return clipped(vectors, clip) + noise * clip * draws


def honest_length(clip: float, noise: float, width: int) -> float:
    """The norm that a vector of ``width`` entries made by :func:`noised` hardly exceeds."""
    return clip * (1 + noise * math.sqrt(width))


def shortened(g: Tensor, longest: float) -> Tensor:
    """Clip a gradient to the L2 norm ``longest``; 0 clips nothing.

    :func:`clipped` rounds otherwise: it would change digests of runs with ``train.clip``.
    """
    if not longest:
        return g
    length: Tensor = torch.linalg.vector_norm(g)
    return g * (longest / length.clamp(min=longest))
