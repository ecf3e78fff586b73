"""One colour per method, the same on every page, whichever methods a page compares.

A method of ours has a slot of its own, somebody's own method one of a few slots by its name.
Colours have enough contrast for text, on light and on dark pages; they are CSS variables of the
page.
"""

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..runs.run import LOCAL

Mode = Literal["light", "dark"]
OURS, ALIASED, OTHERS = 40, 12, 12  # slots of methods, of methods with an adaptation, of others
# Colours of OKLCH: the hues of neighbouring slots are 137.5 degrees apart, the lightness changes
# with each slot, so that similar hues differ in lightness.
COLOURS: dict[Mode, str] = {
    "light": """
        a24019 06453a 8d52a6 5d4b04 0b6080 a23955 02480f 6561bd 733e01 0a6567 913f82 3b3e03
        1b71bc 89221d 0c684b 744ba4 4e3601 127b92 832151 3b6605 455bb2 602803 0b8076 6f2b78
        645907 076b99 6f0823 158447 4f3992 7b4c08 07717a 670a4d 657906 0f4a97 963117 0d745e
        511b6f 896a07 00556e 932c51 2e751e 2e2b81 a75500 005958 81347c 69670d 013d65 b24747
        045c3b 63429b 855907 06424d a84779 3c5702 3152a5 a2410f 04453c 9050a3 5b4c05 066083
        a23950 05481a 695fbb 704005""",
    "dark": """
        fb906a 5dfcdd b97cd3 e4c14a 16b3eb fb89a1 a1f7a4 8c8bec fdb171 14bbbf e78dd4 dfe874
        4d9deb fdaca1 2dc08f c39afa ffd897 0ea9c9 ffa5c8 82b756 94adfe fed4bf 20afa2 efa4f9
        b9a624 48bdff fed1d3 46b16d c3bafd de9232 1bc7d7 feceea 8da432 a1c6fd ee8266 24cda8
        ebd3ff bb9219 60d4ff eb7c9c 7ec770 d6dcfe d97e37 06e0dd d582ce bab73e c3e2fe e2726f
        64e0a5 af90f0 e4a339 9fedfe d771a4 aad56e 7aa1fc fa9165 58fce2 bc7bd0 e0c34b 26b2ed
        fc899c 9af8a9 918aea feb169""",
}


def colour(method: str) -> str:
    """The colour of a method as a CSS variable; Local is grey.

    >>> colour("local"), colour("fedavg")
    ('var(--alone)', 'var(--m0)')
    """
    return "var(--alone)" if method == LOCAL else f"var(--m{_slot(method)})"


@cache
def _slot(method: str) -> int:
    from ..algorithms import ALGORITHMS, ALIASES

    ours = [name for name in ALGORITHMS if name != LOCAL]
    if method in ours:
        return ours.index(method) % OURS
    if method in ALIASES:
        return OURS + list(ALIASES).index(method) % ALIASED
    return OURS + ALIASED + zlib.crc32(method.encode()) % OTHERS


def palette(mode: Mode) -> dict[str, str]:
    """Every variable of a method's colour, and its colour as #rrggbb."""
    return {f"--m{i}": f"#{ink}" for i, ink in enumerate(COLOURS[mode].split())}


def style(mode: Mode) -> str:
    """The palette as CSS declarations."""
    return "; ".join(f"{name}: {value}" for name, value in palette(mode).items()) + ";"


# ---- helpers to draw figures as SVG. Every text is escaped; colours are those of the page's style


def tag(element: str, *children: object, **attributes: object) -> Markup:
    """One SVG element; ``stroke_width=2`` becomes ``stroke-width="2"``, ``class_`` ``class``.

    >>> tag("text", "a < b", x=1.50, class_="label")
    Markup('<text x="1.5" class="label">a &lt; b</text>')
    """
    named = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _short(value))
        for name, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(Markup.escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(element), named, inside)


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


class Scale(NamedTuple):
    """A linear map from data values to positions in the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The position of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About ``about`` round numbers that cover a range, for an axis.

    >>> ticks(3, 97)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    if high <= low:
        room = max(0.5, 1e-3 * abs(low))
        low, high = low - room, high + room
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def polyline(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    """A line through points, with a gap at each point that is not finite."""
    path, pen = [], "M"
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            path.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        else:
            pen = "M"
    return tag("path", d=" ".join(path), fill="none", **attributes)


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Positions moved so that they are ``least`` apart and inside a range; their order is kept.

    >>> apart([10.0, 11.0, 50.0], 10, 0, 60)
    [10.0, 20.0, 50.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, here in itertools.pairwise(order):
        moved[here] = max(moved[here], moved[before] + least)
    limit = high
    for here in reversed(order):
        moved[here] = max(min(moved[here], limit), low)
        limit = moved[here] - least
    return moved


def png(pixels: NDArray[np.uint8]) -> str:
    """RGBA pixels ``[h, w, 4]`` as a PNG image in a ``data:`` URL."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(
        b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    ).decode("ascii")


def figure(width: float, height: float, title: str, *content: Any) -> Markup:
    """An SVG figure that scales with the page; ``title`` describes it for screen readers."""
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", tag("title", title), *content, viewBox=box, role="img", aria_label=title)
