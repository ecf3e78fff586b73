"""The numbers of ``summary.json``: how they are computed and how they are checked.

:func:`checked` checks a summary that was read from a folder against :data:`FIELDS`;
``docs/folders.md`` says what each field means.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..core import metrics
from ..core.algorithm import Mixture, client_digests, combined_digest
from ..errors import StoreError
from ..storage import files
from . import accounting, collaboration, kinds, statistics
from .alarms import raise_alarms
from .run import FEDERATED, LOCAL, RAN, Log, Run, dense

LAST = "{score}_last"  # {score} is "accuracy" for that metric and "score" for every other
BYTES = "bytes_up", "bytes_down", "bytes_serve"
BY_VALIDATION = "{score}_best_by_validation"


def score_field(name: str, metric: str) -> str:
    """The name of a field that begins with ``{score}``, for this metric.

    >>> score_field(LAST, "accuracy"), score_field(LAST, "rmse")
    ('accuracy_last', 'score_last')
    """
    return name.format(score="accuracy" if metric == "accuracy" else "score")


def summarise(run: Run, digest: str | None = None, local: Run | None = None) -> dict[str, Any]:
    """The numbers of ``summary.json``; those relative to Local are None if it is not given."""
    metric, roster = run.metric, run.roster
    spread = statistics.over_clients(run.last, roster.n_test, metric)
    means = metrics.mean_known(run.test)
    by_val = None if run.merge_val else statistics.best_round(run.val, metric)
    by_test = statistics.best_round(run.test, metric)
    gained = None if local is None else metrics.gains(run.last, local.last, metric)
    kin, truth = collaboration.add_up(run.matrices, run.swaps), roster.truth(run.swaps)
    lines = run.lines
    return {
        "method": run.method,
        "rounds": len(lines),
        "seed": run.seed,
        "metric": metric,
        score_field(LAST, metric): spread.mean,
        score_field(BY_VALIDATION, metric): None if by_val is None else float(means[by_val]),
        "round_best_by_validation": None if by_val is None else int(run.rounds[by_val]),
        "bmta": None if by_test is None else float(means[by_test]),
        "best_of_rounds": float(metrics.mean_known(statistics.best_of_rounds(run.test, metric))),
        "round_best_on_test": None if by_test is None else int(run.rounds[by_test]),
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
        "in_group_weight_of": "A A^T" if run.swaps else "A",
        "clients": len(roster),
        "clients_scored": spread.scored,
        "clients_without_test": spread.unscored,
        "clients_without_validation": roster.without_validation,
        "merge_val": run.merge_val,
        "weak_clients": dict(roster.weak),
        **{way: sum(line[way] for line in lines) for way in BYTES},
        "seconds": sum(line["seconds"] for line in lines),
        "digest": digest,
        "partition_fingerprint": roster.fingerprint,
        "alarms": [],
        "rejected": dict(Counter(r["reason"] for line in lines for r in line["rejected"])),
    }


class Predictors(NamedTuple):
    """The clients' final predictors: their digest, and the models if they are here."""

    digest: str
    mixture: Mixture | None

    @classmethod
    def of(cls, mixture: Mixture, digests: tuple[str, ...] | None) -> "Predictors":
        """The predictors of a run's last round; ``digests`` are those that sites computed."""
        here = digests is None or mixture.models.shape[-1] > 0
        found = client_digests(mixture) if here else digests or ()
        return cls(combined_digest(found), mixture if here else None)


def finished(
    log: Log,
    predictors: Predictors,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    references: Mapping[str, Run] | None = None,
) -> Run:
    """The finished run of a log; ``references`` are the runs of ``local`` and ``fedavg``.

    They must have the same clients, because each client is compared with itself.
    """
    run, known = log.run(config=config, environment=environment), references or {}
    for name, other in known.items():
        if other.roster.fingerprint != run.roster.fingerprint:
            raise StoreError(
                f"{run.method} and {name} ran on different data (partition "
                f"{run.roster.fingerprint} and {other.roster.fingerprint}); expected the same "
                "clients; run both with the same seed and partition"
            )
    summary = summarise(run, predictors.digest, known.get(LOCAL))
    summary["privacy"] = accounting.told(config, run.lines, run.roster.clients)
    summary["ran"] = _ran_summary(config, environment)
    summary["alarms"] = [alarm._asdict() for alarm in raise_alarms(run, known)]
    return replace(run, summary=files.plain(summary), held=predictors.mixture)


def _ran_summary(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The engine that ran, and how many forms of calls of each stage were executed in which way."""
    chosen = config.get("resolved", {})
    forms = [(f["stage"], f["way"], f["why"]) for f in environment.get(RAN, {}).values()]
    counted = sorted(Counter(forms).items())
    names = ("engine", "chunk", "compiler")
    return {
        **{name: chosen.get(name) for name in names},
        "calls": [
            {"stage": stage, "way": way, "why": why or None, "forms": count}
            for (stage, way, why), count in counted
        ],
    }


def last_score(summary: Mapping[str, Any]) -> float:
    """The mean over clients in the last round."""
    value = summary[score_field(LAST, summary["metric"])]
    return math.nan if value is None else float(value)


# ---- the check of a summary that was read --------------------------------------------------------


FIELDS: dict[str, str] = {
    "method": "a text",
    "rounds": "a count",
    "seed": "an integer",
    "metric": "a metric",
    LAST: "a number or null",
    BY_VALIDATION: "a number or null",
    "round_best_by_validation": "a count or null",
    "bmta": "a number or null",
    "best_of_rounds": "a number or null",
    "round_best_on_test": "a count or null",
    "weighted_mean": "a number or null",
    "federated_accuracy": "a number or null",
    "worst_tenth": "a number or null",
    "best_tenth": "a number or null",
    "variance": "a number or null",
    "variance_worst_tenth": "a number or null",
    "variance_best_tenth": "a number or null",
    "relative_to_local": "a number or null",
    "worse_than_local": "a count or null",
    "in_group_weight": "a finite number or null",
    "weight_recovery_auc": "a finite number or null",
    "in_group_weight_of": "a text",
    "clients": "a count",
    "clients_scored": "a count",
    "clients_without_test": "a count",
    "clients_without_validation": "a list of texts",
    "merge_val": "true or false",
    "weak_clients": "a table of texts",
    "bytes_up": "a count",
    "bytes_down": "a count",
    "bytes_serve": "a count",
    "seconds": "finite seconds",
    "digest": "a text",
    "partition_fingerprint": "a text",
    "alarms": "a list of alarms",
    "rejected": "a table of counts",
    "privacy": "a table or null",
    "ran": "a table with calls",
}
MAY_LACK = ("privacy",)  # summaries of earlier runs do


def checked(found: Any) -> dict[str, Any]:
    """Check a summary that was read; ValueError names the first field that is not as expected.

    Unknown fields are kept.
    """
    if not isinstance(found, dict):
        raise ValueError(f"found {kinds.shown(found)}; expected a table")
    for general, kind in FIELDS.items():
        name = score_field(general, str(found.get("metric")))
        if name in found:
            kinds.check(name, found[name], kind)
        elif name not in MAY_LACK:
            raise ValueError(f"found no '{name}'; expected {kind}")
    return found
