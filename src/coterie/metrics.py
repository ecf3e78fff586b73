"""What is measured: a client's score, a federation's summary, a test between two methods.

Every score is one number a client; NaN means that the client has nothing to be scored on. Such
clients are left out of every summary and counted. A *gain* is a difference of scores turned so
that more is better, whatever the metric. Definitions are those of spec section 14.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, did_you_mean

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

    ``outputs`` are probabilities ``[n, C]`` or predictions ``[n]``. NaN where there is nothing to
    score: no samples, one class only (auc), constant targets (r2). Outputs that are not numbers
    are wrong answers, not missing ones: a model that diverged must not vanish from the table.

    >>> score("accuracy", np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    if metric not in METRICS:
        raise _wrong_metric(metric)
    if len(targets) == 0:
        return math.nan
    return _SCORES[metric](np.asarray(outputs), np.asarray(targets))


def _classes(outputs: Array) -> Array:
    if outputs.ndim == 1:
        return outputs
    return np.where(np.isfinite(outputs).all(1), outputs.argmax(1), -1)


def _accuracy(outputs: Array, targets: Array) -> float:
    return 100.0 * float((_classes(outputs) == targets).mean())


def _balanced_accuracy(outputs: Array, targets: Array) -> float:
    hits = _classes(outputs) == targets
    return 100.0 * float(np.mean([hits[targets == c].mean() for c in np.unique(targets)]))


def _f1(outputs: Array, targets: Array) -> float:
    """Macro F1 over the classes that occur in the targets or the predictions."""
    found = _classes(outputs)
    seen = np.union1d(targets, found[found >= 0])
    both = [((found == c) & (targets == c)).sum() for c in seen]
    either = [(found == c).sum() + (targets == c).sum() for c in seen]
    return 100.0 * float(np.mean([2.0 * b / e for b, e in zip(both, either, strict=True)]))


def _auc(outputs: Array, targets: Array) -> float:
    """Mean over the classes of this client of the AUC of that class against the rest."""
    columns = outputs[:, None] if outputs.ndim == 1 else outputs
    which = [1] if columns.shape[1] == 1 else range(columns.shape[1])
    areas = [
        area_under_curve(column, targets == c)
        for c, column in zip(which, np.nan_to_num(columns).T, strict=True)
    ]
    known = [area for area in areas if not math.isnan(area)]
    return 100.0 * float(np.mean(known)) if known else math.nan


def _residuals(outputs: Array, targets: Array) -> Floats:
    return outputs.reshape(len(targets)).astype(np.float64) - targets.astype(np.float64)


def _rmse(outputs: Array, targets: Array) -> float:
    error = math.sqrt(float(np.mean(_residuals(outputs, targets) ** 2)))
    return math.inf if math.isnan(error) else error


def _r2(outputs: Array, targets: Array) -> float:
    total = float(np.sum((targets - targets.mean(dtype=np.float64)) ** 2))
    if total == 0.0:
        return math.nan
    left = float(np.sum(_residuals(outputs, targets) ** 2)) / total
    return -math.inf if math.isnan(left) else 1.0 - left


_SCORES: dict[str, Callable[[Array, Array], float]] = {
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
    n, m = int(positive.sum()), int((~positive).sum())
    if n == 0 or m == 0:
        return math.nan
    return float((_ranks(values)[positive].sum() - n * (n + 1) / 2) / (n * m))


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
    with np.errstate(invalid="ignore"):  # a diverged client's infinite error has no variance
        variances = float(values.var()), float(worst.var()), float(best.var())
    return Spread(*means, *variances, n, len(scores) - n)


def mean_known(scores: Floats) -> Floats:
    """The mean over clients (last axis) of those that have a score; NaN where none has."""
    known = ~np.isnan(scores)
    total = np.where(known, scores, 0.0).sum(-1)
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
    """What each client gained over the reference; positive is better off, NaN is not known."""
    with np.errstate(invalid="ignore"):  # two infinite errors have no known difference
        return (scores - reference) * (1.0 if higher_is_better(metric) else -1.0)


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

    Up to 50 pairs the distribution is enumerated exactly, ties included; beyond it is normal.
    """
    kept = np.round(differences[np.isfinite(differences)], 10)
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
    """Mean and sample deviation of the values that are known."""
    known = np.array([v for v in values if v is not None and not math.isnan(v)])
    if len(known) == 0:
        return OverSeeds(math.nan, math.nan)
    return OverSeeds(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan)


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


def in_group_weight(A: Any, groups: Array | None) -> float | None:
    """The share of off-diagonal weight on clients of the same true group; None where nothing is.

    >>> in_group_weight(np.array([[0.5, 0.3, 0.2], [1, 0, 0], [0, 0, 1]]), np.array([0, 0, 1]))
    0.8666666666666667
    """
    if groups is None:
        return None
    weight, row, column = _others(A)
    total = float(weight.sum())
    return float(weight[groups[row] == groups[column]].sum()) / total if total > 0 else None


def weight_recovery(A: Array, groups: Array | None) -> float | None:
    """The AUC of off-diagonal weights as a detector of "same true group"; None where undefined."""
    if groups is None:
        return None
    pairs = ~np.eye(len(A), dtype=bool)
    area = area_under_curve(A[pairs], (groups[:, None] == groups[None, :])[pairs])
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
