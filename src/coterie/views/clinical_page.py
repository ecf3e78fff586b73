"""A page's part on a clinical outcome: calibration curves, sensitivity and subgroups, by site."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from markupsafe import Markup

from ..core.metrics import BESIDE, METRICS
from ..runs.run import LOCAL, Run
from . import words
from .clinical import (
    FEWEST,
    Calibration,
    Clinical,
    ClinicalChoice,
    ClinicalRun,
    Estimate,
    Sensitivity,
    clinical_run,
)
from .svg import Scale, colour, figure, polyline, tag

MOST_CURVES = 8  # figures of a page: all sites together, and the sites with the most test rows
SIDE, LEFT, TOP, BOTTOM = 168.0, 32.0, 10.0, 34.0
ALL = "all sites"


class CurvePanel(NamedTuple):
    """The calibration curves of one site."""

    name: str
    rows: int
    drawn: Markup


class SiteNumbers(NamedTuple):
    """One row of the table of sites."""

    site: int | None  # None for all sites together
    name: str
    cells: tuple[str, ...]


class ClinicalView(NamedTuple):
    """What the template shows."""

    outcome: str | None
    specificity: str
    seed: int
    score: str  # the metric of the subgroups
    column: str
    heads: tuple[str, ...]
    fewest: int
    methods: tuple[tuple[str, str], ...]  # title and colour
    curves: tuple[CurvePanel, ...]
    undrawn: int  # sites with a curve that is not drawn
    sites: tuple[SiteNumbers, ...]
    subgroups: tuple[SiteNumbers, ...]


def clinical_view(
    histories: Mapping[str, Run], choice: ClinicalChoice | None = None, own: int | None = None
) -> ClinicalView | None:
    """The numbers of these methods, each by the run of one seed; None where there are none.

    ``own`` shows one site alone.
    """
    made = {method: clinical_run(history, choice) for method, history in histories.items()}
    runs = {method: run for method, run in made.items() if run is not None}
    if not runs or (own is not None and not next(iter(runs.values())).sites):
        return None
    history, first = histories[next(iter(runs))], next(iter(runs.values()))
    drawn = _drawn(first, own)
    return ClinicalView(
        outcome=first.outcome,
        specificity=f"{100 * first.specificity:g} %",
        seed=history.seed,
        score=METRICS[history.metric].title,
        column=first.column,
        heads=HEADS,
        fewest=FEWEST,
        methods=tuple((words.label(method), colour(method)) for method in runs),
        curves=tuple(_panel(runs, history, i) for i in drawn[:MOST_CURVES]),
        undrawn=len(drawn[MOST_CURVES:]),
        sites=() if first.outcome is None else _site_rows(runs, history, own),
        subgroups=_subgroup_rows(runs, history, own) if first.column else (),
    )


def _part(run: ClinicalRun, site: int | None) -> Clinical:
    return run.together if site is None else run.sites[site]


def _places(run: ClinicalRun, own: int | None) -> list[int | None]:
    """All sites together and then each site; or one site alone."""
    return [own] if own is not None else [None, *range(len(run.sites))]


def _drawn(run: ClinicalRun, own: int | None) -> list[int | None]:
    """The sites with a calibration curve, those with the most test rows first."""
    found = [i for i in _places(run, own) if _part(run, i).calibration is not None]
    return sorted(found, key=lambda i: (i is not None, -_part(run, i).rows))


def _name(history: Run, site: int | None) -> str:
    return ALL if site is None else history.roster.clients[site]


# ---- figures -------------------------------------------------------------------------------------


def _panel(runs: Mapping[str, ClinicalRun], history: Run, site: int | None) -> CurvePanel:
    parts = {method: _part(run, site) for method, run in runs.items()}
    name = _name(history, site)
    curves = {m: part.calibration for m, part in parts.items() if part.calibration is not None}
    rows = next(iter(parts.values())).rows
    return CurvePanel(name, rows, calibration_curves(curves, f"Calibration, {name}"))


def calibration_curves(curves: Mapping[str, Calibration], title: str) -> Markup:
    """Observed shares against predicted probabilities: one line per method, and the diagonal.

    The area of a dot is the number of samples in its bin.
    """
    x, y = Scale(0, 1, LEFT, LEFT + SIDE), Scale(0, 1, TOP + SIDE, TOP)
    content = []
    for value in (0, 0.5, 1):
        content += [
            tag("line", x1=x(0), x2=x(1), y1=y(value), y2=y(value), class_="grid"),
            tag("line", x1=x(value), x2=x(value), y1=y(0), y2=y(1), class_="grid"),
            tag("text", f"{value:g}", x=x(0) - 6, y=y(value) + 4, class_="tick end"),
            tag("text", f"{value:g}", x=x(value), y=y(0) + 16, class_="tick middle"),
        ]
    content.append(tag("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="luck"))
    for method, found in sorted(curves.items(), key=lambda pair: pair[0] != LOCAL):
        content += _curve(found, x, y, method)
    content.append(tag("text", "predicted", x=x(0.5), y=y(0) + 31, class_="tick middle"))
    return figure(LEFT + SIDE + 10, TOP + SIDE + BOTTOM, title, *content)


def _curve(found: Calibration, x: Scale, y: Scale, method: str) -> list[Markup]:
    ink = colour(method)
    dash = {"stroke_dasharray": "5 4"} if method == LOCAL else {}
    places = [(x(part.predicted), y(part.observed)) for part in found.bins]
    most = max(part.rows for part in found.bins)
    sure = [place for place, part in zip(places, found.bins, strict=True) if part.rows >= FEWEST]
    line = polyline(sure, class_="line thin", stroke=ink, **dash)
    told = (
        f"{words.label(method)}: predicted {part.predicted:.2f}, observed {part.observed:.2f}, "
        f"{part.rows} rows"
        for part in found.bins
    )
    dots = [
        tag("circle", tag("title", text), cx=a, cy=b, r=r, class_="dot", fill=ink)
        for text, (a, b), r in zip(
            told,
            places,
            [1.6 + 4.0 * math.sqrt(part.rows / most) for part in found.bins],
            strict=True,
        )
    ]
    return [line, *dots]


# ---- tables --------------------------------------------------------------------------------------


def _site_rows(
    runs: Mapping[str, ClinicalRun], history: Run, own: int | None
) -> tuple[SiteNumbers, ...]:
    """Each site's rows, how many of them have the outcome, and the numbers of each method."""
    first = next(iter(runs.values()))
    return tuple(
        SiteNumbers(
            i,
            _name(history, i),
            (
                str(_part(first, i).rows),
                str(_part(first, i).positives),
                *(text for run in runs.values() for text in _cells(_part(run, i))),
            ),
        )
        for i in _places(first, own)
    )


HEADS = (*(METRICS[m].title for m in BESIDE), "calibration error", "Brier", "slope", "sensitivity")


def _cells(part: Clinical) -> tuple[str, ...]:
    """The numbers of HEADS."""
    if part.calibration is None:
        return (words.NONE,) * len(HEADS)
    scores = (words.number(x, name) for name, x in zip(BESIDE, part.beside, strict=True))
    error, brier, slope = part.calibration[1:]
    places = f"{error:.3f}", f"{brier:.3f}", words.NONE if math.isnan(slope) else f"{slope:.2f}"
    return *scores, *places, sensitivity_text(part.sensitivity)


def sensitivity_text(found: Sensitivity | None) -> str:
    """A sensitivity with its interval, in percent.

    >>> sensitivity_text(Sensitivity(Estimate(0.5, 0.25, 0.75), 0.3))
    '50 % (25 to 75)'
    """
    if found is None:
        return words.NONE
    value, low, high = (f"{100 * part:.0f}" for part in found.found)
    return f"{value} % ({low} to {high})"


def _subgroup_rows(
    runs: Mapping[str, ClinicalRun], history: Run, own: int | None
) -> tuple[SiteNumbers, ...]:
    """One row for each subgroup of each site."""
    first = next(iter(runs.values()))
    made = []
    for i in _places(first, own):
        scores = [{g.name: g.score for g in _part(run, i).subgroups} for run in runs.values()]
        for group in _part(first, i).subgroups:
            few = group.rows < FEWEST
            told = [
                few_text() if few else score_text(s[group.name], history.metric) for s in scores
            ]
            rows = f"< {FEWEST}" if few else str(group.rows)
            made.append(SiteNumbers(i, _name(history, i), (group.name, rows, *told)))
    return tuple(made)


def few_text() -> str:
    """What stands in place of the score of a subgroup that is too small."""
    return "too few rows"


def score_text(found: Estimate | None, metric: str) -> str:
    """A score with its interval.

    >>> score_text(Estimate(80.0, 71.0, 88.0), "accuracy")
    '80.0 (71.0 to 88.0)'
    """
    if found is None:
        return words.NONE
    value, low, high = (words.number(part, metric) for part in found)
    return f"{value} ({low} to {high})"
