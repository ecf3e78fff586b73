"""Figures as files of their own: SVG that other programs read, and PDF.

The figures of a page take their colours and strokes from the page's style. A file of its own holds
its style, with every colour written out for white paper, because few programs besides browsers know
CSS variables.
"""

import re
from functools import cache
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from ..errors import CoterieError
from ..storage import files
from .colours import palette

FONT = "Helvetica, Arial, sans-serif"
EDGE = 8.0  # white space around a figure
_BOX = re.compile(r'viewBox="0 0 (\S+) (\S+)"')


def standalone(drawn: Markup) -> str:
    """A figure of a page as the text of an SVG file."""
    found = _BOX.search(drawn)
    if found is None:
        raise ValueError("a figure has no size")
    width, height = (float(side) + 2 * EDGE for side in found.groups())
    box = f"{-EDGE:g} {-EDGE:g} {width:g} {height:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
    ground = (
        f'<rect x="{-EDGE:g}" y="{-EDGE:g}" width="{width:g}" height="{height:g}" fill="#fff"/>'
    )
    text = str(drawn).replace(found[0], f'viewBox="{box}"', 1).replace("<svg ", head, 1)
    start = text.index(">") + 1
    text = f"{text[:start]}<style>{_strokes()}</style>{ground}{text[start:]}"
    return _resolved(text) + "\n"


@cache
def _strokes() -> str:
    """The rules of the page's style that concern figures."""
    rules = [
        rule for line in _css().splitlines() for rule in re.findall(r"svg [^{]*\{[^}]*\}", line)
    ]
    kept = [
        rule.removeprefix("svg ") for rule in rules if re.match(r"svg (\.[\w.]+|text) \{", rule)
    ]
    return "\n".join([f"text {{ font-family: {FONT}; }}", *kept]).replace(
        "font-family: inherit;", ""
    )


@cache
def _css() -> str:
    return resources.files(__package__).joinpath("templates/report.css").read_text("utf-8")


@cache
def _colours() -> dict[str, str]:
    """The page's colours on white paper."""
    root = _css().partition("{")[2].partition("}")[0]
    named = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]+)", root))
    return {**named, **palette("light"), "--paper": "#ffffff", "--card": "#ffffff"}


def _resolved(text: str) -> str:
    """The text with colours in place of CSS variables."""
    return re.sub(r"var\((--[\w-]+)\)", lambda found: _colours()[found[1]], text)
