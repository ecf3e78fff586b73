"""Statistics over clients and over seeds: means, spreads, counts, and a paired test.

Each takes one score per client, as :mod:`coterie.core.metrics` defines it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from ..core.metrics import Array, Floats, higher_is_better, mean_known, stalled
from .run import Run

EXACT_UP_TO = 50  # pairs; beyond it the signed-rank test takes the normal approximation


class OverClients(NamedTuple):
    """Statistics of the scores of all clients; NaN, except for the counts, if none is scored."""

    mean: float
    weighted_mean: float  # by test size: the pooled score
    worst_tenth: float  # mean of the ceil(n / 10) worst
    best_tenth: float
    variance: float  # population variances, in squared units of the score
    variance_worst: float
    variance_best: float
    scored: int
    unscored: int  # clients without test data


def promised_rounds(run: Run) -> int:
    """The rounds that a run's config asks for: fewer if validation scores stopped it."""
    asked = run.config.get("run", {})
    means = mean_known(run.val).tolist()
    stopped = "patience" in asked and stalled(means, run.metric) == asked["patience"]
    return len(run.lines) if stopped else asked.get("rounds", len(run.lines))


def over_clients(scores: Floats, sizes: Array, metric: str = "accuracy") -> OverClients:
    """Statistics over clients; ``scores`` has one score per client."""
    known = ~np.isnan(scores)
    values, n = scores[known], int(known.sum())
    if n == 0:
        nan = math.nan
        return OverClients(nan, nan, nan, nan, nan, nan, nan, 0, len(scores))
    ordered = np.sort(values) if higher_is_better(metric) else np.sort(values)[::-1]
    tenth = -(-n // 10)
    worst, best = ordered[:tenth], ordered[n - tenth :]
    weights = np.asarray(sizes, dtype=np.float64)[known]
    pooled = float(weights @ values / weights.sum()) if weights.sum() > 0 else math.nan
    means = float(values.mean()), pooled, float(worst.mean()), float(best.mean())
    variances = _variance(values), _variance(worst), _variance(best)
    return OverClients(*means, *variances, n, len(scores) - n)


def _variance(values: Floats, freedom: int = 0) -> float:
    """The variance; infinite if a value is, because a diverged client is infinitely far off."""
    return float(values.var(ddof=freedom)) if np.isfinite(values).all() else math.inf


def best_round(scores: Floats, metric: str) -> int | None:
    """The index of the row of ``[rounds, clients]`` with the best mean; on a tie, the earliest."""
    means = mean_known(scores)
    if np.isnan(means).all():
        return None
    return int(np.nanargmax(means) if higher_is_better(metric) else np.nanargmin(means))


def best_of_rounds(scores: Floats, metric: str) -> Floats:
    """The score ``[K]`` of each client in its own best round, from ``[rounds, K]``.

    P4 reports this for its one requester. The round is chosen on test data, separately for each
    client. NaN for a client without scores.
    """
    best: Floats = (np.fmax if higher_is_better(metric) else np.fmin).reduce(scores)
    return best


def best_so_far(scores: Floats, metric: str) -> Floats:
    """The best score ``[rounds, ...]`` up to each round; NaN before the first that is known."""
    best: Floats = (np.fmax if higher_is_better(metric) else np.fmin).accumulate(scores)
    return best


def count_worse(gained: Floats) -> int:
    """How many clients are worse off (P3's underperformers, reading P3-11)."""
    return int((gained < 0).sum())


class Paired(NamedTuple):
    """Result of a two-sided Wilcoxon signed-rank test: pairs that differ, smaller rank sum, p."""

    n: int
    statistic: float
    p: float


def wilcoxon(differences: Floats) -> Paired:
    """Test whether paired differences lie around zero; zeros are dropped, ties share their rank.

    An infinite difference, of a client that diverged, has the highest rank. For up to 50 pairs the
    distribution is enumerated exactly, with ties, which scipy's exact test does not know; for more,
    it is approximated by a normal one.
    """
    kept = np.round(differences[~np.isnan(differences)], 10)
    kept = kept[kept != 0]
    n = len(kept)
    if n == 0:
        return Paired(0, 0.0, 1.0)
    ranks = rankdata(np.abs(kept))
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
    """Mean and sample deviation of a number over seeds; the deviation is NaN for a single seed."""

    mean: float
    deviation: float


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """Mean and sample deviation of the known values; infinite if one of them is."""
    known = np.array([v for v in values if v is not None and not math.isnan(v)])
    if len(known) == 0:
        return OverSeeds(math.nan, math.nan)
    deviation = math.sqrt(_variance(known, 1)) if len(known) > 1 else math.nan
    return OverSeeds(float(mean_known(known)), deviation)
