"""Checks of a run's folder: files match the manifest, rounds have no gaps, data is the same."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.manifest import Identity, changes
from ...errors import StoreError
from ...results.history import Line, Log
from ...storage import files
from . import stored_models
from .names import (
    AT_SITES,
    CLIENTS,
    CONFIG,
    LISTED,
    MATRICES,
    MODELS,
    NAMES,
    PARTITION,
    PARTS,
    ROUNDS,
    SUMMARY,
    refuse_links,
    refuse_newer,
)
from .reading import read

NOT_AS_WRITTEN = (
    f"{files.MANIFEST} lists what is there but is not byte for byte as it was written; restore it "
    "from a copy"
)


def verify(path: Path) -> list[str]:
    """The faults of a finished run's folder, as sentences; empty if all is as written."""
    refuse_links(path)
    refuse_newer(path / CONFIG)
    return _files(path) or _contents(path)


def _files(path: Path) -> list[str]:
    """The differences between the files of the folder and its manifest."""
    wrong = files.faults(path)
    if wrong:
        return wrong
    listed = files.read_json(path / files.MANIFEST)["files"]
    there = {name for name in NAMES if (path / name).is_file()} - {files.MANIFEST}
    at_sites = models_at_sites(files.read_json(path / CONFIG))
    missing = sorted(there.union(LISTED, () if at_sites else (MODELS,)) - {*listed})
    if missing:
        return [f"{name} is not in {files.MANIFEST}" for name in missing]
    found = files.list_files(path)
    return manifest_faults(path, {name: found[name] for name in sorted(listed)})


def models_at_sites(config: Any) -> bool:
    """Whether the config says that the final models were left at the sites of a federation."""
    resolved = config.get("resolved") if isinstance(config, dict) else None
    return isinstance(resolved, dict) and resolved.get("models") == AT_SITES


def manifest_faults(path: Path, listing: Mapping[str, Any]) -> list[str]:
    """A sentence if the manifest is not exactly the text that coterie writes for this listing."""
    expected = files.to_json({"files": dict(listing)}, indent=2) + "\n"
    found = files.read_start(path / files.MANIFEST, None)
    return [] if found == expected.encode() else [NOT_AS_WRITTEN]


def _contents(path: Path) -> list[str]:
    """Contradictions between files that match the manifest."""
    data = read(path)
    history = data.history
    kept = {
        CLIENTS: [(int(index), None) for index in history.rounds],
        MATRICES: [(index, None) for index in history.matrix_rounds],
    }
    asked = data.config.get("run", {}).get("rounds", len(history.lines))
    wrong = _gaps(history.lines, kept, asked)
    stored = path / MODELS
    if stored.exists() and stored_models.stored_digest(stored) != data.summary.get("digest"):
        wrong.append(f"{MODELS} does not give the digest in {SUMMARY}")
    return wrong


def refuse_gaps(path: Path, log: Log) -> None:
    """Refuse to continue from logs in which rounds, scores or matrices are missing."""
    wrong = _gaps(log.lines, {CLIENTS: log.evaluated, PARTS: log.matrices}, len(log.lines))
    if wrong:
        raise StoreError(f"{path}{os.sep}{wrong[0]}; resume from an earlier checkpoint")


def _gaps(
    lines: Sequence[Line], kept: Mapping[str, Sequence[tuple[int, Any]]], rounds: object
) -> list[str]:
    """Rounds that are missing, doubled or out of order, one sentence per file."""
    there = [line.get("round") for line in lines]
    wrong = []
    if len(there) != rounds or there != list(range(len(there))):
        wrong.append(
            f"{ROUNDS}: found rounds {_some(there)}; expected {rounds} from 0 on, in order"
        )
    for name, mark in zip(kept, ("test", "off_diagonal"), strict=True):
        promised = [line.get("round") for line in lines if mark in line]
        found = [index for index, _ in kept[name]]
        if found != promised:
            expected = f"{_some(promised)}, as {ROUNDS} says"
            wrong.append(f"{name}: found rounds {_some(found)}; expected {expected}")
    return wrong


def _some(rounds: Sequence[Any], most: int = 20) -> str:
    """The first few of these rounds, as text."""
    return f"{list(rounds[:most])}{' …' * (len(rounds) > most)}"


def refuse_other_data(path: Path, now: Identity) -> None:
    """Refuse to continue, or to compare with, a run whose clients had other data."""
    if not (path / PARTITION).is_file():
        raise StoreError(
            f"{path}: has no {PARTITION}, so that its data cannot be compared with what is here; "
            "it was begun by an earlier version; choose another folder with --out or delete it"
        )
    changed = changes(files.read_json(path / PARTITION), now)
    if changed:
        raise StoreError(
            f"{path}: the data is not what this run began with ({'; '.join(changed)}); expected "
            f"partition {now.fingerprint} to be that of {PARTITION}; nothing was changed; "
            "restore the data, or choose another folder with --out"
        )
