"""Judges the claims of a study by the means over the seeds that all methods of a claim have.

A seed counts for a method if its run has the number of the claim: old records lack newer numbers.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .study import Claim, StudyColumn, method_and_column

if TYPE_CHECKING:
    from .outcome import StudyOutcome

HOLDS, FAILS, NOT_RUN = "holds", "fails", "not run"

Relation = Callable[[list[float], float], bool]
RELATIONS: dict[str, Relation] = {
    "above": lambda means, margin: all(means[0] - other > margin for other in means[1:]),
    "best": lambda means, margin: all(means[0] - other > margin for other in means[1:]),
    "below": lambda means, margin: all(other - means[0] > margin for other in means[1:]),
    "rises": lambda means, margin: all(b - a > margin for a, b in pairwise(means)),
    "falls": lambda means, margin: all(a - b > margin for a, b in pairwise(means)),
    "level": lambda means, margin: all(abs(means[0] - other) <= margin for other in means[1:]),
    "at_least": lambda means, margin: means[0] >= margin,
    "at_most": lambda means, margin: means[0] <= margin,
}
TRENDS = ("rises", "falls")
FEWEST = {"at_least": 1, "at_most": 1}  # methods that a relation compares; 2 for all others


class Judged(NamedTuple):
    """A claim with its outcome."""

    claim: Claim
    state: str  # holds, fails, not run
    evidence: tuple[str, ...]  # one sentence per column


def judge(outcome: "StudyOutcome", claim: Claim) -> Judged:
    """A claim holds if it holds in every column in which its methods were run."""
    columns = outcome.study.columns
    named = [c for c in columns if not claim.columns or c.name in claim.columns]
    places = [None] if claim.between_columns else named
    found = [one for place in places if (one := _holds(outcome, claim, place)) is not None]
    if not found:
        return Judged(claim, NOT_RUN, ())
    state = HOLDS if all(holds for holds, _ in found) else FAILS
    return Judged(claim, state, tuple(text for _, text in found))


def _holds(
    outcome: "StudyOutcome", claim: Claim, column: StudyColumn | None
) -> tuple[bool, str] | None:
    """Whether a claim holds in a column, with the numbers; None if a run is missing."""
    values = _compared(outcome, claim, column)
    known = [
        {s for s, value in found.items() if not math.isnan(value)} for found in values.values()
    ]
    shared = set.intersection(*known) if known else set()
    if not shared or len(values) < FEWEST.get(claim.relation, 2):
        return None
    means = {m: float(np.mean([found[s] for s in shared])) for m, found in values.items()}
    holds = RELATIONS[claim.relation](list(means.values()), claim.margin)
    shown = ", ".join(f"{_with_place(m)} {mean:.2f}" for m, mean in means.items())
    where = "" if column is None else f"{column.name}: "
    if claim.p is not None and column is not None:
        largest = _largest_p(outcome, claim, column)
        holds, shown = holds and largest < claim.p, f"{shown}; p at most {largest:.1g}"
    return holds, f"{where}{shown} ({len(shared)} seed{'s' * (len(shared) > 1)})"


def _largest_p(outcome: "StudyOutcome", claim: Claim, column: StudyColumn) -> float:
    """The largest p of the signed-rank tests of a claim's first method against the others."""
    first, *others = claim.methods
    tests = [outcome.paired(column, first, other) for other in others]
    return max(1.0 if test is None else test.p for test in tests)


def _compared(
    outcome: "StudyOutcome", claim: Claim, column: StudyColumn | None
) -> dict[str, dict[int, float]]:
    """The numbers by seed of every method that a claim compares in a column."""
    methods = claim.methods
    if claim.relation == "best" and column is not None:
        methods = (*methods, *(m.label for m in column.config.methods()))
    found = {m: _numbers(outcome, m, column, claim.number) for m in methods}
    if claim.relation == "best":  # of the methods that were run
        found = {m: known for m, known in found.items() if known or m == methods[0]}
    elif claim.relation in TRENDS:  # over the values that this scale has
        found = {m: known for m, known in found.items() if known is not None}
    return {m: known or {} for m, known in found.items()}


def _numbers(
    outcome: "StudyOutcome", method: str, column: StudyColumn | None, number: str | None
) -> dict[int, float] | None:
    """A method's number by seed, in its own column if it names one; None if there is no such.

    The number is empty, not None, if the study has the method and it was not run yet.
    """
    label, name = method_and_column(method)
    named = {one.name: one for one in outcome.study.columns}.get(name) if name else column
    if named is None or label not in {one.label for one in named.config.methods()}:
        return None
    return outcome.values(named, label, number)


def _with_place(method: str) -> str:
    """A method of a claim as a reader sees it, with its own column in brackets."""
    label, name = method_and_column(method)
    return f"{label} ({name})" if name else label
