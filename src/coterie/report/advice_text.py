"""The answer of a probe in words, and its evidence as a table."""

import math
from typing import TYPE_CHECKING

from ..core.metrics import METRICS
from . import words
from .table import Line, Table, to_text
from .table_columns import Heading

if TYPE_CHECKING:
    from ..results.advice import Advice, Contest
    from .outcomes import Comparison

ANSWERS = {
    "stay local": "Stay local: train alone, nothing that was tried helps enough.",
    "average": "Average: one common model serves these clients.",
    "cluster": "Cluster: the clients fall into groups, each of which needs a model of its own.",
    "personalise": "Personalise: join, and let each client have a model of its own.",
}


def advice_text(advice: "Advice", comparison: "Comparison") -> str:
    """The table of the kinds, and the answer."""
    return "\n\n".join([to_text(_table(advice, comparison)), advice_words(advice, comparison)])


def advice_words(advice: "Advice", comparison: "Comparison") -> str:
    """The answer, what it rests on, and how sure it is."""
    seeds, rounds = len(comparison.seeds), len(comparison.runs[0].history.lines)
    probe = f"This is a probe of {rounds} rounds and {seeds} {'seeds' if seeds > 1 else 'seed'}"
    if advice.kind is None:
        return f"{_cannot_tell(advice, comparison)} {probe}."
    mine = [one for one in advice.contests if advice.kind in (one.kind, one.simpler)]
    evidence = " ".join(_sentence(one, advice, comparison.metric) for one in mine)
    return f"{ANSWERS[advice.kind]} {evidence} {probe}; 'coterie compare' runs the whole length."


def _sentence(one: "Contest", advice: "Advice", metric: str) -> str:
    gain = one.gain
    if one.kind == advice.kind:
        size = words.interval(gain.gain, gain.low, gain.high, metric)
        return f"Over '{one.simpler}' it has {size}, {words.chance(gain.p)}."
    points = " points" if METRICS[metric].percent else ""
    size, most = (words.number(value, metric, sign=True) for value in (gain.gain, gain.high))
    name = words.label(advice.methods[one.kind])
    return f"'{one.kind}' ({name}) gives {size}{points} and at most {most}."


def _cannot_tell(advice: "Advice", comparison: "Comparison") -> str:
    names = [f"'{kind}'" for kind in advice.between]
    among = " and ".join(names) if len(names) < 3 else ", ".join(names)
    told = (
        f"This probe cannot tell: {among} are not ruled out."
        if names
        else ("This probe cannot tell.")
    )
    open_ = [
        one
        for one in advice.contests
        if {one.kind, one.simpler} <= {*advice.between} and math.isfinite(one.gain.error)
    ]
    evidence = [
        f"'{one.kind}' over '{one.simpler}': "
        + words.interval(one.gain.gain, one.gain.low, one.gain.high, comparison.metric)
        + "."
        for one in open_
    ]
    return " ".join([told, *evidence, "More seeds (--seeds) or more rounds (--rounds) may tell."])


def _table(advice: "Advice", comparison: "Comparison") -> Table:
    unit = words.unit(comparison.metric).strip()
    rows = {row.method: row for row in comparison.rows}
    over_local = {one.kind: one.gain for one in advice.contests if one.simpler == "stay local"}
    heads = ("kind", "method", f"mean {unit}".strip(), "gain over staying local (95 % interval)")
    lines = []
    for kind, method in advice.methods.items():
        gain = over_local.get(kind)
        numbers = (gain.gain, gain.low, gain.high) if gain is not None else ()
        ends = [words.number(value, comparison.metric, sign=True) for value in numbers]
        cells = (
            kind,
            words.label(method),
            words.number(rows[method].mean.mean, comparison.metric),
            f"{ends[0]} ({ends[1]} to {ends[2]})" if ends else words.NONE,
        )
        lines.append(Line(cells, best=kind == advice.kind, local=False, alarm=False))
    return Table(tuple(Heading(head, "") for head in heads), tuple(lines))
