"""Evaluates predictors: scores, losses and answers on the clients' own samples."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..core import metrics, tree
from ..core.algorithm import Mixture, Round
from ..core.answers import Answers, Outcomes, outcomes_of
from ..core.batches import EVALUATION_BLOCK
from ..core.flat import FlatModel
from ..core.shards import Shards, Split
from .base import Scores

FEW_CLASSES = 5  # probabilities are kept beside the answers for at most so many classes


def outputs(model: FlatModel, mixture: Mixture, x: Tensor, regression: bool) -> Tensor:
    """The predictions of a mixture: probabilities ``[n, classes]`` or values ``[n]``."""
    total: Tensor | None = None
    for weight, w in zip(mixture.weights, mixture.models, strict=True):
        h = model(w, x)
        part = weight * (h.squeeze(-1) if regression else h.softmax(-1))
        total = part if total is None else total + part
    if total is None:
        raise ValueError("a mixture needs at least one model")
    return total


def kept(mixture: Mixture, keep: bool) -> Mixture:
    """A predictor on the CPU; without its models unless ``keep`` is set."""
    if not keep:
        mixture = mixture._replace(models=mixture.models[..., :0])
    moved: Mixture = tree.move(mixture, torch.device("cpu"))
    return moved


def blocks_of(split: Split) -> Iterator[Tensor]:
    """Sample indices of a split in blocks that bound the memory of an evaluation."""
    yield from split.samples.split(EVALUATION_BLOCK, dim=-1)


def judge(
    shards: Shards, metric: str, ids: list[int], name: str, predicted: Tensor
) -> tuple[Scores, Scores]:
    """Score and mean loss of padded predictions ``[m, n, ...]`` of some clients on a split.

    In a regression both are computed from values in the target's own unit.

    Accuracy and loss are computed for all clients at once, on the device of the predictions; any
    other metric is computed client by client.
    """
    split = shards.splits[name].rows(ids)
    y = _targets(shards, ids, split.samples)
    regression = y.is_floating_point()
    if regression:
        predicted, y = shards.in_units(predicted), shards.in_units(y)
    inside = torch.arange(y.shape[1], device=y.device) < split.size[:, None]
    losses = _mean(_losses(predicted, y, regression), inside)
    if metric == "accuracy":
        return 100.0 * _mean(_hits(predicted, y), inside), losses
    values, targets = predicted.double().cpu().numpy(), y.cpu().numpy()
    sizes = [shards.splits[name].sizes[k] for k in ids]
    scores = [
        metrics.score(metric, values[i, :size], targets[i, :size]) for i, size in enumerate(sizes)
    ]
    return np.array(scores), losses


def _targets(shards: Shards, ids: list[int], samples: Tensor) -> Tensor:
    """The targets of samples ``[m, n]``, in the class numbers that their clients use."""
    y = shards.y[samples]
    if not shards.relabel.shape[-1]:
        return y
    return shards.relabel[torch.tensor(ids, device=shards.device)].gather(1, y)


def answers(shards: Shards, metric: str, ids: list[int], predicted: Tensor) -> dict[int, Answers]:
    """Each client's answers to its test samples, from padded predictions ``[m, n, ...]``.

    Answers are classes if the metric needs only these, and probabilities for auc. Beside classes
    the probabilities of few classes are kept, for calibration.
    """
    split = shards.splits["test"].rows(ids)
    values, targets = predicted, _targets(shards, ids, split.samples)
    probable = None
    if targets.is_floating_point():
        values, targets = shards.in_units(values), shards.in_units(targets)
    elif metrics.METRICS[metric].probabilities:
        values = predicted.float()
    else:
        values = torch.where(predicted.isfinite().all(-1), predicted.argmax(-1), -1)
        if predicted.shape[-1] <= FEW_CLASSES:
            probable = predicted.float().cpu().numpy()
    given, y = values.cpu().numpy(), targets.cpu().numpy()
    units, samples = shards.units, split.samples
    whose = (samples if units is None else units[samples]).cpu().numpy()
    sizes = [shards.splits["test"].sizes[k] for k in ids]
    return {
        k: Answers(
            *(given[i, :size], y[i, :size], whose[i, :size]),
            None if probable is None else probable[i, :size],
        )
        for i, (k, size) in enumerate(zip(ids, sizes, strict=True))
    }


def outcomes(found: dict[int, Answers], round: Round) -> Outcomes | None:
    """The answers of a round's clients, in the round's order; None if they were not kept."""
    return outcomes_of([found[i] for i in round.clients.tolist()]) if found else None


def _mean(values: Tensor, inside: Tensor) -> Scores:
    """The mean over each client's samples ``[m]``, float64; NaN for a client without samples."""
    total = torch.where(inside, values.double(), 0.0).sum(1)
    mean: Scores = (total / inside.sum(1)).cpu().numpy()
    return mean


def _hits(predicted: Tensor, y: Tensor) -> Tensor:
    """Whether each sample's most likely class is right; a non-finite prediction is wrong."""
    return (predicted.argmax(-1) == y) & predicted.isfinite().all(-1)


def _losses(predicted: Tensor, y: Tensor, regression: bool) -> Tensor:
    """The loss of every sample ``[m, n]``."""
    if regression:
        return 0.5 * (predicted.double() - y) ** 2
    chosen = predicted.gather(-1, y[..., None]).squeeze(-1).double()
    return -chosen.clamp(min=1e-300).log()
