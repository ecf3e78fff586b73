"""What paired gains show: four questions, each with its own estimate and test.

    A  my site                       are the two models of this run equally good on data like mine?
    B  these sites, these models     is the mean gain of the models of this run zero?
    C  these sites, trained again    is the mean gain zero on average over trainings?
    D  sites like these              is the mean gain of all sites like these zero?

In A and B only the test samples are random, in C also the training, in D also the choice of sites.
A method that was chosen on validation data is one method, so that A and B need no correction for
the number of methods; after a choice on test data they are corrected (:func:`holm`).
Arrays hold one gain per site in their last axis. ``docs/results/verdict.md`` has the error rates.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats
from scipy.special import ndtr, ndtri, roots_genlaguerre, stdtrit

from .metrics import Array, Floats
from .paired_tests import LEVEL, Discordant, Gain, mid_p, two_sided

SURE = 0.99  # probability of a gain, given what all sites show, at which a site may be told
ALONE = 0.045  # level of the sites' own p-values; the other way to be told has the rest of 5 %
OWN = 0.05  # the one-sided p-value that the site's own samples must reach in any case
IDLE = 0.8  # share of sites without an effect above which the sites show nothing of one another
POOLED = 3  # sites: fewer show nothing of one another
WIDEST = 40.0  # points: the largest deviation between sites that is considered
GRID = 60  # deviations between 0 and the widest, closer together where they are small
TRAININGS = 5  # the fewest that tell how much trainings differ
NODES = 80  # of the integral over the variance of trainings
POWER = 0.8  # probability with which a planned comparison should show the gain that was seen


# ---- A: my site ----------------------------------------------------------------------------------


class PooledGains(NamedTuple):
    """What all sites together show of each; the last two axes are the deviations and the sites."""

    weights: Floats  # [..., T, 1] of the deviations between sites
    means: Floats  # [..., T, K] of each site's true gain, given the deviation
    deviations: Floats  # [..., T, K]

    @property
    def mean(self) -> Floats:
        """The expected true gain of each site ``[..., K]``."""
        expected: Floats = (self.weights * self.means).sum(-2)
        return expected

    def above(self, value: Array | float = 0.0) -> Floats:
        """The probability ``[..., K]`` that each site's true gain is above a value."""
        z = (self.means - np.atleast_1d(value)[..., None, :]) / self.deviations
        found: Floats = (self.weights * ndtr(z)).sum(-2)
        return found

    def interval(self, level: float = LEVEL) -> tuple[Floats, Floats]:
        """The ends ``[..., K]`` of the intervals of the true gains."""
        return self._quantile(level / 2), self._quantile(1 - level / 2)

    def _quantile(self, share: float) -> Floats:
        low = (self.means - 9 * self.deviations).min(-2)
        high = (self.means + 9 * self.deviations).max(-2)
        for _ in range(50):
            middle: Floats = (low + high) / 2
            short = 1.0 - self.above(middle) < share
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return middle


def pool(gains: Floats, variances: Floats, widest: float = WIDEST) -> PooledGains:
    """Partial pooling: gains ``[..., K]`` are normal around true gains, and these around a mean.

    The mean, and the deviation between sites up to the widest one, have flat priors.
    """
    steps = ((np.arange(GRID) + 0.5) / GRID)[:, None]
    tau = widest * steps**2  # each stands for a stretch in proportion to its step
    g, v = gains[..., None, :], variances[..., None, :]
    precision = 1.0 / (v + tau**2)
    total = precision.sum(-1, keepdims=True)
    mean = (precision * g).sum(-1, keepdims=True) / total
    fit = np.log(precision).sum(-1, keepdims=True) - np.log(total)
    fit = (fit - (precision * (g - mean) ** 2).sum(-1, keepdims=True)) / 2
    weights = steps * np.exp(fit - fit.max(-2, keepdims=True))
    shrunk = v * precision
    spread = np.sqrt(v * (1 - shrunk) + shrunk**2 / total)
    return PooledGains(
        weights / weights.sum(-2, keepdims=True), shrunk * mean + (1 - shrunk) * g, spread
    )


def pooled_variances(counts: Sequence[Discordant]) -> Floats:
    """The variances of gains in accuracy if all sites have the same share of discordant samples."""
    wins, losses, rows = np.array(counts, dtype=np.float64).T
    share = (wins.sum() + losses.sum() + 1.0) / (rows.sum() + 2.0)
    mean = ((wins - losses) / rows).mean()
    variances: Floats = 1e4 * max(share - mean**2, 0.5 / (rows.sum() + 2.0)) / rows
    return variances


def told(gains: Floats, p: Floats, above: Floats, sure: float = SURE, own: float = OWN) -> Array:
    """Which sites are told of a gain (1), a loss (-1) or neither (0), ``[..., K]``.

    A site's own samples must agree, and either its two-sided p-value is small beside those of the
    other sites, or all sites together are sure: ``above`` is the probability that the site's true
    gain is above 0. Few sites have Benjamini and Hochberg's procedure alone. Of more, p-values
    above a half show how many sites may be without an effect (Storey, Taylor and Siegmund 2004):
    the procedure counts only these, and where nearly all are, no site convinces another.
    """
    count, adjusted = p.shape[-1], stats.false_discovery_control(p, axis=-1)
    if count < POOLED:
        return np.where(adjusted < LEVEL, np.sign(gains), 0.0)
    idle = np.minimum(1.0, (1 + (p > 0.5).sum(-1, keepdims=True)) / (count / 2))
    alone = adjusted * idle < ALONE
    together = (np.where(gains > 0, above, 1.0 - above) >= sure) & (idle <= IDLE)
    return np.where((alone | together) & (p / 2 <= own), np.sign(gains), 0.0)


class SiteFinding(NamedTuple):
    """What is said of one site's gain, and the gain with what the other sites show."""

    claim: int  # 1: a gain is shown; -1: a loss; 0: neither
    gain: float  # NaN, as its interval, where the other sites show nothing
    low: float
    high: float


def my_site(gains: Sequence[Gain], widest: float | None = WIDEST) -> list[SiteFinding]:
    """What is said of each site's gain by the one method that validation data chose.

    Without a ``widest`` deviation, it is four times what the gains show.
    """
    if not gains:
        return []
    g, p = np.array([one.gain for one in gains]), np.array([one.p for one in gains])
    finite = np.isfinite(g)
    above, (mean, low, high) = np.full(len(gains), 0.5), np.full((3, len(gains)), math.nan)
    if finite.sum() >= POOLED:
        shown = [one for one in gains if math.isfinite(one.gain)]
        counts = [one.counts for one in shown if one.counts is not None]
        variances = np.array([one.variance for one in shown])
        if len(counts) == len(shown):
            variances = pooled_variances(counts)
        spread = float(g[finite].std()) + math.sqrt(float(variances.max()))
        variances = np.maximum(variances, 1e-9 * spread**2 + 1e-300)  # models may be the same
        found = pool(g[finite], variances, 4 * spread if widest is None else widest)
        above[finite], mean[finite] = found.above(), found.mean
        low[finite], high[finite] = found.interval()
    claims = told(np.where(finite, g, np.sign(g)), p, above)
    return [SiteFinding(int(c), *ends) for c, *ends in zip(claims, mean, low, high, strict=True)]


# ---- B, C, D: the mean over sites ----------------------------------------------------------------


class MeanGain(NamedTuple):
    """The mean gain over sites, with its standard error, interval and p-value."""

    gain: float
    error: float  # standard error of the gain
    freedom: float  # degrees of freedom of what is estimated of the standard error
    low: float
    high: float
    p: float  # two-sided
    sites: int
    known: float = 0.0  # the part of the standard error that is not estimated

    @classmethod
    def of(
        cls, gain: float, error: float, freedom: float, sites: int, known: float = 0.0
    ) -> "MeanGain":
        """A mean gain with its test and interval; Student's, if no part of the error is known."""
        p = two_sided(gain, error, freedom)
        if known > 0:
            p = float(p_of_two(gain, known, math.sqrt(max(0.0, error**2 - known**2)), freedom))
        return cls(gain, error, freedom, gain, gain, p, sites, known)._reaching(LEVEL)

    def corrected(self, p: float) -> "MeanGain":
        """The mean gain with a corrected p-value, and the interval that agrees with it."""
        if p == self.p or self.p == 0 or not math.isfinite(self.error):
            return self._replace(p=p)
        return self._replace(p=p)._reaching(LEVEL * self.p / p)

    def _reaching(self, level: float) -> "MeanGain":
        """With the interval of the gains that a test of this level does not reject."""
        reach = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        if self.known > 0:
            drawn = math.sqrt(max(0.0, self.error**2 - self.known**2))
            reach = optimize.brentq(
                lambda x: float(p_of_two(x, self.known, drawn, self.freedom)) - level, 0, 2 * reach
            )
        return self._replace(low=self.gain - reach, high=self.gain + reach)


def p_of_two(gain: Array | float, known: float, drawn: Array | float, freedom: float) -> Floats:
    """The two-sided p-value of a gain with two independent errors, one of them estimated.

    The gain has a normal error of standard deviation ``known``, and one whose deviation ``drawn``
    is an estimate with so many degrees of freedom. The p-value of the normal test is averaged over
    the true deviations that such an estimate leaves open (Behrens and Fisher): it is Student's if
    nothing is known, and the normal one if nothing is drawn.
    """
    halves, weights = _half_chi_squared(min(freedom, 300.0))
    variances = np.square(drawn)[..., None] * freedom / (2 * halves) + known**2
    p: Floats = 2 * ndtr(-np.abs(gain)[..., None] / np.sqrt(variances)) @ weights
    return p


@cache
def _half_chi_squared(freedom: float) -> tuple[Floats, Floats]:
    """Values and weights that integrate over half of a χ² variable."""
    values, weights = roots_genlaguerre(NODES, freedom / 2 - 1)
    return values, weights / weights.sum()


def these_sites(gains: Sequence[Gain]) -> MeanGain | None:
    """B: the mean gain of these sites by the models of this run; None without any site.

    Of one site it is that site's own test. A gain of minus infinity, of a model that diverged,
    makes the mean a loss whatever the others gain.
    """
    if not gains:
        return None
    g, v = np.array([one.gain for one in gains]), np.array([one.variance for one in gains])
    if not np.isfinite(g).all():
        side = -math.inf if (g == -math.inf).any() else math.inf
        return MeanGain(side, math.inf, math.inf, side, side, 0.0, len(g))
    spread = float((v**2 / np.array([one.freedom for one in gains])).sum())
    freedom = float(v.sum()) ** 2 / spread if spread > 0 else math.inf  # Satterthwaite's
    if len(gains) == 1:
        one = gains[0]
        return MeanGain(one.gain, math.sqrt(one.variance), freedom, one.low, one.high, one.p, 1)
    return MeanGain.of(float(g.mean()), math.sqrt(float(v.sum())) / len(g), freedom, len(g))


def over_deals(found: Sequence[MeanGain]) -> MeanGain | None:
    """B over several deals of the same samples, whose errors count as one and the same."""
    if not found:
        return None
    gains = np.array([one.gain for one in found])
    if not np.isfinite(gains).all():
        return min(found, key=lambda one: one.gain)
    error = float(np.mean([one.error for one in found]))
    freedom = min(one.freedom for one in found)
    return MeanGain.of(float(gains.mean()), error, freedom, max(one.sites for one in found))


def trained_again(by_training: Floats, error: float, sites: int) -> MeanGain | None:
    """C: the mean gain of these sites over trainings ``[S]``; None with fewer than five.

    ``error`` is the standard error that the test samples alone give the mean over trainings. All
    trainings share the samples, so that it adds to the error of training, whose variance the
    trainings show: the larger of the two alone would be too small.
    """
    count = len(by_training)
    if count < TRAININGS:
        return None
    total = math.sqrt(float(by_training.var(ddof=1)) / count + error**2)
    return MeanGain.of(float(by_training.mean()), total, count - 1, sites, error)


def sites_like_these(gains: Sequence[Gain]) -> MeanGain | None:
    """D: the mean gain of all sites like these; None with fewer than two.

    The variance between sites is never estimated below what the test samples alone cause: gains
    may agree by chance.
    """
    if len(gains) < 2 or not all(math.isfinite(one.gain) for one in gains):
        return None
    g, within = np.array([one.gain for one in gains]), np.mean([one.variance for one in gains])
    error = math.sqrt(max(float(g.var(ddof=1)), float(within)) / len(g))
    return MeanGain.of(float(g.mean()), error, len(g) - 1, len(g))


# ---- several tests, and plans --------------------------------------------------------------------


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: the chance of any false claim among all tests has the level of one test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, so_far = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        so_far = max(so_far, min(1.0, p[i] * (len(p) - rank)))
        corrected[i] = so_far
    return corrected


def smallest_gain(samples: int, sites: int) -> float | None:
    """The smallest gain in accuracy, in points, that a site of so many samples can be told.

    By a method that is right wherever its reference is right, if the other sites agree (with fewer
    than three sites, by its own samples). None if the samples cannot show any gain.
    """
    most = 2 * OWN if sites >= POOLED else LEVEL / sites
    wins = next((w for w in range(1, samples + 1) if mid_p(w, 0) <= most), None)
    return None if wins is None else 100.0 * wins / samples


def more_rows(gain: float, error: float) -> float | None:
    """How many times as many test rows would show the gain that was seen, with a power of 80 %.

    None where that cannot be told.
    """
    if not math.isfinite(error) or not math.isfinite(gain) or gain == 0:
        return None
    quantile = float(ndtri(1 - LEVEL / 2) + ndtri(POWER))
    return max(1.0, (quantile * error / gain) ** 2)
