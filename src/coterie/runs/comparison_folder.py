"""The folder of a comparison: its files, the folders of its runs, its manifest, and their checks.

compare.json                  what was asked for, and the folder's format
comparison.json, report.html  the table, the verdict, the page
gains.json                    each client's gain over Local, if the clients computed it themselves
METHOD/seed-N/                the folder of one run
MANIFEST.json                 sha256 and size of the files above and of each run's own manifest;
                              written last, so a comparison without it is unfinished
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.paired_tests import SiteGain
from ..errors import StoreError
from ..storage import files, lock
from . import run_folder
from .config.methods import TAG

COMPARE, COMPARISON, REPORT = "compare.json", "comparison.json", "report.html"
GAINS = "gains.json"  # only where the answers on test samples stay with the clients
FILES = (COMPARE, COMPARISON, REPORT)
_PLACE = re.compile(rf"[^\W\d]\w*(?:@{TAG.pattern})?/seed-\d+")


def place(out: Path, label: str, seed: int) -> Path:
    """The folder of one run; a link on the way to it is refused."""
    for part in (out / label, out / label / f"seed-{seed}"):
        _refuse_link(part)
    return out / label / f"seed-{seed}"


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise StoreError(
            f"{path}: is a link; expected a folder of this comparison; nothing was changed; copy "
            "the run into its place, or choose another folder with --out"
        )


def write_asked(out: Path, tables: Mapping[str, Any]) -> None:
    """Write ``compare.json``: the config that was asked for, and the format of the folder."""
    files.write_json(out / COMPARE, {run_folder.FORMAT_KEY: run_folder.FORMAT, **tables})


def read_asked(out: Path) -> dict[str, Any]:
    """Read the config of a comparison from its folder; a folder of another format is refused."""
    refuse_links(out)
    run_folder.refuse_other_format(out / COMPARE)
    tables = files.read_json(out / COMPARE)
    if not isinstance(tables, dict):
        raise StoreError(
            f"{out / COMPARE}: is not as a comparison writes it; expected its config; start the "
            "comparison again in another folder"
        )
    return {name: part for name, part in tables.items() if name != run_folder.FORMAT_KEY}


def write_gains(out: Path, gains: Mapping[str, Sequence[SiteGain]] | None) -> None:
    """Write the gains that clients computed themselves; without any, remove an older file."""
    if gains is None:
        with files.writing(out):
            (out / GAINS).unlink(missing_ok=True)
    else:
        tables = {method: [one.to_json() for one in clients] for method, clients in gains.items()}
        files.write_json(out / GAINS, tables)


def read_gains(out: Path) -> dict[str, list[SiteGain]] | None:
    """Read the gains that clients computed themselves; None if there are none."""
    if not (out / GAINS).exists():
        return None
    found = files.read_json(out / GAINS)
    try:
        return {m: [SiteGain.from_json(one) for one in clients] for m, clients in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(
            f"{out / GAINS}: {error}; expected each client's gain by method, as a comparison "
            "writes it; check the folder with 'coterie verify'"
        ) from error


def refuse_links(out: Path) -> None:
    files.refuse_links(out, (*FILES, GAINS, files.MANIFEST, lock.NAME))


def refuse_used(out: Path) -> None:
    """Refuse to write a run into the folder of a comparison."""
    refuse_links(out)
    if (out / COMPARE).exists():
        raise StoreError(
            f"{out}: holds a comparison; expected a folder without one; nothing was overwritten; "
            "choose another folder with --out"
        )


def refuse_run(out: Path) -> None:
    """Refuse to write a comparison into the folder of a run; an earlier comparison is continued."""
    refuse_links(out)
    if not (out / COMPARE).exists() or (out / run_folder.CONFIG).exists():
        run_folder.refuse_used(out)


def unseal(out: Path) -> None:
    """Remove the manifest before any file of the comparison changes."""
    with files.writing(out):
        (out / files.MANIFEST).unlink(missing_ok=True)


def seal(out: Path, runs: Iterable[Path]) -> None:
    """Write the manifest of a comparison, after all its files and runs are written."""
    files.seal(out, _listed(out, (run.relative_to(out).as_posix() for run in runs)))


def _listed(out: Path, runs: Iterable[str]) -> list[str]:
    """The files that the manifest of a comparison lists: its own, and the manifests of its runs."""
    gains = [GAINS] if (out / GAINS).exists() else []
    return [*FILES, *gains, *(f"{run}/{files.MANIFEST}" for run in runs)]


def verify(out: Path) -> dict[str, list[str]]:
    """The faults of a comparison and of each of its runs; empty lists if all is as written."""
    refuse_links(out)
    run_folder.refuse_other_format(out / COMPARE)
    places = sorted(found for found in out.glob("*/seed-*") if found.is_dir())
    for found in places:
        _refuse_link(found.parent)
        _refuse_link(found)
    report = {
        str(found): run_folder.verify(found)
        if run_folder.is_finished(found)
        else ["is not finished"]
        for found in places
    }
    ours = any((out / name).exists() for name in (*FILES, GAINS, files.MANIFEST))
    return {**report, str(out): _faults(out)} if ours else report


def _faults(out: Path) -> list[str]:
    """The differences from the manifest of a comparison, one sentence per file."""
    if not (out / files.MANIFEST).is_file():
        return [f"has no {files.MANIFEST}: it is not finished; 'coterie resume' finishes it"]
    try:
        runs = run_names(out)
    except StoreError:  # the manifest tells that it has changed
        runs = []
    return files.faults(out, _listed(out, runs))


def run_names(out: Path) -> list[str]:
    """The paths of the runs of a comparison relative to its folder, in its order."""
    found = files.read_json(out / COMPARISON)
    runs = found.get("runs") if isinstance(found, dict) else None
    tables = runs if isinstance(runs, list) else [None]
    names = [run.get("path") if isinstance(run, dict) else None for run in tables]
    if not all(isinstance(name, str) and _PLACE.fullmatch(name) for name in names):
        raise StoreError(
            f"{out / COMPARISON}: is not as a comparison writes it; expected a list of runs, each "
            "with its path; check the folder with 'coterie verify'"
        )
    return [str(name) for name in names]
