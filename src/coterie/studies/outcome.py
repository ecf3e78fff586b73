"""The table of a study: every method's number in every column, beside the paper's, and the claims.

A number over seeds is a mean with its deviation. It is *inside* if it differs from the printed
number by no more than the printed deviation or the study's tolerance. Claims are judged by
the means over the seeds that all methods of a claim have.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ..errors import printable_lines
from ..runs import statistics
from ..runs.run import LOCAL
from ..runs.statistics import OverSeeds, Paired
from .records import CellRecord, record_for
from .study import Claim, Printed, Study, StudyCell, StudyColumn, method_and_column

if TYPE_CHECKING:
    pass


# ---- claims --------------------------------------------------------------------------------------

# A seed counts for a method if its run has the number of the claim: old records lack newer numbers.

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


class StudyNumber(NamedTuple):
    """One number of the table."""

    column: str
    method: str
    ours: OverSeeds  # NaN if no run is there
    seeds: int  # runs that are there
    wanted: int
    printed: Printed | None
    seconds: float  # of one run, on average
    bytes_per_client: float
    inside: bool | None  # None if there is nothing to compare

    @property
    def difference(self) -> float:
        """Ours minus the printed number; NaN if one of them is missing."""
        return self.ours.mean - self.printed.mean if self.printed else math.nan


@final
@dataclass(frozen=True, eq=False, repr=False)
class StudyOutcome:
    """The table and the claims of a study, from the records of its runs."""

    study: Study
    records: Mapping[str, CellRecord]  # by key

    @cached_property
    def entries(self) -> tuple[StudyNumber, ...]:
        """One entry per column and method that the study runs or the paper prints."""
        found = []
        for column in self.study.columns:
            printed = self.study.printed.get(column.name, {})
            labels = [method.label for method in column.config.methods()]
            shown = [m for m in labels if m in printed or m != LOCAL or not printed]
            for label in dict.fromkeys([*shown, *printed]):
                found.append(self._entry(column, label, printed.get(label)))
        return tuple(found)

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of the table, one dictionary per column and method."""
        return [
            {
                "column": number.column,
                "method": number.method,
                "mean": number.ours.mean,
                "deviation": number.ours.deviation,
                "printed": None if number.printed is None else number.printed.mean,
                "seeds": number.seeds,
                "seconds": number.seconds,
                "bytes_per_client": number.bytes_per_client,
            }
            for number in self.entries
        ]

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """Every claim with its outcome."""
        return tuple(judge(self, claim) for claim in self.study.claims)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of runs that are there, and of runs that the table needs."""
        cells = list(self.study.cells())
        return sum(record_for(cell, self.records) is not None for cell in cells), len(cells)

    @property
    def verdict(self) -> str:
        """Whether the claims hold, in one word or a few; "run" if none of them can be judged."""
        judged = [one for one in self.judged if one.state != NOT_RUN]
        failed = sum(one.state == FAILS for one in judged)
        if failed:
            return f"{failed} of {len(judged)} claims {'fail' if failed > 1 else 'fails'}"
        if judged:
            return HOLDS
        return "run" if self.counts[0] else NOT_RUN

    @property
    def state(self) -> str:
        """The verdict for a list of studies, with the number of runs if some are missing."""
        done, wanted = self.counts
        return self.verdict if done in (0, wanted) else f"{self.verdict} ({done} of {wanted} runs)"

    def __repr__(self) -> str:
        from .card_text import markdown

        return printable_lines(markdown(self))

    def _repr_html_(self) -> str:
        from .study_page import study_page

        return study_page(self)

    def of(self, column: StudyColumn, label: str) -> list[CellRecord]:
        """The records of a method in a column, by seed, relative to the Local of their seed."""
        methods = {method.label: method for method in column.config.methods()}
        if label not in methods:
            return []
        found = []
        for seed in column.config.seeds:
            record = record_for(StudyCell(column, methods[label], seed), self.records)
            local = record_for(StudyCell(column, methods[LOCAL], seed), self.records)
            if record is not None:
                found.append(record if local is None else record.relative(local))
        return found

    def values(
        self, column: StudyColumn, label: str, number: str | None = None
    ) -> dict[int, float]:
        """A method's number in a column, by seed."""
        name = number or column.number
        found = self.of(column, label)
        return {record.seed: record.number(name, column.clients) for record in found}

    def paired(self, column: StudyColumn, first: str, second: str) -> Paired | None:
        """Wilcoxon's test over clients of two methods at their best rounds (P5); None if unknown.

        A client's differences are averaged over the seeds that both methods have.
        """
        one = {record.seed: record.scores("best") for record in self.of(column, first)}
        two = {record.seed: record.scores("best") for record in self.of(column, second)}
        seeds = sorted(one.keys() & two.keys())
        if not seeds:
            return None
        return statistics.wilcoxon(np.mean([one[seed] - two[seed] for seed in seeds], axis=0))

    def _entry(self, column: StudyColumn, label: str, printed: Printed | None) -> StudyNumber:
        found = self.of(column, label)
        ours = statistics.over_seeds(list(self.values(column, label).values()))
        inside = None
        if printed is not None and found and not math.isnan(ours.mean):
            allowed = max(self.study.tolerance, printed.deviation or 0.0)
            inside = abs(ours.mean - printed.mean) <= allowed
        traffic = [
            (r.number("bytes_up") + r.number("bytes_down")) / max(1, len(r.last)) for r in found
        ]
        return StudyNumber(
            column.name,
            label,
            ours,
            len(found),
            len(column.config.seeds),
            printed,
            statistics.over_seeds([r.number("seconds") for r in found]).mean,
            statistics.over_seeds(traffic).mean,
            inside,
        )
