"""Learning curves: of the methods of a comparison, of one site, and of the clients of one run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from ..core import metrics
from ..core.metrics import METRICS, Floats
from ..results.history import History
from ..results.judgement import LOCAL
from . import words
from .colours import colour
from .svg import Scale, apart, figure, polyline, tag, ticks

if TYPE_CHECKING:
    from .outcomes import Comparison

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


class Curve(NamedTuple):
    """A line of a figure: places on its axis, and the mean, least and largest score over seeds."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def learning_curves(comparison: "Comparison") -> Markup:
    """The mean test score after every evaluated round: one line per method, a band over seeds."""
    drawn = {m: _curve([r.history for r in comparison.of_method(m)]) for m in comparison.methods}
    return method_curves(drawn, comparison.metric, "Mean ")


def byte_curves(comparison: "Comparison") -> Markup | None:
    """The mean test score against the bytes that one client has sent and received for training.

    Local, which sends nothing, is a level line at its last score. None if no method sends anything.
    """
    drawn = {}
    for method in comparison.methods:
        runs = [run.history for run in comparison.of_method(method)]
        drawn[method] = _curve(runs)._replace(
            x=metrics.mean_known(np.array([*map(_bytes, runs)]).T)
        )
    most = max(float(curve.x[-1]) for curve in drawn.values())
    if most == 0:
        return None
    for method, curve in drawn.items():
        if curve.x[-1] == 0:
            level = [np.repeat(scores[-1], 2) for scores in curve[1:]]
            drawn[method] = Curve(np.array([0.0, most]), *level)
    return method_curves(drawn, comparison.metric, "Over bytes, mean ", _byte_axis)


def _bytes(history: History) -> Floats:
    """Bytes sent and received by one client up to each evaluated round."""
    each = np.cumsum([line["bytes_up"] + line["bytes_down"] for line in history.lines])
    here = np.isin([line["round"] for line in history.lines], history.rounds)
    total: Floats = each[here] / len(history.roster)
    return total


def site_curves(histories: Mapping[str, Sequence[History]], i: int) -> Markup:
    """The test score of one client after every evaluated round: one line per method."""
    drawn = {method: _curve(some, i) for method, some in histories.items()}
    return method_curves(drawn, next(iter(histories.values()))[0].metric, "")


def method_curves(
    drawn: Mapping[str, Curve], metric: str, kind: str, axis: Axis | None = None
) -> Markup:
    """One line per method with a band over seeds, over rounds or over what ``axis`` shows."""
    left, top, bottom = 38.0, 12.0, 36.0
    height = max(320.0, top + bottom + 15 * (len(drawn) + 2))  # room for all names
    right = 14 + 7.9 * max(len(words.label(method)) for method in drawn)
    grid = ticks(*_extent([scores for curve in drawn.values() for scores in curve[1:]]))
    first, last = (
        f(float(curve.x[k]) for curve in drawn.values()) for f, k in ((min, 0), (max, -1))
    )
    x = Scale(first, last if last > first else first + 1, left, WIDTH - right)
    y = Scale(grid[0], grid[-1], height - bottom, top)
    content = [*_level_lines(grid, y, left, WIDTH - right, metric)]
    content += (axis or _round_axis)(first, last, x, height - bottom)
    ends = []
    for method, curve in drawn.items():
        points = [(x(place), y(v)) for place, v in zip(curve.x, curve.mean, strict=True)]
        ends.append(next((p[1] for p in reversed(points) if math.isfinite(p[1])), y(grid[0])))
        alone = {"stroke_dasharray": "5 4"} if method == LOCAL else {}
        ink = colour(method)
        content += [_band(curve, x, y, ink), polyline(points, class_="line", stroke=ink, **alone)]
    content += _end_labels(list(drawn), ends, WIDTH - right, (top, height - bottom - 8))
    what = f"{kind}{METRICS[metric].title}{'' if axis else ' over rounds'}"
    return figure(WIDTH, height, f"{what}, one line per method", *content)


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


def client_curves(history: History) -> Markup:
    """The test score of each client after every evaluated round of one run, and their mean."""
    height, left, top, bottom, right = 320.0, 38.0, 12.0, 36.0, 54.0
    shown = _drawable(history.test)[:, :: -(-len(history.roster) // MOST_LINES)]
    places, means = _curve([history])[:2]
    grid = ticks(*_extent([shown, means]))
    first, last = float(places[0]), float(places[-1])
    x = Scale(first, max(last, first + 1), left, WIDTH - right)
    y = Scale(grid[0], grid[-1], height - bottom, top)

    def points(scores: Floats) -> list[tuple[float, float]]:
        return [(x(place), y(v)) for place, v in zip(places, scores, strict=True)]

    end = next((p[1] for p in reversed(points(means)) if math.isfinite(p[1])), y(grid[0]))
    ink = colour(history.method)
    return figure(
        WIDTH,
        height,
        f"{METRICS[history.metric].title} of each client over rounds",
        *_level_lines(grid, y, left, WIDTH - right, history.metric),
        *_round_axis(first, last, x, height - bottom),
        *(polyline(points(scores), class_="client", stroke="var(--alone)") for scores in shown.T),
        polyline(points(means), class_="line", stroke=ink),
        tag("text", "mean", x=WIDTH - right + 8, y=end + 4.5, class_="name", fill=ink),
    )


def _curve(histories: Sequence[History], client: int | None = None) -> Curve:
    """The mean over clients, or the score of one client, averaged over runs."""
    means = np.array(
        [
            metrics.mean_known(history.test) if client is None else history.test[:, client]
            for history in histories
        ]
    )
    return curve_of((histories[0].rounds + 1).astype(np.float64), means)


def curve_of(places: Floats, means: Floats) -> Curve:
    """The line of scores ``[seeds, places]``: their mean, and their range over seeds."""
    seeds = np.where(np.isfinite(_drawable(means)), means, np.nan)
    known = np.asarray(~np.isnan(seeds).all(0))
    low, high = (np.full(len(known), np.nan) for _ in range(2))
    low[known], high[known] = np.nanmin(seeds[:, known], 0), np.nanmax(seeds[:, known], 0)
    return Curve(places, _drawable(metrics.mean_known(means.T)), low, high)


def _level_lines(
    grid: Sequence[float], y: Scale, left: float, right: float, metric: str
) -> list[Markup]:
    unit = words.unit(metric)
    drawn = []
    for value in grid:
        text = f"{value:g}{unit.strip() if value == grid[-1] else ''}"
        drawn.append(tag("line", x1=left, x2=right, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(tag("text", text, x=left - 6, y=y(value) + 4, class_="tick end"))
    return drawn


def _round_axis(low: float, high: float, x: Scale, base: float) -> list[Markup]:
    first, last = int(low), int(high)
    shown = sorted({first, last, *(int(t) for t in ticks(first, last, 4) if first < t < last)})
    kept = [r for r in shown if r in (first, last) or min(r - first, last - r) * 12 >= last - first]
    marks = [tag("text", r, x=x(r), y=base + 17, class_="tick middle") for r in kept]
    middle = (x.start + x.end) / 2
    return [*marks, tag("text", "round", x=middle, y=base + 33, class_="tick middle")]


def _byte_axis(low: float, high: float, x: Scale, base: float) -> list[Markup]:
    kept = [value for value in ticks(low, high, 3) if low <= value <= high]
    marks = [tag("text", words.size(v), x=x(v), y=base + 17, class_="tick middle") for v in kept]
    what, middle = "sent and received per client", (x.start + x.end) / 2
    return [*marks, tag("text", what, x=middle, y=base + 33, class_="tick middle")]


def _end_labels(
    methods: Sequence[str],
    ends: Sequence[float],
    x: float,
    within: tuple[float, float],
) -> list[Markup]:
    """The methods' names at the ends of their lines, in place of a legend."""
    places = apart(ends, 15, *within)
    return [
        tag(
            "text",
            words.label(m),
            x=x + 8,
            y=place + 4.5,
            class_="name",
            fill=colour(m),
        )
        for m, place in zip(methods, places, strict=True)
    ]
