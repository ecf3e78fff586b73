"""Learning curves: of the methods of a comparison, of one site, and of the clients of one run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from ..core import metrics
from ..core.metrics import METRICS, Floats
from ..runs.run import LOCAL, Run
from . import words
from .helping import NAMED_UP_TO, room, short
from .judgement import CLAIMS, Claim
from .svg import Scale, apart, colour, figure, polyline, tag, ticks

if TYPE_CHECKING:
    from .comparison import Comparison


WIDTH = 440.0
LARGEST_SCORE = 1e100  # larger scores are drawn as infinite


def _drawable(scores: Floats) -> Floats:
    """The scores, where those of a diverged run that no axis can show are replaced by infinity."""
    return np.where(np.abs(scores) > LARGEST_SCORE, np.copysign(np.inf, scores), scores)


def _extent(arrays: Sequence[Floats]) -> tuple[float, float]:
    """The smallest and the largest finite value of all arrays."""
    values = np.concatenate([array.ravel() for array in arrays])
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


Axis = Callable[[float, float, Scale, float], list[Markup]]  # first, last, scale, base


class Panel(NamedTuple):
    """A figure of one method."""

    method: str
    colour: str
    counts: str
    drawn: Markup


class Curve(NamedTuple):
    """A line of a figure: places on its axis, and the mean, least and largest score over seeds."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def learning_curves(comparison: "Comparison") -> Markup:
    """The mean test score after every evaluated round: one line per method, a band over seeds."""
    drawn = {m: _curve(list(comparison.of_method(m))) for m in comparison.methods}
    return method_curves(drawn, comparison.metric, "Mean ")


def site_curves(runs: Mapping[str, Sequence[Run]], i: int) -> Markup:
    """The test score of one client after every evaluated round: one line per method."""
    drawn = {method: _curve(some, i) for method, some in runs.items()}
    return method_curves(drawn, next(iter(runs.values()))[0].metric, "")


class CurveFrame(NamedTuple):
    """The scales of a figure of curves, and its axes as drawn."""

    x: Scale
    y: Scale
    axes: list[Markup]
    floor: float  # where a curve without any finite score has its name

    def end(self, scores: Sequence[float]) -> float:
        """The height of the last finite score."""
        return next((self.y(v) for v in reversed(scores) if math.isfinite(v)), self.floor)

    def points(self, places: Floats, scores: Floats) -> list[tuple[float, float]]:
        """A curve's places in the drawing."""
        return [(self.x(a), self.y(b)) for a, b in zip(places, scores, strict=True)]


CURVE_TOP, CURVE_BOTTOM = 12.0, 36.0


def _frame(
    arrays: Sequence[Floats],
    ends: tuple[float, float],
    metric: str,
    size: tuple[float, float],
    axis: Axis | None = None,
) -> CurveFrame:
    """The frame of curves with these scores, from the first place to the last one."""
    (first, last), (right, height), left = ends, size, 38.0
    grid = ticks(*_extent(arrays))
    x = Scale(first, last if last > first else first + 1, left, right)
    y = Scale(grid[0], grid[-1], height - CURVE_BOTTOM, CURVE_TOP)
    unit = words.unit(metric).strip()
    texts = {value: f"{value:g}{unit if value == grid[-1] else ''}" for value in grid}
    marks = (axis or _round_axis)(first, last, x, height - CURVE_BOTTOM)
    return CurveFrame(x, y, [*_levels(texts, y, left, right), *marks], y(grid[0]))


def method_curves(
    drawn: Mapping[str, Curve], metric: str, kind: str, axis: Axis | None = None
) -> Markup:
    """One line per method with a band over seeds, over rounds or over what ``axis`` shows."""
    height = max(320.0, CURVE_TOP + CURVE_BOTTOM + 15 * (len(drawn) + 2))  # room for all names
    right = WIDTH - 14 - 9.2 * max(len(words.label(method)) for method in drawn)
    arrays = [scores for curve in drawn.values() for scores in curve[1:]]
    places = [float(place) for curve in drawn.values() for place in curve.x[[0, -1]]]
    frame = _frame(arrays, (min(places), max(places)), metric, (right, height), axis)
    lines: list[Markup] = []
    for method, curve in drawn.items():
        alone = {"stroke_dasharray": "5 4"} if method == LOCAL else {}
        points = frame.points(curve.x, curve.mean)
        line = polyline(points, class_="line", stroke=colour(method), **alone)
        lines += [_band(curve, frame.x, frame.y, colour(method)), line]
    ends = [frame.end(curve.mean.tolist()) for curve in drawn.values()]
    names = [  # at the ends of their lines, in place of a legend
        tag("text", words.label(m), x=right + 8, y=place + 4.5, class_="name", fill=colour(m))
        for m, place in zip(
            drawn, apart(ends, 15, CURVE_TOP, height - CURVE_BOTTOM - 8), strict=True
        )
    ]
    what = f"{kind}{METRICS[metric].title}{'' if axis else ' over rounds'}"
    return figure(WIDTH, height, f"{what}, one line per method", *frame.axes, *lines, *names)


def _band(curve: Curve, x: Scale, y: Scale, ink: str) -> Markup:
    """The range over seeds; nothing for one seed."""
    known = np.isfinite(curve.low) & np.isfinite(curve.high)
    if not (curve.high > curve.low)[known].any():
        return Markup("")
    there = [(x(a), y(b)) for a, b in zip(curve.x[known], curve.low[known], strict=True)]
    back = [(x(a), y(b)) for a, b in zip(curve.x[known], curve.high[known], strict=True)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*there, *reversed(back)])
    return tag("polygon", points=points, class_="band-seeds", fill=ink)


MOST_LINES = 60  # at most so many clients have a line; of more clients, only every n-th has one


def client_curves(run: Run) -> Markup:
    """The test score of each client after every evaluated round of one run, and their mean."""
    height, right, ink = 320.0, WIDTH - 54.0, colour(run.method)
    shown = _drawable(run.test)[:, :: -(-len(run.roster) // MOST_LINES)]
    places, means = _curve([run])[:2]
    ends = float(places[0]), float(places[-1])
    frame = _frame([shown, means], ends, run.metric, (right, height))
    clients = (frame.points(places, scores) for scores in shown.T)
    name = {"x": right + 8, "y": frame.end(means.tolist()) + 4.5, "class_": "name", "fill": ink}
    return figure(
        WIDTH,
        height,
        f"{METRICS[run.metric].title} of each client over rounds",
        *frame.axes,
        *(polyline(points, class_="client", stroke="var(--alone)") for points in clients),
        polyline(frame.points(places, means), class_="line", stroke=ink),
        tag("text", "mean", **name),
    )


def _curve(runs: Sequence[Run], client: int | None = None) -> Curve:
    """The mean over clients, or the score of one client, averaged over runs."""
    means = np.array(
        [metrics.mean_known(run.test) if client is None else run.test[:, client] for run in runs]
    )
    return curve_of((runs[0].rounds + 1).astype(np.float64), means)


def curve_of(places: Floats, means: Floats) -> Curve:
    """The line of scores ``[seeds, places]``: their mean, and their range over seeds."""
    seeds = np.where(np.isfinite(_drawable(means)), means, np.nan)
    known = np.asarray(~np.isnan(seeds).all(0))
    low, high = (np.full(len(known), np.nan) for _ in range(2))
    low[known], high[known] = np.nanmin(seeds[:, known], 0), np.nanmax(seeds[:, known], 0)
    return Curve(places, _drawable(metrics.mean_known(means.T)), low, high)


def _levels(texts: Mapping[float, str], y: Scale, left: float, right: float) -> list[Markup]:
    """A level line at each value, with its text."""
    lines = (tag("line", x1=left, x2=right, y1=y(v), y2=y(v), class_="grid") for v in texts)
    marks = (tag("text", t, x=left - 6, y=y(v) + 4, class_="tick end") for v, t in texts.items())
    return [*lines, *marks]


def _below(texts: Mapping[float, str], x: Scale, y: float) -> list[Markup]:
    """Texts below an axis."""
    return [tag("text", text, x=x(v), y=y, class_="tick middle") for v, text in texts.items()]


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}".replace("-", words.MINUS)


def _round_axis(low: float, high: float, x: Scale, base: float) -> list[Markup]:
    first, last = int(low), int(high)
    shown = sorted({first, last, *(int(t) for t in ticks(first, last, 4) if first < t < last)})
    kept = [r for r in shown if r in (first, last) or min(r - first, last - r) * 12 >= last - first]
    return titled({r: str(r) for r in kept}, "round", x, base)


def titled(texts: Mapping[float, str], title: str, x: Scale, base: float) -> list[Markup]:
    """The marks of an axis and its title."""
    middle = (x.start + x.end) / 2
    head = tag("text", title, x=middle, y=base + 33, class_="tick middle")
    return [*_below(texts, x, base + 17), head]


def _beside_local(comparison: "Comparison", best: str) -> list[str]:
    """The methods beside Local, the recommended one first."""
    methods = [method for method in comparison.methods if method != LOCAL]
    return sorted(methods, key=lambda method: method != best)


def _one_of(step: int) -> str:
    return f"; one of {step} sites is drawn" if step > 1 else ""


# ---- each site's gain against its score alone, one dot per site (P3's Figure 2) -----------------

# It shows whom a method leaves worse off: in P3, the clients whose own models are good already.

SCATTER_WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320.0, 226.0, 44.0, 10.0, 8.0, 44.0
MOST_DOTS = 300  # of a panel; of more sites, only every n-th is drawn


def scatters(comparison: "Comparison", best: str) -> list[Panel]:
    """One panel per method beside Local; the recommended method first.

    Sites without a score in either run are left out.
    """
    alone, metric = comparison.site_scores(LOCAL), comparison.metric
    names = comparison.runs[0].roster.clients
    return [
        scatter(method, alone, comparison.site_gain(method), names, metric)
        for method in _beside_local(comparison, best)
    ]


def scatter(method: str, alone: Floats, gained: Floats, names: Sequence[str], metric: str) -> Panel:
    """The panel of a method from each site's score alone and its gain."""
    known = np.flatnonzero((np.abs(alone) < LARGEST) & (np.abs(gained) < LARGEST))
    step = -(-len(known) // MOST_DOTS) or 1
    shown, ink = known[::step].tolist(), colour(method)
    across = ticks(*_extent([alone[shown]]), about=4)
    up = ticks(*_extent([np.append(gained[shown], 0.0)]), about=4)
    x = Scale(across[0], across[-1], LEFT, SCATTER_WIDTH - RIGHT)
    y = Scale(up[0], up[-1], HEIGHT - BOTTOM, TOP)
    below, middle = y(up[0]) - y(0), (x.start + x.end) / 2
    gain, loss = (
        [
            tag(
                "circle",
                tag("title", f"{names[i]}: {words.number(float(gained[i]), metric, sign=True)}"),
                cx=round(x(float(alone[i])), 1),
                cy=round(y(float(gained[i])), 1),
                r=3.5,
                data_site=i,
            )
            for i in shown
            if (gained[i] < 0) == worse
        ]
        for worse in (False, True)
    )
    name, what = words.label(method), f"{METRICS[metric].title} of training alone"
    drawn = figure(
        SCATTER_WIDTH,
        HEIGHT,
        f"{name}: gain against the score of training alone",
        tag("rect", x=LEFT, y=y(0), width=x.end - LEFT, height=below, class_="worse-side"),
        *_levels({value: _signed(value) for value in up}, y, LEFT, x.end),
        *_below({v: f"{v:g}" for v in across[:: 1 if len(across) <= 6 else 2]}, x, y.start + 22),
        tag("text", what, x=middle, y=y.start + 39, class_="tick middle"),
        tag("line", x1=LEFT, x2=x.end, y1=y(0), y2=y(0), class_="zero"),
        tag("g", *gain, class_="dot", fill=ink),
        tag("g", *loss, class_="dot worse"),
    )
    worse = int((gained[known] < 0).sum())
    counts = f"{worse} of {len(known)} below training alone{_one_of(step)}"
    return Panel(name, ink, counts, drawn)


# ---- each site's gain over training alone with its interval: one panel per method, each to scale

# Every panel has a scale of its own, so that one method that fails does not squash the others.

SIZES, PLOT = 46.0, 200.0
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
    claim: Claim | None  # None if it cannot be judged


def panels(comparison: "Comparison", best: str) -> list[Panel]:
    """One panel per method beside Local; that of the recommended method first."""
    made = []
    for method in _beside_local(comparison, best):
        rows, name = _rows(comparison, method), words.label(method)
        step = -(-len(rows) // MOST_ROWS)
        better, worse = (sum(row.claim == claim for row in rows) for claim in ("better", "worse"))
        title = f"{name}: each site's gain over training alone"
        drawn = draw(rows[::step], comparison.metric, title, colour(method))
        counts = f"shown: {better} better, {worse} worse"
        if any(row.claim == "untested" for row in rows):
            counts = "not tested"
        made.append(Panel(name, colour(method), f"{counts}{_one_of(step)}", drawn))
    return made


def _rows(comparison: "Comparison", method: str) -> list[GainRow]:
    """The sites, those with the most training samples first."""
    roster = comparison.of_method(method)[0].roster
    judged = (comparison.judgements or {}).get(method)
    tests = {one.client: one for one in judged.clients} if judged else {}
    first = comparison.site_gain(method)
    rows = []
    for i, name in enumerate(roster.clients):
        one, low, high = tests.get(name), math.nan, math.nan
        if one is not None:
            low, high = one.gain.low, one.gain.high
        claim = None if one is None else one.claim
        rows.append(GainRow(i, name, int(roster.n_train[i]), float(first[i]), low, high, claim))
    return sorted(rows, key=lambda row: -row.size)


def draw(rows: Sequence[GainRow], metric: str, title: str, ink: str) -> Markup:
    """The rows of one method; an interval that leaves the scale ends at its edge."""
    named = len(rows) <= NAMED_UP_TO
    left, height = (room([row.name for row in rows]), ROW) if named else (16.0, THIN)
    grid = _grid(rows)
    x = Scale(grid[0], grid[-1], left, left + PLOT)
    base = 4 + height * len(rows)
    kept = grid if len(grid) <= 6 else [v for k, v in enumerate(grid) if k % 2 == 0 or v == 0]
    axis = [tag("line", x1=x(v), x2=x(v), y1=2, y2=base, class_="grid") for v in kept]
    axis += _below({value: _signed(value) for value in kept}, x, base + 17)
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
        parts.append(tag("text", short(row.name), x=x.start - 8, y=y + 4.5, class_="tick end"))
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
    ends = "" if math.isnan(row.low) else f" ({words.ends(row.gain, row.low, row.high, metric)})"
    claim = f", {row.claim}" if row.claim in CLAIMS.values() else ""
    return f"{row.name}: {gain}{ends}{claim}; trained on {row.size}"
