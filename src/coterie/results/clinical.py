"""Numbers for a clinical outcome: calibration, sensitivity at a chosen specificity, subgroups.

The outcome is one class against all others. All numbers are computed from the answers to test
samples after the last round.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core import metrics
from ..core.answers import Answers
from ..core.metrics import METRICS, Array
from ..errors import ConfigError, did_you_mean
from .calibration import (
    Calibration,
    Estimate,
    Sensitivity,
    Truths,
    calibration,
    drawn,
    estimate,
    sensitivity,
)
from .history import History
from .judged_rows import JudgedRows

SPECIFICITY = 0.9  # unless another one is chosen
MOST_SITES = 1000  # of more sites, only all together have numbers
FEWEST = 10  # test rows: a smaller subgroup or site has no numbers


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
    calibration: Calibration | None
    sensitivity: Sensitivity | None
    subgroups: tuple[Subgroup, ...]


class ClinicalRun(NamedTuple):
    """The numbers of one run."""

    outcome: str | None  # the class, in words; None where none was chosen among several
    specificity: float
    column: str  # that gives the subgroups; empty if there is none
    sites: tuple[Clinical, ...]  # [K]; none of very many sites
    together: Clinical


class SiteClinical(NamedTuple):
    """The numbers of one client alone, for the card of its model."""

    outcome: str | None
    specificity: float
    column: str
    metric: str
    numbers: Clinical


def clinical_run(history: History, choice: ClinicalChoice | None = None) -> ClinicalRun | None:
    """The numbers of one run; None where its folder has no answers, outcome and subgroups."""
    choice, rows = choice or ClinicalChoice(), history.roster.rows
    if history.outcomes is None or rows is None:
        if choice.positive is not None:
            raise ConfigError(
                f"--positive: found '{choice.positive}', and this run has no answers to test "
                "samples with names of classes; expected a simulation by this version"
            )
        return None
    sites, codes = list(history.outcomes.clients()), _codes(history.outcomes.sizes, rows)
    outcome = _outcome(rows, choice, sites)
    if outcome is None and rows.codes is None:
        return None
    if len(sites) > MOST_SITES:
        sites, codes = [], []
    whole = history.outcomes._replace(sizes=history.outcomes.sizes.sum(keepdims=True))
    made = [
        clinical(history.metric, answers, outcome, choice.specificity, rows.names, own)
        for answers, own in zip([*sites, *whole.clients()], [*codes, rows.codes], strict=True)
    ]
    title = None if outcome is None else _title(rows, outcome)
    return ClinicalRun(title, choice.specificity, rows.column, tuple(made[:-1]), made[-1])


def site_clinical(
    metric: str, answers: Answers, rows: JudgedRows, choice: ClinicalChoice | None = None
) -> SiteClinical | None:
    """The numbers of one client's answers; None without an outcome and subgroups."""
    choice = choice or ClinicalChoice()
    outcome = _outcome(rows, choice, [answers])
    if outcome is None and rows.codes is None:
        return None
    found = clinical(metric, answers, outcome, choice.specificity, rows.names, rows.codes)
    title = None if outcome is None else _title(rows, outcome)
    return SiteClinical(title, choice.specificity, rows.column, metric, found)


def rows_of(rows: JudgedRows, sizes: Array, client: int) -> JudgedRows:
    """The rows of one client among those of all clients."""
    return rows._replace(codes=_codes(sizes, rows)[client])


def _codes(sizes: Array, rows: JudgedRows) -> Sequence[Array | None]:
    """Each client's part of the subgroups."""
    if rows.codes is None:
        return [None] * len(sizes)
    return np.split(rows.codes, np.cumsum(sizes)[:-1])


def _outcome(rows: JudgedRows, choice: ClinicalChoice, sites: Sequence[Answers]) -> int | None:
    """The class that is the outcome; None if none is chosen, or probabilities were not kept."""
    outcome = outcome_class(rows.classes, choice.positive)
    return outcome if all(site.chances is not None for site in sites) else None


def _title(rows: JudgedRows, outcome: int) -> str:
    name = rows.classes[outcome]
    return f"{rows.target}: {name}" if rows.target else name


def outcome_class(classes: Sequence[str], positive: str | None) -> int | None:
    """The number of the class that is the outcome: the chosen one, or the second of two."""
    if positive is None:
        return 1 if len(classes) == 2 else None
    if positive not in classes:
        raise ConfigError(
            f"--positive: no class is called '{positive}'; {_known(positive, classes)}"
        )
    return classes.index(positive)


def _known(name: str, classes: Sequence[str]) -> str:
    return did_you_mean(name, classes) if classes else "this is a regression"


def clinical(
    metric: str,
    answers: Answers,
    outcome: int | None,
    specificity: float,
    names: Sequence[str],
    codes: Array | None,
) -> Clinical:
    """The numbers of one client's test samples; ``names`` and ``codes`` are of the subgroups."""
    count, positives, calibrated, sensitive = len(answers.targets), None, None, None
    if outcome is not None and answers.chances is not None:
        p, truth = answers.chances[:, outcome].astype(np.float64), answers.targets == outcome
        positives = int(truth.sum())
        if count >= FEWEST and bool(np.isfinite(p).all()):
            calibrated = calibration(p, truth)
            sensitive = sensitivity(p, truth, answers.units, specificity)
    groups = [] if codes is None else [(i, codes == i) for i in range(len(names))]
    return Clinical(
        count,
        positives,
        calibrated,
        sensitive,
        tuple(
            Subgroup(names[i], int(inside.sum()), _score(metric, answers, inside))
            for i, inside in groups
            if inside.any()
        ),
    )


def _score(metric: str, answers: Answers, inside: Truths) -> Estimate | None:
    """The score of a subgroup with its interval; None if it has too few rows or no score."""
    if inside.sum() < FEWEST:
        return None
    values, targets, units = (part[inside] for part in answers[:3])
    value = metrics.score(metric, values, targets)
    if not math.isfinite(value):
        return None
    alike = len(np.unique(units)) if metric == "accuracy" else None
    weights = drawn(units) if alike != len(units) else ()  # a proportion has Wilson's interval
    again = [metrics.scores(metric, values, targets, some) for some in weights]
    scale = 100.0 if METRICS[metric].percent else 1.0
    found = estimate(value / scale, np.concatenate([[], *again]) / scale, proportion_of=alike)
    return Estimate(*(scale * part for part in found))
