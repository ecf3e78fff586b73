"""Each site's gain over training alone with its interval: one panel per method, each to scale.

Every panel has a scale of its own, so that one method that fails does not squash the others.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from ..core import metrics
from ..results.judgement import LOCAL, Claim
from . import words
from .colours import colour
from .share_matrix import NAMED_UP_TO, short
from .svg import Scale, figure, tag, ticks

if TYPE_CHECKING:
    from .outcomes import Comparison

NAMES, SIZES, PLOT = 112.0, 46.0, 200.0
ROW, THIN = 18.0, 5.0  # height of a row with a name, and without
MOST_ROWS = 300  # sites in a panel; of more sites, only every n-th is drawn
LARGEST = 1e100  # larger gains are drawn at the edge


class GainRow(NamedTuple):
    """One site in a panel."""

    site: int
    name: str
    size: int  # training samples
    gain: float  # NaN if the method does not serve the site
    low: float
    high: float
    claim: Claim | None  # None if it was not tested


class Panel(NamedTuple):
    """The panel of one method."""

    method: str
    colour: str
    counts: str
    drawn: Markup


def panels(comparison: "Comparison", best: str) -> list[Panel]:
    """One panel per method beside Local; that of the recommended method first."""
    methods = [method for method in comparison.methods if method != LOCAL]
    methods.sort(key=lambda method: method != best)
    return [_panel(comparison, method) for method in methods]


def _panel(comparison: "Comparison", method: str) -> Panel:
    rows = _rows(comparison, method)
    step = -(-len(rows) // MOST_ROWS)
    better, worse = (sum(row.claim == claim for row in rows) for claim in ("better", "worse"))
    ink = colour(method)
    title = f"{words.label(method)}: each site's gain over training alone"
    drawn = draw(rows[::step], comparison.metric, title, ink)
    counts = f"shown: {better} better, {worse} worse"
    counts += f"; one of {step} sites is drawn" if step > 1 else ""
    return Panel(words.label(method), ink, counts, drawn)


def _rows(comparison: "Comparison", method: str) -> list[GainRow]:
    """The sites, those with the most training samples first."""
    roster = comparison.of_method(method)[0].history.roster
    judged = (comparison.judgements or {}).get(method)
    tests = {one.client: one for one in judged.clients} if judged else {}
    means = metrics.mean_known(comparison.gains(method).T)
    rows = []
    for i, name in enumerate(roster.clients):
        one, size = tests.get(name), int(roster.n_train[i])
        if one is None:
            rows.append(GainRow(i, name, size, float(means[i]), math.nan, math.nan, None))
        else:
            gain = one.gain
            rows.append(GainRow(i, name, size, gain.gain, gain.low, gain.high, one.claim))
    return sorted(rows, key=lambda row: -row.size)


def draw(rows: Sequence[GainRow], metric: str, title: str, ink: str) -> Markup:
    """The rows of one method; an interval that leaves the scale ends at its edge."""
    named = len(rows) <= NAMED_UP_TO
    left, height = (NAMES, ROW) if named else (16.0, THIN)
    grid = _grid(rows)
    x = Scale(grid[0], grid[-1], left, left + PLOT)
    base = 4 + height * len(rows)
    axis = [*_axis(grid, x, base)]
    shade = tag("rect", x=left, y=2, width=x(0) - left, height=base - 2, class_="worse-side")
    zero = tag("line", x1=x(0), x2=x(0), y1=2, y2=base, class_="zero")
    most = math.sqrt(max(row.size for row in rows) or 1)
    drawn = [
        _row(row, x, 4 + (k + 0.5) * height, metric, ink, named, most) for k, row in enumerate(rows)
    ]
    width = left + PLOT + (SIZES if named else 16.0)
    return figure(width, base + 24, title, shade, *axis, zero, *drawn)


def _grid(rows: Sequence[GainRow]) -> list[float]:
    """Marks that cover zero, all gains, and most intervals: not those of very small sites."""
    gains = np.array([row.gain for row in rows])
    wide = np.array([max(row.high - row.gain, row.gain - row.low) for row in rows])
    seen = np.isfinite(gains) & (np.abs(gains) < LARGEST)
    usual = np.isfinite(wide) & seen
    arm = 1.5 * float(np.median(wide[usual])) if usual.any() else 0.0
    shown = np.append(gains[seen], 0.0)
    low, high = float(shown.min()) - arm, float(shown.max()) + arm
    ends = [0.0, *(end for row in rows for end in (row.low, row.high) if math.isfinite(end))]
    return ticks(max(low, min(*ends, *shown)), min(high, max(*ends, *shown)), about=4)


def _axis(grid: Sequence[float], x: Scale, base: float) -> list[Markup]:
    kept = grid if len(grid) <= 6 else [v for k, v in enumerate(grid) if k % 2 == 0 or v == 0]
    marks = []
    for value in kept:
        text = "0" if value == 0 else f"{value:+g}".replace("-", words.MINUS)
        marks.append(tag("line", x1=x(value), x2=x(value), y1=2, y2=base, class_="grid"))
        marks.append(tag("text", text, x=x(value), y=base + 17, class_="tick middle"))
    return marks


def _row(
    row: GainRow, x: Scale, y: float, metric: str, ink: str, named: bool, most: float
) -> Markup:
    """One site: name, interval, a dot whose area is its size, and its number of samples."""
    place = min(x.end, max(x.start, x(np.nan_to_num(row.gain, nan=0.0, posinf=1e99, neginf=-1e99))))
    ends = [min(x.end, max(x.start, x(end))) for end in (row.low, row.high) if math.isfinite(end)]
    worse = " worse" if row.gain < 0 else ""
    radius = (2.0 + 4.0 * math.sqrt(row.size) / most) if named else 2.0
    parts = [tag("title", _told(row, metric))]
    if named:
        parts.append(tag("text", short(row.name), x=NAMES - 8, y=y + 4.5, class_="tick end"))
        size = f"{row.size:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
        parts.append(tag("text", size, x=x.end + SIZES - 2, y=y + 4.5, class_="tick end"))
    if len(ends) == 2 and not math.isnan(row.gain):
        sure = "" if row.claim in ("better", "worse") else " unsure"
        parts.append(
            tag("line", x1=ends[0], x2=ends[1], y1=y, y2=y, class_=f"arm{sure}", stroke=ink)
        )
    if not math.isnan(row.gain):
        parts.append(tag("circle", cx=place, cy=y, r=radius, class_=f"dot{worse}", fill=ink))
    return tag("g", *parts, data_site=row.site)


def _told(row: GainRow, metric: str) -> str:
    gain = words.number(row.gain, metric, sign=True)
    ends = ""
    if row.claim is not None:
        low, high = (words.number(end, metric) for end in (row.low, row.high))
        ends = f" ({low} to {high}), {row.claim}"
    return f"{row.name}: {gain}{ends}; {row.size} training samples"
