"""The graph of who helps whom: clients on a circle, with links from helpers to those they help."""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from ..results.history import Roster
from ..results.reliance import Reliance
from .grouping import Grouping
from .share_matrix import NAMED_UP_TO, group_colour, short
from .svg import apart, figure, tag

MOST_NODES = 120  # clients; a graph of more shows nothing
MOST_LINKS = 5  # links to one client, those with the largest shares
RADIUS, WIDEST = 100.0, 11.0  # WIDEST: of the link with the largest share
LABELS = 118.0  # room for names on either side

Point = tuple[float, float]


def graph(relied: Reliance, roster: Roster, found: Grouping, title: str) -> Markup | None:
    """Links of shares above uniform; those that are not clear are dashed. None for many clients.

    A link is wide at the client that helps and ends in a point at the one that it helps.
    """
    K = len(roster)
    if K > MOST_NODES:
        return None
    room = LABELS if K <= NAMED_UP_TO else 12.0
    middle = (RADIUS + 10 + room, RADIUS + 16)
    places = _circle(found.order.tolist(), middle)
    links = [_link(relied, i, j, places, middle) for i in range(K) for j in _drawn(relied, i)]
    names = _names(roster, places, middle) if K <= NAMED_UP_TO else []
    groups = found.groups if roster.groups is None else roster.groups
    nodes = [
        tag(
            "circle",
            tag("title", _told(relied, roster, i)),
            cx=places[i][0],
            cy=places[i][1],
            r=6.0 if K <= NAMED_UP_TO else 3.5,
            class_="node",
            fill=group_colour(int(groups[i])),
            data_site=i,
        )
        for i in found.order.tolist()
    ]
    return figure(2 * middle[0], 2 * middle[1], title, *links, *names, *nodes)


def _circle(order: Sequence[int], middle: Point) -> dict[int, Point]:
    """The place of each client, clockwise from the top in the given order."""
    turn = 2 * math.pi / len(order)
    return {
        i: (
            middle[0] + RADIUS * math.sin((k + 0.5) * turn),
            middle[1] - RADIUS * math.cos((k + 0.5) * turn),
        )
        for k, i in enumerate(order)
    }


def _drawn(relied: Reliance, i: int) -> list[int]:
    """The clients that help client ``i`` with more than a uniform share."""
    least = 1.0 / max(1, len(relied.share) - 1)
    best = np.argsort(-relied.share[i], kind="stable")[:MOST_LINKS]
    few = len(relied.share) == 2  # the only other client has the uniform share
    return [int(j) for j in best if relied.share[i, j] > (0.0 if few else least * 1.05)]


def _link(relied: Reliance, i: int, j: int, places: dict[int, Point], middle: Point) -> Markup:
    """A curved wedge from the helper ``j`` to client ``i``."""
    (x0, y0), (x1, y1) = places[j], places[i]
    length = math.dist(places[j], places[i]) or 1.0
    half = max(0.7, WIDEST * relied.share[i, j] / relied.share.max() / 2)
    u, v = -(y1 - y0) / length, (x1 - x0) / length  # across the link
    x = 0.55 * (x0 + x1) / 2 + 0.45 * middle[0] + 9 * u  # bent, so that both directions are seen
    y = 0.55 * (y0 + y1) / 2 + 0.45 * middle[1] + 9 * v
    path = (
        f"M{x0 + half * u:.1f} {y0 + half * v:.1f}"
        f"Q{x + half / 2 * u:.1f} {y + half / 2 * v:.1f} {x1:.1f} {y1:.1f}"
        f"Q{x - half / 2 * u:.1f} {y - half / 2 * v:.1f} {x0 - half * u:.1f} {y0 - half * v:.1f}Z"
    )
    many = " many" if len(places) > NAMED_UP_TO else ""
    kind = "link" if relied.clear[i, j] else f"link unsure{many}"
    return tag("path", d=path, class_=kind, data_to=i, data_from=j)


def _names(roster: Roster, places: dict[int, Point], middle: Point) -> list[Markup]:
    """The names in a column on either side, each with a thin line to its client."""
    drawn = []
    for side in (-1, 1):
        here = [i for i, place in places.items() if (place[0] > middle[0]) == (side > 0)]
        levels = apart([places[i][1] for i in here], 17, 8, 2 * middle[1] - 8)
        edge = middle[0] + side * (RADIUS + 12)
        for i, y in zip(here, levels, strict=True):
            x0, y0 = places[i]
            drawn.append(tag("line", x1=x0, y1=y0, x2=edge, y2=y, class_="leader"))
            drawn.append(
                tag(
                    "text",
                    tag("title", roster.clients[i]),
                    short(roster.clients[i]),
                    x=edge + 3 * side,
                    y=y + 4.5,
                    class_="tick" if side > 0 else "tick end",
                    data_site=i,
                )
            )
    return drawn


def _told(relied: Reliance, roster: Roster, i: int) -> str:
    """One client and its helpers, as text."""
    helped = [f"{roster.clients[j]} {100 * relied.share[i, j]:.0f} %" for j in _drawn(relied, i)]
    return f"{roster.clients[i]}: {', '.join(helped) or 'relies on nobody in particular'}"
