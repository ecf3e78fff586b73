"""Helpers to draw figures as SVG. Every text is escaped; colours are those of the page's style."""

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray


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
