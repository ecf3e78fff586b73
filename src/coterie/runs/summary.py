"""The numbers of ``summary.json``: how they are computed, what they mean, and how they are checked.

:data:`FIELDS` is the one table of the file's fields. :func:`checked` checks a summary that was read
from a folder against it, and a test compares ``docs/folders.md`` with it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core import metrics
from . import collaboration, kinds, statistics
from .run import FEDERATED, History, dense

LAST = "{score}_last"  # {score} is "accuracy" for that metric and "score" for every other
BYTES = "bytes_up", "bytes_down", "bytes_serve"
BY_VALIDATION = "{score}_best_by_validation"


def score_field(name: str, metric: str) -> str:
    """The name of a field that begins with ``{score}``, for this metric.

    >>> score_field(LAST, "accuracy"), score_field(LAST, "rmse")
    ('accuracy_last', 'score_last')
    """
    return name.format(score="accuracy" if metric == "accuracy" else "score")


def summarise(
    history: History, digest: str | None = None, local: History | None = None
) -> dict[str, Any]:
    """The numbers of ``summary.json``; those relative to Local are None if it is not given."""
    metric, roster = history.metric, history.roster
    spread = statistics.over_clients(history.last, roster.n_test, metric)
    means = metrics.mean_known(history.test)
    by_val = None if history.merge_val else statistics.best_round(history.val, metric)
    by_test = statistics.best_round(history.test, metric)
    gained = None if local is None else metrics.gains(history.last, local.last, metric)
    kin, truth = collaboration.add_up(history.matrices, history.swaps), roster.truth(history.swaps)
    lines = history.lines
    return {
        "method": history.method,
        "rounds": len(lines),
        "seed": history.seed,
        "metric": metric,
        score_field(LAST, metric): spread.mean,
        score_field(BY_VALIDATION, metric): None if by_val is None else float(means[by_val]),
        "round_best_by_validation": None if by_val is None else int(history.rounds[by_val]),
        "bmta": None if by_test is None else float(means[by_test]),
        "best_of_rounds": float(
            metrics.mean_known(statistics.best_of_rounds(history.test, metric))
        ),
        "round_best_on_test": None if by_test is None else int(history.rounds[by_test]),
        "weighted_mean": spread.weighted_mean,
        "federated_accuracy": next((r[FEDERATED] for r in lines[::-1] if FEDERATED in r), None),
        "worst_tenth": spread.worst_tenth,
        "best_tenth": spread.best_tenth,
        "variance": spread.variance,
        "variance_worst_tenth": spread.variance_worst,
        "variance_best_tenth": spread.variance_best,
        "relative_to_local": None if gained is None else float(metrics.mean_known(gained)),
        "worse_than_local": None if gained is None else statistics.count_worse(gained),
        "in_group_weight": None if kin is None else collaboration.in_group_weight(kin, *truth),
        "weight_recovery_auc": None
        if kin is None
        else collaboration.weight_recovery(dense(kin), *truth),
        "in_group_weight_of": "A A^T" if history.swaps else "A",
        "clients": len(roster),
        "clients_scored": spread.scored,
        "clients_without_test": spread.unscored,
        "clients_without_validation": roster.without_validation,
        "merge_val": history.merge_val,
        "weak_clients": dict(roster.weak),
        **{way: sum(line[way] for line in lines) for way in BYTES},
        "seconds": sum(line["seconds"] for line in lines),
        "digest": digest,
        "partition_fingerprint": roster.fingerprint,
        "alarms": [],
        "rejected": dict(Counter(r["reason"] for line in lines for r in line["rejected"])),
    }


def last_score(summary: Mapping[str, Any]) -> float:
    """The mean over clients in the last round."""
    value = summary[score_field(LAST, summary["metric"])]
    return math.nan if value is None else float(value)


# ---- the check of a summary that was read --------------------------------------------------------


class SummaryField(NamedTuple):
    """One field of ``summary.json``."""

    kind: str  # a key of kinds.KINDS
    meaning: str
    before: Any = ...  # the value for folders that were written before the field existed


FIELDS: dict[str, SummaryField] = {
    "method": SummaryField("a text", "the method's name"),
    "rounds": SummaryField("a count", "rounds of the run"),
    "seed": SummaryField("an integer", "the seed that every draw is derived from"),
    "metric": SummaryField("a metric", "what is scored"),
    LAST: SummaryField("a number or null", "mean over clients on test data, last round"),
    BY_VALIDATION: SummaryField(
        "a number or null", "the same in the round with the best validation score"
    ),
    "round_best_by_validation": SummaryField("a count or null", "that round, counted from 0"),
    "bmta": SummaryField("a number or null", "the same in the best round on test data: optimistic"),
    "best_of_rounds": SummaryField(
        "a number or null", "mean over clients, each in its own best round on test data", None
    ),
    "round_best_on_test": SummaryField("a count or null", "the best round on test data, from 0"),
    "weighted_mean": SummaryField("a number or null", "mean weighted by test samples, last round"),
    "federated_accuracy": SummaryField(
        "a number or null",
        "accuracy of the global model on the federated test set, last round; null without either",
        None,
    ),
    "worst_tenth": SummaryField(
        "a number or null", "mean of the worst tenth of clients, last round"
    ),
    "best_tenth": SummaryField("a number or null", "mean of the best tenth of clients, last round"),
    "variance": SummaryField("a number or null", "variance over clients, last round"),
    "variance_worst_tenth": SummaryField(
        "a number or null", "variance over the worst tenth of clients"
    ),
    "variance_best_tenth": SummaryField(
        "a number or null", "variance over the best tenth of clients"
    ),
    "relative_to_local": SummaryField(
        "a number or null", "mean gain over each client's own local model; null without Local"
    ),
    "worse_than_local": SummaryField(
        "a count or null", "clients worse off than with their local model"
    ),
    "in_group_weight": SummaryField(
        "a finite number or null",
        "share of the weight on other clients that is inside the true group",
    ),
    "weight_recovery_auc": SummaryField(
        "a finite number or null", "how well weights tell clients of the same true group (AUC)"
    ),
    "in_group_weight_of": SummaryField("a text", "the matrix these two are taken from", "A"),
    "clients": SummaryField("a count", "clients of the federation"),
    "clients_scored": SummaryField("a count", "clients that have a score in the last round"),
    "clients_without_test": SummaryField("a count", "clients without a score"),
    "clients_without_validation": SummaryField(
        "a list of texts", "clients without validation data", []
    ),
    "merge_val": SummaryField("true or false", "whether validation data was trained on too", True),
    "weak_clients": SummaryField("a table of texts", "what a client lacks to be judged"),
    "bytes_up": SummaryField("a count", "bytes sent by all clients for training, whole run"),
    "bytes_down": SummaryField("a count", "bytes received by all clients for training, whole run"),
    "bytes_serve": SummaryField("a count", "bytes received by all clients only for prediction"),
    "seconds": SummaryField("finite seconds", "seconds of all rounds"),
    "digest": SummaryField("a text", "sha256 over the sha256 of each client's predictor"),
    "partition_fingerprint": SummaryField("a text", "which client holds which samples"),
    "alarms": SummaryField("a list of alarms", "what to know before these numbers are believed"),
    "rejected": SummaryField("a table of counts", "uploads that were left out, by reason"),
    "ran": SummaryField("a table with calls", "the engine, and how each kind of call ran", {}),
}


def checked(found: Any) -> dict[str, Any]:
    """Check a summary that was read; ValueError names the first field that is not as expected.

    Fields that did not exist when the folder was written are added; unknown fields are kept.
    """
    if not isinstance(found, dict):
        raise ValueError(f"found {kinds.shown(found)}; expected a table")
    whole: dict[str, Any] = dict(found)
    for general, field in FIELDS.items():
        name = score_field(general, str(found.get("metric")))
        if name not in whole and field.before is not ...:
            whole[name] = field.before
        if name not in whole:
            raise ValueError(f"found no '{name}'; expected {field.kind}")
        kinds.check(name, whole[name], field.kind)
    return whole
