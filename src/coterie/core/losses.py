"""Losses per sample, computed from a model's outputs."""

import torch
from torch import Tensor


def per_sample(output: Tensor, y: Tensor, *, regression: bool) -> Tensor:
    """The loss of every sample ``[B]``: cross-entropy or half the squared error."""
    if regression:
        return 0.5 * (output.squeeze(-1) - y) ** 2
    chosen = output.log_softmax(-1).gather(-1, y.unsqueeze(-1))
    return -chosen.squeeze(-1)


def of_mixture(weights: Tensor, outputs: Tensor, y: Tensor, *, regression: bool) -> Tensor:
    """The loss of every sample ``[B]`` for a weighted mixture of model outputs ``[r, B, ...]``.

    Class probabilities are mixed; for a regression, the predicted values.
    """
    if regression:
        return 0.5 * (weights @ outputs.squeeze(-1) - y) ** 2
    each = outputs.log_softmax(-1).gather(-1, y.expand(len(outputs), -1)[..., None])
    logs = each.squeeze(-1)
    top = logs.max(0).values.detach()
    total = weights @ (logs - top).exp()  # not logsumexp: a weight may be 0
    return -(total.clamp(min=torch.finfo(total.dtype).tiny).log() + top)


def mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over all entries that are not padding."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)
