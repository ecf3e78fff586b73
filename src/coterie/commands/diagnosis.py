"""What ``coterie doctor`` found: facts, one row per site, what leaves a site, and warnings."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..data.inspection import SitePart
from ..errors import printable

MOST = 30  # sites that are printed; JSON has all of them
FEW = 4  # classes whose shares are printed
COLUMNS = ("site", "rows", "train", "val", "test", "missing", "commonest", "shows from", "classes")


class SiteRow(NamedTuple):
    """One site: its data, and the smallest gain that its test data can show."""

    part: SitePart
    smallest: float | None  # in percentage points; None if no gain can be shown

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name, for JSON."""
        return {**self.part._asdict(), "rows": self.part.rows, "smallest_gain": self.smallest}

    def cells(self) -> tuple[str, ...]:
        """The text of each column."""
        part = self.part
        return (
            part.client,
            *(f"{n:,}" for n in (part.rows, part.train, part.val, part.test)),
            "—" if part.missing is None else f"{100 * part.missing:.1f} %",
            "—" if part.commonest is None else f"{part.commonest:.1f} %",
            "—" if self.smallest is None else f"{self.smallest:.0f} points",
            _balance(part.classes),
        )


def _balance(classes: dict[str, float]) -> str:
    if not classes:
        return "—"
    often = sorted(classes.items(), key=lambda pair: -pair[1])
    said = ", ".join(f"{name} {100 * share:.0f} %" for name, share in often[:FEW])
    return f"{said}, {len(often) - FEW} more" if len(often) > FEW else said


@dataclass(frozen=True)
class Diagnosis:
    """Facts about an experiment before it is run, its sites, what leaves them, and warnings."""

    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    sites: tuple[SiteRow, ...] = ()
    leaves: tuple[tuple[str, str], ...] = ()  # method, and what leaves a site under it
    estimate: tuple[tuple[str, float | None], ...] = ()  # seconds and mib

    def __repr__(self) -> str:
        blocks = [
            _aligned(self.facts),
            _table([COLUMNS, *(row.cells() for row in self.sites[:MOST])], len(self.sites)),
            ["what leaves a site:", *(f"  {line}" for line in _aligned(self.leaves))],
            [f"warning: {warning}" for warning in self.warnings],
        ]
        return "\n\n".join("\n".join(map(printable, block)) for block in blocks if block)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md and stay."""
        return {
            "facts": dict(self.facts),
            "estimate": dict(self.estimate),
            "sites": [row.to_dict() for row in self.sites],
            "leaves": dict(self.leaves),
            "warnings": list(self.warnings),
        }


def _aligned(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}" for name, text in pairs]


def _table(rows: list[tuple[str, ...]], sites: int) -> list[str]:
    """Lines of aligned cells; numbers to the right, the first and the last column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        middle = (f"{c:>{w}}" for c, w in zip(row[1:-1], widths[1:-1], strict=True))
        lines.append("  ".join((f"{row[0]:<{widths[0]}}", *middle, row[-1])))
    return [*lines, f"… and {sites - MOST} more"] if sites > MOST else lines
