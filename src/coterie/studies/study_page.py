"""The HTML page of a study: tables, claims, figures."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from ..core import metrics
from ..runs.run import LOCAL
from ..views import words
from ..views.figures import Axis, Curve, curve_of, method_curves, scatter, titled
from ..views.helping import heatmap
from ..views.page import rendered
from ..views.svg import Scale
from .card_text import WARNING, careful, claim_lines, study_table
from .outcome import StudyOutcome
from .records import CellRecord
from .study import StudyColumn

# ---- figures -------------------------------------------------------------------------------------

MOST_MATRICES = 40  # of one study


class StudyFigure(NamedTuple):
    """A figure with its caption."""

    caption: str
    drawn: Markup
    size: str = "wide"  # or small


def study_figures(outcome: StudyOutcome) -> list[StudyFigure]:
    """The figures of a study, of the kind that it asks for; none if nothing was run."""
    kind = outcome.study.figure
    if kind == "sweep":
        return _sweeps(outcome)
    if kind == "curves":
        return [one for column in outcome.study.columns for one in _curves(outcome, column)]
    if kind == "matrices":
        found = [one for column in outcome.study.columns for one in _matrices(outcome, column)]
        return found[:MOST_MATRICES]
    if kind == "scatter":
        return [one for column in outcome.study.columns for one in _scatters(outcome, column)]
    return []


def _records(outcome: StudyOutcome, column: StudyColumn) -> dict[str, list[CellRecord]]:
    """The records of each method of a column that was run."""
    labels = [method.label for method in column.config.methods()]
    return {label: found for label in labels if (found := outcome.of(column, label))}


# ---- lines over a swept field --------------------------------------------------------------------


def _sweeps(outcome: StudyOutcome) -> list[StudyFigure]:
    """One figure over the columns' field, or one per column over the field of variants."""
    metric = _metric(outcome)
    lines: dict[str, dict[float, list[float]]] = {}
    field = ""
    for column in outcome.study.columns:
        field, value = _place(column.name)
        for label, found in _records(outcome, column).items():
            if not math.isnan(value):
                scores = [r.number(column.number, column.clients) for r in found]
                lines.setdefault(label, {})[value] = scores
    if any(len(line) > 1 for line in lines.values()):
        return [_line_figure(lines, metric, field)]  # one column per value
    return [one for column in outcome.study.columns for one in _variants(outcome, column, metric)]


def _variants(outcome: StudyOutcome, column: StudyColumn, metric: str) -> list[StudyFigure]:
    """One figure per field of which a method has variants; other methods are level lines."""
    found, fields = _records(outcome, column), dict[str, dict[str, dict[float, list[float]]]]()
    for label, records in found.items():
        base, _, tag_ = label.partition("@")
        field, value = _place(tag_)
        scores = [record.number(column.number, column.clients) for record in records]
        if not math.isnan(value):
            fields.setdefault(field, {}).setdefault(base, {})[value] = scores
    made = []
    for field, lines in fields.items():
        places = sorted({value for line in lines.values() for value in line})
        for label, records in found.items():
            if "@" not in label and label not in lines:
                scores = [r.number(column.number, column.clients) for r in records]
                lines[label] = {places[0]: scores, places[-1]: scores}
        made.append(_line_figure(lines, metric, field, column.name))
    return made


def _line_figure(
    lines: Mapping[str, Mapping[float, list[float]]], metric: str, field: str, where: str = ""
) -> StudyFigure:
    drawn = {label: _line(line) for label, line in lines.items()}
    caption = f"Score over {field}" + (f", {where}" if where else "")
    axis = _value_axis(sorted({value for line in lines.values() for value in line}), field)
    return StudyFigure(caption, method_curves(drawn, metric, f"Over {field}: ", axis))


def _line(line: Mapping[float, list[float]]) -> Curve:
    places = sorted(line)
    seeds = max(len(line[place]) for place in places)
    scores = np.full((seeds, len(places)), np.nan)
    for at, place in enumerate(places):
        scores[: len(line[place]), at] = line[place]
    return curve_of(np.array(places, dtype=np.float64), scores)


def _place(name: str) -> tuple[str, float]:
    """The field and the value of ``field=value``; NaN if the value is no number."""
    field, _, value = name.rpartition("=")
    try:
        return field.rpartition(", ")[2], float(value) if field else math.nan
    except ValueError:
        return field, math.nan


def _value_axis(values: list[float], field: str) -> Axis:
    """An axis that marks the swept values themselves."""

    def axis(low: float, high: float, x: Scale, base: float) -> list[Markup]:
        kept: list[float] = []
        for value in values:
            if not kept or x(value) - x(kept[-1]) >= 26:
                kept.append(value)
        return titled({value: f"{value:g}" for value in kept}, field, x, base)

    return axis


# ---- one column ----------------------------------------------------------------------------------


def _curves(outcome: StudyOutcome, column: StudyColumn) -> list[StudyFigure]:
    """Scores over rounds, of the column's clients; the best so far if its number is a best one.

    A record that has no curve of these clients is left out.
    """
    clients, best = column.clients, column.number == "best_of_rounds"
    drawn = {}
    for label, found in _records(outcome, column).items():
        curves = [r.best_so_far(clients) if best else r.over_rounds(clients) for r in found]
        known = [at for at, curve in enumerate(curves) if not np.isnan(curve).all()]
        same = [at for at in known if found[at].rounds == found[known[0]].rounds]
        if same:
            rounds = np.array(found[same[0]].rounds, dtype=np.float64) + 1
            drawn[label] = curve_of(rounds, np.array([curves[at] for at in same]))
    if not drawn:
        return []
    kind = "Best so far: mean " if best else "Mean "
    over = f", client {', '.join(map(str, clients))}" if clients else ""
    caption = f"{column.name}{over}{', best so far' * best}"
    return [StudyFigure(caption, method_curves(drawn, _metric(outcome), kind))]


def _matrices(outcome: StudyOutcome, column: StudyColumn) -> list[StudyFigure]:
    made = []
    for label, found in _records(outcome, column).items():
        first = found[0]
        groups = None if first.groups is None else np.array(first.groups, dtype=np.int64)
        for round, matrix in first.matrices.items():
            caption = f"{column.name}: {words.label(label)}, round {int(round) + 1}"
            drawn = heatmap(np.array(matrix), groups, caption)
            made.append(StudyFigure(caption, drawn, "small"))
    return made


def _scatters(outcome: StudyOutcome, column: StudyColumn) -> list[StudyFigure]:
    found = _records(outcome, column)
    if LOCAL not in found:
        return []
    metric, made = _metric(outcome), []
    alone = {record.seed: record.scores("last") for record in found[LOCAL]}
    for label, records in found.items():
        shared = [record for record in records if record.seed in alone]
        if label == LOCAL or not shared:
            continue
        own = np.array([alone[record.seed] for record in shared])
        gained = metrics.gains(np.array([r.scores("last") for r in shared]), own, metric)
        names = [f"client {i}" for i in range(own.shape[1])]
        means = metrics.mean_known(own.T), metrics.mean_known(gained.T)
        panel = scatter(label, *means, names, metric)
        made.append(StudyFigure(f"{column.name}: {panel.method}, {panel.counts}", panel.drawn))
    return made


def _metric(outcome: StudyOutcome) -> str:
    known = [record.metric for record in outcome.records.values()]
    return known[0] if known else "accuracy"


def study_page(outcome: StudyOutcome, command: str = "coterie") -> str:
    """The page of a study: its table, claims and figures."""
    done, wanted = outcome.counts
    study, table = outcome.study, study_table(outcome)
    claims = f" claims: {outcome.state}." if study.claims else ""
    values = {
        "title": f"{study.name}: {study.title}",
        "eyebrow": " ".join(command.split()[:2]),
        "verdict": f"{done} of {wanted} runs{';' if claims else '.'}{claims}",
        "facts": (),
        "alarms": [{"text": f"{WARNING} {text}", "code": ""} for text in careful(outcome)],
        "rejected": (),
        "command": command,
        "study": study,
        "figures": study_figures(outcome),
        "table": table,
        "rows": [[_bold(cell) for cell in row] for row in table.rows],
        "claims": claim_lines(outcome),
    }
    return rendered("study.html", values)


def _bold(cell: str) -> Markup:
    """A cell of Markdown as HTML."""
    _, bold, rest = cell.rpartition("**")
    return Markup("<b>{}</b>{}").format(cell.split("**")[1], rest) if bold else Markup.escape(cell)
