"""The loss of every sample, from a model's outputs and the targets."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ConfigError

Losses = Callable[[Tensor, Tensor], Tensor]


class OwnLoss(ABC):
    """A loss of one's own, for training: extend it, and name it as ``train.loss``."""

    @abstractmethod
    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample ``[B]``, from the model's outputs ``[B, …]``."""


def losses_of(output: Tensor, y: Tensor, regression: bool, own: Losses | None) -> Tensor:
    """The loss of every sample ``[B]``, by a loss of one's own if there is one."""
    if own is None:
        return per_sample(output, y, regression=regression)
    found = own(output, y)
    if found.shape != (len(y),):
        raise ConfigError(
            f"train.loss: found losses of shape {list(found.shape)} for {len(y)} samples; expected "
            "one per sample: torch's own losses give them with reduction='none'"
        )
    return found


def refuse_own(own: Losses | None) -> None:
    """Refuse a loss of one's own where models are mixed in training."""
    if own is not None:
        raise ConfigError(
            "train.loss: this method trains a mixture of models, whose loss is that of the mixed "
            "probabilities; expected no loss of one's own, or another method"
        )


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
