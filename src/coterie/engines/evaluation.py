"""Evaluates predictors: scores, losses and answers on the clients' own samples."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..adapt.knn import answered
from ..core import metrics, tree
from ..core.algorithm import Mixture, Predictor, Recalling, Round
from ..core.answers import Answers, Outcomes, outcomes_of
from ..core.batches import EVALUATION_BLOCK
from ..core.flat import FlatModel
from ..core.shards import Shards, Split
from .base import Scores

FEW_CLASSES = 5  # probabilities are kept beside the answers for at most so many classes


def outputs(model: FlatModel, mixture: Predictor, x: Tensor, regression: bool) -> Tensor:
    """The predictions of a mixture: probabilities ``[n, classes]`` or values ``[n]``."""
    total: Tensor | None = None
    for at, (weight, w) in enumerate(zip(mixture.weights, mixture.models, strict=True)):
        if isinstance(mixture, Recalling):
            h = answered(model, w, x, tree.row(mixture.memory, at), regression)
        else:
            h = model(w, x) if regression else model(w, x).softmax(-1)
        part = weight * (h.squeeze(-1) if regression else h)
        total = part if total is None else total + part
    if total is None:
        raise ValueError("a mixture needs at least one model")
    return total


def kept(predictor: Predictor, keep: bool) -> Mixture:
    """A predictor's models on the CPU; without them unless ``keep`` is set."""
    mixture = predictor.mixture if isinstance(predictor, Recalling) else predictor
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
    predicted, y, _, sizes = _by_target(shards, ids, name, predicted)
    regression = y.is_floating_point()
    if regression:
        predicted, y = shards.in_units(predicted), shards.in_units(y)
    inside = _inside(y, sizes)
    losses = _mean(_losses(predicted, y, regression), inside)
    if metric == "accuracy":
        return 100.0 * _mean(hits(predicted, y), inside), losses
    if metrics.METRICS[metric].by_share:
        predicted = _signed_weights(shards, ids, predicted, y, inside)
    values, targets = predicted.double().cpu().numpy(), y.cpu().numpy()
    scores = [
        metrics.score(metric, values[i, :size], targets[i, :size]) for i, size in enumerate(sizes)
    ]
    return np.array(scores), losses


def _by_target(
    shards: Shards, ids: list[int], name: str, predicted: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Predictions, targets and sample numbers ``[m, n, ...]``, and each client's number of targets.

    Targets are in the class numbers that their clients use. A sample with a target at every
    position has as many entries.
    """
    samples, sizes = (
        shards.splits[name].rows(ids).samples,
        [shards.splits[name].sizes[k] for k in ids],
    )
    y = shards.y[samples]
    if y.ndim > 2:
        positions = y.shape[2]
        predicted, y = predicted.flatten(1, 2), y.flatten(1)
        samples = samples.repeat_interleave(positions, 1)
        sizes = [positions * size for size in sizes]
    if shards.relabel.shape[-1]:
        y = shards.relabel[torch.tensor(ids, device=shards.device)].gather(1, y)
    return predicted, y, samples, sizes


def _inside(y: Tensor, sizes: list[int]) -> Tensor:
    """Whether an entry ``[m, n]`` is one of the client's own, and no padding."""
    held = torch.tensor(sizes, device=y.device)
    return torch.arange(y.shape[1], device=y.device) < held[:, None]


def answers(shards: Shards, metric: str, ids: list[int], predicted: Tensor) -> dict[int, Answers]:
    """Each client's answers to its test samples, from padded predictions ``[m, n, ...]``.

    Answers are classes if the metric needs only these, probabilities for auc, and signed weights
    where samples count by their class. Beside classes the probabilities of few classes are kept,
    for calibration.
    """
    predicted, targets, samples, sizes = _by_target(shards, ids, "test", predicted)
    values, probable = predicted, None
    if targets.is_floating_point():
        values, targets = shards.in_units(values), shards.in_units(targets)
    elif metrics.METRICS[metric].probabilities:
        values = predicted.float()
    elif metrics.METRICS[metric].by_share:
        inside = _inside(targets, sizes)
        values = _signed_weights(shards, ids, predicted, targets, inside)
    else:
        values = torch.where(predicted.isfinite().all(-1), predicted.argmax(-1), -1)
        if predicted.shape[-1] <= FEW_CLASSES:
            probable = predicted.float().cpu().numpy()
    given, y = values.cpu().numpy(), targets.cpu().numpy()
    units = shards.units
    whose = (samples if units is None else units[samples]).cpu().numpy()
    return {
        k: Answers(
            *(given[i, :size], y[i, :size], whose[i, :size]),
            None if probable is None else probable[i, :size],
        )
        for i, (k, size) in enumerate(zip(ids, sizes, strict=True))
    }


def _signed_weights(
    shards: Shards, ids: list[int], predicted: Tensor, y: Tensor, inside: Tensor
) -> Tensor:
    """The weight of each sample ``[m, n]``, negative where the prediction is wrong (metrics.py)."""
    if shards.shares is None:
        raise ValueError(
            "the metric needs the class shares of training data: simulate(shares=True)"
        )
    mine = shards.shares[torch.tensor(ids, device=y.device)].double()
    count = torch.zeros_like(mine).scatter_add(1, y, inside.double())
    weights = torch.where(inside, mine.gather(1, y) / count.gather(1, y), 0.0)
    return torch.where(hits(predicted, y), weights, -weights)


def outcomes(found: dict[int, Answers], round: Round) -> Outcomes | None:
    """The answers of a round's clients, in the round's order; None if they were not kept."""
    return outcomes_of([found[i] for i in round.clients.tolist()]) if found else None


def _mean(values: Tensor, inside: Tensor) -> Scores:
    """The mean over each client's samples ``[m]``, float64; NaN for a client without samples."""
    total = torch.where(inside, values.double(), 0.0).sum(1)
    mean: Scores = (total / inside.sum(1)).cpu().numpy()
    return mean


def hits(predicted: Tensor, y: Tensor) -> Tensor:
    """Whether each sample's most likely class is right; a non-finite prediction is wrong."""
    return (predicted.argmax(-1) == y) & predicted.isfinite().all(-1)


def _losses(predicted: Tensor, y: Tensor, regression: bool) -> Tensor:
    if regression:
        return 0.5 * (predicted.double() - y) ** 2
    chosen = predicted.gather(-1, y[..., None]).squeeze(-1).double()
    return -chosen.clamp(min=1e-300).log()
