"""One colour per method, the same on every page, whichever methods a page compares.

A method of ours has a slot of its own, somebody's own method one of a few slots by its name. The
hues of neighbouring slots are far apart. Colours have enough contrast for text, on light and on
dark pages; they are CSS variables of the page.
"""

import math
import zlib
from functools import cache
from typing import Literal

from ..results.judgement import LOCAL

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
