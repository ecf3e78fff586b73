"""The seam between the round loop and whatever runs the clients."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core import metrics, paired, tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form as Form
from ..core.client import EVALUATION_BLOCK, Shape
from ..core.flat import FlatModel
from ..core.paired import Answers, Outcomes
from ..core.task import Split, Task
from ..core.tree import Tree
from ..training.guard import Rejection

Scores = NDArray[np.float64]
DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"
MOST_THREADS = 1024  # OpenMP ends the process where it cannot have all that it is asked for


class Evaluation(NamedTuple):
    """How good every client's predictor is; NaN where a client has no such data."""

    test: Scores  # [K] the run's metric on test data
    val: Scores  # [K] the same on validation data
    test_loss: Scores  # [K]
    val_loss: Scores  # [K]


class Predicted(NamedTuple):
    """What the predictors of a round's clients are and how they fare."""

    evaluation: Evaluation
    mixture: Mixture  # on the CPU
    outcomes: Outcomes | None  # every answer to a test sample, where the predictors are kept


class Replies(NamedTuple):
    """What came back in a round: a row for each of ``clients``, who need not be all."""

    uploads: Tree
    states: Tree
    clients: Tensor  # [n] those who answered in the form that is expected
    rejected: tuple[Rejection, ...] = ()


class Engine(Protocol):
    """Runs the client half of a method for many clients, wherever they are."""

    task: Task

    @property
    def state_device(self) -> torch.device:
        """Where the clients' state is kept between rounds."""

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved: enough to get the same numbers again."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of calls so far; none where every call is executed as it is written."""

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, a row for every one of them."""

    def exchange(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Replies:
        """The same for whoever answers as expected: what the round loop asks for."""

    def predict(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        states: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = True,
    ) -> Predicted:
        """How good the predictors of the round's clients are, and the predictors (on the CPU).

        Without ``keep`` only the predictors' weights come back: moving models takes longer than
        judging them. Nor do their answers.
        """


def state_device(state: str, task: Task) -> torch.device:
    """Where the clients' state is kept between rounds; files are read and written by the host."""
    return task.device if state == "device" else torch.device("cpu")


def shape_of(task: Task, ids: list[int], *, batched: bool) -> Shape:
    """What these clients have in common when they are computed together."""
    return Shape(
        smallest=min(task.splits["train"].sizes[i] for i in ids),
        even={name: task.splits[name].even(ids) for name in ("train", "val")},
        batched=batched,
    )


def outputs(model: FlatModel, mixture: Mixture, x: Tensor, regression: bool) -> Tensor:
    """What a mixture predicts: probabilities ``[n, classes]`` or values ``[n]``."""
    total: Tensor | None = None
    for weight, w in zip(mixture.weights, mixture.models, strict=True):
        h = model(w, x)
        part = weight * (h.squeeze(-1) if regression else h.softmax(-1))
        total = part if total is None else total + part
    if total is None:
        raise ValueError("a mixture needs at least one model")
    return total


def kept(mixture: Mixture, keep: bool) -> Mixture:
    """A predictor on the CPU, without its models where they are not kept."""
    if not keep:
        mixture = mixture._replace(models=mixture.models[..., :0])
    moved: Mixture = tree.move(mixture, torch.device("cpu"))
    return moved


def blocks_of(split: Split) -> Iterator[Tensor]:
    """Sample indices of a split in blocks that bound the memory of an evaluation."""
    yield from split.samples.split(EVALUATION_BLOCK, dim=-1)


def judge(
    task: Task, metric: str, ids: list[int], name: str, predicted: Tensor
) -> tuple[Scores, Scores]:
    """Score and mean loss of padded predictions ``[m, n, ...]`` of some clients on a split.

    Those of a regression are of values in the target's own unit.

    Accuracy and loss are taken of all clients at once, where they were computed; another metric
    client by client.
    """
    split = task.splits[name].rows(ids)
    y = _targets(task, ids, split.samples)
    if task.regression:
        predicted, y = task.in_units(predicted), task.in_units(y)
    inside = torch.arange(y.shape[1], device=y.device) < split.size[:, None]
    losses = _mean(_losses(predicted, y, task.regression), inside)
    if metric == "accuracy":
        return 100.0 * _mean(_hits(predicted, y), inside), losses
    values, targets = predicted.double().cpu().numpy(), y.cpu().numpy()
    sizes = [task.splits[name].sizes[k] for k in ids]
    scores = [
        metrics.score(metric, values[i, :size], targets[i, :size]) for i, size in enumerate(sizes)
    ]
    return np.array(scores), losses


def _targets(task: Task, ids: list[int], samples: Tensor) -> Tensor:
    """The targets of samples ``[m, n]`` as their clients read them."""
    y = task.y[samples]
    if not task.relabel.shape[-1]:
        return y
    return task.relabel[torch.tensor(ids, device=task.device)].gather(1, y)


def answers(task: Task, metric: str, ids: list[int], predicted: Tensor) -> dict[int, Answers]:
    """What padded predictions ``[m, n, ...]`` say of each client's test samples.

    Classes where the metric looks at no more than them; the probabilities for auc.
    """
    split = task.splits["test"].rows(ids)
    values, targets = predicted, _targets(task, ids, split.samples)
    if task.regression:
        values, targets = task.in_units(values), task.in_units(targets)
    elif metric == "auc":
        values = predicted.float()
    else:
        values = torch.where(predicted.isfinite().all(-1), predicted.argmax(-1), -1)
    given, y = values.cpu().numpy(), targets.cpu().numpy()
    units = task.federation.dataset.units
    samples = split.samples.cpu()
    whose = (samples if units is None else units[samples]).numpy()
    sizes = [task.splits["test"].sizes[k] for k in ids]
    return {
        k: Answers(given[i, :size], y[i, :size], whose[i, :size])
        for i, (k, size) in enumerate(zip(ids, sizes, strict=True))
    }


def outcomes(found: dict[int, Answers], round: Round) -> Outcomes | None:
    """The answers of a round's clients in their order; None where they were not kept."""
    return paired.outcomes_of([found[i] for i in round.clients.tolist()]) if found else None


def _mean(values: Tensor, inside: Tensor) -> Scores:
    """The mean over a client's samples ``[m]``, float64; NaN for a client without any."""
    total = torch.where(inside, values.double(), 0.0).sum(1)
    mean: Scores = (total / inside.sum(1)).cpu().numpy()
    return mean


def _hits(predicted: Tensor, y: Tensor) -> Tensor:
    """Whose most likely class is right; a prediction that is not a number is wrong."""
    return (predicted.argmax(-1) == y) & predicted.isfinite().all(-1)


def _losses(predicted: Tensor, y: Tensor, regression: bool) -> Tensor:
    """The loss of every sample ``[m, n]``."""
    if regression:
        return 0.5 * (predicted.double() - y) ** 2
    chosen = predicted.gather(-1, y[..., None]).squeeze(-1).double()
    return -chosen.clamp(min=1e-300).log()
