"""Pictures of a partition: as text for a terminal, as SVG for a page."""

from html import escape

import numpy as np

from .assign import Floats
from .federation import Federation
from .manifest import ClientRow, describe, emd, remarks

_SHADES = " ░▒▓█"
_ROW, _CELL, _LEFT, _TOP = 16, 16, 150, 40  # pixels


def as_text(federation: Federation) -> str:
    """A line a client: its group, its sizes, and a shade for its share of every class."""
    rows = describe(federation)
    width = max(6, *(len(row.client) for row in rows))
    title = f"{federation.dataset.name} · {federation.partition} · {federation.fingerprint}"
    lines = [title, *([federation.note] if federation.note else []), ""]
    lines.append(f"{'client':<{width}}  group  train    val   test  classes")
    lines += [_line(row, width) for row in rows]
    apart = emd(federation)
    if apart is not None:
        lines += ["", f"distance of class shares: emd_p1 {apart.emd_p1:.3f}, l1 {apart.l1:.3f}"]
    return "\n".join([*lines, *remarks(federation)])


def _line(row: ClientRow, width: int) -> str:
    group = "-" if row.group is None else str(row.group)
    sizes = f"{row.train:>6} {row.val:>6} {row.test:>6}"
    return f"{row.client:<{width}}  {group:>5} {sizes}  {shades(row.classes)}"


def shades(counts: tuple[int, ...]) -> str:
    """A character a class, darker for a larger share of the client's samples; dot for none.

    >>> shades((0, 1, 9))
    '·░█'
    """
    top = max(counts, default=0)
    steps = len(_SHADES) - 1
    return "".join("·" if n == 0 else _SHADES[max(1, -(-n * steps // top))] for n in counts)


def as_svg(federation: Federation) -> str:
    """A square a client and class, darker for a larger share of the class's samples."""
    rows = describe(federation)
    counts = np.array([row.classes for row in rows], np.float64).reshape(len(rows), -1)
    names = federation.dataset.class_names
    width = _LEFT + _CELL * max(counts.shape[1], 1) + 90
    height = _TOP + _ROW * len(rows) + 20
    title = escape(f"{federation.dataset.name}: {federation.partition}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img"><title>{title}</title>',
        *(
            f'<text x="{_LEFT + _CELL * c + _CELL // 2}" y="{_TOP - 6}" text-anchor="middle">'
            f"{escape(name[:2])}</text>"
            for c, name in enumerate(names)
        ),
        *map(_svg_row, range(len(rows)), rows, _shares(counts)),
        "</svg>",
    ]
    return "\n".join(parts)


def _shares(counts: Floats) -> Floats:
    """Each client's samples of a class against the client that holds most of it."""
    return np.asarray(counts / counts.max(axis=0, initial=1.0))


def _svg_row(i: int, row: ClientRow, share: Floats) -> str:
    y = _TOP + _ROW * i
    group = "" if row.group is None else f" (group {row.group})"
    cells = "".join(
        f'<rect x="{_LEFT + _CELL * c}" y="{y}" width="{_CELL - 1}" height="{_ROW - 1}" '
        f'fill="#1f5fa8" fill-opacity="{value:.3f}"><title>{row.classes[c]}</title></rect>'
        for c, value in enumerate(share.tolist())
        if value > 0
    )
    end = _LEFT + _CELL * len(row.classes) + 6
    size = row.train + row.val
    return (
        f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(row.client + group)}</text>'
        f'{cells}<text x="{end}" y="{y + 12}">{size} + {row.test} test</text>'
    )
