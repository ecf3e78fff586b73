"""Vectors of bounded length, with noise where it is asked for: what may be shown to a peer."""

import math

import torch
from torch import Tensor


def clipped(vectors: Tensor, bound: Tensor | float) -> Tensor:
    """Rows cut to a length of at most ``bound``.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors * (bound / length.clamp(min=1e-30)).clamp(max=1)


def noised(vectors: Tensor, clip: float, noise: float, draws: Tensor) -> Tensor:
    """Rows cut to the length ``clip`` plus ``noise * clip`` times the normal ``draws``."""
    return clipped(vectors, clip) + noise * clip * draws


def honest_length(clip: float, noise: float, width: int) -> float:
    """The length beyond which a vector of so many entries was hardly made by :func:`noised`."""
    return clip * (1 + noise * math.sqrt(width))
