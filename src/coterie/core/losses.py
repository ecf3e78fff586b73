"""Losses per sample, computed from a model's outputs."""

import torch
from torch import Tensor


def per_sample(output: Tensor, y: Tensor, *, regression: bool) -> Tensor:
    """The loss of every sample ``[B]``: cross-entropy or half the squared error.

    If a sample has a target at every position ``[B, T]``, its loss is the mean over positions.
    """
    if regression:
        return 0.5 * (output.squeeze(-1) - y) ** 2
    chosen = output.log_softmax(-1).gather(-1, y.unsqueeze(-1))
    return -over_positions(chosen.squeeze(-1))


def of_mixture(weights: Tensor, outputs: Tensor, y: Tensor, *, regression: bool) -> Tensor:
    """The loss of every sample ``[B]`` for a weighted mixture of model outputs ``[r, B, ...]``.

    Class probabilities are mixed; for a regression, the predicted values.
    """
    if regression:
        return 0.5 * (weights @ outputs.squeeze(-1) - y) ** 2
    each = outputs.log_softmax(-1).gather(-1, y.expand(len(outputs), *y.shape)[..., None])
    logs = each.squeeze(-1)
    top = logs.max(0).values.detach()
    each = (logs - top).exp()  # not logsumexp: a weight may be 0
    total = weights @ each if y.ndim == 1 else (weights @ each.flatten(1)).view(y.shape)
    return -over_positions(total.clamp(min=torch.finfo(total.dtype).tiny).log() + top)


def over_positions(values: Tensor) -> Tensor:
    """The value of every sample ``[B]``: its mean over positions where there are any ``[B, T]``."""
    return values.mean(-1) if values.ndim > 1 else values


def mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over all entries that are not padding."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
