"""The figures of a comparison's or a run's page, by the names of their files."""

import re
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from ..results.clinical import ClinicalChoice
from ..results.reliance import reliance
from ..storage import files
from . import figures, gain_panels, helping
from .clinical_page import ClinicalView, clinical_view
from .colours import colour
from .figure_files import standalone, to_pdf
from .local_scatter import scatters
from .outcomes import Comparison, RunResult
from .page import clinical_of, helping_of, shown_method


def page_figures(
    found: Comparison | RunResult, choice: ClinicalChoice | None = None
) -> dict[str, Markup]:
    """The figures that the page shows; names are those of files, without their ending."""
    named = _of_run(found, choice) if isinstance(found, RunResult) else _of_all(found, choice)
    made: dict[str, Markup] = {}
    for name, drawn in named:
        if drawn is not None:
            safe = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "figure"
            taken = sum(re.sub(r"-\d+$", "", other) == safe for other in made)
            made[f"{safe}-{taken + 1}" if taken else safe] = drawn
    return made


def _of_all(
    found: Comparison, choice: ClinicalChoice | None
) -> Iterator[tuple[str, Markup | None]]:
    best = shown_method(found)
    yield "learning curves", figures.learning_curves(found)
    yield "score against bytes", figures.byte_curves(found)
    for panel in gain_panels.panels(found, best):
        yield f"gains {panel.method}", panel.drawn
    for dots in scatters(found, best):
        yield f"gain against alone {dots.method}", dots.drawn
    yield from _helped(helping_of(found, best))
    yield from _calibrated(clinical_of(found, best, choice))


def _of_run(found: RunResult, choice: ClinicalChoice | None) -> Iterator[tuple[str, Markup | None]]:
    history, relied = found.history, reliance([found.history])
    yield "learning curves", figures.client_curves(history)
    if relied is not None:
        method = history.method
        ink = {method: colour(method)}
        yield from _helped(
            helping.helping({method: relied}, {method: history}, ink, helping.OF_RUN)
        )
    yield from _calibrated(clinical_view({history.method: history}, choice))


def _helped(found: helping.Helping | None) -> Iterator[tuple[str, Markup | None]]:
    for card in found.cards if found else ():
        yield f"helpers {card.method}", card.graph
        yield f"matrix {card.method}", card.matrix


def _calibrated(found: ClinicalView | None) -> Iterator[tuple[str, Markup | None]]:
    for curve in found.curves if found else ():
        yield f"calibration {curve.name}", curve.drawn


def write_figures(named: dict[str, Markup], folder: Path, *, pdf: bool) -> list[Path]:
    """Write each figure as SVG, and as PDF if asked for; returns the files."""
    made = []
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in named.items():
        svg = standalone(drawn)
        made.append(folder / f"{name}.svg")
        files.write_text(made[-1], svg)
        if pdf:
            made.append(folder / f"{name}.pdf")
            with files.whole(made[-1]) as temporary:
                temporary.write_bytes(to_pdf(svg))
    return made
