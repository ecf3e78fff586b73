"""How far predicted probabilities can be trusted: calibration, sensitivity, intervals.

Intervals cover 95 %: they come from a bootstrap over units (patients), and the interval of a
proportion is at least as wide as the exact one, which does not vanish where a model makes no
mistake.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, expit, logit

from ..core import metrics
from ..core.answers import Answers, outcomes_of
from ..core.metrics import BESIDE, BY_CLASS, METRICS, RARE, Array, Floats, mean_known
from ..core.paired_tests import LEVEL
from ..errors import ConfigError, did_you_mean
from ..runs.run import JudgedRows, Run
from . import words

BINS, FEW_BINS = 10, 5  # of a calibration curve, of equal width
ENOUGH = 200  # samples for the larger number of bins
BLOCK = 2_000_000  # bootstrap weights in memory at a time
DRAWS, FEW_DRAWS = 400, 100  # of a bootstrap; few for many samples
MANY = 20_000  # samples
FEWEST = 10  # test rows: a smaller subgroup or site has no numbers, and no smaller bin is drawn

Truths = NDArray[np.bool_]


class Bin(NamedTuple):
    """The samples of a calibration curve whose predicted probabilities are in one interval."""

    predicted: float  # mean of the predicted probabilities
    observed: float  # share of samples that have the outcome
    rows: int


class Calibration(NamedTuple):
    """How well predicted probabilities agree with observed shares."""

    bins: tuple[Bin, ...]  # small ones are merged with the next
    error: float  # expected calibration error: mean distance of a bin before merging, by rows
    brier: float  # the mean squared difference of probability and outcome
    slope: float  # of the outcome on the probabilities' logits; below 1, these are too extreme


class Estimate(NamedTuple):
    """A number and its 95 % interval; NaN where it is not known."""

    value: float
    low: float
    high: float


class Sensitivity(NamedTuple):
    """The share of samples with the outcome that are found at a chosen specificity."""

    found: Estimate
    threshold: float  # a probability of at least this much is an alarm; infinite: none is
    specificity: Estimate | None = None  # that it has; None if it was chosen on the same samples


def calibration(p: Floats, truth: Truths) -> Calibration:
    """The calibration curve of probabilities ``p [n]`` in bins of equal width, and two errors.

    >>> round(calibration(np.array([0.1, 0.2, 0.9]), np.array([False, True, True])).brier, 4)
    0.22
    """
    count = BINS if len(p) >= ENOUGH else FEW_BINS
    at = np.minimum((p * count).astype(np.int64), count - 1)
    rows, hits = np.bincount(at, minlength=count), np.bincount(at, truth, count)
    total = np.bincount(at, p, count)
    apart = float(np.abs(total - hits).sum() / len(p))
    bins = tuple(Bin(float(t / n), float(h / n), int(n)) for n, t, h in _merged(rows, total, hits))
    return Calibration(bins, apart, float(((p - truth) ** 2).mean()), slope(p, truth))


def _merged(*counts: Array) -> list[Array]:
    """The columns of counts, added up until each has ``FEWEST`` rows, which are the first count."""
    found: list[Array] = []
    for column in np.stack(counts, 1):
        if found and found[-1][0] < FEWEST:
            found[-1] = found[-1] + column
        else:
            found.append(column)
    if len(found) > 1 and found[-1][0] < FEWEST:
        last = found.pop()
        found[-1] = found[-1] + last
    return found


def slope(p: Floats, truth: Truths) -> float:
    """The calibration slope: the logistic regression of the outcome on the logits.

    NaN where it does not exist: a threshold divides the outcomes, or all probabilities are equal.
    """
    logits = logit(np.clip(p, 1e-6, 1 - 1e-6))
    design, found = np.stack([np.ones(len(p)), logits], 1), np.zeros(2)
    for _ in range(50):  # Newton's steps
        chance = expit(design @ found)
        curvature = (design * (chance * (1 - chance))[:, None]).T @ design
        if np.linalg.cond(curvature) > 1e12:
            return math.nan
        step = np.linalg.solve(curvature, design.T @ (truth - chance))
        found = found + step
        if np.abs(step).max() < 1e-9:
            return float(found[1])
    return math.nan


def sensitivity(
    p: Floats,
    truth: Truths,
    units: Array,
    specificity: float,
    validation: tuple[Floats, Truths] | None = None,
) -> Sensitivity | None:
    """The largest sensitivity of a threshold whose specificity is at least the chosen one.

    The threshold is chosen on validation samples of both kinds if there are any, else on the same
    samples, in every bootstrap draw again. None if there are no samples with the outcome, or none
    without it.
    """
    if truth.all() or not truth.any():
        return None
    if validation is not None and validation[1].any() and not validation[1].all():
        edge = _threshold(*validation, specificity)
        return Sensitivity(
            _share((p >= edge)[truth], units[truth]),
            edge,
            _share((p < edge)[~truth], units[~truth]),
        )
    values, at = _sensitivities(p, truth, np.ones((1, len(p))), specificity)
    again = np.concatenate(
        [_sensitivities(p, truth, weights, specificity)[0] for weights in drawn(units)]
    )
    alike = len(np.unique(units[truth]))
    found = estimate(float(values[0]), again, proportion_of=alike)
    edges = np.unique(p)[::-1]
    return Sensitivity(found, float(edges[at[0] - 1]) if at[0] else math.inf)


def _threshold(p: Floats, truth: Truths, specificity: float) -> float:
    """The lowest probability that is an alarm at this specificity; infinite if there is none."""
    allowed = int(_sensitivities(p, truth, np.ones((1, len(p))), specificity)[1][0])
    return float(np.unique(p)[::-1][allowed - 1]) if allowed else math.inf


def _share(hits: Truths, units: Array) -> Estimate:
    """The share of hits among samples, and its interval over units."""
    again = [weights @ hits / weights.sum(1) for weights in drawn(units)]
    return estimate(float(hits.mean()), np.concatenate(again), len(np.unique(units)))


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
        least, most = exact(value, proportion_of)
        low, high = min(low, least), max(high, most)
    return Estimate(value, min(low, value), max(high, value))


def exact(share: float, n: int) -> tuple[float, float]:
    """Clopper and Pearson's exact interval for a proportion that was found among ``n`` samples."""
    hits = share * n
    low = float(betaincinv(hits, n - hits + 1, LEVEL / 2)) if hits > 0 else 0.0
    return low, float(betaincinv(hits + 1, n - hits, 1 - LEVEL / 2)) if hits < n else 1.0


# ---- numbers for a clinical outcome: calibration, sensitivity at a chosen specificity, subgroups

# The outcome is one class against all others. All numbers are computed from the answers to test
# samples after the last round.

SPECIFICITY = 0.9  # unless another one is chosen
MOST_SITES = 1000  # of more sites, only all together have numbers


class ClinicalChoice(NamedTuple):
    """What the reader of a report chooses."""

    specificity: float = SPECIFICITY
    positive: str | None = None  # the class that is the outcome; None: the second of two classes

    @classmethod
    def checked(cls, specificity: float, positive: str | None = None) -> "ClinicalChoice":
        """The choice of a user; refuses a specificity that is no share."""
        if not 0 < specificity < 1:
            raise ConfigError(
                f"--specificity: found {specificity:g}; expected a share between 0 and 1, as 0.9"
            )
        return cls(specificity, positive)


class Subgroup(NamedTuple):
    """The score of one subgroup; not given if the subgroup has fewer rows than ``FEWEST``."""

    name: str
    rows: int
    score: Estimate | None


class Clinical(NamedTuple):
    """The numbers of one client, or of all clients together."""

    rows: int
    positives: int | None  # None without an outcome
    beside: tuple[float, ...]  # scores by the metrics BESIDE; none with too few rows
    calibration: Calibration | None
    sensitivity: Sensitivity | None
    subgroups: tuple[Subgroup, ...]


class SiteClinical(NamedTuple):
    """The numbers of one client alone, for the card of its model."""

    outcome: str | None  # the class, in words; None where none was chosen among several
    specificity: float
    column: str  # that gives the subgroups; empty if there is none
    metric: str
    numbers: Clinical


class ClinicalRun(NamedTuple):
    """The numbers of one run."""

    outcome: str | None
    specificity: float
    column: str
    sites: tuple[Clinical, ...]  # [K]; none of very many sites
    together: Clinical


def clinical_run(runs: Sequence[Run], choice: ClinicalChoice | None = None) -> ClinicalRun | None:
    """The numbers of one run, or of the folds of one method; None without outcome and subgroups.

    Of folds, the scores of a client are means over folds, and all else is of all rows together.
    """
    choice = scarce_outcome(runs, choice)
    parts = [_client_rows(run) for run in runs]
    if any(part is None for part in parts) and choice.positive is not None:
        raise ConfigError(
            f"--positive: found '{choice.positive}', and this run has no answers to test "
            "samples with names of classes; expected a simulation by this version"
        )
    together = _together(runs, choice)
    if together is None:
        return None
    clients = list(zip(*(part for part in parts if part is not None), strict=True))
    sites = clients if len(clients) <= MOST_SITES else []
    own = [_of_folds(runs[0].metric, folds, choice) for folds in sites]
    numbers = tuple(site.numbers for site in own if site is not None)
    return ClinicalRun(*together[:3], numbers, together.numbers)


def scarce_outcome(runs: Sequence[Run], choice: ClinicalChoice | None = None) -> ClinicalChoice:
    """The choice, with the first of two classes as the outcome if few test samples have it."""
    rows = runs[0].roster.rows
    targets = [run.outcomes.targets for run in runs if run.outcomes is not None]
    return scarce_class(rows.classes if rows else (), targets, choice or ClinicalChoice())


def scarce_class(
    classes: Sequence[str], targets: Sequence[Array], choice: ClinicalChoice
) -> ClinicalChoice:
    """The same by the classes' names and the test samples' targets."""
    if choice.positive is not None or not targets or len(classes) != 2:
        return choice
    return choice._replace(positive=classes[int((np.concatenate(targets) == 0).mean() >= RARE)])


def _client_rows(run: Run) -> list[tuple[Answers, JudgedRows]] | None:
    """Each client's answers in a run, with what is known of its rows; None if it has none."""
    if run.outcomes is None or (rows := run.roster.rows) is None:
        return None
    sizes = run.outcomes.sizes
    return [(x, rows_of(rows, sizes, i)) for i, x in enumerate(run.outcomes.clients())]


def _together(runs: Sequence[Run], choice: ClinicalChoice) -> SiteClinical | None:
    """The numbers of all clients together."""
    whole = [
        (_joined([*run.outcomes.clients()]), run.roster.rows)
        for run in runs
        if run.outcomes is not None and run.roster.rows is not None
    ]
    return _of_folds(runs[0].metric, whole, choice) if len(whole) == len(runs) else None


def _joined(parts: Sequence[Answers]) -> Answers:
    """All answers as those of one client."""
    found = outcomes_of(parts)
    (whole,) = found._replace(sizes=found.sizes.sum(keepdims=True)).clients()
    return whole


def _of_folds(
    metric: str, folds: Sequence[tuple[Answers, JudgedRows]], choice: ClinicalChoice
) -> SiteClinical | None:
    """The numbers of a client's answers in all folds, or in the one run."""
    answers, rows = zip(*folds, strict=True)
    codes = [some.codes for some in rows if some.codes is not None]
    every = rows[0]._replace(codes=np.concatenate(codes) if codes else None)
    found = site_clinical(metric, _joined(answers), every, choice)
    if found is None or not found.numbers.beside or len(folds) == 1:
        return found
    outcome = outcome_class(every.classes, choice.positive)
    scores = np.array([_beside(some, outcome) for some in answers])
    means = tuple(mean_known(scores.T).tolist())
    return found._replace(numbers=found.numbers._replace(beside=means))


def _beside(answers: Answers, outcome: int | None) -> tuple[float, ...]:
    """The scores by the metrics ``BESIDE``, of one class against the others."""
    if outcome is None or answers.chances is None:
        return ()
    p, truth = answers.chances[:, outcome].astype(np.float64), answers.targets == outcome
    if truth.all() or not truth.any():
        return (math.nan,) * len(BESIDE)
    both = np.stack([1 - p, p], 1)
    return tuple(metrics.score(name, both, truth.astype(int)) for name in BESIDE)


def companions(runs: Sequence[Run]) -> str:
    """What belongs beside a score such as the AUC of two classes: the other scores, in words.

    They are those of all sites together that the page shows. Empty for a metric of another kind,
    and where the answers are not known.
    """
    found = _together(runs, scarce_outcome(runs)) if runs[0].metric in BESIDE else None
    if found is None or (calibrated := found.numbers.calibration) is None:
        return ""
    parts = [f"outcome “{found.outcome}”"]
    parts += [
        f"{METRICS[name].title} {score:.1f} %"
        for name, score in zip(BESIDE, found.numbers.beside, strict=True)
        if name != runs[0].metric
    ]
    if (caught := found.numbers.sensitivity) is not None:
        level = f"{100 * SPECIFICITY:.0f} % specificity"
        parts.append(f"sensitivity {100 * caught.found.value:.0f} % at {level}")
    parts.append(f"Brier score {calibrated.brier:.3f}")
    sloped = words.plain(calibrated.slope)
    parts += [] if sloped == words.NONE else [f"calibration slope {sloped}"]
    return ", ".join(parts)


def site_clinical(
    metric: str,
    answers: Answers,
    rows: JudgedRows,
    choice: ClinicalChoice | None = None,
    validation: Answers | None = None,
) -> SiteClinical | None:
    """The numbers of one client's answers; None without an outcome and subgroups.

    The threshold is chosen on the answers to validation samples, where there are any.
    """
    choice = choice or ClinicalChoice()
    outcome = outcome_class(rows.classes, choice.positive)
    if answers.chances is None:  # probabilities were not kept
        outcome = None
    if outcome is None and rows.codes is None:
        return None
    count, positives, calibrated, sensitive = len(answers.targets), None, None, None
    beside: tuple[float, ...] = ()
    if outcome is not None and answers.chances is not None:
        p, truth = answers.chances[:, outcome].astype(np.float64), answers.targets == outcome
        positives = int(truth.sum())
        if count >= FEWEST and bool(np.isfinite(p).all()):
            beside = _beside(answers, outcome)
            calibrated = calibration(p, truth)
            held = None
            if validation is not None and validation.chances is not None:
                held = validation.chances[:, outcome], validation.targets == outcome
            sensitive = sensitivity(p, truth, answers.units, choice.specificity, held)
    groups = [] if rows.codes is None else [rows.codes == i for i in range(len(rows.names))]
    subgroups = (
        Subgroup(name, int(inside.sum()), estimated_score(metric, answers.where(inside)))
        for name, inside in zip(rows.names, groups, strict=False)
        if inside.any()
    )
    found = Clinical(count, positives, beside, calibrated, sensitive, tuple(subgroups))
    named = None if outcome is None else rows.classes[outcome]
    title = f"{rows.target}: {named}" if named is not None and rows.target else named
    return SiteClinical(title, choice.specificity, rows.column, metric, found)


def rows_of(rows: JudgedRows, sizes: Array, client: int) -> JudgedRows:
    """The rows of one client among those of all clients."""
    if rows.codes is None:
        return rows
    end = int(sizes[: client + 1].sum())
    return rows._replace(codes=rows.codes[end - int(sizes[client]) : end])


def outcome_class(classes: Sequence[str], positive: str | None) -> int | None:
    """The number of the class that is the outcome: the chosen one, or the second of two."""
    if positive is None:
        return 1 if len(classes) == 2 else None
    if positive not in classes:
        known = did_you_mean(positive, classes) if classes else "this is a regression"
        raise ConfigError(f"--positive: no class is called '{positive}'; {known}")
    return classes.index(positive)


def estimated_score(metric: str, answers: Answers) -> Estimate | None:
    """The score of answers with its interval; None if they are too few or have no score."""
    values, targets, units = answers[:3]
    if len(targets) < FEWEST:
        return None
    value = metrics.score(metric, values, targets)
    if not math.isfinite(value):
        return None
    alike = len(np.unique(units)) if metric == "accuracy" else None
    if alike is None and METRICS[metric].targets == "classes" and value in (0.0, 100.0):
        # No draw differs from a perfect ranking; it rests on the units of the rarer class.
        alike = min(len(np.unique(units[targets == one])) for one in np.unique(targets))
    weights = drawn(units) if alike != len(units) else ()  # a proportion has the exact interval
    again = [metrics.scores(metric, values, targets, some) for some in weights]
    scale = 100.0 if METRICS[metric].percent else 1.0
    found = estimate(value / scale, np.concatenate([[], *again]) / scale, proportion_of=alike)
    if metric == BY_CLASS:
        found = _of_shares(found, values, targets, units)
    return Estimate(*(scale * part for part in found))


def _of_shares(found: Estimate, values: Array, targets: Array, units: Array) -> Estimate:
    """An interval of balanced accuracy no narrower than that of exact shares, one per class.

    The distances of the shares from their exact ends are added as independent ones (Zou 2008).
    """
    right, apart = metrics.classes(values) == targets, []
    for one in np.unique(targets):
        share, n = float(right[targets == one].mean()), len(np.unique(units[targets == one]))
        low, high = exact(share, n)
        apart.append((share - low, high - share))
    below, above = np.sqrt((np.array(apart) ** 2).sum(0)) / len(apart)
    low, high = found.value - float(below), found.value + float(above)
    return Estimate(found.value, min(low, found.low), max(high, found.high))
