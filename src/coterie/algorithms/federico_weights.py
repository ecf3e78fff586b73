"""FedeRiCo's E-step: tracked losses of the models a client has evaluated, and their weights."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Tracked(NamedTuple):
    """What a client keeps."""

    last: Tensor  # [K] the last loss of each client's model
    tracked: Tensor  # [K] L̂
    seen: Tensor  # [K]
    weights: Tensor  # [K] w
    rounds: Tensor  # [] the number of rounds in which the client took part


def posterior(tracked: Tensor, seen: Tensor) -> Tensor:
    """Line 15: softmax of minus the tracked losses over the clients seen; all zero if none is.

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
    """L̂ of all clients after a round ``[K]``; the values of clients never seen are meaningless.

    ``average`` is the weight β of the newest loss and the start of the moving average. None sums
    the losses, and counts the loss of a newly seen client once for every round so far.
    """
    if average is None:
        return torch.where(state.seen, state.tracked + last, rounds * last)
    beta, begin = average
    first = last if begin == "first" else torch.zeros_like(last)
    before = torch.where(state.seen, state.tracked, first)
    return (1 - beta) * before + beta * last


def kept_weights(weights: Tensor, least: float) -> Tensor:
    """Which models to download for prediction ``[K]``: weight at least ``least``, or the best."""
    return weights >= weights.max().clamp(max=least)
