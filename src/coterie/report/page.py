"""One page that holds a whole comparison: it needs no network, no script and no other file."""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .. import files
from ..results import LOCAL
from . import figures, matrices, words
from .table import Table, notes, table, to_html

if TYPE_CHECKING:
    from ..results import Comparison


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
    worse: bool


def page(comparison: "Comparison") -> str:
    """The report as one HTML text; everything that comes from users is escaped."""
    loader = PackageLoader("coterie.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    shown = table(comparison)
    best = _best(comparison)
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
        metric=words.METRIC_NAMES[comparison.metric],
        command=_command(comparison),
        runs=comparison.to_dict()["runs"],
        config=_pretty(comparison.runs[-1].data.config),
        where=_pretty(comparison.runs[-1].data.environment),
    )


def _unbroken(text: str) -> str:
    """The text with numbers that stay on one line with their units."""
    return re.sub(r" (?=[%=<]|[0-9.]+\))", "\N{NO-BREAK SPACE}", text)


def _best(comparison: "Comparison") -> str:
    others = [row for row in comparison.rows if row.method != LOCAL] or list(comparison.rows)
    return max(others, key=lambda row: row.relative_to_local.mean).method


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


def _tests(comparison: "Comparison") -> list[tuple[str, str, int, str, str]]:
    """Gain over Local and the paired test of every other method."""
    return [
        (
            words.label(row.method),
            words.number(row.relative_to_local.mean, comparison.metric, sign=True),
            row.paired.n,
            f"{row.paired.statistic:g}",
            words.chance(row.paired.p),
        )
        for row in comparison.rows
        if row.paired is not None
    ]


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
    return [
        ClientLine(
            name,
            int(roster.n_train[i]),
            tuple(words.number(float(first[m].last[i]), metric) for m in comparison.methods),
            words.number(float(gained[i]), metric, sign=True),
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
