"""How far predicted probabilities can be trusted: calibration, sensitivity, intervals.

Intervals cover 95 %: they come from a bootstrap over units (patients), and the interval of a
proportion is at least as wide as Wilson's, which does not vanish where a model makes no mistake.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from ..core.metrics import Array, Floats
from ..core.paired import LEVEL

BINS, FEW_BINS = 10, 5  # of a calibration curve, of equal width
ENOUGH = 200  # samples for the larger number of bins
BLOCK = 2_000_000  # bootstrap weights in memory at a time
DRAWS, FEW_DRAWS = 400, 100  # of a bootstrap; few for many samples
MANY = 20_000  # samples

Truths = NDArray[np.bool_]


class Bin(NamedTuple):
    """The samples of a calibration curve whose predicted probabilities are in one interval."""

    predicted: float  # mean of the predicted probabilities
    observed: float  # share of samples that have the outcome
    rows: int


class Calibration(NamedTuple):
    """How well predicted probabilities agree with observed shares."""

    bins: tuple[Bin, ...]  # those with samples
    error: float  # the expected calibration error: mean distance of a bin, weighted by its rows
    brier: float  # the mean squared difference of probability and outcome


class Estimate(NamedTuple):
    """A number and its 95 % interval; NaN where it is not known."""

    value: float
    low: float
    high: float


class Sensitivity(NamedTuple):
    """The share of samples with the outcome that are found at a chosen specificity."""

    found: Estimate
    threshold: float  # a probability of at least this much is an alarm; infinite: none is


def calibration(p: Floats, truth: Truths) -> Calibration:
    """The calibration curve of probabilities ``p [n]`` in bins of equal width, and two errors.

    >>> round(calibration(np.array([0.1, 0.2, 0.9]), np.array([False, True, True])).brier, 4)
    0.22
    """
    count = BINS if len(p) >= ENOUGH else FEW_BINS
    at = np.minimum((p * count).astype(np.int64), count - 1)
    rows, hits = np.bincount(at, minlength=count), np.bincount(at, truth, count)
    total = np.bincount(at, p, count)
    bins = tuple(
        Bin(float(total[i] / rows[i]), float(hits[i] / rows[i]), int(rows[i]))
        for i in np.flatnonzero(rows)
    )
    apart = sum(part.rows * abs(part.predicted - part.observed) for part in bins) / len(p)
    return Calibration(bins, apart, float(((p - truth) ** 2).mean()))


def sensitivity(p: Floats, truth: Truths, units: Array, specificity: float) -> Sensitivity | None:
    """The largest sensitivity of a threshold whose specificity is at least the chosen one.

    The threshold is chosen on the same samples, in every bootstrap draw again. None if there are no
    samples with the outcome, or none without it.
    """
    if truth.all() or not truth.any():
        return None
    values, at = _sensitivities(p, truth, np.ones((1, len(p))), specificity)
    again = np.concatenate(
        [_sensitivities(p, truth, weights, specificity)[0] for weights in drawn(units)]
    )
    alike = len(np.unique(units[truth]))
    found = estimate(float(values[0]), again, proportion_of=alike)
    edges = np.unique(p)[::-1]
    return Sensitivity(found, float(edges[at[0] - 1]) if at[0] else math.inf)


def _sensitivities(
    p: Floats, truth: Truths, weights: Floats, specificity: float
) -> tuple[Floats, NDArray[np.int64]]:
    """For each row of weights, the sensitivity ``[B]`` and how many thresholds are allowed."""
    order = np.argsort(-p, kind="stable")
    last = np.flatnonzero(np.diff(p[order], append=-math.inf))  # of equal values
    sorted_weights, has = weights[:, order], truth[order]
    found, false = (
        np.cumsum(np.where(part, sorted_weights, 0.0), axis=1)[:, last] for part in (has, ~has)
    )
    rate = np.divide(false, false[:, -1:], out=np.ones_like(false), where=false[:, -1:] > 0)
    allowed = (rate <= 1.0 - specificity + 1e-12).sum(axis=1)
    hits = np.take_along_axis(found, np.maximum(allowed - 1, 0)[:, None], axis=1)[:, 0]
    hits = np.where(allowed > 0, hits, 0.0)
    none = np.full(len(hits), math.nan)
    return np.divide(hits, found[:, -1], out=none, where=found[:, -1] > 0), allowed


def drawn(units: Array) -> Iterator[Floats]:
    """How often each sample is drawn in each bootstrap draw, in blocks ``[b, n]`` of draws.

    Units are drawn whole.
    """
    found, place = np.unique(units, return_inverse=True)
    left = DRAWS if len(units) < MANY else FEW_DRAWS
    share, rng = np.full(len(found), 1 / len(found)), np.random.default_rng(0)
    while left > 0:
        size = min(left, max(1, BLOCK // len(units)))
        yield rng.multinomial(len(found), share, size=size)[:, place].astype(np.float64)
        left -= size


def estimate(value: float, again: Floats, proportion_of: int | None) -> Estimate:
    """A number with the percentiles of its bootstrap draws as its interval."""
    known = again[np.isfinite(again)]
    low, high = value, value
    if len(known):
        low, high = np.quantile(known, [LEVEL / 2, 1 - LEVEL / 2]).tolist()
    if proportion_of is not None:
        least, most = wilson(value, proportion_of)
        low, high = min(low, least), max(high, most)
    return Estimate(value, min(low, value), max(high, value))


def wilson(share: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval for a proportion that was found among ``n`` samples."""
    z = float(ndtri(1 - level / 2))
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - reach), min(1.0, middle + reach)
