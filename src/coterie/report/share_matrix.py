"""The matrix of who helps whom: mean shares with names, sorted by discovered groups."""

from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..core.metrics import Floats
from ..results.history import Roster
from ..results.reliance import Reliance
from .grouping import Grouping
from .svg import figure, png, tag

NAMED_UP_TO = 24  # clients; in a larger matrix names would overlap
SIDE, EDGE, NAMES = 300.0, 12.0, 112.0
CLEAR, UNSURE = (0, 114, 178), (128, 128, 128)  # an image cannot take the page's colours
GROUP_COLOURS = 7  # --c1 … --c7 of the page's style
FINE_UP_TO = 300  # clients; a larger matrix has fewer levels of colour
LONGEST = 14  # characters of a name in a figure


def short(name: str) -> str:
    """A name as figures show it."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def matrix(relied: Reliance, roster: Roster, found: Grouping, title: str) -> Markup:
    """The mean shares, one row per client, ordered by the discovered groups.

    Clear shares are blue and others grey. Bars mark the true groups, if they are known.
    """
    K, order = len(roster), found.order
    left = EDGE + (NAMES if K <= NAMED_UP_TO else 0)
    cell = SIDE / K
    place = {"x": left, "y": EDGE, "width": SIDE, "height": SIDE}
    drawn = [
        tag("image", href=_image(relied, order), preserveAspectRatio="none", **place),
        tag("rect", class_="frame", **place),
        *_cuts(found, cell, left),
        *([] if roster.groups is None else _bars(roster.groups[order], cell, left)),
        *(_names(roster, order, cell, left) if K <= NAMED_UP_TO else []),
    ]
    return figure(left + SIDE + 1, EDGE + SIDE + 1, title, *drawn)


def _image(relied: Reliance, order: NDArray[np.int64]) -> str:
    """One pixel per cell, whose opacity is the share, so that it suits light and dark pages."""
    here = np.ix_(order, order)
    share, clear = relied.share[here], relied.clear[here]
    pixels = np.zeros((*share.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(clear[..., None], CLEAR, UNSURE)
    levels = 255 if len(share) <= FINE_UP_TO else 15  # fewer levels make a smaller file
    pixels[..., 3] = np.round(levels * strength(share)) * (255 // levels)
    return png(pixels)


def strength(share: Floats) -> Floats:
    """The shares relative to the largest one."""
    shown: Floats = share / (share.max() or 1.0)
    return shown


def _names(roster: Roster, order: NDArray[np.int64], cell: float, left: float) -> list[Markup]:
    return [
        tag(
            "text",
            tag("title", roster.clients[i]),
            short(roster.clients[i]),
            x=left - EDGE,
            y=EDGE + (row + 0.5) * cell + 4,
            class_="tick end row" if cell < 16 else "tick end",
            data_site=int(i),
        )
        for row, i in enumerate(order)
    ]


def _cuts(found: Grouping, cell: float, left: float) -> list[Markup]:
    """Lines between the discovered groups."""
    groups = found.groups[found.order]
    marks = []
    for row in (np.flatnonzero(np.diff(groups)) + 1).tolist():
        x, y = left + row * cell, EDGE + row * cell
        marks.append(tag("line", x1=left, x2=left + SIDE, y1=y, y2=y, class_="cut"))
        marks.append(tag("line", x1=x, x2=x, y1=EDGE, y2=EDGE + SIDE, class_="cut"))
    return marks


def _bars(groups: NDArray[Any], cell: float, left: float) -> list[Markup]:
    """A bar beside each row and above each column, in the colour of the client's true group."""
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist()]
    marks = []
    for start, end in zip(starts, [*starts[1:], len(groups)], strict=True):
        group, size = int(groups[start]), (end - start) * cell - 1
        facts = {"class_": "truth", "fill": group_colour(group)}
        label = tag("title", f"true group {group}")
        along = start * cell + 0.5
        marks.append(tag("rect", label, x=left - 9, y=EDGE + along, width=5, height=size, **facts))
        marks.append(tag("rect", label, x=left + along, y=2, width=size, height=5, **facts))
    return marks


def group_colour(group: int) -> str:
    """The colour of a group of clients."""
    return f"var(--c{group % GROUP_COLOURS + 1})"
