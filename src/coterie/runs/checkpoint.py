"""Checkpoints of a run: each is written to disk completely or not at all.

    RUN/checkpoint/
        LATEST                    the name of the newest checkpoint
        round-00000012/
            server.safetensors    the server's arrays after 12 rounds
            states.safetensors    the arrays of every client's state
            MANIFEST.json         sha256 and size of both and of the logs so far; written last

A checkpoint is written into a temporary folder, flushed, and renamed in one step; only then does
LATEST name it. Two are kept. A checkpoint that does not match its manifest is never loaded; the one
before it is. The files hold arrays without their tree structure, which comes from
``Algorithm.init``. No random state is stored, because every draw of a run is derived from its seed.
No file is a pickle.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..core.rows import RowTable
from ..core.tree import Tree, flatten, unflatten
from ..errors import StoreError
from ..storage import faults, files
from ..storage.archives import Some, Stored, size_of, write_arrays

if TYPE_CHECKING:
    from ..training.rounds import Record
    from .run_folder import RunFolder

FOLDER, LATEST = "checkpoint", "LATEST"
PARTS = ("server", "states")
IDS, ROWS = ":ids", ":rows"  # suffixes for an array of which only some rows are stored
SHARE = 0.05  # share of a run's time that checkpoints may take
LEAST, SPEED = 0.1, 200e6  # estimated cost of the first one: seconds, and bytes per second
_NAME = re.compile(r"round-(\d{8})")
_OURS = re.compile(r"round-\d{8}|\.round-\d{8}\.\d+\.tmp|LATEST|\.LATEST\.\d+\.tmp")
_LOG = re.compile(r"(rounds\.jsonl|clients\.csv|collaboration\.parts/\d{8}\.npz)")

Listing = dict[str, dict[str, Any]]  # name: bytes and sha256
Arrays = dict[str, Tensor]


class StoredCheckpoint(NamedTuple):
    """A checkpoint that has been read and checked."""

    rounds: int
    folder: Path
    logs: Listing  # sizes and hashes of the run's logs at that time
    server: Arrays
    states: Arrays


# ---- trees and their arrays ----------------------------------------------------------------------


def arrays_of(tree: Tree) -> dict[str, Any]:
    """Every array of a tree, by its name in the file, which is its path in the tree."""
    return {path or ".": leaf for path, leaf in flatten(tree)}


def stored(tree: Tree) -> dict[str, Stored]:
    """The arrays to store for a tree; of a table of rows, only the rows that have changed."""
    arrays: dict[str, Stored] = {}
    for name, leaf in arrays_of(tree).items():
        if isinstance(leaf, Tensor):
            arrays[name] = leaf
        else:
            ids = leaf.written
            arrays |= {name + IDS: ids, name + ROWS: Some.of(leaf, ids)}
    return arrays


def rebuild(like: Tree, arrays: Mapping[str, Tensor]) -> Tree:
    """A tree with the structure and the devices of ``like`` and the values of ``arrays``.

    Arrays are copied, because a view into a file's bytes is not aligned like torch's own memory,
    and the last bits of results may depend on that.
    """
    return unflatten(like, [_read_leaf(*named, arrays) for named in arrays_of(like).items()])


def _read_leaf(name: str, like: Tensor, arrays: Mapping[str, Tensor]) -> Tensor | RowTable:
    """One array, or a table with the rows that were stored."""
    some = name not in arrays
    found = arrays[name + ROWS] if some else arrays[name]
    if found.dtype != like.dtype or found.dim() != like.dim():
        raise StoreError(
            f"the checkpoint has {'an array' if name == '.' else name} as {found.dtype} "
            f"{list(found.shape)}; expected {like.dtype} {list(like.shape)}; resume with the "
            "version it began with"
        )
    if not some:
        return found.clone().to(like.device)
    ids = arrays[name + IDS].tolist()
    rows = (row.clone().to(like.device) for row in found)
    return RowTable(like, dict(zip(ids, rows, strict=True)))


def restore(stored: StoredCheckpoint, server: Tree, states: Tree) -> tuple[Tree, Tree]:
    """The server and the states of a checkpoint, in the structure that ``Algorithm.init`` gave."""
    for part, like, arrays in zip(
        PARTS, (server, states), (stored.server, stored.states), strict=True
    ):
        wanted = set(arrays_of(like))
        there = {name.removesuffix(IDS).removesuffix(ROWS) for name in arrays}
        if wanted != there:
            found, expected = (", ".join(sorted(names)) or "nothing" for names in (there, wanted))
            raise StoreError(
                f"{stored.folder / part}.safetensors: holds {found}; expected {expected}; resume "
                "with the version of coterie, or of your method, that the run began with"
            )
    return rebuild(server, stored.server), rebuild(states, stored.states)


# ---- writing -------------------------------------------------------------------------------------


def write(run: Path, rounds: int, server: Tree, states: Tree, logs: Listing) -> Path:
    """Write a checkpoint as one transaction; ``logs`` are sizes and hashes of the run's logs."""
    home = run / FOLDER
    files.refuse_links(run, [FOLDER])
    name = f"round-{rounds:08d}"
    temporary = home / f".{name}.{os.getpid()}.tmp"
    try:
        with files.writing(home):
            if not home.exists():
                home.mkdir()
                files.flush_to_disk(run)
            temporary.mkdir()
            listing = {}
            for part, tree in zip(PARTS, (server, states), strict=True):
                file = f"{part}.safetensors"
                listing[file] = write_arrays(temporary / file, stored(tree))
                faults.at(f"checkpoint.{part}")
            manifest = {"rounds": rounds, "files": listing, "logs": logs}
            files.write_json(temporary / files.MANIFEST, {**manifest, "sha256": _seal(manifest)})
            faults.at("checkpoint.manifest")
            shutil.rmtree(home / name, ignore_errors=True)  # an earlier one that did not match
            files.install(temporary, home / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    faults.at("checkpoint.renamed")
    files.write_text(home / LATEST, name + "\n")
    faults.at("checkpoint.pointed")
    return home / name


def _seal(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest's own text."""
    return hashlib.sha256(files.to_json(dict(manifest)).encode()).hexdigest()


@dataclass
class Keeper:
    """Decides when a checkpoint is due, writes it, and keeps the last two.

    Without ``every``, a checkpoint is due when its cost is at most SHARE of the time of the rounds
    since the last one. The cost is that of the last checkpoint; for the first, it is estimated from
    the size.
    """

    run: Path
    every: int | None = None
    before: Path | None = None  # the newest good checkpoint
    cost: float | None = None  # seconds that the last checkpoint took
    since: float = 0.0  # seconds of rounds since then

    def due(self, record: "Record") -> bool:
        """Whether to write a checkpoint after this round."""
        self.since += record.seconds
        if self.every is not None:
            return (record.index + 1) % self.every == 0
        if self.cost is None:
            arrays = [*stored(record.server).values(), *stored(record.snapshot()).values()]
            self.cost = LEAST + sum(map(size_of, arrays)) / SPEED
        return self.since * SHARE >= self.cost

    def write(self, record: "Record", folder: "RunFolder") -> None:
        began = time.perf_counter()
        logs = folder.sync()
        faults.at("checkpoint.synced")
        made = write(
            self.run, record.index + 1, (record.server, record.accepted), record.snapshot(), logs
        )
        prune(self.run, {made, self.before} if self.before else {made})
        faults.at("checkpoint.pruned")
        self.before, self.since = made, 0.0
        self.cost = time.perf_counter() - began


def prune(run: Path, keep: set[Path]) -> None:
    """Remove all checkpoints but these, and checkpoints that a kill has left incomplete."""
    files.refuse_links(run, [FOLDER])
    for entry in (run / FOLDER).iterdir():
        if _OURS.fullmatch(entry.name) and entry.is_dir() and entry not in keep:
            shutil.rmtree(entry, ignore_errors=True)


def clear(run: Path) -> None:
    files.remove(run / FOLDER, _OURS)


# ---- reading -------------------------------------------------------------------------------------


def newest(run: Path) -> tuple[StoredCheckpoint | None, list[str]]:
    """The newest checkpoint that matches its manifest, and what is wrong with newer ones."""
    files.refuse_links(run, [FOLDER])
    wrong: list[str] = []
    for folder in _candidates(run / FOLDER):
        try:
            return read(folder, run), wrong
        except StoreError as error:
            wrong.append(str(error))
    return None, wrong


def _candidates(home: Path) -> list[Path]:
    """All checkpoint folders, newest first, and the one that LATEST names even if it is missing."""
    names = [entry.name for entry in home.iterdir()] if home.is_dir() else []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        names.append((home / LATEST).read_text(encoding="utf-8").strip())
    return [home / name for name in sorted({n for n in names if _NAME.fullmatch(n)}, reverse=True)]


def read(folder: Path, run: Path) -> StoredCheckpoint:
    """Read a checkpoint; every byte is checked before it is used."""
    rounds, listing, logs = _manifest(folder)
    for name, promised in logs.items():
        _refuse_changed(run / name, promised, promised["bytes"])
    arrays = []
    for part in PARTS:
        path = folder / f"{part}.safetensors"
        _refuse_changed(path, listing[path.name])
        arrays.append(_unpacked(path))
    return StoredCheckpoint(rounds, folder, logs, *arrays)


def _manifest(folder: Path) -> tuple[int, Listing, Listing]:
    path = folder / files.MANIFEST
    found = files.read_json(path)
    try:
        rounds, listing, logs = found["rounds"], found["files"], found["logs"]
        whole = all(
            type(entry["bytes"]) is int and entry["bytes"] >= 0 and type(entry["sha256"]) is str
            for entry in (*listing.values(), *logs.values())
        )
        own = {name: part for name, part in found.items() if name != "sha256"}
        if found["sha256"] != _seal(own):
            raise ValueError("it has changed since it was written")
        named = listing.keys() == {f"{part}.safetensors" for part in PARTS}
        known = all(_LOG.fullmatch(name) for name in logs)
        if not (whole and named and known and f"round-{rounds:08d}" == folder.name):
            raise ValueError("it describes something else")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path}: is no manifest of this checkpoint ({error}); expected the one it was "
            "written with"
        ) from error
    return rounds, listing, logs


def _refuse_changed(path: Path, promised: Mapping[str, Any], size: int | None = None) -> None:
    """Refuse a file whose size or sha256, up to ``size`` bytes, differs from the manifest."""
    found = files.describe(path, size)
    if found["bytes"] != promised["bytes"]:
        raise StoreError(
            f"{path}: has {found['bytes']} bytes; expected {promised['bytes']}; it is not used"
        )
    if found["sha256"] != promised["sha256"]:
        raise StoreError(f"{path}: has changed since it was written; it is not used")


def _unpacked(path: Path) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise StoreError(f"{path}: cannot be read ({error}); expected safetensors") from error
