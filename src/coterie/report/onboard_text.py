"""The table and the sentences for a client that joins a finished run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.metrics import METRICS
from . import words
from .table import Line, Table
from .table_columns import Heading

if TYPE_CHECKING:
    from .onboarded import Onboarded

MOST_NAMED = 3  # collaborators in a row of the table


def answer(found: "Onboarded") -> str:
    """With whom, how good, and from how few samples, in a few sentences."""
    return " ".join([_with_whom(found), _how_good(found), _how_long(found)]).strip()


def table_of(found: "Onboarded") -> Table:
    """One line per number of labelled samples."""
    unit = words.unit(found.metric).strip()
    score = f"{METRICS[found.metric].title}{f' {unit}' if unit else ''}"
    joined = words.label(found.method)
    columns = [
        Heading("labelled samples", "numbers of labelled samples of the newcomer"),
        Heading(f"alone, {score}", "trained alone from the run's start, mean ± over draws"),
        Heading("average", "the run's plain average"),
        Heading(f"joined ({joined})", "by the method's rule, then trained on the same samples"),
        Heading("gain (95 % interval)", "of joined over alone"),
        Heading("collaborators", "the clients with the most weight"),
    ]
    lines = [_cells(found, at) for at in range(len(found.points))]
    shown = [at for at in range(len(columns)) if at != 2 or found.average is not None]
    return Table(
        tuple(columns[at] for at in shown),
        tuple(
            Line(tuple(cells[at] for at in shown), best=False, local=False, alarm=False)
            for cells in lines
        ),
    )


def _cells(found: "Onboarded", at: int) -> list[str]:
    point, metric = found.points[at], found.metric
    gain, low, high = (
        words.number(value, metric, sign=True) for value in (point.gain, point.low, point.high)
    )
    every = at == len(found.points) - 1
    return [
        f"{point.samples} (all)" if every else str(point.samples),
        words.spread(point.alone, metric),
        words.NONE if found.average is None else words.number(found.average, metric),
        words.spread(point.joined, metric),
        f"{gain} ({low} to {high})",
        _named(found.weights[at]),
    ]


def _named(weights: Mapping[str, float | None]) -> str:
    if any(weight is None for weight in weights.values()):
        return "everybody"
    shown = [f"{name} {weight:.2f}" for name, weight in list(weights.items())[:MOST_NAMED]]
    more = len(weights) - MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") or "nobody"


def _with_whom(found: "Onboarded") -> str:
    weights = found.weights[-1]
    if any(weight is None for weight in weights.values()):
        name = words.label(found.method)
        return f"Your collaborators: all {found.clients} clients; {name} has one model for all."
    if not weights:
        return "You have no collaborators here: no model of the run helps on your samples."
    return f"Your collaborators: {_named(weights)}."


def _how_good(found: "Onboarded") -> str:
    point, metric = found.points[-1], found.metric
    unit, title = words.unit(metric), METRICS[metric].title
    joined, alone = (words.number(v.mean, metric) for v in (point.joined, point.alone))
    size = words.interval(point.gain, point.low, point.high, metric)
    return (
        f"With all {point.samples} labelled samples joining gives {found.client} {joined}{unit} "
        f"{title} instead of {alone}{unit} alone on {found.test} test samples, {size}."
    )


def _how_long(found: "Onboarded") -> str:
    """Up to how many samples a gain over training alone is shown."""
    if len(found.points) < 2:
        return ""
    shown = [point.samples for point in found.points if point.shown]
    if not shown:
        return "A gain over training alone is shown for no number of samples."
    if len(shown) == len(found.points):
        return "A gain over training alone is shown for every number of samples tried."
    listed = words.listing([str(n) for n in shown], most=len(shown))
    return f"A gain over training alone is shown with {listed} samples, and not with the others."
