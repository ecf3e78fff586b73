"""Learning curves: of the methods of a comparison, of one site, and of the clients of one run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..core import metrics
from ..core.metrics import METRICS, Floats
from ..results.history import History
from ..results.judgement import LOCAL
from . import words
from .svg import Scale, apart, figure, polyline, tag, ticks

if TYPE_CHECKING:
    from .outcomes import Comparison

WIDTH = 440.0
LARGEST_SCORE = 1e100  # larger scores are drawn as infinite
COLOURS = 7  # --c1 … --c7 of the page's style; with more methods, colours repeat


def colour(methods: Iterable[str], method: str) -> str:
    """A method's colour among all methods, the same in every figure; Local is grey."""
    others = [name for name in methods if name != LOCAL]
    if method == LOCAL:
        return "var(--alone)"
    return f"var(--c{others.index(method) % COLOURS + 1})"


def _drawable(scores: Floats) -> Floats:
    """The scores, where those of a diverged run that no axis can show are replaced by infinity."""
    return np.where(np.abs(scores) > LARGEST_SCORE, np.copysign(np.inf, scores), scores)


def _extent(arrays: Sequence[Floats]) -> tuple[float, float]:
    """The smallest and the largest finite value of all arrays."""
    values = np.concatenate([array.ravel() for array in arrays])
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def learning_curves(comparison: "Comparison") -> Markup:
    """The mean test score after every evaluated round: one line per method, the mean over seeds."""
    drawn = {m: _curve([r.history for r in comparison.of_method(m)]) for m in comparison.methods}
    return _method_curves(drawn, comparison.metric, "Mean ")


def site_curves(histories: Mapping[str, Sequence[History]], i: int) -> Markup:
    """The test score of one client after every evaluated round: one line per method."""
    drawn = {method: _curve(some, i) for method, some in histories.items()}
    return _method_curves(drawn, next(iter(histories.values()))[0].metric, "")


Curve = tuple[NDArray[np.int64], Floats]  # the evaluated rounds, and a score in each


def _method_curves(drawn: Mapping[str, Curve], metric: str, kind: str) -> Markup:
    left, top, bottom = 38.0, 12.0, 36.0
    height = max(320.0, top + bottom + 15 * (len(drawn) + 1))  # room for all names
    right = 14 + 7.9 * max(len(words.label(method)) for method in drawn)
    grid = ticks(*_extent([means for _, means in drawn.values()]))
    last = max(int(rounds[-1]) for rounds, _ in drawn.values()) + 1
    first = min(int(rounds[0]) for rounds, _ in drawn.values()) + 1
    x = Scale(first, max(last, first + 1), left, WIDTH - right)
    y = Scale(grid[0], grid[-1], height - bottom, top)
    content = [*_level_lines(grid, y, left, WIDTH - right, metric)]
    content += _round_axis(first, last, x, height - bottom)
    ends = []
    for method, (rounds, means) in drawn.items():
        points = [(x(r + 1), y(v)) for r, v in zip(rounds, means, strict=True)]
        ends.append(next((p[1] for p in reversed(points) if math.isfinite(p[1])), y(grid[0])))
        alone = {"stroke_dasharray": "5 4"} if method == LOCAL else {}
        content.append(polyline(points, class_="line", stroke=colour(drawn, method), **alone))
    content += _end_labels(list(drawn), ends, WIDTH - right, (top, height - bottom))
    what = METRICS[metric].title
    return figure(WIDTH, height, f"{kind}{what} over rounds, one line per method", *content)


MOST_LINES = 60  # at most so many clients have a line; of more clients, only every n-th has one


def client_curves(history: History) -> Markup:
    """The test score of each client after every evaluated round of one run, and their mean."""
    height, left, top, bottom, right = 320.0, 38.0, 12.0, 36.0, 54.0
    shown = _drawable(history.test)[:, :: -(-len(history.roster) // MOST_LINES)]
    rounds, means = _curve([history])
    grid = ticks(*_extent([shown, means]))
    first, last = int(rounds[0]) + 1, int(rounds[-1]) + 1
    x = Scale(first, max(last, first + 1), left, WIDTH - right)
    y = Scale(grid[0], grid[-1], height - bottom, top)

    def points(scores: Floats) -> list[tuple[float, float]]:
        return [(x(r + 1), y(v)) for r, v in zip(rounds, scores, strict=True)]

    end = next((p[1] for p in reversed(points(means)) if math.isfinite(p[1])), y(grid[0]))
    return figure(
        WIDTH,
        height,
        f"{METRICS[history.metric].title} of each client over rounds",
        *_level_lines(grid, y, left, WIDTH - right, history.metric),
        *_round_axis(first, last, x, height - bottom),
        *(polyline(points(scores), class_="client", stroke="var(--alone)") for scores in shown.T),
        polyline(points(means), class_="line", stroke="var(--accent)"),
        tag("text", "mean", x=WIDTH - right + 8, y=end + 4.5, class_="name", fill="var(--accent)"),
    )


def _curve(histories: Sequence[History], client: int | None = None) -> Curve:
    """The mean over clients, or the score of one client, averaged over runs."""
    means = np.array(
        [
            metrics.mean_known(history.test) if client is None else history.test[:, client]
            for history in histories
        ]
    )
    return histories[0].rounds, _drawable(metrics.mean_known(means.T))


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


def _round_axis(first: int, last: int, x: Scale, base: float) -> list[Markup]:
    shown = sorted({first, last, *(int(t) for t in ticks(first, last, 4) if first < t < last)})
    kept = [r for r in shown if r in (first, last) or min(r - first, last - r) * 12 >= last - first]
    marks = [tag("text", r, x=x(r), y=base + 17, class_="tick middle") for r in kept]
    middle = (x.start + x.end) / 2
    return [*marks, tag("text", "round", x=middle, y=base + 33, class_="tick middle")]


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
            fill=colour(methods, m),
        )
        for m, place in zip(methods, places, strict=True)
    ]
