"""One colour per method, the same on every page, whichever methods a page compares.

A method of ours has a slot of its own, somebody's own method one of a few slots by its name. The
hues of neighbouring slots are far apart. Colours have enough contrast for text, on light and on
dark pages; they are CSS variables of the page.
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
GOLDEN = 137.508  # degrees between the hues of neighbouring slots
# Lightness of OKLCH by slot, in turn, so that similar hues differ in lightness.
LIGHTNESS: dict[Mode, tuple[float, ...]] = {
    "light": (0.5, 0.35, 0.54, 0.42, 0.46),
    "dark": (0.76, 0.9, 0.68, 0.82, 0.72),
}
CHROMA = 0.14  # less where the screen cannot show it


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


@cache
def palette(mode: Mode) -> dict[str, str]:
    """Every variable of a method's colour, and its colour as #rrggbb."""
    return {f"--m{i}": _hex(i, mode) for i in range(OURS + ALIASED + OTHERS)}


def style(mode: Mode) -> str:
    """The palette as CSS declarations."""
    return "; ".join(f"{name}: {value}" for name, value in palette(mode).items()) + ";"


def _hex(slot: int, mode: Mode) -> str:
    lightness, hue = LIGHTNESS[mode][slot % 5], math.radians((40 + slot * GOLDEN) % 360)
    chromas = (CHROMA * 0.95**k for k in range(100))
    tried = (_rgb(lightness, chroma, hue) for chroma in chromas)
    shown = next(parts for parts in tried if min(parts) >= 0 and max(parts) <= 1)
    return "#" + "".join(f"{round(255 * _gamma(part)):02x}" for part in shown)


def _rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Linear sRGB of a colour in OKLCH (Björn Ottosson's matrices)."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )


def _gamma(part: float) -> float:
    """Linear light as sRGB encodes it."""
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


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
