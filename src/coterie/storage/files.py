"""Atomic file writes, and a manifest of sizes and sha256 sums that proves files unchanged.

Every file of a run is written under a temporary name in the same folder, flushed to disk and
renamed. No file is a pickle. A folder of results may come from somebody else: links and special
files in it are refused, so that only files in the folder itself are read, written or removed.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast, dataclass_transform

from ..errors import ConfigError, DataError, StoreError, printable

MANIFEST = "MANIFEST.json"

Kind = TypeVar("Kind")


# ---- paths ---------------------------------------------------------------------------------------


def expanded(path: str | Path) -> Path:
    """The path with ``~`` replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"'{path}': found '~', but this user has no home folder; write the whole path, or set "
            "the variable HOME"
        ) from None


def folder_of(name: str | Path, where: str) -> Path:
    """The path of a folder, which need not exist; an invalid name is refused."""
    path = Path(name)
    try:
        if not str(name).strip() or printable(name) != str(name):
            raise ValueError("it is empty or has control characters")
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = f"{str(name)[:60]!r}{' …' * (len(str(name)) > 60)}"
        raise ConfigError(
            f"{where}: found {shown} ({reason}); expected the name of a folder"
        ) from None
    return path


def refuse_links(folder: Path, names: Iterable[str], depth: int = 2) -> None:
    """Refuse links and special files among these names of a folder, and in its subfolders.

    ``depth`` is the number of levels of subfolders that are allowed.
    """
    for name in names:
        path = folder / name
        try:
            mode = path.lstat().st_mode
            inside = [each.name for each in path.iterdir()] if stat.S_ISDIR(mode) else []
        except OSError:
            continue  # the code that needs the file reports that it is missing
        if stat.S_ISDIR(mode) and depth > 0:
            refuse_links(path, inside, depth - 1)
        elif not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
            raise StoreError(
                f"{path}: is {kind}; expected a file or folder as coterie writes it; nothing was "
                "read or changed; copy what it stands for into its place, or leave this folder be"
            )


def remove(folder: Path, form: re.Pattern[str]) -> None:
    """Remove the entries of a folder whose names match ``form``, and the folder if it is empty.

    Links are not followed. Entries that cannot be removed stay.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for entry in folder.iterdir():
        if form.fullmatch(entry.name):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


# ---- writing -------------------------------------------------------------------------------------


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def install(made: Path, path: Path) -> None:
    """Rename a finished file or folder atomically; content and name survive a power cut."""
    flush_to_disk(made)
    made.replace(path)
    flush_to_disk(path.parent)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it atomically becomes ``path``, or is removed on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            temporary.unlink(missing_ok=True)  # it could be a link that somebody put there
            yield temporary
            install(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a write to ``path`` into a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror or error}); what was written before is "
            "intact; free some space and use 'coterie resume', or choose another folder with --out"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def plain(value: Any) -> Any:
    """The value in types of JSON: NaN becomes null, infinities the strings "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, to_json(value, indent=2) + "\n")


# ---- reading -------------------------------------------------------------------------------------


MOST_NESTED = 50  # levels of nested lists and tables; runs write far fewer


def from_json(text: str) -> Any:
    """Parse JSON text; ValueError if it is not JSON or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep") from error
    inside = [value]
    for _ in range(MOST_NESTED):
        tables = [part for part in inside if isinstance(part, dict | list)]
        inside = [
            part for one in tables for part in (one.values() if isinstance(one, dict) else one)
        ]
    if inside:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file; StoreError if it is missing or cannot be read."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"{path}: missing; expected a finished run's folder") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); expected JSON text") from error


def read_start(path: Path, size: int | None) -> bytes:
    """The first ``size`` bytes of a file, or all bytes if ``size`` is None."""
    try:
        with path.open("rb") as file:
            return file.read(-1 if size is None else size)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error})") from error


def shorten(path: Path, size: int) -> None:
    """Truncate a file to its first ``size`` bytes."""
    with writing(path):
        os.truncate(path, size)
        flush_to_disk(path)


def describe(path: Path, size: int | None = None) -> dict[str, Any]:
    """Size and sha256 of a file, or of its first ``size`` bytes."""
    try:
        with path.open("rb") as file:
            if size is not None:
                data = file.read(size)
                return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            total = hashlib.file_digest(file, "sha256")
            return {"bytes": file.tell(), "sha256": total.hexdigest()}
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror or error}), so nothing can be said about it; "
            "expected a file that this user may read"
        ) from error


# ---- manifests -----------------------------------------------------------------------------------


def seal(folder: Path, names: Iterable[str]) -> None:
    """Write the manifest of these files of a folder: the size and sha256 of each."""
    write_text(folder / MANIFEST, _manifest({name: describe(folder / name) for name in names}))


def _manifest(listing: dict[str, Any]) -> str:
    return to_json({"files": listing}, indent=2) + "\n"


def faults(folder: Path, names: Sequence[str]) -> list[str]:
    """The differences between these files of a folder and its manifest, one sentence each.

    The manifest has to list these files and no others, as :func:`seal` writes it. Files with other
    names are not looked at.
    """
    manifest = read_json(folder / MANIFEST)
    promised = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(promised, dict):
        return [f"{MANIFEST} lists no files; expected the one that was written last"]
    wrong = [
        f"{name}, which {MANIFEST} lists, is missing or does not belong here"
        for name in promised.keys() - {*names}
    ]
    found: dict[str, Any] = {}
    for name in names:
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif name not in promised:
            wrong.append(f"{name} is not in {MANIFEST}")
        else:
            found[name] = describe(folder / name)
            if found[name] != promised[name]:
                wrong.append(f"{name} has changed since it was finished")
    if not wrong and read_start(folder / MANIFEST, None) != _manifest(found).encode():
        wrong.append(f"{MANIFEST} is not byte for byte as it was written; restore it from a copy")
    return sorted(wrong)


# ---- JSON that another machine sent, as dataclasses: strict types, no unknown fields -------------


MOST_BYTES = 64 * 2**20  # of a text; a schema of 10,000 columns takes less than one mebibyte
MOST_SHOWN = 60  # characters of a value that a message repeats
STRICT: Final = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


@dataclass_transform(frozen_default=True)
def strict(kind: type[Kind]) -> type[Kind]:
    """Make a frozen dataclass that can be parsed."""
    kind.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return dataclass(frozen=True)(kind)


def parsed(text: str, kind: type[Kind], where: str) -> Kind:
    """The object of this dataclass that a JSON text describes; anything else is a DataError."""
    from pydantic import ValidationError  # slow to import

    if len(text) > MOST_BYTES:
        raise DataError(f"{where}: found {len(text):,} characters; expected at most {MOST_BYTES:,}")
    try:
        found: Kind = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        return found
    path = ".".join([where, *(str(part) for part in first["loc"])])
    shown = repr(first["input"])
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
    raise DataError(f"{path}: found {shown}; {first['msg'][:200]}")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
