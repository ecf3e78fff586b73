"""The figures of a comparison's or a run's page, by the names of their files."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib import resources
from xml.etree import ElementTree

from markupsafe import Markup

from ..runs.run import Run
from . import figures
from .clinical import ClinicalChoice
from .clinical_page import clinical_view
from .comparison import Comparison
from .figures import scatters
from .page import clinical_of, helping_of, helping_of_run, shown_method
from .reliance import reliance
from .svg import palette


def page_figures(
    found: Comparison | Run, choice: ClinicalChoice | None = None
) -> dict[str, Markup]:
    """The figures that the page shows; names are those of files, without their ending."""
    made: dict[str, Markup] = {}
    for name, drawn in _named(found, choice):
        if drawn is not None:
            name = unicodedata.normalize("NFC", name.lower())
            safe = re.sub(r"[\W_]+", "-", name).strip("-") or "figure"
            taken = sum(re.sub(r"-\d+$", "", other) == safe for other in made)
            made[f"{safe}-{taken + 1}" if taken else safe] = drawn
    return made


def _named(
    found: Comparison | Run, choice: ClinicalChoice | None
) -> Iterator[tuple[str, Markup | None]]:
    if isinstance(found, Run):
        yield "learning curves", figures.client_curves(found)
        helped = helping_of_run(found, reliance([found]))
        clinical = clinical_view({found.method: [found]}, choice)
    else:
        best = shown_method(found)
        yield "learning curves", figures.learning_curves(found)
        for panel in figures.panels(found, best):
            yield f"gains {panel.method}", panel.drawn
        for dots in scatters(found, best):
            yield f"gain against alone {dots.method}", dots.drawn
        helped, clinical = helping_of(found, best), clinical_of(found, best, choice)
    for card in helped.cards if helped else ():
        yield f"helpers {card.method}", card.graph
        yield f"matrix {card.method}", card.matrix
    for curve in clinical.curves if clinical else ():
        yield f"calibration {curve.name}", curve.drawn


# ---- figures as files of their own: SVG that other programs read ---------------------------------

# The figures of a page take their colours and strokes from the page's style. In a file of its own
# every element has its style as attributes, and colours are those on white paper: few programs
# besides browsers know CSS variables and classes of SVG.

EDGE = 8.0  # white space around a figure
FONT = "Helvetica, Arial, sans-serif"
_RULE = re.compile(r"svg ((?:\.[\w.-]+|text)) \{([^}]*)\}")


def standalone(drawn: Markup) -> str:
    """A figure of a page as the text of an SVG file."""
    root = ElementTree.fromstring(str(drawn))
    for element in root.iter():
        _style(element)
    width, height = (float(side) + 2 * EDGE for side in root.attrib["viewBox"].split()[2:])
    box = {"width": f"{width:g}", "height": f"{height:g}"}
    corner = f"{-EDGE:g}"
    ground = ElementTree.Element("rect", {"x": corner, "y": corner, **box, "fill": "#ffffff"})
    root.insert(1, ground)  # after the title
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"{corner} {corner} {width:g} {height:g}",
        "font-family": FONT,
        **box,
    }
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _style(element: ElementTree.Element) -> None:
    """Write the rules of an element's classes into its attributes."""
    classes = set(element.attrib.pop("class", "").split())
    for wanted, kind, declared in _rules():
        if wanted <= classes and kind in (None, element.tag):
            element.attrib |= declared
    kept = {k: v for k, v in element.attrib.items() if not k.startswith("data-")}
    element.attrib.clear()
    element.attrib |= {name: _resolved(value) for name, value in kept.items()}


@cache
def _rules() -> tuple[tuple[set[str], str | None, dict[str, str]], ...]:
    """The rules of the page's style on figures: classes, element and attributes; weaker first."""
    return tuple(sorted(_parsed(), key=lambda rule: (rule[1] is None, len(rule[0]))))


def _parsed() -> Iterator[tuple[set[str], str | None, dict[str, str]]]:
    for selector, text in _RULE.findall(_css()):
        pairs = (part.partition(":") for part in text.split(";") if ":" in part)
        found = {name.strip(): value.strip() for name, _, value in pairs}
        declared = {
            name: re.sub(r"(?<=\d)px", "", value)
            for name, value in found.items()
            if value != "inherit" and name != "pointer-events"
        }
        is_class = selector.startswith(".")
        yield (
            set(selector[1:].split(".") if is_class else ()),
            (None if is_class else selector),
            declared,
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
