"""Finds groups of clients that rely on each other, and an order that keeps groups together."""

import base64
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..core.metrics import Floats
from ..runs.run import Roster, Run
from . import words
from .reliance import Reliance, applied, coalitions, parts_of
from .svg import apart, figure, png, tag

LEAST = 0.25  # modularity below which groups are hardly told from chance
MOST_GROUPS = 40
BEST_ORDER_UP_TO = 200  # clients; scipy's optimal order of leaves takes long for more


class Grouping(NamedTuple):
    """The clients in the order of the figures, and the group that each was found in."""

    order: NDArray[np.int64]  # [K] clients
    groups: NDArray[np.int64]  # [K] the group of each client, counted from 0 in that order


def discovered(share: Floats) -> Grouping:
    """Cluster clients by their shares of each other's weight (average linkage).

    The tree is cut where the modularity is largest: the weight inside groups, beyond what as many
    groups would hold if weight fell on clients at random. Below ``LEAST`` all are one group.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform

    K, alike = len(share), share + share.T
    one = Grouping(np.arange(K), np.zeros(K, dtype=np.int64))
    if K < 3 or not alike.max() > 0:
        return one
    apart = 1 - alike / alike.max()
    np.fill_diagonal(apart, 0.0)
    tree = linkage(squareform(apart, checks=False), "average", K <= BEST_ORDER_UP_TO)
    order = leaves_list(tree).astype(np.int64)
    cuts = [fcluster(tree, k, "maxclust") for k in range(2, min(K // 2, MOST_GROUPS) + 1)]
    found = max(cuts, key=lambda groups: _modularity(alike, groups), default=one.groups)
    if _modularity(alike, found) < LEAST:
        return one._replace(order=order)
    ranks = {group: rank for rank, group in enumerate(dict.fromkeys(found[order].tolist()))}
    return Grouping(order, np.array([ranks[group] for group in found.tolist()]))


def _modularity(alike: Floats, groups: NDArray[np.int64]) -> float:
    total, degree = alike.sum(), alike.sum(1)
    same = groups[:, None] == groups
    return float((alike[same].sum() - (np.outer(degree, degree)[same] / total).sum()) / total)


# ---- matrices over clients: any weights, and mean shares sorted by discovered groups ------------

NAMED_UP_TO = 24  # clients; names and cells of a larger matrix would overlap
SIDE, EDGE = 300.0, 12.0
CLEAR, UNSURE = (0, 114, 178), (128, 128, 128)  # an image cannot take the page's colours
GROUP_COLOURS = 7  # --c1 … --c7 of the page's style
FINE_UP_TO = 300  # clients; a larger matrix has fewer levels of colour
LONGEST = 36  # characters of a name in a figure


def short(name: str) -> str:
    """A name as figures show it."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def room(names: Sequence[str]) -> float:
    """The width of a column of these names in a figure."""
    return 10 + 7.2 * max(map(len, map(short, names)), default=0)


def heatmap(A: NDArray[Any], groups: NDArray[np.int64] | None, title: str) -> Markup:
    """A matrix over clients ordered by true group; the diagonal (a client's own model) is grey.

    The colour scale ends at the largest weight on another client, because a client's weight on its
    own model is often much larger than all others.
    """
    K = len(A)
    order = np.arange(K) if groups is None else np.argsort(groups, kind="stable")
    shown, own = A[np.ix_(order, order)], np.eye(K, dtype=bool)
    strong = np.clip(shown / (float(np.where(own, 0, shown).max()) or 1.0), 0, 1)
    levels = np.where(own, 90, np.round(255 * strong))
    drawn = [_picture(np.where(own[..., None], UNSURE, CLEAR), levels, EDGE)]
    return _framed(drawn, None if groups is None else groups[order], groups, order, EDGE, title)


def matrix(relied: Reliance, roster: Roster, found: Grouping, title: str) -> Markup:
    """The mean shares, one row per client, ordered by the discovered groups, which lines separate.

    Clear shares are blue and others grey.
    """
    K, order = len(roster), found.order
    left = EDGE + (room(roster.clients) if K <= NAMED_UP_TO else 0)
    here = np.ix_(order, order)
    share = relied.share[here] / (relied.share.max() or 1.0)
    levels = 255 if K <= FINE_UP_TO else 15  # fewer levels make a smaller file
    ink = np.where(relied.clear[here][..., None], CLEAR, UNSURE)
    drawn = [_picture(ink, np.round(levels * share) * (255 // levels), left)]
    if K <= NAMED_UP_TO:
        drawn += _names(roster, order, SIDE / K, left)
    return _framed(drawn, found.groups[order], roster.groups, order, left, title)


def _picture(ink: NDArray[Any], opacity: NDArray[Any], left: float) -> Markup:
    """One pixel per cell, whose opacity is its weight, so that it suits light and dark pages."""
    pixels = np.concatenate([ink, opacity[..., None]], -1).astype(np.uint8)
    place = {"x": left, "y": EDGE, "width": SIDE, "height": SIDE, "image_rendering": "pixelated"}
    return tag("image", href=png(pixels), preserveAspectRatio="none", **place)


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


def _framed(
    drawn: Sequence[Markup],
    cut: NDArray[np.int64] | None,
    truth: NDArray[np.int64] | None,
    order: NDArray[np.int64],
    left: float,
    title: str,
) -> Markup:
    """A matrix with lines between the groups ``cut``, and bars in the colours of true groups."""
    cell, right, base = SIDE / len(order), left + SIDE, EDGE + SIDE
    marks = [tag("rect", x=left, y=EDGE, width=SIDE, height=SIDE, class_="frame")]
    for _, start, _ in [] if cut is None else _spans(cut)[1:]:
        x, y = left + start * cell, EDGE + start * cell
        marks.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="cut"))
        marks.append(tag("line", x1=x, x2=x, y1=EDGE, y2=base, class_="cut"))
    for group, start, end in [] if truth is None else _spans(truth[order]):
        label, along, size = tag("title", f"true group {group}"), start * cell, (end - start) * cell
        facts = {"class_": "truth", "fill": group_colour(group)}
        place = {"x": left - 9, "y": EDGE + along + 0.5, "width": 5, "height": size - 1}
        marks.append(tag("rect", label, **place, **facts))
        place = {"x": left + along + 0.5, "y": 2, "width": size - 1, "height": 5}
        marks.append(tag("rect", label, **place, **facts))
    return figure(right + 1, base + 1, title, *drawn, *marks)


def _spans(groups: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Each stretch of equal groups, with its first row and the row after its last."""
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    return [(int(groups[start]), start, end) for start, end in itertools.pairwise(edges)]


def group_colour(group: int) -> str:
    """The colour of a group of clients."""
    return f"var(--c{group % GROUP_COLOURS + 1})"


# ---- the graph of who helps whom: clients on a circle, with links from helpers to those they help

MOST_NODES = 120  # clients; a graph of more shows nothing
MOST_LINKS = 5  # links to one client, those with the largest shares
RADIUS, WIDEST = 100.0, 11.0  # WIDEST: of the link with the largest share

Point = tuple[float, float]


def graph(relied: Reliance, roster: Roster, found: Grouping, title: str) -> Markup | None:
    """Links of shares above uniform; those that are not clear are dashed. None for many clients.

    A link is wide at the client that helps and ends in a point at the one that it helps.
    """
    K = len(roster)
    if K > MOST_NODES:
        return None
    beside = room(roster.clients) if K <= NAMED_UP_TO else 12.0
    middle = (RADIUS + 12 + beside, RADIUS + 16)
    places = _circle(found.order.tolist(), middle)
    links = [_link(relied, i, j, places, middle) for i in range(K) for j in _drawn(relied, i)]
    names = _node_names(roster, places, middle) if K <= NAMED_UP_TO else []
    groups = found.groups if roster.groups is None else roster.groups
    nodes = [
        tag(
            "circle",
            tag("title", _told(relied, roster, i)),
            cx=round(places[i][0], 1),
            cy=round(places[i][1], 1),
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


def _node_names(roster: Roster, places: dict[int, Point], middle: Point) -> list[Markup]:
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
    if helped and (often := relied.seldom(i)):
        helped.append(often)
    return f"{roster.clients[i]}: {', '.join(helped) or 'relies on nobody in particular'}"


# ---- the section on who helps whom: a graph and a matrix per method, averaged and round by round

MOST_ROUNDS = 20  # rounds whose matrices a page holds
# Bytes of the matrices of all rounds on a page, at most; with many methods it holds fewer rounds.
OF_RUN, OF_COMPARISON = 500_000, 3_000_000


class HelpCard(NamedTuple):
    """One method's graph and matrix, and the numbers that the page's script draws."""

    method: str
    graph: Markup | None
    matrix: Markup
    order: str  # JSON list of clients in the order of the matrix
    seldom: str  # JSON list in that order: [rounds in which a client relied on others, all]; or 0
    largest: float  # the share that the number 255 stands for
    top: float  # the share that is drawn darkest
    coalitions: str  # that the method formed in the run that is drawn; empty if it forms none
    frames: str  # base64 of uint8 [2 + rounds, K, K]: clear, mean, rounds; empty for many clients


class Helping(NamedTuple):
    """The section of a page: one card per method, and what they have in common."""

    cards: tuple[HelpCard, ...]
    names: str  # JSON list of the clients' names
    rounds: str  # JSON list of the rounds, counted from 1


def helping(
    relied: Mapping[str, Reliance],
    first: Mapping[str, Run],
    most: int,
) -> Helping | None:
    """The section for methods with these mean weights; rounds are those of the first seed.

    ``most`` limits the bytes of the matrices; without room for any, the page has only the mean as a
    picture.
    """
    if not relied:
        return None
    some = first[next(iter(relied))]
    room = int(most / (len(relied) * len(some.roster) ** 2 * 4 / 3)) - 2
    rounds = None if room < 0 else _rounds(some.matrix_rounds, room)
    cards = tuple(_card(relied[m], first[m], rounds) for m in relied)
    names = json.dumps(some.roster.clients, ensure_ascii=False)
    return Helping(cards, names, json.dumps([index + 1 for index in rounds or []]))


def _rounds(known: Sequence[int], room: int) -> list[int]:
    """Rounds to show, evenly spaced, as many as there is room for."""
    most = min(MOST_ROUNDS, room, len(known))
    places = np.linspace(0, len(known) - 1, most).round().astype(int)
    return [known[place] for place in dict.fromkeys(places.tolist())]


def _card(relied: Reliance, run: Run, rounds: Sequence[int] | None) -> HelpCard:
    name, roster, found = words.label(run.method), run.roster, discovered(relied.share)
    held = zip(run.matrix_rounds, applied(run) if rounds else (), strict=False)
    shown = {index: parts_of(weight) for index, weight in held if index in (rounds or ())}
    none = np.zeros_like(relied.share)
    frames = np.stack([relied.share, *(shown.get(index, none) for index in rounds or ())])
    largest = float(frames.max()) or 1.0
    numbers = np.round(255 * frames / largest)
    packed = np.concatenate([255 * relied.clear[None], numbers]).astype(np.uint8)
    packed = packed[:, found.order][:, :, found.order]
    return HelpCard(
        name,
        graph(relied, roster, found, f"{name}: who helps whom, as a graph"),
        matrix(relied, roster, found, f"{name}: who helps whom, as a matrix"),
        json.dumps(found.order.tolist()),
        json.dumps(
            [
                [int(relied.rounds[i]), int(relied.of[i])] if relied.seldom(i) else 0
                for i in found.order
            ]
        ),
        largest,
        float(relied.share.max()) or 1.0,
        "; ".join(map(", ".join, coalitions(run))),
        "" if rounds is None else base64.b64encode(packed.tobytes()).decode("ascii"),
    )
