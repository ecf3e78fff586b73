"""Paired tests of two predictors on one client's test samples: gain, interval and p-value.

Both predictors answer the same samples, so that their outcomes are paired. For accuracy the test is
the exact McNemar test and the interval is Tango's score interval for paired proportions; for every
other metric both come from a paired bootstrap. Samples of one unit (a patient) are not independent
evidence, nor is one sample that several seeds test: such samples are resampled, or change sign,
together.

:func:`client_gain` is a pure function of one client's outcomes and returns a few numbers, so that
it can be computed at the site that holds the data.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr, ndtr, ndtri, stdtr, stdtrit

from . import metrics
from .answers import Answers, Counts
from .metrics import Floats

LEVEL = 0.05  # significance level of every test; intervals cover 1 - LEVEL
REPLICATES = 1000  # bootstrap resamples
EXACT_UNITS = 2000  # with more units the sign-flip test uses the normal approximation


class Gain(NamedTuple):
    """One client's gain of one predictor over another; positive is better.

    With several seeds it is the mean over seeds; for accuracy, over all test samples of all seeds.
    """

    gain: float  # in the metric's unit; percentage points for the metrics of classes
    variance: float  # of the gain, due to the choice of test samples
    low: float  # the interval's lower end, not corrected for several clients or methods
    high: float
    p: float  # two-sided, not corrected
    samples: int  # test samples per run (the mean over seeds)


Pair = tuple[
    Answers, Answers
]  # the answers of the predictor under test, and those of the reference predictor


def client_gain(metric: str, pairs: Sequence[Pair]) -> Gain | None:
    """The gain of the first predictor of each pair over the second, with one pair per seed.

    None where the metric is not defined on the client's test data.
    """
    samples = round(sum(len(a.targets) for a, _ in pairs) / len(pairs))
    if samples == 0:
        return None
    if metrics.metric_named(metric).by_share:
        return _by_weights(pairs, samples)
    return (_by_counts if metric == "accuracy" else _by_bootstrap)(metric, pairs, samples)


# ---- accuracy ------------------------------------------------------------------------------------


def _by_counts(metric: str, pairs: Sequence[Pair], samples: int) -> Gain:
    signs = np.concatenate([_differences(a, b) for a, b in pairs])
    _, place = np.unique(np.concatenate([a.units for a, _ in pairs]), return_inverse=True)
    sums = np.bincount(place, signs).astype(np.int64)  # wins minus losses of each unit
    n, wins, losses = len(signs), int((signs > 0).sum()), int((signs < 0).sum())
    alone = of_counts(wins, losses, n)
    if len(sums) == n:
        return alone._replace(samples=samples)
    variance = max(alone.variance, _unit_variance(sums, n))
    worth = alone.variance / variance  # how many independent samples one sample is worth
    low, high = tango(wins * worth, losses * worth, n * worth)
    ends = {"low": 100.0 * low, "high": 100.0 * high}
    return alone._replace(variance=variance, **ends, p=sign_flip(sums), samples=samples)


def of_counts(wins: int, losses: int, n: int) -> Gain:
    """The gain in accuracy from the number of samples that only one predictor classifies correctly.

    On ``wins`` samples only the first is right, on ``losses`` only the second. For the variance,
    half a sample is added to each of the four cells.
    """
    low, high = tango(wins, losses, n)
    b, c, m = wins + 0.5, losses + 0.5, n + 2.0
    variance = 1e4 * (b + c - (b - c) ** 2 / m) / m**2
    gain = 100.0 * (wins - losses) / n
    return Gain(gain, variance, 100.0 * low, 100.0 * high, mcnemar(wins, losses), n)


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided p-value of McNemar's test: a fair coin with these numbers of outcomes.

    >>> round(mcnemar(5, 1), 9)  # the last digit depends on the version of scipy
    0.21875
    """
    if wins == losses:
        return 1.0
    return min(1.0, 2.0 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def _differences(a: Answers, b: Answers) -> Counts:
    """1 where only the first predictor is right, -1 where only the second is, else 0."""
    hits, others = ((x.values == x.targets).astype(np.int64) for x in (a, b))
    found: Counts = hits - others
    return found


def _unit_variance(sums: Counts, n: int) -> float:
    """The variance of the gain where the samples of a unit are dependent."""
    count = len(sums)
    if count < 2:
        return 1e4
    return 1e4 * float(((sums - sums.mean()) ** 2).sum()) * count / (count - 1) / n**2


def sign_flip(sums: Counts) -> float:
    """Two-sided p-value of the sign-flip test over the units' sums.

    It is the share of all sign patterns whose sum is at least as far from 0 as the observed one.
    Where every unit is one sample, this is the exact McNemar test.
    """
    sizes, seen = np.abs(sums[sums != 0]), abs(int(sums.sum()))
    if seen == 0:
        return 1.0
    if len(sizes) > EXACT_UNITS:
        return 2.0 * float(ndtr(-(seen - 0.5) / math.sqrt(float((sizes**2).sum()))))
    total = int(sizes.sum())
    ways = np.zeros(2 * total + 1)
    ways[total] = 1.0
    for size in sizes:
        ways = (np.roll(ways, size) + np.roll(ways, -size)) / 2.0  # no mass wraps around the ends
    return min(1.0, 2.0 * float(ways[total + seen :].sum()))


def tango(wins: float, losses: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Tango's score interval for (wins - losses) / n, the difference of paired proportions.

    Its ends are the differences at which the score test begins to reject (Tango 1998).
    """
    z, found = float(ndtri(1 - level / 2)), (wins - losses) / n

    def score(delta: float) -> float:
        """The score statistic of a difference; it decreases as the difference grows."""
        a, c = 2 * n, -losses * delta * (1 - delta)
        b = (2 * n - wins + losses) * delta - wins - losses
        loss = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # its share, given delta
        variance = n * (2 * loss + delta * (1 - delta))
        apart = wins - losses - n * delta
        return apart / math.sqrt(variance) if variance > 1e-300 else math.copysign(math.inf, apart)

    def end(inside: float, outside: float, wanted: float) -> float:
        for _ in range(50):
            middle = (inside + outside) / 2
            crossed = score(middle) > wanted if wanted > 0 else score(middle) < wanted
            inside, outside = (inside, middle) if crossed else (middle, outside)
        return (inside + outside) / 2

    return end(found, -1.0, z), end(found, 1.0, -z)


def _by_weights(pairs: Sequence[Pair], samples: int) -> Gain | None:
    """The gain in weighted accuracy from signed weights; the test is Student's over units."""
    parts = []
    for a, b in pairs:
        weights = np.abs(a.values) / max(np.abs(a.values).sum(), 1e-300)
        signs = (a.values > 0).astype(np.int64) - (b.values > 0)
        parts.append((weights, signs, a.units))
    weights, signs, units = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not weights.any():
        return None
    found, place = np.unique(units, return_inverse=True)
    weights = weights / weights.sum()
    gain, freedom = float(weights @ signs), len(found) - 1
    if freedom == 0:
        return Gain(100.0 * gain, math.inf, -math.inf, math.inf, 1.0, samples)
    sums = np.bincount(place, weights * (signs - gain))
    deviation = 100.0 * math.sqrt(float(sums @ sums) * len(found) / freedom)
    reach, gain = float(stdtrit(freedom, 1 - LEVEL / 2)) * deviation, 100.0 * gain
    p = 1.0 if gain == 0 else two_sided(gain, deviation, freedom)
    return Gain(gain, deviation**2, gain - reach, gain + reach, p, samples)


# ---- other metrics -------------------------------------------------------------------------------


def _by_bootstrap(metric: str, pairs: Sequence[Pair], samples: int) -> Gain | None:
    found, place = np.unique(np.concatenate([a.units for a, _ in pairs]), return_inverse=True)
    whose = np.split(place, np.cumsum([len(a.targets) for a, _ in pairs])[:-1])
    gain = float(_mean_gains(metric, pairs, [np.ones((1, len(at))) for at in whose])[0])
    if math.isnan(gain):
        return None
    if math.isinf(gain):
        return Gain(gain, math.inf, gain, gain, 0.0, samples)
    drawn = np.random.default_rng(0).multinomial(
        len(found), np.full(len(found), 1 / len(found)), size=REPLICATES
    )
    again = _mean_gains(metric, pairs, [drawn[:, at].astype(np.float64) for at in whose])
    again = again[np.isfinite(again)]  # a draw may lack a class, or miss those that diverged
    if len(found) < 2 or len(again) < REPLICATES / 2:
        return Gain(gain, math.inf, -math.inf, math.inf, 1.0, samples)
    deviation, freedom = float(again.std(ddof=1)), len(found) - 1
    reach = float(stdtrit(freedom, 1 - LEVEL / 2)) * deviation
    p = 1.0 if gain == 0 else two_sided(gain, deviation, freedom)
    return Gain(gain, deviation**2, gain - reach, gain + reach, p, samples)


def _mean_gains(metric: str, pairs: Sequence[Pair], weights: Sequence[Any]) -> Floats:
    """The gain for each row of sample weights ``[B]``, averaged over seeds."""
    rows = []
    for (a, b), counted in zip(pairs, weights, strict=True):
        ours, theirs = (metrics.scores(metric, x.values, x.targets, counted) for x in (a, b))
        rows.append(metrics.gains(ours, theirs, metric))
    total: Floats = np.mean(rows, 0)
    return total


def two_sided(value: float, deviation: float, freedom: float) -> float:
    """The two-sided p-value of Student's t; 0 where the deviation is 0."""
    return 2.0 * float(stdtr(freedom, -abs(value) / deviation)) if deviation > 0 else 0.0


# ---- several tests -------------------------------------------------------------------------------


def holm(p: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Holm's correction: the chance of any false claim among all tests has the level of one test.

    A test of larger weight is corrected less; weights must not depend on the data that is tested.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    shares = [1.0] * len(p) if weights is None else list(weights)
    corrected, so_far, left = [0.0] * len(p), 0.0, sum(shares)
    for i in sorted(range(len(p)), key=lambda i: p[i] / shares[i]):
        so_far = max(so_far, min(1.0, p[i] * left / shares[i]))
        corrected[i] = so_far
        left -= shares[i]
    return corrected
