"""FedeRiCo's E-step: the losses a client has seen, and the weights that they give."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Tracked(NamedTuple):
    """What a client keeps."""

    last: Tensor  # [K] the last loss of everybody's model
    tracked: Tensor  # [K] L̂
    seen: Tensor  # [K]
    weights: Tensor  # [K] w
    rounds: Tensor  # [] in which it took part


def posterior(tracked: Tensor, seen: Tensor) -> Tensor:
    """Line 15: softmax of minus the tracked loss over those seen; all zero where none is.

    >>> posterior(torch.tensor([2.0, 3.0, 0.0]), torch.tensor([True, True, False]))
    tensor([0.7311, 0.2689, 0.0000])
    """
    known = torch.where(seen, tracked, torch.inf)
    least = known.min(-1, keepdim=True).values
    weight = torch.where(seen, torch.exp(-(torch.where(seen, tracked, 0.0) - least)), 0.0)
    return torch.where(seen, weight / weight.sum(-1, keepdim=True), 0.0)  # line 15


def tracked_losses(
    state: Tracked,
    last: Tensor,
    rounds: Tensor,
    average: tuple[float, Literal["first", "zero"]] | None,
) -> Tensor:
    """L̂ of everybody after a round ``[K]``; of those never seen it means nothing.

    ``average`` is the share β of the newest loss and what the moving average starts at; None adds
    up the losses, and counts a client that is new with its loss once for every round so far.
    """
    if average is None:
        return torch.where(state.seen, state.tracked + last, rounds * last)
    beta, begin = average
    first = last if begin == "first" else torch.zeros_like(last)
    before = torch.where(state.seen, state.tracked, first)
    return (1 - beta) * before + beta * last


def kept_weights(weights: Tensor, least: float) -> Tensor:
    """Whose models are worth fetching to predict with ``[K]``; the best always is."""
    return weights >= weights.max().clamp(max=least)
