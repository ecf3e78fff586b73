"""One client's gain of one predictor over another: estimate, interval and p-value.

Both predictors answer the same test samples, so that their outcomes are paired. Samples of one unit
(a patient), and a sample that several trainings test, are one piece of evidence: they count
together. Every function is a pure function of one client's answers and returns a few numbers, so
that it can be computed at the site that holds the data.

    test of the metric's row     p-value                          interval
    counts (accuracy)            mid-p McNemar; units: flips      Tango's score interval
    ranks (AUC, two classes)     DeLong; Student's t with         as the p-value
                                 min(n+, n-) - 1 degrees
    flips, root, ratio           sign flips of paired losses      linearised, Student's t
      (MAE, RMSE, R2)
    means (log loss, Brier)      Student's t of paired losses     as the p-value
    shares (class shares)        Student's t of weighted wins     as the p-value
    strata (balanced accuracy,   stratified jackknife;            as the p-value
      F1, AUPRC, AUC of more;    Student's t
      every other metric)
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, ndtr, ndtri, stdtr, stdtrit

from . import metrics
from .answers import Answers, Counts
from .metrics import Array, Floats

LEVEL = 0.05  # significance level of every test; intervals cover 1 - LEVEL
MOST_PARTS = 200  # of a class: more units are left out together
EXACT_UNITS = 1000  # with more units the sign-flip test uses the normal approximation
STEPS = 10_000  # of the grid on which unequal losses change their signs
FEWEST_OF_A_CLASS = 10  # test units: with fewer of either class nothing is said of an AUC

FLIPPED = ("flips", "root", "ratio")  # tests in which losses change their signs

Pair = tuple[Answers, Answers]  # the answers of the predictor under test, and of the reference


class Discordant(NamedTuple):
    """How often only one of two predictors is right; of dependent samples, their effective number.

    Ten samples of one unit that always agree are worth one sample.
    """

    wins: float
    losses: float
    rows: float


class Gain(NamedTuple):
    """One client's gain of one predictor over another; positive is better.

    With several trainings it is the mean over them.
    """

    gain: float  # in the metric's unit; percentage points for the metrics of classes
    variance: float  # of the gain, due to the choice of test samples; infinite: too few to tell
    low: float  # the ends of the interval
    high: float
    p: float  # two-sided, of this client and predictor alone
    samples: int  # test samples (of one training)
    freedom: float = math.inf  # degrees of freedom of the variance
    counts: Discordant | None = None  # where the metric is accuracy

    @property
    def judged(self) -> bool:
        """Whether the test samples say how sure the gain is; always, if a model diverged."""
        return math.isfinite(self.variance) or math.isinf(self.gain)


def client_gain(metric: str, pairs: Sequence[Pair]) -> Gain | None:
    """The gain of the first predictor of each pair over the second, with one pair per training.

    None where the metric is not defined on the client's test data.
    """
    samples = round(sum(len(a.targets) for a, _ in pairs) / len(pairs))
    if samples == 0:
        return None
    test = metrics.metric_named(metric).test
    if test == "counts":
        return _accuracy_gain(pairs)._replace(samples=samples)
    ours, theirs = (
        np.array([metrics.score(metric, x.values, x.targets) for x in side])
        for side in zip(*pairs, strict=True)
    )
    gain = float(metrics.gains(ours, theirs, metric).mean())
    if math.isnan(gain):
        return None
    if math.isinf(gain):  # a model diverged
        return Gain(gain, math.inf, gain, gain, 0.0, samples)
    if not np.isfinite(ours).all():  # both did, with the same training
        return Gain(0.0, 0.0, 0.0, 0.0, 1.0, samples) if gain == 0 else _unknown(gain, samples)
    if test == "strata" or (test == "ranks" and _classes(pairs[0][0]) > 2):
        return _resampled(metric, pairs, gain, samples)
    return _linearised(metric, pairs, gain, samples)


def _unknown(gain: float, samples: int) -> Gain:
    """A gain of too few units to tell how sure it is."""
    return Gain(gain, math.inf, -math.inf, math.inf, 1.0, samples)


# ---- accuracy ------------------------------------------------------------------------------------


def _accuracy_gain(pairs: Sequence[Pair]) -> Gain:
    signs = np.concatenate([_hits(a) - _hits(b) for a, b in pairs])
    sums = _unit_sums(np.concatenate([a.units for a, _ in pairs]), signs.astype(np.float64))
    wins, losses = int((signs > 0).sum()), int((signs < 0).sum())
    return of_counts(wins, losses, len(signs), sums if len(sums) < len(signs) else None)


def of_counts(wins: int, losses: int, n: int, unit_sums: Floats | None = None) -> Gain:
    """The gain in accuracy where only the first predictor is right on ``wins`` samples of ``n``.

    On ``losses`` only the second is. ``unit_sums`` are wins minus losses of each unit, where a unit
    has several samples. One sample or one unit does not tell how sure its gain is.
    """
    gain, variance = 100.0 * (wins - losses) / n, count_variance(wins, losses, n)
    worth, p = 1.0, float(mid_p(wins, losses))
    if (n if unit_sums is None else len(unit_sums)) < 2:
        return _unknown(gain, n)
    if unit_sums is not None:
        units = len(unit_sums)
        dependent, p = 1e4 * units * float(unit_sums.var(ddof=1)) / n**2, sign_flip(unit_sums)
        worth = min(1.0, float(variance) / dependent) if dependent > 0 else 1.0
    counts = Discordant(wins * worth, losses * worth, n * worth)
    low, high = tango(*counts)
    return Gain(gain, float(variance) / worth, 100 * low, 100 * high, p, n, counts=counts)


def count_variance(wins: Array | float, losses: Array | float, n: Array | float) -> Floats:
    """The variance of a gain in accuracy, in squared points.

    Half a sample is added to each of the four cells for the shares, and none for their number: few
    samples that happen to agree would otherwise seem sure.
    """
    b, c, m = np.asarray(wins) + 0.5, np.asarray(losses) + 0.5, np.asarray(n) + 2.0
    variance: Floats = 1e4 * (b + c - (b - c) ** 2 / m) / (m * np.asarray(n))
    return variance


def mid_p(wins: Array | int, losses: Array | int) -> Floats:
    """The two-sided mid-p value of McNemar's test: a fair coin with these numbers of outcomes.

    >>> round(float(mid_p(5, 1)), 9)
    0.125
    """
    few, thrown = np.minimum(wins, losses), np.add(wins, losses)
    fewer = np.where(few > 0, bdtr(np.maximum(few - 1, 0), thrown, 0.5), 0.0)
    p = bdtr(few, thrown, 0.5) + fewer
    return np.where(np.equal(wins, losses), 1.0, p)


def sign_flip(sums: Floats) -> float:
    """Two-sided mid-p value of the sign-flip test over the units' sums.

    It is the share of all sign patterns whose sum is farther from 0 than the observed one; patterns
    whose sum is as far count half. Where every unit is one sample, this is mid-p McNemar. Sums that
    are no whole numbers are rounded to a grid of ``STEPS`` over their total.
    """
    if not sums.any():
        return 1.0
    if len(sums) > EXACT_UNITS:
        return 2.0 * float(ndtr(-abs(sums.sum()) / math.sqrt(float((sums**2).sum()))))
    whole = bool((sums == np.round(sums)).all())
    steps = np.round(sums if whole else sums * (STEPS / np.abs(sums).sum())).astype(np.int64)
    total, seen = int(np.abs(steps).sum()), abs(int(steps.sum()))
    if seen == 0:
        return 1.0
    ways = np.zeros(2 * total + 1)
    ways[total] = 1.0
    for size in np.abs(steps[steps != 0]):
        ways = (np.roll(ways, size) + np.roll(ways, -size)) / 2.0  # no mass wraps around the ends
    return min(1.0, float(2.0 * ways[total + seen + 1 :].sum() + ways[total + seen]))


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


# ---- metrics that are means over samples, or nearly so -------------------------------------------


class _Parts(NamedTuple):
    """A gain as a sum over samples."""

    influence: Floats  # [n] of each sample on the gain; they sum to 0
    losses: Floats | None  # [n] the reference's loss minus ours, to flip the signs of


def _linearised(metric: str, pairs: Sequence[Pair], gain: float, samples: int) -> Gain:
    """The gain with the variance of its linear part."""
    test = metrics.METRICS[metric].test
    parts = [_parts(metric, a, b) for a, b in pairs]
    units = np.concatenate([a.units for a, _ in pairs])
    sums = _unit_sums(units, np.concatenate([part.influence for part in parts]) / len(pairs))
    freedom = len(sums) - 1
    if test == "ranks":
        freedom = int(_class_units(pairs).min()) - 1
    if freedom < (FEWEST_OF_A_CLASS - 1 if test == "ranks" else 1):
        return _unknown(gain, samples)
    variance = float(sums @ sums)
    variance *= 1.0 if test == "ranks" else len(sums) / freedom
    found = of_variance(gain, variance, freedom, samples)
    if test not in FLIPPED:
        return found
    flipped = np.concatenate([part.losses for part in parts if part.losses is not None])
    return found._replace(p=sign_flip(_unit_sums(units, flipped)))


def of_variance(gain: float, variance: float, freedom: float, samples: int) -> Gain:
    """A gain with Student's test and interval."""
    reach = float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(variance)
    p = two_sided(gain, math.sqrt(variance), freedom)
    return Gain(gain, variance, gain - reach, gain + reach, p, samples, freedom)


def two_sided(value: float, deviation: float, freedom: float) -> float:
    """The two-sided p-value of Student's t; 0 where only the deviation is 0."""
    if value == 0:
        return 1.0
    return 2.0 * float(stdtr(freedom, -abs(value) / deviation)) if deviation > 0 else 0.0


def _parts(metric: str, a: Answers, b: Answers) -> _Parts:
    test = metrics.METRICS[metric].test
    if test == "ranks":
        return _Parts(_delong(a) - _delong(b), None)
    if test == "shares":
        weights = np.abs(a.values) / max(np.abs(a.values).sum(), 1e-300)
        signs = (a.values > 0).astype(np.float64) - (b.values > 0)
        return _Parts(100.0 * weights * (signs - weights @ signs), None)
    ours, theirs = (metrics.sample_losses(metric, x.values, x.targets) for x in (a, b))
    apart = theirs - ours
    if test == "root":
        return _Parts(_root_influence(theirs) - _root_influence(ours), apart)
    if test == "ratio":
        y = a.targets.astype(np.float64)
        squares = (y - y.mean()) ** 2
        of_total = (squares - squares.mean()) * apart.mean() / squares.mean()
        return _Parts((apart - apart.mean() - of_total) / squares.mean() / len(y), apart)
    return _Parts((apart - apart.mean()) / len(apart), apart)


def _root_influence(squares: Floats) -> Floats:
    """The influence of each sample on the root of the mean of squares: its jackknife value."""
    total, rest = float(squares.sum()), max(1, len(squares) - 1)
    without = np.sqrt(np.maximum(total - squares, 0.0) / rest)
    influence: Floats = (without.mean() - without) * (rest / len(squares))
    return influence


def _delong(answers: Answers) -> Floats:
    """The influence of each sample on the AUC in points (DeLong 1988).

    Their squares sum to DeLong's variance: those of a class are scaled by √(n / (n - 1)).
    """
    values, positive = _chances(answers), answers.targets == 1
    influence = np.zeros(len(values))
    for side, sign in ((positive, 1.0), (~positive, -1.0)):
        own, other, count = values[side], np.sort(values[~side]), int(side.sum())
        below = np.searchsorted(other, own) + np.searchsorted(other, own, "right")
        won = below / (2.0 * len(other))
        scale = math.sqrt(count / max(1, count - 1)) / count
        influence[side] = sign * (won - won.mean()) * scale
    return 100.0 * influence


def _chances(answers: Answers) -> Floats:
    """The values that rank the samples of two classes."""
    values = answers.values if answers.values.ndim == 1 else answers.values[:, -1]
    return np.nan_to_num(values).astype(np.float64)


# ---- metrics that are no means -------------------------------------------------------------------


def _resampled(metric: str, pairs: Sequence[Pair], gain: float, samples: int) -> Gain:
    """The gain with its jackknife variance, in which every class keeps its weight.

    A stratum is the units with the same classes; targets that are numbers are one stratum. Each
    unit, or each part of a stratum of very many, is left out once.
    """
    row = metrics.METRICS[metric]
    units = np.concatenate([a.units for a, _ in pairs])
    found, place = np.unique(units, return_inverse=True)
    targets = np.concatenate([a.targets for a, _ in pairs])
    _, kind = np.unique(targets * (row.targets == "classes"), return_inverse=True)
    held = np.zeros((len(found), kind.max() + 1), dtype=bool)
    held[place, kind] = True
    _, stratum = np.unique(held, axis=0, return_inverse=True)
    sizes, freedom = np.bincount(stratum), int(held.sum(0)[held.any(0)].min()) - 1
    if freedom < 1 or sizes.max() < 2:  # no two units are alike in their classes
        return _unknown(gain, samples)
    left, which = _left_out(stratum, sizes)
    ends = np.cumsum([len(a.targets) for a, _ in pairs])[:-1]
    rows = []
    for pair, weights in zip(pairs, np.split(left[:, place], ends, axis=1), strict=True):
        ours, theirs = (metrics.scores(metric, x.values, x.targets, weights) for x in pair)
        rows.append(metrics.gains(ours, theirs, metric))
    parts = [np.mean(rows, 0)[which == one] for one in np.unique(which)]
    variance = float(sum((len(part) - 1) * part.var() for part in parts))
    if row.targets == "classes" and not row.probabilities:
        variance = max(variance, _least_variance(pairs))
    return of_variance(gain, variance, freedom, samples)


def _left_out(stratum: Array, sizes: Counts) -> tuple[Floats, Array]:
    """The weights ``[B, units]`` with a part of one stratum left out, and that stratum ``[B]``."""
    rng, weights, which = np.random.default_rng(0), [], []
    for one, n in enumerate(sizes):
        inside = np.flatnonzero(stratum == one)
        for part in np.array_split(rng.permutation(inside), min(n, MOST_PARTS)) if n > 1 else ():
            row = np.ones(len(stratum))
            row[inside] = n / (n - len(part))
            row[part] = 0.0
            weights.append(row)
            which.append(one)
    return np.array(weights), np.array(which)


def _least_variance(pairs: Sequence[Pair]) -> float:
    """The variance of a gain in balanced accuracy if each class had half a sample in each cell.

    A class whose samples all agree would show no variance.
    """
    a, b = pairs[0]
    signs, which = _hits(a) - _hits(b), np.unique(a.targets)
    inside = [signs[a.targets == c] for c in which]
    each = [count_variance((s > 0).sum(), (s < 0).sum(), len(s)) for s in inside]
    return float(sum(each)) / len(which) ** 2


# ---- samples and units ---------------------------------------------------------------------------


def _hits(answers: Answers) -> Counts:
    right: Counts = (metrics.classes(answers.values) == answers.targets).astype(np.int64)
    return right


def _unit_sums(units: Array, values: Floats) -> Floats:
    _, place = np.unique(units, return_inverse=True)
    sums: Floats = np.bincount(place, values).astype(np.float64)
    return sums


def _classes(answers: Answers) -> int:
    """The number of classes that answers tell apart."""
    values = answers.values
    if values.ndim == 2 and values.shape[1] > 1:
        return int(values.shape[1])
    return 2 if values.dtype.kind == "f" else int(max(values.max(), answers.targets.max())) + 1


def _class_units(pairs: Sequence[Pair]) -> NDArray[np.int64]:
    """The number of units with a positive, and with a negative."""
    units = np.concatenate([a.units for a, _ in pairs])
    positive = np.concatenate([a.targets == 1 for a, _ in pairs])
    return np.array([len(np.unique(units[side])) for side in (positive, ~positive)])


# ---- what leaves a site --------------------------------------------------------------------------


class SiteGain(NamedTuple):
    """One client's gain of one method over another: all that leaves the place of the answers."""

    each: tuple[Gain | None, ...]  # with each training; None where the method does not serve it
    together: Gain | None  # over all trainings

    def to_json(self) -> dict[str, Any]:
        return {"each": [_to_json(one) for one in self.each], "together": _to_json(self.together)}

    @classmethod
    def from_json(cls, value: Any) -> "SiteGain":
        """The gain that was sent or stored as JSON; ValueError if it is none."""
        try:
            return cls(tuple(map(_from_json, value["each"])), _from_json(value["together"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"is no gain of a client ({error})") from error


def site_gain(metric: str, pairs: Sequence[Pair | None]) -> SiteGain:
    """One client's gain, with one pair per training; None where the method does not serve it."""
    known = [pair for pair in pairs if pair is not None]
    each = tuple(None if pair is None else client_gain(metric, [pair]) for pair in pairs)
    return SiteGain(each, client_gain(metric, known) if known else None)


MOST_SAMPLES = 10**12  # of one client
INFINITE = {"inf": math.inf, "-inf": -math.inf}  # JSON has no such number


def _to_json(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    numbers = {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value
        for name, value in gain._asdict().items()
    }
    return numbers | {"counts": None if gain.counts is None else list(gain.counts)}


def _from_json(value: Any) -> Gain | None:
    if value is None:
        return None
    counts = value["counts"]
    numbers = {name: _number(value[name]) for name in Gain._fields if name != "counts"}
    samples = int(numbers.pop("samples"))
    if numbers["variance"] < 0 or not 0 <= numbers["p"] <= 1 or numbers["freedom"] <= 0:
        raise ValueError("found a negative variance, or a p-value that is no probability")
    low, high = numbers["low"] - 1e-6, numbers["high"] + 1e-6  # roundings
    if not low <= numbers["gain"] <= high or not 0 <= samples <= MOST_SAMPLES:
        raise ValueError(
            "found a gain outside of its interval, or a number of samples that is none"
        )
    known = None if counts is None else Discordant(*map(_number, counts))
    if known is not None and not 0 <= min(known) <= max(known) <= MOST_SAMPLES:
        raise ValueError("found a number of wins, losses or rows that is none")
    return Gain(**numbers, samples=samples, counts=known)


def _number(value: Any) -> float:
    """A number of JSON; ValueError otherwise."""
    if isinstance(value, str) and value in INFINITE:
        return INFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {str(value)[:20]!r}; expected a number")
    return value
