"""Folders of results and configs as somebody with bad intentions would write them."""

import json
from pathlib import Path
from typing import Any

import coterie

TINY: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "concept_shift", "clients": 4, "groups": 2},
    "model": {"name": "linear"},
    "train": {"batch": 50},
    "engine": {"name": "vmap", "chunk": 4},
    "run": {"rounds": 3, "checkpoint_every": 1},
}


class StopError(Exception):
    """What ends a run before its last round is over."""


def unfinished(
    out: Path, method: str = "fedfomo", config: dict[str, Any] = TINY, **options: Any
) -> Path:
    """A run that ended in its third round, with checkpoints after the first and the second."""

    def stop(step: Any) -> None:
        if step.done == config["run"]["rounds"]:
            raise StopError

    try:
        coterie.run(config, method=method, out=str(out), progress=stop, **options)
    except StopError:
        return out
    raise AssertionError("it should have ended early")


def rewritten(path: Path, **changes: Any) -> None:
    """A JSON file with some of its keys replaced."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
