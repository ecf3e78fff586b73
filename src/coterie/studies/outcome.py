"""The table of a study: every method's number in every column, beside the paper's, and the claims.

A number over seeds is a mean with its deviation. It is *inside* if it differs from the printed
number by no more than the printed deviation or the study's tolerance. ``judging`` judges claims.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np

from ..errors import printable_lines
from ..results import statistics
from ..results.judgement import LOCAL
from ..results.statistics import OverSeeds, Paired
from .cell_record import CellRecord, record_for
from .judging import FAILS, HOLDS, NOT_RUN, Judged, judge
from .study import Printed, Study, StudyCell, StudyColumn


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
