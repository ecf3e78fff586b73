"""The table of a study: every method's number in every column, beside the paper's, and the claims.

A number over seeds is a mean with its deviation. It is *inside* if it differs from the printed
number by no more than the printed deviation or the study's tolerance.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np

from ..core.metrics import Floats
from ..errors import printable_lines
from ..runs import statistics
from ..runs.run import LOCAL
from ..runs.statistics import OverSeeds, Paired
from .records import CellRecord, record_for
from .study import Claim, Printed, Study, StudyCell, StudyColumn, method_and_column

# ---- claims --------------------------------------------------------------------------------------

HOLDS, FAILS, UNDECIDED, PARTIAL, NOT_RUN = "holds", "fails", "undecided", "partial", "not run"
JUDGED = (HOLDS, FAILS, UNDECIDED)
STATES = (*JUDGED, PARTIAL, NOT_RUN)
ENOUGH = 3  # seeds; with fewer a claim is partial

# From the numbers of a claim's methods over seeds and its margin: by how much each of its
# comparisons holds, seed by seed. Below zero it does not.
Relation = Callable[[Sequence[Floats], float], list[Floats]]
RELATIONS: dict[str, Relation] = {
    "above": lambda found, by: [found[0] - other - by for other in found[1:]],
    "best": lambda found, by: [found[0] - other - by for other in found[1:]],
    "below": lambda found, by: [other - found[0] - by for other in found[1:]],
    "rises": lambda found, by: [b - a - by for a, b in pairwise(found)],
    "falls": lambda found, by: [a - b - by for a, b in pairwise(found)],
    "level": lambda found, by: [
        by + sign * (found[0] - other) for other in found[1:] for sign in (1, -1)
    ],
    "at_least": lambda found, by: [found[0] - by],
}
FEWEST = {"at_least": 1}  # methods that a relation compares; 2 for all others


class Interval(NamedTuple):
    """A mean over seeds with its 95 % interval; without one if there are fewer than two seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Floats) -> "Interval":
        """The t interval of these numbers, one per seed."""
        from scipy.stats import t  # takes long to import

        mean, n = float(values.mean()), len(values)
        wide = float(t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else math.inf
        return cls(mean, mean - wide, mean + wide)

    @property
    def state(self) -> str:
        """Whether the numbers are above zero: a tie is a tie, for and against."""
        return HOLDS if self.low > 0 else FAILS if self.high < 0 else UNDECIDED

    @property
    def strength(self) -> tuple[int, float]:
        """Orders comparisons: those that fail, the undecided ones, those that hold; by the mean."""
        return (FAILS, UNDECIDED, HOLDS).index(self.state), self.mean


class Judged(NamedTuple):
    """A claim with its outcome."""

    claim: Claim
    state: str  # one of STATES
    columns: int  # that it needs
    seeds: int  # the fewest of its columns
    least: Interval | None  # of the comparison that decides: the one of least strength
    evidence: tuple[str, ...]  # one sentence per column
    ours: "Judged | None" = None  # the claim of our variant of the method

    @property
    def leans(self) -> bool | None:
        """Whether the means agree with the claim, be it judged or not; None without any."""
        return None if self.least is None else self.least.mean > 0


def judge(outcome: "StudyOutcome", claim: Claim) -> Judged:
    """A claim is judged with all its columns, all its methods and enough seeds, else *partial*.

    It holds if each of its comparisons does, by the interval over seeds, and fails if one fails.
    """
    columns = outcome.study.columns
    named = [c for c in columns if not claim.columns or c.name in claim.columns]
    places = [None] if claim.between_columns else named
    found = [one for place in places if (one := _compare(outcome, claim, place)) is not None]
    ours = None
    if claim.ours is not None:
        methods = (claim.ours, *claim.methods[1:])
        ours = judge(outcome, claim._replace(methods=methods, ours=None))
    wanted = len(claim.columns) or len(columns) + len(outcome.study.left_out)
    wanted = 1 if claim.between_columns else wanted
    if not found:
        return Judged(claim, NOT_RUN, wanted, 0, None, (), ours)
    enough = all(one.whole and one.seeds >= ENOUGH for one in found)
    whole = enough and len(found) == wanted
    states = [state for one in found for state in one.states]
    state = FAILS if FAILS in states else UNDECIDED if UNDECIDED in states else HOLDS
    return Judged(
        claim,
        state if whole else PARTIAL,
        wanted,
        min(one.seeds for one in found),
        min((one.least for one in found), key=lambda least: least.strength),
        tuple(one.text for one in found),
        ours,
    )


class _InColumn(NamedTuple):
    """A claim in one column."""

    states: list[str]  # of its comparisons
    seeds: int
    whole: bool  # every method that it names has a run
    least: Interval
    text: str


def _compare(outcome: "StudyOutcome", claim: Claim, column: StudyColumn | None) -> _InColumn | None:
    """A claim in a column, by the seeds that all its methods have; None without any."""
    values = _compared(outcome, claim, column)
    known = {m: {s: v for s, v in one.items() if not math.isnan(v)} for m, one in values.items()}
    ran = {method: found for method, found in known.items() if found}
    shared = sorted(set.intersection(*map(set, ran.values()))) if ran else []
    first = claim.methods[0]
    if not shared or first not in ran or len(ran) < FEWEST.get(claim.relation, 2):
        return None
    numbers = {m: np.array([found[s] for s in shared]) for m, found in ran.items()}
    apart = [Interval.over(x) for x in RELATIONS[claim.relation]([*numbers.values()], claim.margin)]
    states, least = [one.state for one in apart], min(apart, key=lambda one: one.strength)
    shown = ", ".join(f"{_with_place(m)} {found.mean():.2f}" for m, found in numbers.items())
    if claim.p is not None and column is not None:  # the largest of all signed-rank tests
        tested = [outcome.paired(column, first, other) for other in claim.methods[1:]]
        largest = max(1.0 if test is None else test.p for test in tested)
        states.append(HOLDS if largest < claim.p else UNDECIDED)
        shown += f"; p at most {largest:.1g}"
    where = "" if column is None else f"{column.name}: "
    text = f"{where}{shown} ({len(shared)} seed{'s' * (len(shared) > 1)})"
    return _InColumn(states, len(shared), len(ran) == len(values), least, text)


def _compared(
    outcome: "StudyOutcome", claim: Claim, column: StudyColumn | None
) -> dict[str, dict[int, float]]:
    """The numbers by seed of every method that a claim compares in a column."""
    methods = claim.methods
    if claim.relation == "best" and column is not None:
        own, _, _ = methods[0].partition("@")
        here = [method.label for method in column.config.methods()]
        labels = [m for m in (*here, *outcome.study.unasked) if m.partition("@")[0] != own]
        # ours are not the paper's rivals
        printed = outcome.study.printed.get(column.name) or labels
        methods = (*methods, *(label for label in labels if label in printed))
    return {m: _numbers(outcome, m, column, claim) for m in methods}


def _numbers(
    outcome: "StudyOutcome", method: str, column: StudyColumn | None, claim: Claim
) -> dict[int, float]:
    """A method's number by seed, in its own column if it names one."""
    label, name = method_and_column(method)
    named = {one.name: one for one in outcome.study.columns}.get(name) if name else column
    if named is None:
        return {}
    found = outcome.values(named, label, claim.number)
    if claim.lead_over is None:
        return found
    behind = outcome.values(named, claim.lead_over, claim.number)
    return {seed: value - behind[seed] for seed, value in found.items() if seed in behind}


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
    def state(self) -> str:
        """How many claims hold, fail and so on, and how many runs are there if some are missing."""
        done, wanted = self.counts
        if not done:
            return NOT_RUN
        found = Counter(one.state for one in self.judged)
        told = [f"{found[state]} {state}" for state in STATES if found[state]] or ["run"]
        return ", ".join(told) + (f" ({done} of {wanted} runs)" if done < wanted else "")

    def __repr__(self) -> str:
        from .card_text import markdown

        return printable_lines(markdown(self))

    @cached_property
    def _found(self) -> dict[tuple[str, str], list[CellRecord]]:
        """The records by column and method."""
        found: dict[tuple[str, str], list[CellRecord]] = {}
        for column in self.study.columns:
            for seed in column.config.seeds:
                cells = {m.label: StudyCell(column, m, seed) for m in column.config.methods()}
                local = record_for(cells[LOCAL], self.records)
                for label, cell in cells.items():
                    record = local if label == LOCAL else record_for(cell, self.records)
                    if record is not None:
                        record = record if local is None else record.relative(local)
                        found.setdefault((column.name, label), []).append(record)
        return found

    def of(self, column: StudyColumn, label: str) -> list[CellRecord]:
        """The records of a method in a column, by seed, relative to the Local of their seed."""
        return self._found.get((column.name, label), [])

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
