"""The metrics (accuracy, AUC, F1, RMSE, ...): one table row for each, and a client's scores.

A score is one number per client. NaN means that the client has nothing to be scored on; every
summary leaves such clients out and counts them. A model that diverged has an infinite score, which
no summary leaves out. A *gain* is a difference of scores with the sign chosen so that larger is
better, whatever the metric.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, did_you_mean

Array = NDArray[Any]
Floats = NDArray[np.float64]
LEAST_CHANCE = 1e-7  # a probability below it counts as so much in the log loss
ROUNDING = 1e-9  # by which a computed percentage may be above 100
LARGEST_SCORE = 1e150
Scorer = Callable[[Array, Array, Floats], Floats]  # outputs, targets, weights [B, n] -> scores [B]


@dataclass(frozen=True)
class Metric:
    """One metric: all that the config, the scores and the report need to know about it."""

    name: str  # as written in a config
    title: str  # as written in a table or a sentence
    scorer: Scorer
    targets: Literal["classes", "numbers"]  # what it can score
    percent: bool  # scores are percents, and their differences are percentage points
    highest: float  # of all possible scores; infinite for an error, which a diverged model has
    higher_is_better: bool = True
    probabilities: bool = False  # reads probabilities, not only the most likely class
    test: str = "strata"  # of the gain of one predictor over another, see core.paired_tests
    losses: Callable[[Array, Array], Floats] | None = None  # of each sample, of one's own metric
    by_share: bool = False  # reads signed weights, see _share_weighted_accuracy
    unit: str = ""  # added where a table names the metric
    lowest: float = 0.0  # of all possible scores
    # One test row changes a score by at most its share of all rows, or of those of the smallest
    # class; or, if errors are bounded, by its share of that. Without such a bound: None.
    one_row: Literal["rows", "classes", "errors"] | None = None

    def possible(self, score: float) -> bool:
        """Whether a score that somebody else computed may be one; NaN is no score.

        What is infinite in the metric's own range is a model that diverged. A finite score whose
        square overflows is none.
        """
        if math.isnan(score):
            return True
        inside = self.lowest - ROUNDING <= score <= self.highest + ROUNDING
        return inside and (math.isinf(score) or abs(score) < LARGEST_SCORE)

    def possible_gain(self, gain: float) -> bool:
        """Whether a difference of two scores that somebody else computed may be one."""
        widest = self.highest - self.lowest + ROUNDING
        return abs(gain) <= widest and (math.isinf(gain) or abs(gain) < LARGEST_SCORE)


def score(metric: str, outputs: Array, targets: Array) -> float:
    """One client's score: a percent or a plain number, as the metric's row says.

    ``outputs`` are probabilities ``[n, C]``, classes ``[n]`` or predictions ``[n]``. The score is
    NaN where there is nothing to score: no samples, one class only (auc), constant targets (r2).
    Outputs that are not numbers count as wrong, not as missing: a model that diverged must not
    vanish from the table.

    >>> score("accuracy", np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    return float(scores(metric, outputs, targets, np.ones((1, len(targets))))[0])


def scores(metric: str, outputs: Array, targets: Array, weights: Floats) -> Floats:
    """Weighted scores ``[B]``, one per row of weights: sample j counts ``weights[b, j]`` times."""
    scorer = metric_named(metric).scorer
    if len(targets) == 0:
        return np.full(len(weights), math.nan)
    return scorer(np.asarray(outputs), np.asarray(targets), weights)


def classes(outputs: Array) -> Array:
    """The most likely class of each sample ``[n]``; -1 where an output is not a number."""
    if outputs.ndim == 1:
        return outputs
    return np.where(np.isfinite(outputs).all(1), outputs.argmax(1), -1)


def _ratio(over: Floats, under: Floats) -> Floats:
    """``over / under``, and NaN where the divisor is not above 0."""
    none = np.full(np.broadcast_shapes(over.shape, under.shape), math.nan)
    found: Floats = np.divide(over, under, out=none, where=under > 0)
    return found


# ---- metrics of one's own --------------------------------------------------------------------


class OwnMetric:
    """A metric of one's own: extend it, and define ``each`` or else ``score``.

    ``outputs`` are probabilities ``[n, C]``, or predictions ``[n]`` where ``targets`` are numbers.
    A mean over samples is tested in pairs, any other metric by resampling.
    """

    title: str = ""  # as written in a table; by default the name of the class
    targets: Literal["classes", "numbers"] = "classes"  # what it can score
    higher_is_better: bool = True
    percent: bool = False  # scores are percents

    def each(self, outputs: Array, targets: Array) -> Array:
        """The value of each sample ``[n]``, of which the score is the mean."""
        raise NotImplementedError

    def score(self, outputs: Array, targets: Array, weights: Floats) -> float:
        """The score where sample j counts ``weights[j]`` times."""
        raise NotImplementedError


class _Each(OwnMetric):
    """A function that gives the value of each sample; larger is better."""

    def __init__(self, function: Callable[[Array, Array], Array]) -> None:
        self.each = function  # type: ignore[method-assign, assignment]
        self.title = function.__name__.replace("_", " ")


def register(name: str, own: Any) -> None:
    """Add the row of an OwnMetric, or of a function that gives a value per sample."""
    own = own() if isinstance(own, type) else own
    own = own if isinstance(own, OwnMetric) else _Each(own)
    means = "each" in vars(own) or type(own).each is not OwnMetric.each
    if not means and type(own).score is OwnMetric.score:
        raise ConfigError(f"run.metric: '{name}' defines neither 'each' nor 'score'")
    sign = 1.0 if own.higher_is_better else -1.0

    def losses(outputs: Array, targets: Array) -> Floats:
        values = np.asarray(own.each(outputs, targets), dtype=np.float64)
        if values.shape != (len(targets),):
            raise ConfigError(
                f"run.metric: '{name}' gives values of shape {list(values.shape)} for "
                f"{len(targets)} samples; expected one per sample, or a class with 'score'"
            )
        return np.where(np.isfinite(values), -sign * values, math.inf)

    def whole(outputs: Array, targets: Array, weights: Floats) -> Floats:
        return np.array([own.score(outputs, targets, one) for one in weights], dtype=np.float64)

    def mean(outputs: Array, targets: Array, weights: Floats) -> Floats:
        return -sign * _mean_loss(name)(outputs, targets, weights)

    METRICS[name] = Metric(
        name,
        own.title or type(own).__name__,
        mean if means else whole,
        own.targets,
        percent=own.percent,
        higher_is_better=own.higher_is_better,
        probabilities=own.targets == "classes",
        test="means" if means else "strata",
        lowest=-math.inf,
        highest=math.inf,
        losses=losses if means else None,
    )


FACTS = ("title", "targets", "percent", "higher_is_better")


def facts(name: str) -> dict[str, Any]:
    """What a folder keeps of a metric of one's own, for readers that lack its code."""
    return {key: getattr(METRICS[name], key) for key in FACTS}


def read_facts(name: str, stored: Mapping[str, Any]) -> None:
    """Add the row of a metric whose code is not here: it is shown, and scores nothing new."""
    if name in METRICS:
        return
    title, targets, *flags = (stored.get(key) for key in FACTS)
    if not isinstance(title, str) or targets not in ("classes", "numbers"):
        raise ValueError(f"the metric '{name}' is not described")

    class Known(OwnMetric):
        def score(self, outputs: Array, targets: Array, weights: Floats) -> float:
            return math.nan

    known = Known()
    known.title, known.targets = title, targets
    known.percent, known.higher_is_better = (flag is True for flag in flags)
    register(name, known)


def _accuracy(outputs: Array, targets: Array, weights: Floats) -> Floats:
    return 100.0 * _ratio(weights @ (classes(outputs) == targets), weights.sum(1))


def _share_weighted_accuracy(outputs: Array, targets: Array, weights: Floats) -> Floats:
    """Σ_c (share of class c in the client's training data) · (accuracy on class c), reading P3-13.

    ``outputs`` are signed weights ``[n]``: a sample's weight is the share of its class over the
    number of test samples of the class; it is negative where the answer is wrong. Answers without
    weights count equally.
    """
    if outputs.ndim > 1 or outputs.dtype.kind != "f":
        return _accuracy(outputs, targets, weights)
    return 100.0 * _ratio(weights @ outputs.clip(min=0.0), weights @ np.abs(outputs))


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
    """One-against-rest AUC, averaged over the classes of this client."""
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


def sample_losses(metric: str, outputs: Array, targets: Array) -> Floats:
    """The loss of each sample ``[n]`` whose mean is the metric, or which its mean determines.

    RMSE and R² are functions of mean squared errors. A prediction that is not a number has an
    infinite loss.
    """
    own = METRICS[metric].losses
    if own is not None:
        return own(outputs, targets)
    if metric in ("log_loss", "brier"):
        held = np.arange(outputs.shape[1]) == targets[:, None]
        p = outputs.astype(np.float64)
        if metric == "log_loss":
            losses = -np.log(np.maximum(p[held], LEAST_CHANCE))
        else:
            losses = ((p - held) ** 2).sum(1) / 2.0  # of two classes: the usual square of one
    else:
        errors = _residuals(outputs, targets)
        losses = np.abs(errors) if metric == "mae" else errors**2
    return np.where(np.isfinite(losses), losses, math.inf)


def log_losses(probabilities: Array, targets: Array) -> Floats:
    return sample_losses("log_loss", probabilities, targets)


def _mean_loss(metric: str) -> Scorer:
    def scorer(outputs: Array, targets: Array, weights: Floats) -> Floats:
        losses = sample_losses(metric, outputs, targets)
        lost = np.isinf(losses)
        found = _ratio(weights @ np.where(lost, 0.0, losses), weights.sum(1))
        return np.where(weights @ lost > 0, math.inf, found)

    return scorer


def _auprc(outputs: Array, targets: Array, weights: Floats) -> Floats:
    """Average precision of one class against the rest: of two classes, of the second."""
    columns = np.nan_to_num(outputs)
    which = [1] if columns.shape[1] == 2 else range(columns.shape[1])
    found = [_average_precision(columns[:, c], targets == c, weights) for c in which]
    return 100.0 * mean_known(np.stack(found, 1))


def _average_precision(values: Array, positive: Array, weights: Floats) -> Floats:
    order = np.argsort(-values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=math.inf))  # of equal values
    sorted_weights = weights[:, order]
    hits = np.add.reduceat(np.where(positive[order], sorted_weights, 0.0), starts, axis=1)
    found = np.add.reduceat(sorted_weights, starts, axis=1).cumsum(1)
    precision = np.divide(hits.cumsum(1), found, out=np.zeros_like(found), where=found > 0)
    return _ratio((hits * precision).sum(1), hits.sum(1))


def area_under_curve(values: Array, positive: Array) -> float:
    """The probability that a positive has a larger value than a negative; ties count half."""
    return float(_areas(values, positive, np.ones((1, len(values))))[0])


def _areas(values: Array, positive: Array, weights: Floats) -> Floats:
    """The area under the curve for each row of sample weights ``[B]``; NaN for one class only."""
    if len(values) == 0:
        return np.full(len(weights), math.nan)
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=-math.inf))  # of equal values
    sorted_weights, high = weights[:, order], positive[order]
    won = np.add.reduceat(np.where(high, sorted_weights, 0.0), starts, axis=1)
    lost = np.add.reduceat(np.where(high, 0.0, sorted_weights), starts, axis=1)
    below = lost.cumsum(1) - lost / 2.0
    return _ratio((won * below).sum(1), won.sum(1) * lost.sum(1))


def _loss(name: str, title: str, targets: Literal["classes", "numbers"], **more: Any) -> Metric:
    """The row of a metric that is the mean of a loss."""
    scorer = _mean_loss(name)
    more |= {"percent": False, "higher_is_better": False, "highest": math.inf}
    return Metric(name, title, scorer, targets, **more)


def _percent(name: str, title: str, scorer: Scorer, **more: Any) -> Metric:
    """The row of a metric of classes that is a percentage."""
    return Metric(name, title, scorer, "classes", percent=True, highest=100.0, **more)


METRICS = {
    row.name: row
    for row in (  # the first row of each kind of targets is the default
        _percent("accuracy", "accuracy", _accuracy, test="counts", one_row="rows"),
        _percent("balanced_accuracy", "balanced accuracy", _balanced_accuracy, one_row="classes"),
        _percent(
            "share_weighted_accuracy",
            "accuracy weighted by class shares",
            _share_weighted_accuracy,
            test="shares",
            by_share=True,
            one_row="classes",
        ),
        _percent("auc", "AUC", _auc, probabilities=True, test="ranks", one_row="classes"),
        _percent("auprc", "AUPRC", _auprc, probabilities=True),
        _percent("f1", "F1", _f1),
        _loss("log_loss", "log loss", "classes", probabilities=True, test="means"),
        _loss("brier", "Brier score", "classes", probabilities=True, test="means"),
        Metric(
            "rmse",
            "error (RMSE)",
            _rmse,
            "numbers",
            percent=False,
            highest=math.inf,
            higher_is_better=False,
            test="root",
            unit="in the target's unit",
        ),
        _loss(
            "mae",
            "error (MAE)",
            "numbers",
            test="flips",
            unit="in the target's unit",
            one_row="errors",
        ),
        Metric(
            "r2", "R²", _r2, "numbers", percent=False, highest=1.0, test="ratio", lowest=-math.inf
        ),
    )
}


BY_CLASS = "balanced_accuracy"  # the mean of the shares of right answers, one for each class
BESIDE = ("auc", "auprc", BY_CLASS)  # shown of an outcome, whatever the metric
RARE = 1 / 3  # share of a class below which accuracy says little: the metric "auto" is then AUC


def automatic(prevalence: float | None) -> str:
    """The metric of two classes one of which has this share of the samples; None: of others."""
    scarce = prevalence is not None and not RARE <= prevalence <= 1 - RARE
    return "auc" if scarce else metrics_for("classes")[0]


def metric_named(name: str) -> Metric:
    if name not in METRICS:
        raise ConfigError(f"there is no metric '{name}'; {did_you_mean(name, METRICS)}")
    return METRICS[name]


def metrics_for(targets: Literal["classes", "numbers"]) -> tuple[str, ...]:
    """The names of the metrics that score such targets, the default first."""
    return tuple(row.name for row in METRICS.values() if row.targets == targets)


def higher_is_better(metric: str) -> bool:
    return metric_named(metric).higher_is_better


def mean_known(scores: Floats) -> Floats:
    """The mean over the clients (last axis) that have a score; NaN where no client has one.

    Where values are infinite in both directions, the mean is minus infinity.
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


def stalled(means: Sequence[float], metric: str) -> int:
    """How many evaluations ago the best mean was reached for the first time.

    >>> stalled([50.0, 70.0, 70.0, 60.0], "accuracy")
    2
    """
    signed = np.array(means) * (1.0 if higher_is_better(metric) else -1.0)
    return len(means) - 1 - int(np.nan_to_num(signed, nan=-math.inf).argmax())


def gains(scores: Floats, reference: Floats, metric: str) -> Floats:
    """Each client's gain over the reference scores; positive is better, NaN is unknown.

    A client whose models diverged with both has a gain of 0.
    """
    better = 1.0 if higher_is_better(metric) else -1.0
    with np.errstate(invalid="ignore"):
        gained = (scores - reference) * better
    return np.where(np.isinf(scores) & (scores == reference), 0.0, gained)
