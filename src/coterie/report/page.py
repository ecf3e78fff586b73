"""The HTML page of a comparison, in one file that needs no network and no other file.

A script makes choosing a site easier; without it the page shows everything.
"""

from typing import TYPE_CHECKING, NamedTuple

from ..core.metrics import METRICS
from ..results.clinical import ClinicalChoice
from ..results.judgement import LOCAL, Claim
from . import exposed, figures, gain_panels, helping, pieces, words
from .clinical_page import ClinicalView, clinical_view
from .colours import colour
from .local_scatter import scatters
from .table import Table, notes, table, to_html

if TYPE_CHECKING:
    from .outcomes import Comparison


class ClientLine(NamedTuple):
    """One row of the table of clients: the scores of one client in the runs of the first seed."""

    name: str
    samples: int
    scores: tuple[str, ...]
    gain: str
    interval: str
    shown: Claim
    worse: bool


def page(comparison: "Comparison", choice: ClinicalChoice | None = None) -> str:
    """The page of a comparison as HTML text; everything that comes from users is escaped."""
    shown, last = table(comparison), comparison.runs[-1].data
    best = shown_method(comparison)
    return pieces.rendered(
        "report.html",
        {
            "eyebrow": "coterie comparison",
            "title": "Is joining worth it?",
            "verdict": pieces.unbroken(comparison.verdict),
            "answers": comparison.answers,
            "facts": _facts(comparison),
            "alarms": [alarm for row in comparison.rows for alarm in row.alarms],
            "rejected": _rejected(comparison),
            "table": to_html(shown),
            "meanings": _meanings(shown),
            "notes": notes(comparison),
            "tests": _tests(comparison),
            "curves": figures.learning_curves(comparison),
            "by_bytes": figures.byte_curves(comparison),
            "own": False,
            "exposed": exposed.exposed(
                {m: [run.history for run in comparison.of_method(m)] for m in comparison.methods}
            ),
            "unit": ", in points," if METRICS[comparison.metric].percent else "",
            "clinical": clinical_of(comparison, best, choice),
            "panels": gain_panels.panels(comparison, best),
            "scatters": scatters(comparison, best),
            "helping": helping_of(comparison, best),
            "seed": comparison.seeds[0],
            "seeds": len(comparison.seeds),
            "heads": [words.label(method) for method in comparison.methods],
            "clients": _clients(comparison, best),
            "best": words.label(best),
            "metric": METRICS[comparison.metric].title,
            "command": pieces.command_of(last.environment),
            "runs": comparison.to_dict()["runs"],
            "config": pieces.pretty(last.config),
            "where": pieces.pretty(last.environment),
        },
    )


def shown_method(comparison: "Comparison") -> str:
    """The method that the page shows first: the recommended one, or the last."""
    return comparison.choice.method if comparison.choice else comparison.methods[-1]


def _facts(comparison: "Comparison") -> list[tuple[str, str]]:
    history = comparison.runs[0].history
    groups = max(pieces.groups_of(run.history.roster) for run in comparison.runs)
    facts = [
        ("clients", str(len(history.roster))),
        ("true groups", str(groups)),
        ("training samples per client", pieces.samples_of(history.roster)),
        ("rounds", str(len(history.lines))),
        ("seeds", str(len(comparison.seeds))),
    ]
    return [fact for fact in facts if fact != ("true groups", "0")]


def _rejected(comparison: "Comparison") -> list[str]:
    """One sentence for each reason why uploads were rejected."""
    found: dict[str, dict[str, int]] = {}
    for run in comparison.runs:
        for reason, count in run.summary["rejected"].items():
            methods = found.setdefault(reason, {})
            methods[run.method] = methods.get(run.method, 0) + count
    return [
        f"Uploads were left out as {reason.replace('_', ' ')}: "
        + ", ".join(f"{count} of {words.label(method)}" for method, count in methods.items())
        + "."
        for reason, methods in found.items()
    ]


def _meanings(shown: Table) -> list[tuple[str, str]]:
    return [(column.head, column.meaning) for column in shown.columns if column.meaning]


def _tests(comparison: "Comparison") -> list[tuple[str, ...]]:
    """For every method but Local: its mean gain over Local, and both tests of that gain."""
    metric = comparison.metric
    lines: list[tuple[str, ...]] = []
    for row in comparison.rows:
        found = (comparison.judgements or {}).get(row.method)
        if row.paired is None:
            continue
        ends, p = words.NONE, words.NONE
        if found is not None:
            low, high = (words.number(x, metric) for x in (found.overall.low, found.overall.high))
            ends, p = f"{low} to {high}", words.chance(found.p)
        gain = words.number(row.relative_to_local.mean, metric, sign=True)
        name, ranks = words.label(row.method), words.chance(row.paired.p)
        lines.append((name, gain, ends, p, str(row.paired.n), ranks))
    return lines


def helping_of(comparison: "Comparison", best: str) -> helping.Helping | None:
    """Who helps whom, by method; the recommended method first."""
    relied = comparison.reliances
    order = sorted(relied, key=lambda method: method != best)
    strokes = {method: colour(method) for method in order}
    first = {method: comparison.of_method(method)[0].history for method in order}
    ordered = {method: relied[method] for method in order}
    return helping.helping(ordered, first, strokes, helping.OF_COMPARISON)


def clinical_of(
    comparison: "Comparison", best: str, choice: ClinicalChoice | None
) -> ClinicalView | None:
    """The clinical numbers of the recommended method and of Local, of the first seed."""
    first = comparison.of_seed(comparison.seeds[0])
    shown = [method for method in dict.fromkeys((best, LOCAL)) if method in first]
    return clinical_view({method: first[method] for method in shown}, choice)


def _clients(comparison: "Comparison", best: str) -> list[ClientLine]:
    first = comparison.of_seed(comparison.seeds[0])
    roster, metric = first[LOCAL].roster, comparison.metric
    gained = comparison.gains(best)[0]
    found = (comparison.judgements or {}).get(best)
    judged = {one.client: one for one in found.clients} if found else {}

    def ends(name: str) -> str:
        low, high = judged[name].gain.low, judged[name].gain.high
        return f"{words.number(low, metric)} to {words.number(high, metric)}"

    return [
        ClientLine(
            name,
            int(roster.n_train[i]),
            tuple(words.number(float(first[m].last[i]), metric) for m in comparison.methods),
            words.number(float(gained[i]), metric, sign=True),
            ends(name) if name in judged else words.NONE,
            judged[name].claim if name in judged else "unclear",
            bool(gained[i] < 0),
        )
        for i, name in enumerate(roster.clients)
    ]
