"""Figures of a collaboration matrix: the weights between clients, and weight inside true groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..results.history import History
from .svg import Scale, figure, png, polyline, tag

NAMED_CELLS_UP_TO = 24  # clients; a larger matrix is drawn as an image without names
ACCENT = (0, 114, 178)  # of images, which cannot take the page's colours


def heatmap(
    A: NDArray[Any], names: Sequence[str], groups: NDArray[np.int64] | None, title: str
) -> Markup:
    """A matrix over clients ordered by true group; the diagonal (a client's own model) is grey.

    The colour scale ends at the largest weight on another client, because a client's weight on its
    own model is often much larger than all others.
    """
    K = len(A)
    order = np.arange(K) if groups is None else np.argsort(groups, kind="stable")
    shown = A[np.ix_(order, order)]
    top = float(np.where(np.eye(K, dtype=bool), 0, shown).max()) or 1.0
    strength = np.clip(shown / top, 0, 1)
    side, edge = 220.0, 10.0
    cell = side / K
    body = (
        _cells(strength, shown, [names[i] for i in order], cell, edge)
        if K <= NAMED_CELLS_UP_TO
        else [tag("image", href=_image(strength), x=edge, y=edge, width=side, height=side)]
    )
    frame = tag("rect", x=edge, y=edge, width=side, height=side, class_="frame")
    marks = [] if groups is None else _group_marks(groups[order], cell, edge, side)
    return figure(side + edge + 1, side + edge + 1, title, *body, frame, *marks)


def _cells(
    strength: NDArray[Any],
    shown: NDArray[Any],
    names: Sequence[str],
    cell: float,
    edge: float,
) -> list[Markup]:
    return [
        tag(
            "rect",
            tag("title", f"{names[i]} ← {names[j]}: {shown[i, j]:.3g}"),
            x=edge + j * cell,
            y=edge + i * cell,
            width=cell,
            height=cell,
            class_="self" if i == j else "cell",
            fill_opacity=None if i == j else float(strength[i, j]),
        )
        for i in range(len(names))
        for j in range(len(names))
    ]


def _image(strength: NDArray[Any]) -> str:
    """The matrix as an image whose opacity is the weight, so that it suits light and dark pages."""
    K = len(strength)
    pixels = np.zeros((K, K, 4), dtype=np.uint8)
    pixels[..., :3] = ACCENT
    pixels[..., 3] = np.round(255 * strength)
    diagonal = np.arange(K)
    pixels[diagonal, diagonal] = (128, 128, 128, 90)
    zoom = max(1, -(-440 // K))
    return png(pixels.repeat(zoom, 0).repeat(zoom, 1))


def _group_marks(groups: NDArray[np.int64], cell: float, edge: float, side: float) -> list[Markup]:
    """A bar beside the rows and columns of each true group, and lines between groups."""
    marks = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        start, end = edge + members[0] * cell, edge + (members[-1] + 1) * cell
        label = tag("title", f"true group {group}")
        marks.append(
            tag("rect", label, x=1, y=start + 1, width=4, height=end - start - 2, class_="group")
        )
        marks.append(
            tag("rect", label, y=1, x=start + 1, height=4, width=end - start - 2, class_="group")
        )
        if members[0] > 0:
            marks.append(tag("line", x1=edge, x2=edge + side, y1=start, y2=start, class_="cut"))
            marks.append(tag("line", y1=edge, y2=edge + side, x1=start, x2=start, class_="cut"))
    return marks


def inside_curve(history: History, stroke: str) -> Markup | None:
    """The share of weight inside the true group over rounds, and the share expected by chance."""
    points = [
        (line["round"] + 1, line["in_group_weight"])
        for line in history.lines
        if line.get("in_group_weight") is not None
    ]
    held, wanted = history.roster.truth(history.swaps)
    if len(points) < 2 or held is None or wanted is None:
        return None
    same = wanted[:, None] == held
    luck = (same.sum() - same.diagonal().sum()) / max(1, same.size - len(same))
    width, height = 300.0, 72.0
    x = Scale(points[0][0], points[-1][0], 2, width - 52)
    y = Scale(0, 1, height - 6, 6)
    end = points[-1][1]
    return figure(
        width,
        height,
        "Share of weight inside the true group over rounds",
        tag("line", x1=2, x2=width - 52, y1=y(luck), y2=y(luck), class_="luck"),
        tag("text", "chance", x=width - 46, y=y(luck) + 4, class_="tick small"),
        polyline([(x(r), y(v)) for r, v in points], class_="line", stroke=stroke),
        tag(
            "text",
            f"{100 * end:.0f} %",
            x=width - 46,
            y=y(end) + 4,
            class_="name small",
            fill=stroke,
        ),
    )
