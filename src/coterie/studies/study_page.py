"""The HTML page of a study, or of several: tables, claims, figures."""

import re
from collections.abc import Sequence
from typing import Any

from ..report.pieces import rendered
from .card_text import about_column, claim_lines, column_table, tests
from .card_warnings import WARNING, warnings
from .outcome import StudyOutcome
from .study_figures import study_figures


def study_page(outcome: StudyOutcome, command: str = "coterie") -> str:
    """The page of one study."""
    done, wanted = outcome.counts
    study = outcome.study
    return page_of(
        [section(outcome, study.name)],
        title=f"{study.name}: {study.title}",
        eyebrow=" ".join(command.split()[:2]),
        verdict=f"{done} of {wanted} runs; claims: {outcome.state}."
        if study.claims
        else f"{done} of {wanted} runs.",
        command=command,
    )


def section(outcome: StudyOutcome, name: str) -> dict[str, Any]:
    """What the page shows of one study."""
    study = outcome.study
    tables = [(column, column_table(outcome, column)) for column in study.columns]
    return {
        "id": name,
        "anchor": re.sub(r"\W+", "-", name),
        "title": study.title,
        "state": outcome.state,
        "notes": study.notes,
        "figures": study_figures(outcome),
        "tables": [
            {
                "name": column.name,
                "about": about_column(column),
                "heads": rows[0],
                "rows": rows[1:],
                "tested": tests(outcome, column),
                "warnings": [f"{WARNING} {text}." for text in warnings(outcome, column)],
            }
            for column, rows in tables
            if rows
        ],
        "claims": claim_lines(outcome),
    }


def page_of(
    sections: Sequence[dict[str, Any]], *, title: str, eyebrow: str, verdict: str, command: str
) -> str:
    """A page with one section per study."""
    values = {
        "cards": sections,
        "title": title,
        "eyebrow": eyebrow,
        "verdict": verdict,
        "facts": (),
        "alarms": (),
        "rejected": (),
        "command": command,
    }
    return rendered("cards.html", values)
