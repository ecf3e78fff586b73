"""The log of what left a site: one line per answer, appended before the answer leaves."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..engines.codec import digest
from .protocol import refused_by


def write_down(
    log: Path, head: Mapping[str, Any], reply: bytes, experiment: str, told: Sequence[str] = ()
) -> None:
    """Append a line about the answer to a message; ``experiment`` if the message names none.

    ``told`` names what the answer holds; a refusal holds its reason.
    """
    refused = refused_by(reply)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": _short(head.get("kind"), 40),
        "experiment": _short(head.get("experiment", experiment), 64),
        "round": round if isinstance(round := head.get("round"), int) else None,
        "told": [*told] if refused is None else [f"refused: {refused[0]}"],
        "bytes": len(reply),
        "sha256": digest(reply),
    }
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _short(value: Any, most: int) -> str:
    """A text of a message; what is no text is not written out, however deep it is."""
    return value[:most] if isinstance(value, str) else ""
