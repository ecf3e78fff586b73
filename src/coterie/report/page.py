"""One page that holds a whole comparison: it needs no network, no script and no other file."""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..core.metrics import METRICS
from ..results.judgement import LOCAL, Claim
from ..storage import files
from . import figures, matrices, words
from .table import Table, notes, table, to_html

if TYPE_CHECKING:
    from .outcomes import Comparison


class Card(NamedTuple):
    """One method's collaboration matrix at the end of its first seed's run."""

    method: str
    weights: Markup
    shared: Markup
    most: str  # the largest weight on another client
    inside: Markup | None


class ClientLine(NamedTuple):
    """One client in the first seed's runs."""

    name: str
    samples: int
    scores: tuple[str, ...]
    gain: str
    interval: str
    shown: Claim
    worse: bool


def page(comparison: "Comparison") -> str:
    """The report as one HTML text; everything that comes from users is escaped."""
    loader = PackageLoader("coterie.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    shown = table(comparison)
    best = comparison.choice.method if comparison.choice else comparison.methods[-1]
    return environment.get_template("report.html").render(
        title="Is joining worth it?",
        verdict=_unbroken(comparison.verdict),
        facts=_facts(comparison),
        alarms=[alarm for row in comparison.rows for alarm in row.alarms],
        rejected=_rejected(comparison),
        table=to_html(shown),
        meanings=_meanings(shown),
        notes=notes(comparison),
        tests=_tests(comparison),
        curves=figures.learning_curves(comparison),
        gains=figures.gains(comparison) if len(comparison.methods) > 1 else None,
        cards=_cards(comparison),
        seed=comparison.seeds[0],
        heads=[words.label(method) for method in comparison.methods],
        clients=_clients(comparison, best),
        best=words.label(best),
        metric=METRICS[comparison.metric].title,
        command=_command(comparison),
        runs=comparison.to_dict()["runs"],
        config=_pretty(comparison.runs[-1].data.config),
        where=_pretty(comparison.runs[-1].data.environment),
    )


def _unbroken(text: str) -> str:
    """The text with numbers that stay on one line with their units."""
    return re.sub(r" (?=[%=<]|[0-9.]+\))", "\N{NO-BREAK SPACE}", text)


def _facts(comparison: "Comparison") -> list[tuple[str, str]]:
    history = comparison.runs[0].history
    roster = history.roster
    groups = max(
        (0 if r.history.roster.groups is None else len(set(r.history.roster.groups.tolist())))
        for r in comparison.runs
    )
    size = (
        f"{roster.n_train.min()}"
        if len(set(roster.n_train.tolist())) == 1
        else (f"{roster.n_train.min()}–{roster.n_train.max()}")
    )
    facts = [
        ("clients", str(len(roster))),
        ("true groups", str(groups)),
        ("training samples a client", size),
        ("rounds", str(len(history.lines))),
        ("seeds", str(len(comparison.seeds))),
    ]
    return [fact for fact in facts if fact != ("true groups", "0")]


def _rejected(comparison: "Comparison") -> list[str]:
    """A sentence for each reason for which uploads were left out."""
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
    """The mean gain over Local of every other method with both tests of it."""
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


def _cards(comparison: "Comparison") -> list[Card]:
    cards = []
    for method in comparison.methods:
        history = comparison.of_seed(comparison.seeds[0]).get(method)
        A = None if history is None else history.weights
        if history is None or A is None:
            continue
        name, most = words.label(method), float((A - np.diag(A.diagonal())).max())
        cards.append(
            Card(
                name,
                matrices.heatmap(
                    A, history, f"{name}: weight of each row's client on each column's"
                ),
                matrices.heatmap(
                    A @ A.T, history, f"{name}: how much two clients draw on the same"
                ),
                f"{most:.2g}",
                matrices.inside_curve(history, figures.colour(comparison, method)),
            )
        )
    return cards


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


def _command(comparison: "Comparison") -> str | None:
    """The command line that made this, where there was one."""
    argv = comparison.runs[-1].data.environment.get("argv") or []
    if not argv or Path(argv[0]).stem not in ("coterie", "__main__"):
        return None
    return shlex.join(["coterie", *argv[1:]])


def _pretty(value: Any) -> str:
    return json.dumps(files.plain(dict(value)), indent=2, ensure_ascii=False, default=str)
