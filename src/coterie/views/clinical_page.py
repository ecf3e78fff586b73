"""A page's part on a clinical outcome: calibration curves, sensitivity and subgroups, by site."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
    Estimate,
    Subgroup,
    clinical_run,
)
from .svg import Scale, colour, figure, polyline, tag

MOST_CURVES = 8  # figures of a page: all sites together, and the sites with the most test rows
SIDE, LEFT, TOP, BOTTOM = 168.0, 32.0, 10.0, 34.0
ALL = "all sites"
TOO_FEW = "too few rows"  # in place of the score of a small subgroup


class CurvePanel(NamedTuple):
    """The calibration curves of one site."""

    name: str
    rows: int
    drawn: Markup


class SiteNumbers(NamedTuple):
    """One row of the table of sites or of subgroups."""

    site: int | None  # None for all sites together
    name: str
    cells: tuple[str, ...]


class ClinicalView(NamedTuple):
    """What the template shows."""

    outcome: str | None
    specificity: str
    rows: str  # which rows, in words
    score: str  # the metric of the subgroups
    column: str
    heads: tuple[str, ...]
    fewest: int
    methods: tuple[tuple[str, str], ...]  # title and colour
    curves: tuple[CurvePanel, ...]
    undrawn: int  # sites with a curve that is not drawn
    sites: tuple[SiteNumbers, ...]
    subgroups: tuple[SiteNumbers, ...]


class _Site(NamedTuple):
    """The numbers of one site, or of all together, by method."""

    at: int | None
    name: str
    parts: Mapping[str, Clinical]

    @property
    def first(self) -> Clinical:
        return next(iter(self.parts.values()))


def clinical_view(
    runs: Mapping[str, Sequence[Run]], choice: ClinicalChoice | None = None, own: int | None = None
) -> ClinicalView | None:
    """The numbers of these methods, each by one run or by all folds; None where there are none.

    ``own`` shows one site alone.
    """
    made = {method: clinical_run(some, choice) for method, some in runs.items()}
    found = {method: one for method, one in made.items() if one is not None}
    first = next(iter(found.values()), None)
    if first is None or (own is not None and not first.sites):
        return None
    run, *more = runs[next(iter(found))]
    places = [own] if own is not None else [None, *range(len(first.sites))]
    sites = [
        _Site(
            i,
            ALL if i is None else run.roster.clients[i],
            {m: one.together if i is None else one.sites[i] for m, one in found.items()},
        )
        for i in places
    ]
    drawn = [site for site in sites if site.first.calibration is not None]
    drawn.sort(key=lambda site: (site.at is not None, -site.first.rows))
    return ClinicalView(
        outcome=first.outcome,
        specificity=f"{100 * first.specificity:g} %",
        rows=f"all rows, each tested in one of {len(more) + 1} folds (scores are means over folds)"
        if more
        else f"test rows of seed {run.seed}",
        score=METRICS[run.metric].title,
        column=first.column,
        heads=(*FIRST, *HEADS),
        fewest=FEWEST,
        methods=tuple((words.label(method), colour(method)) for method in found),
        curves=tuple(map(_panel, drawn[:MOST_CURVES])),
        undrawn=len(drawn[MOST_CURVES:]),
        sites=() if first.outcome is None else tuple(r for site in sites for r in _site_rows(site)),
        subgroups=tuple(row for site in sites for row in _subgroup_rows(site, run.metric)),
    )


# ---- tables --------------------------------------------------------------------------------------


HEADS = (*(METRICS[m].title for m in BESIDE), "calibration error", "Brier", "slope", "sensitivity")
FIRST = ("site", "method", "rows", "outcome")


def _site_rows(site: _Site) -> Iterator[SiteNumbers]:
    """The numbers of each method at the site, its rows, and how many of them have the outcome."""
    for method, part in site.parts.items():
        cells = [words.label(method), str(part.rows), str(part.positives)]
        if part.calibration is None:
            cells += [words.NONE] * len(HEADS)
        else:
            scores = (words.number(x, name) for name, x in zip(BESIDE, part.beside, strict=True))
            error, brier, slope = part.calibration[1:]
            caught = part.sensitivity
            sensitive = words.NONE if caught is None else share_text(caught.found)
            cells += [*scores, f"{error:.3f}", f"{brier:.3f}", words.plain(slope), sensitive]
        yield SiteNumbers(site.at, site.name, tuple(cells))


def _subgroup_rows(site: _Site, metric: str) -> Iterator[SiteNumbers]:
    """The score of each method in each subgroup of the site."""
    scores = [{group.name: group.score for group in part.subgroups} for part in site.parts.values()]
    for group in site.first.subgroups:
        told = [subgroup_text(group, some[group.name], metric) for some in scores]
        cells = group.name, rows_text(group.rows), *told
        yield SiteNumbers(site.at, site.name, cells)


def rows_text(rows: int) -> str:
    """A number of test rows that may be passed on."""
    return f"fewer than {FEWEST}" if rows < FEWEST else str(rows)


def subgroup_text(group: Subgroup, score: Estimate | None, metric: str) -> str:
    """The score of a subgroup with its interval, if it has enough rows."""
    return TOO_FEW if group.rows < FEWEST else score_text(score, metric)


def share_text(found: Estimate) -> str:
    """A share with its interval, in percent.

    >>> share_text(Estimate(0.5, 0.25, 0.75))
    '50 % (25 to 75)'
    """
    value, low, high = (f"{100 * part:.0f}" for part in found)
    return f"{value} % ({low} to {high})"


def score_text(found: Estimate | None, metric: str) -> str:
    """A score with its interval.

    >>> score_text(Estimate(80.0, 71.0, 88.0), "accuracy")
    '80.0 (71.0 to 88.0)'
    """
    if found is None:
        return words.NONE
    value, low, high = (words.number(part, metric) for part in found)
    return f"{value} ({low} to {high})"


# ---- figures -------------------------------------------------------------------------------------


def _panel(site: _Site) -> CurvePanel:
    curves = {m: one.calibration for m, one in site.parts.items() if one.calibration is not None}
    drawn = calibration_curves(curves, f"Calibration, {site.name}")
    return CurvePanel(site.name, site.first.rows, drawn)


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
    """A line through the bins, with a dot for each."""
    ink = colour(method)
    dash = {"stroke_dasharray": "5 4"} if method == LOCAL else {}
    most = max(part.rows for part in found.bins)
    places = [(x(part.predicted), y(part.observed)) for part in found.bins]
    drawn = [polyline(places, class_="line thin", stroke=ink, **dash)]
    for part in found.bins:
        told = (
            f"{words.label(method)}: predicted {part.predicted:.2f}, observed {part.observed:.2f}, "
            f"{part.rows} rows"
        )
        place = {"cx": round(x(part.predicted), 1), "cy": round(y(part.observed), 1)}
        size = 1.6 + 4.0 * math.sqrt(part.rows / most)
        drawn.append(tag("circle", tag("title", told), r=size, class_="dot", fill=ink, **place))
    return drawn
