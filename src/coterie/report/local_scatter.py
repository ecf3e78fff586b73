"""Each site's gain against its score alone, one dot per site (P3's Figure 2).

It shows whom a method leaves worse off: in P3, the clients whose own models are good already.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from ..core import metrics
from ..core.metrics import METRICS, Floats
from ..results.judgement import LOCAL
from . import words
from .colours import colour
from .gain_panels import LARGEST
from .svg import Scale, figure, tag, ticks

if TYPE_CHECKING:
    from .outcomes import Comparison

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320.0, 226.0, 44.0, 10.0, 8.0, 44.0
MOST_DOTS = 300  # of a panel; of more sites, only every n-th is drawn


class ScatterPanel(NamedTuple):
    """The panel of one method."""

    method: str
    colour: str
    counts: str
    drawn: Markup


def scatters(comparison: "Comparison", best: str) -> list[ScatterPanel]:
    """One panel per method beside Local; that of the recommended method first."""
    methods = [method for method in comparison.methods if method != LOCAL]
    methods.sort(key=lambda method: method != best)
    return [_panel(comparison, method) for method in methods]


def _panel(comparison: "Comparison", method: str) -> ScatterPanel:
    """The means over seeds; sites without a score in either run are left out."""
    alone = metrics.mean_known(
        np.array([run.history.last for run in comparison.of_method(LOCAL)]).T
    )
    gained = metrics.mean_known(comparison.gains(method).T)
    names = comparison.of_method(LOCAL)[0].history.roster.clients
    return scatter(method, alone, gained, names, comparison.metric)


def scatter(
    method: str, alone: Floats, gained: Floats, names: Sequence[str], metric: str
) -> ScatterPanel:
    """The panel of a method from each site's score alone and its gain."""
    known = np.flatnonzero((np.abs(alone) < LARGEST) & (np.abs(gained) < LARGEST))
    step = -(-len(known) // MOST_DOTS) or 1
    worse = int((gained[known] < 0).sum())
    counts = f"{worse} of {len(known)} below training alone"
    counts += f"; one of {step} sites is drawn" if step > 1 else ""
    ink, title = colour(method), f"{words.label(method)}: gain against the score of training alone"
    drawn = _draw(alone, gained, known[::step].tolist(), names, metric, ink, title)
    return ScatterPanel(words.label(method), ink, counts, drawn)


def _draw(
    alone: Floats,
    gained: Floats,
    shown: list[int],
    names: Sequence[str],
    metric: str,
    ink: str,
    title: str,
) -> Markup:
    across = ticks(*_range(alone[shown]), about=4)
    up = ticks(*_range(np.append(gained[shown], 0.0)), about=4)
    x = Scale(across[0], across[-1], LEFT, WIDTH - RIGHT)
    y = Scale(up[0], up[-1], HEIGHT - BOTTOM, TOP)
    below = y(up[0]) - y(0)
    content = [
        tag("rect", x=LEFT, y=y(0), width=x.end - LEFT, height=below, class_="worse-side"),
        *_axes(across, up, x, y, metric),
        tag("line", x1=LEFT, x2=x.end, y1=y(0), y2=y(0), class_="zero"),
    ]
    gain, loss = (
        [
            _dot(i, names[i], x(float(alone[i])), y(float(gained[i])), float(gained[i]), metric)
            for i in shown
            if (gained[i] < 0) == worse
        ]
        for worse in (False, True)
    )
    content += [tag("g", *gain, class_="dot", fill=ink), tag("g", *loss, class_="dot worse")]
    return figure(WIDTH, HEIGHT, title, *content)


def _dot(site: int, name: str, x: float, y: float, gain: float, metric: str) -> Markup:
    told = tag("title", f"{name}: {words.number(gain, metric, sign=True)}")
    return tag("circle", told, cx=round(x, 1), cy=round(y, 1), r=3.5, data_site=site)


def _range(values: Floats) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)


def _axes(across: list[float], up: list[float], x: Scale, y: Scale, metric: str) -> list[Markup]:
    marks = []
    for value in up:
        text = "0" if value == 0 else f"{value:+g}".replace("-", words.MINUS)
        marks.append(tag("line", x1=LEFT, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
        marks.append(tag("text", text, x=LEFT - 6, y=y(value) + 4, class_="tick end"))
    for value in across if len(across) <= 6 else across[::2]:
        marks.append(tag("text", f"{value:g}", x=x(value), y=y.start + 22, class_="tick middle"))
    what = f"{METRICS[metric].title} of training alone"
    middle = (x.start + x.end) / 2
    return [*marks, tag("text", what, x=middle, y=y.start + 39, class_="tick middle")]
