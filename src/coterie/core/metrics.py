"""What is measured: a client's score, a federation's summary, a test between two methods.

Every score is one number a client; NaN means that the client has nothing to be scored on. Such
clients are left out of every summary and counted. An infinite score is that of a model that
diverged; it is left out of nothing. A *gain* is a difference of scores turned so that more is
better, whatever the metric. Definitions are those of spec section 14.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, did_you_mean

Array = NDArray[Any]
Floats = NDArray[np.float64]

EXACT_UP_TO = 50  # pairs; beyond it the signed-rank test takes the normal approximation
UNIFORM_WITHIN = 0.01  # relative spread of a row's off-diagonal weights that counts as none
ZERO_WITHIN = 1e-4  # a row's total off-diagonal weight that counts as none


def _wrong_metric(metric: str) -> ConfigError:
    return ConfigError(f"there is no metric '{metric}'; {did_you_mean(metric, METRICS)}")


def higher_is_better(metric: str) -> bool:
    """Whether a larger score is a better one (all but ``rmse``)."""
    if metric not in METRICS:
        raise _wrong_metric(metric)
    return metric != "rmse"


def score(metric: str, outputs: Array, targets: Array) -> float:
    """One client's score: percent for the metrics of classes, the plain number for r2 and rmse.

    ``outputs`` are probabilities ``[n, C]``, classes ``[n]`` or predictions ``[n]``. NaN where
    there is nothing to score: no samples, one class only (auc), constant targets (r2). Outputs that
    are not numbers are wrong answers, not missing ones: a model that diverged must not vanish from
    the table.

    >>> score("accuracy", np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    return float(scores(metric, outputs, targets, np.ones((1, len(targets))))[0])


def scores(metric: str, outputs: Array, targets: Array, weights: Floats) -> Floats:
    """The same where sample j counts ``weights[b, j]`` times: one score for each row ``[B]``."""
    if metric not in METRICS:
        raise _wrong_metric(metric)
    if len(targets) == 0:
        return np.full(len(weights), math.nan)
    return _SCORES[metric](np.asarray(outputs), np.asarray(targets), weights)


def classes(outputs: Array) -> Array:
    """The most likely class of each sample ``[n]``; -1 where an output is not a number."""
    if outputs.ndim == 1:
        return outputs
    return np.where(np.isfinite(outputs).all(1), outputs.argmax(1), -1)


def _ratio(over: Floats, under: Floats) -> Floats:
    """NaN where there is nothing to divide by."""
    none = np.full(np.broadcast_shapes(over.shape, under.shape), math.nan)
    found: Floats = np.divide(over, under, out=none, where=under > 0)
    return found


def _accuracy(outputs: Array, targets: Array, weights: Floats) -> Floats:
    return 100.0 * _ratio(weights @ (classes(outputs) == targets), weights.sum(1))


def _balanced_accuracy(outputs: Array, targets: Array, weights: Floats) -> Floats:
    hits, held = classes(outputs) == targets, targets[:, None] == np.unique(targets)
    return 100.0 * mean_known(_ratio(weights @ (held & hits[:, None]), weights @ held))


def _f1(outputs: Array, targets: Array, weights: Floats) -> Floats:
    """Macro F1 over the classes that occur in the targets or the predictions."""
    found = classes(outputs)
    seen = np.union1d(targets, found[found >= 0])
    said, held = found[:, None] == seen, targets[:, None] == seen
    both, either = weights @ (said & held), weights @ said + weights @ held
    return 100.0 * mean_known(_ratio(2.0 * both, either))


def _auc(outputs: Array, targets: Array, weights: Floats) -> Floats:
    """Mean over the classes of this client of the AUC of that class against the rest."""
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    which = [1] if columns.shape[1] == 1 else range(columns.shape[1])
    areas = [
        _areas(column, targets == c, weights)
        for c, column in zip(which, np.nan_to_num(columns).T, strict=True)
    ]
    return 100.0 * mean_known(np.stack(areas, 1))


def _residuals(outputs: Array, targets: Array) -> Floats:
    return outputs.reshape(len(targets)).astype(np.float64) - targets.astype(np.float64)


def _squares(outputs: Array, targets: Array, weights: Floats) -> Floats:
    """The sum of squared errors ``[B]``: infinite where a prediction is not a number."""
    errors = _residuals(outputs, targets)
    lost = ~np.isfinite(errors)
    total = weights @ np.where(lost, 0.0, errors) ** 2
    return np.where(weights @ lost > 0, math.inf, total)


def _rmse(outputs: Array, targets: Array, weights: Floats) -> Floats:
    return np.sqrt(_ratio(_squares(outputs, targets, weights), weights.sum(1)))


def _r2(outputs: Array, targets: Array, weights: Floats) -> Floats:
    y = targets.astype(np.float64)
    y = y - y.mean()
    mean = _ratio(weights @ y, weights.sum(1))
    total = (weights * (y - mean[:, None]) ** 2).sum(1)
    return 1.0 - _ratio(_squares(outputs, targets, weights), total)


_SCORES: dict[str, Callable[[Array, Array, Floats], Floats]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "auc": _auc,
    "f1": _f1,
    "r2": _r2,
    "rmse": _rmse,
}
METRICS = tuple(_SCORES)


def _ranks(values: Array) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = counts.cumsum() - (counts - 1) / 2.0
    return mean[place]


def area_under_curve(values: Array, positive: Array) -> float:
    """The chance that a positive has a larger value than a negative; ties count half."""
    return float(_areas(values, positive, np.ones((1, len(values))))[0])


def _areas(values: Array, positive: Array, weights: Floats) -> Floats:
    """The same for samples that count several times ``[B]``; NaN where all are of one kind."""
    if len(values) == 0:
        return np.full(len(weights), math.nan)
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=-math.inf))  # of equal values
    sorted_weights, high = weights[:, order], positive[order]
    won = np.add.reduceat(np.where(high, sorted_weights, 0.0), starts, axis=1)
    lost = np.add.reduceat(np.where(high, 0.0, sorted_weights), starts, axis=1)
    below = lost.cumsum(1) - lost / 2.0
    return _ratio((won * below).sum(1), won.sum(1) * lost.sum(1))


class Spread(NamedTuple):
    """How the clients of a federation fare; every field but the counts is NaN where there are 0."""

    mean: float
    weighted_mean: float  # by test size: the pooled score
    worst_tenth: float  # mean of the ceil(n / 10) worst
    best_tenth: float
    variance: float  # population variances, in squared units of the score
    variance_worst: float
    variance_best: float
    scored: int
    unscored: int  # clients without test data


def spread(scores: Floats, sizes: Array, metric: str = "accuracy") -> Spread:
    """Summaries over clients (spec 14) of one score a client."""
    known = ~np.isnan(scores)
    values, n = scores[known], int(known.sum())
    if n == 0:
        nan = math.nan
        return Spread(nan, nan, nan, nan, nan, nan, nan, 0, len(scores))
    ordered = np.sort(values) if higher_is_better(metric) else np.sort(values)[::-1]
    tenth = -(-n // 10)
    worst, best = ordered[:tenth], ordered[n - tenth :]
    weights = np.asarray(sizes, dtype=np.float64)[known]
    pooled = float(weights @ values / weights.sum()) if weights.sum() > 0 else math.nan
    means = float(values.mean()), pooled, float(worst.mean()), float(best.mean())
    variances = _variance(values), _variance(worst), _variance(best)
    return Spread(*means, *variances, n, len(scores) - n)


def _variance(values: Floats, freedom: int = 0) -> float:
    """Infinite where a value is: a client that diverged is infinitely far from the others."""
    return float(values.var(ddof=freedom)) if np.isfinite(values).all() else math.inf


def mean_known(scores: Floats) -> Floats:
    """The mean over clients (last axis) of those that have a score; NaN where none has.

    Where gains are infinite in both directions, the loss counts: the mean is minus infinity.
    """
    known = ~np.isnan(scores)
    finite = np.where(np.isfinite(scores), scores, 0.0).sum(-1)
    highest = np.where(known, scores, 0.0).max(-1, initial=0.0)
    lowest = np.where(known, scores, 0.0).min(-1, initial=0.0)
    total = np.where(highest == math.inf, math.inf, finite)
    total = np.where(lowest == -math.inf, -math.inf, total)
    count = known.sum(-1)
    means: Floats = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return means


def best_round(scores: Floats, metric: str) -> int | None:
    """The row of ``[rounds, clients]`` with the best mean, the earliest of equals."""
    means = mean_known(scores)
    if np.isnan(means).all():
        return None
    return int(np.nanargmax(means) if higher_is_better(metric) else np.nanargmin(means))


def best_of_rounds(scores: Floats, metric: str) -> Floats:
    """Each client's score in its own best round ``[K]`` of ``[rounds, K]``; NaN where it has none.

    P4 reports this of its one requester. It is chosen on test data, and by each client apart.
    """
    best: Floats = (np.fmax if higher_is_better(metric) else np.fmin).reduce(scores)
    return best


def gains(scores: Floats, reference: Floats, metric: str) -> Floats:
    """What each client gained over the reference; positive is better off, NaN is not known.

    Who diverged with both has gained nothing.
    """
    better = 1.0 if higher_is_better(metric) else -1.0
    with np.errstate(invalid="ignore"):
        gained = (scores - reference) * better
    return np.where(np.isinf(scores) & (scores == reference), 0.0, gained)


def count_worse(gained: Floats) -> int:
    """How many clients are worse off (spec 14: underperformers)."""
    return int((gained < 0).sum())


class Paired(NamedTuple):
    """A two-sided Wilcoxon signed-rank test: pairs that differ, smaller rank sum, p."""

    n: int
    statistic: float
    p: float


def wilcoxon(differences: Floats) -> Paired:
    """Whether paired differences lie around zero; zeros are dropped, ties share their rank.

    An infinite difference, of a client that diverged, has the highest rank. Up to 50 pairs the
    distribution is enumerated exactly, ties included; beyond it is normal.
    """
    kept = np.round(differences[~np.isnan(differences)], 10)
    kept = kept[kept != 0]
    n = len(kept)
    if n == 0:
        return Paired(0, 0.0, 1.0)
    ranks = _ranks(np.abs(kept))
    statistic = float(min(ranks[kept > 0].sum(), ranks[kept < 0].sum()))
    if n <= EXACT_UP_TO:
        return Paired(n, statistic, _exact_p(ranks, statistic))
    deviation = math.sqrt(float((ranks**2).sum()) / 4.0)
    z = (statistic - float(ranks.sum()) / 2.0) / deviation
    return Paired(n, statistic, min(1.0, math.erfc(-z / math.sqrt(2.0))))


def _exact_p(ranks: Floats, statistic: float) -> float:
    """Twice the share of all sign patterns whose rank sum is at most the one seen."""
    doubled = np.round(2 * ranks).astype(int)  # mean ranks end in .5
    ways = np.zeros(doubled.sum() + 1)
    ways[0] = 1.0
    for rank in doubled:
        ways[rank:] = ways[rank:] + ways[: len(ways) - rank]
    return min(1.0, 2.0 * float(ways[: round(2 * statistic) + 1].sum() / ways.sum()))


class OverSeeds(NamedTuple):
    """A number over seeds: its mean and sample deviation (NaN for a single seed)."""

    mean: float
    deviation: float


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """Mean and sample deviation of the values that are known; infinite where one is."""
    known = np.array([v for v in values if v is not None and not math.isnan(v)])
    if len(known) == 0:
        return OverSeeds(math.nan, math.nan)
    deviation = math.sqrt(_variance(known, 1)) if len(known) > 1 else math.nan
    return OverSeeds(float(mean_known(known)), deviation)


class _Others(NamedTuple):
    """The positive weights on others, of a matrix or of the non-zero entries of one."""

    weight: Floats  # [K, K], or [n] of the entries that there are
    row: Array  # whose they are, and on whom; shaped as the weights, or to be broadcast
    column: Array

    @property
    def sums(self) -> Floats:
        """Each client's total ``[K]``."""
        if self.weight.ndim == 2:
            return np.asarray(self.weight.sum(1))
        return np.bincount(self.row, self.weight).astype(np.float64)


def _others(A: Any) -> _Others:
    if isinstance(A, np.ndarray):
        K = np.arange(len(A))
        weight = np.where(np.eye(len(A), dtype=bool), 0.0, np.maximum(A, 0.0))
        return _Others(weight, K[:, None], K[None, :])
    entries = A.tocoo()
    there = (entries.row != entries.col) & (entries.data > 0)
    return _Others(entries.data[there], entries.row[there], entries.col[there])


def any_others(A: Any) -> bool:
    """Whether anybody has a weight on another, of whatever sign."""
    if isinstance(A, np.ndarray):
        return bool((A != 0).sum() > (A.diagonal() != 0).sum())
    return bool(A.count_nonzero() > np.count_nonzero(A.diagonal()))


def kinship(A: Any, models_change_hands: bool) -> Any:
    """The weights by which clients are judged to work together.

    ``A`` itself, or ``A Aᵀ`` (how much two clients use the same models) where models change hands.
    """
    return A @ A.T if models_change_hands else A


def add_up(matrices: Iterable[Any], models_change_hands: bool) -> Any:
    """The weights on others of a whole run: the sum of its rounds' matrices; None without any.

    Each entry is cut at zero first. Rounds in which clients rely on others count by how much they
    do, so a method that ends by training alone is judged by the rounds before.
    """
    total: Any = None
    for A in matrices:
        kin = kinship(A, models_change_hands)
        kin = np.maximum(kin, 0.0) if isinstance(kin, np.ndarray) else kin.maximum(0.0)
        total = kin.astype(np.float64) if total is None else total + kin
    return total


def in_group_weight(A: Any, groups: Array | None, wanted: Array | None = None) -> float | None:
    """The share of off-diagonal weight on clients of the same true group; None where nothing is.

    ``wanted`` are the groups of the rows where they differ from those of the columns: under foreign
    targets a client should rely on the group whose data judges it.

    >>> in_group_weight(np.array([[0.5, 0.3, 0.2], [1, 0, 0], [0, 0, 1]]), np.array([0, 0, 1]))
    0.8666666666666667
    """
    if groups is None:
        return None
    weight, row, column = _others(A)
    total = float(weight.sum())
    inside = (groups if wanted is None else wanted)[row] == groups[column]
    return float(weight[inside].sum()) / total if total > 0 else None


def weight_recovery(A: Array, groups: Array | None, wanted: Array | None = None) -> float | None:
    """The AUC of off-diagonal weights as a detector of "same true group"; None where undefined.

    ``wanted`` are the groups of the rows, as for :func:`in_group_weight`.
    """
    if groups is None:
        return None
    pairs = ~np.eye(len(A), dtype=bool)
    same = (groups if wanted is None else wanted)[:, None] == groups
    area = area_under_curve(A[pairs], same[pairs])
    return None if math.isnan(area) else area


def off_diagonal(A: Any, clients: Sequence[int]) -> Literal["zero", "uniform", "varied"]:
    """What the weights between clients say: nothing at all, the same of everybody, or something.

    Uniform is judged among the participants of the round, for only they could be weighed. Two
    clients cannot be told apart from uniform and count as varied.
    """
    if _others(A).sums.max(initial=0.0) <= ZERO_WITHIN:
        return "zero"
    n, here = len(clients), list(clients)
    among = A[here][:, here]
    among = among if isinstance(among, np.ndarray) else among.toarray()
    block = among[~np.eye(n, dtype=bool)].reshape(n, max(n - 1, 0))
    if n < 3 or (block.sum(1) <= ZERO_WITHIN).any():
        return "varied"
    wide = (block.max(1) - block.min(1)) / block.mean(1)
    return "uniform" if (wide <= UNIFORM_WITHIN).all() else "varied"
