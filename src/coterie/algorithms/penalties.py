"""FedAMP's functions A of squared distances, and the weights ξ that follow from their slopes."""

from typing import Literal

import torch
from torch import Tensor

from ..core.mixing import off_diagonal, squared_distances
from .likeness import TINY

Penalty = Literal["exponential", "scad", "mcp"]

SCAD, MCP = 3.7, 3.0  # where the slopes of these penalties reach zero, in units of σ


def slope(distances: Tensor, sigma: Tensor | float, penalty: Penalty = "exponential") -> Tensor:
    """``A'(s)`` of squared distances, zero on the diagonal; 1/σ at s = 0 for every penalty."""
    s = distances / sigma
    if penalty == "exponential":
        fall = torch.exp(-s)
    elif penalty == "scad":
        fall = ((SCAD - s) / (SCAD - 1)).clamp(0, 1)
    else:
        fall = (1 - s / MCP).clamp(min=0)
    return (fall / sigma).fill_diagonal_(0)


def penalty_of(distances: Tensor, sigma: Tensor | float, penalty: Penalty) -> Tensor:
    """``A(s)`` of squared distances: the integral of :func:`slope` from 0 to s.

    >>> penalty_of(torch.tensor([0.0, 2.0, 8.0]), 2.0, "mcp")
    tensor([0.0000, 0.8333, 1.5000])
    """
    s = distances / sigma
    if penalty == "exponential":
        return -torch.expm1(-s)
    if penalty == "scad":
        beyond = (s.clamp(max=SCAD) - 1).clamp(min=0)  # the slope falls from 1 to 0 there
        return s.clamp(max=1) + beyond - beyond**2 / (2 * (SCAD - 1))
    return s.clamp(max=MCP) - s.clamp(max=MCP) ** 2 / (2 * MCP)


def attention(
    W: Tensor, alpha: Tensor | float, sigma: Tensor | float, penalty: Penalty = "exponential"
) -> Tensor:
    """Eq. 5 and 7, by default with the negative exponential: rows sum to one, float64.

    >>> attention(torch.tensor([[0.0], [1.0], [3.0]]), alpha=0.5, sigma=2.0)[0]
    tensor([0.8456, 0.1516, 0.0028], dtype=torch.float64)
    """
    return weights(slope(squared_distances(W), sigma, penalty), alpha)


def weights(slopes: Tensor, alpha: Tensor | float) -> Tensor:
    """The weights ξ from the slopes A' ``[m, m]``."""
    A = alpha * slopes  # Eq. 5
    return A + torch.diag(1 - A.sum(1))  # Eq. 7


def step_size(
    W: Tensor, sigma: Tensor | float, mass: float, penalty: Penalty = "exponential"
) -> Tensor:
    """The largest α_k with ``ξ_ii ≥ 1 − mass`` for every client; 0 where all A' vanish."""
    return largest_step(slope(squared_distances(W), sigma, penalty), mass)


def largest_step(slopes: Tensor, mass: float) -> Tensor:
    """As :func:`step_size`, from the slopes A' ``[m, m]``."""
    largest = slopes.sum(1).max()
    return torch.where(largest > TINY, mass / largest, 0.0)


def median_width(W: Tensor, factor: float) -> Tensor:
    """σ as a multiple of the median squared distance, 1 where all models are the same."""
    return width_of(squared_distances(W), factor)


def width_of(distances: Tensor, factor: float) -> Tensor:
    """As :func:`median_width`, from the squared distances ``[m, m]``."""
    width = factor * off_diagonal(distances).median()
    return torch.where(width > TINY, width, 1.0)


def spread(A: Tensor, mass: float) -> Tensor:
    """Scale every row's off-diagonal weights to sum to ``mass``; rows without any stay as is."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > 0, mass * others / total, 0.0)
    return others + torch.diag(1 - others.sum(1))


def shared(slopes: Tensor, most: Tensor | float, rows: bool) -> Tensor:
    """ξ from the slopes A' ``[m, m]``, where a client's own model counts as one at distance 0.

    ``most`` is A'(0). α_k is the largest step at which no other model gets more weight than a
    client's own: one for all clients, or with ``rows`` one per client.

    >>> shared(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.5, 0.0]]), 1.0, rows=True)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.4000, 0.4000, 0.2000],
            [0.0000, 0.3333, 0.6667]])
    """
    total = slopes.sum(1, keepdim=True)
    return weights(slopes, 1 / (most + (total if rows else total.max())))


def safe(A: Tensor, most: float = 1.0) -> Tensor:
    """Scale down the rows whose off-diagonal weights sum to more than ``most``."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > most, most * others / total.clamp(min=TINY), others)
    return others + torch.diag(1 - others.sum(1))
