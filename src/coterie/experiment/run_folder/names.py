"""The file names in a run's folder, its format version, and checks before a folder is used."""

import re
from pathlib import Path

from ...errors import StoreError
from ...results import kinds
from ...storage import files, lock
from .. import checkpoint

CONFIG, ENVIRONMENT, SUMMARY = "config.json", "environment.json", "summary.json"
ROUNDS, CLIENTS, MODELS = "rounds.jsonl", "clients.csv", "models.safetensors"
MATRICES, PARTS = "collaboration.npz", "collaboration.parts"
PARTITION = "partition.json"
PREPROCESSING = "preprocessing.json"  # how samples become inputs; older folders have none
PREDICTIONS, REPORT = "predictions.npz", "report.html"
NAMES = (
    *(CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, MATRICES, PARTS, MODELS, SUMMARY, files.MANIFEST),
    *(PARTITION, PREPROCESSING, PREDICTIONS, REPORT, checkpoint.FOLDER),
)
FIRST = (PARTITION, PREPROCESSING)  # alone they are not a run, and may be overwritten
LISTED = (CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, SUMMARY)  # every manifest lists them
AT_SITES = "sites"  # resolved.models of a config whose run left the final models at the sites
PART = re.compile(r"\d{8}\.npz")
CUT_SHORT = re.compile(  # writes that a kill has cut short
    rf"\.({'|'.join(map(re.escape, NAMES))})\.\d+\.tmp|\.states-\w+\.tmp"
)

FORMAT = 1  # of the folders that this version writes; older folders have no number, which means 0
FORMAT_KEY = "format"  # in config.json of a run and in compare.json of a comparison


def refuse_newer(first: Path) -> None:
    """Refuse a folder of a newer format; ``first`` is the file of the folder that has the format.

    A file that is missing or not a JSON table is accepted here; its reader refuses it.
    """
    try:
        found = files.read_json(first)
    except StoreError:
        return
    number = found.get(FORMAT_KEY, 0) if isinstance(found, dict) else 0
    if not kinds.KINDS["a count"](number):
        raise StoreError(
            f"{first}: '{FORMAT_KEY}' is {kinds.shown(number)}; expected the number of a format, "
            f"from 0 to {FORMAT}; restore the file, or run the experiment again in another folder"
        )
    if number > FORMAT:
        raise StoreError(
            f"{first}: the folder has format {number}, which a newer version of coterie wrote; "
            f"expected at most {FORMAT}; install a newer version to read it"
        )


def finished(path: Path) -> bool:
    """Whether the folder holds a finished run."""
    return (path / files.MANIFEST).is_file() and (path / SUMMARY).is_file()


def refuse_links(path: Path) -> None:
    """Refuse a folder in which a name that coterie uses is a link or a special file."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    ours = [n for n in names if n in NAMES or n == lock.NAME or CUT_SHORT.fullmatch(n)]
    files.refuse_links(path, ours)


def refuse_used(path: Path) -> None:
    """Refuse a folder that already holds a run; the message says what to do."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file; expected a folder, new or empty; choose one by --out")
    refuse_links(path)
    used = [name for name in NAMES if name not in FIRST and (path / name).exists()]
    if not used:
        return
    found, advice = f"an unfinished run ({', '.join(used)})", f"run 'coterie resume {path}', "
    if finished(path):
        found, advice = "a finished run", ""
    raise StoreError(
        f"{path}: holds {found}; expected a folder without one; nothing was overwritten; {advice}"
        "choose another folder with --out or delete this one first"
    )


def untidy(path: Path) -> bool:
    """Whether the folder of a finished run still has files that only an unfinished run needs."""
    refuse_links(path)
    return any((path / name).exists() for name in (PARTS, checkpoint.FOLDER, lock.NAME))


def tidy(path: Path) -> None:
    """Remove the files that only an unfinished run needs."""
    files.remove(path / PARTS, PART)
    checkpoint.clear(path)


def unreadable(path: Path, error: Exception, expected: str) -> StoreError:
    """The error for a file that is not as a run writes it."""
    return StoreError(
        f"{path}: cannot be read ({error}); expected {expected}; check the folder with "
        "'coterie verify'"
    )
