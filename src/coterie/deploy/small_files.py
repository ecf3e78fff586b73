"""Reads and writes the small files of a federation safely: TOML, PEM and secrets.

A file may come from somebody else: it is read only if it is a plain file (no link) of bounded size,
and TOML only with declared fields. A secret has mode 600 from the moment it exists and is refused
if other users can read it. Every file is written atomically.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, StoreError, did_you_mean
from ..storage import files
from .documents import Document

MOST_BYTES = 64 * 1024
PRIVATE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_Kind = TypeVar("_Kind", bound=Document)


# ---- reading -------------------------------------------------------------------------------------


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file of at most so many bytes."""
    files.refuse_links(path.parent, [path.name], depth=0)
    data = files.read_start(path, most + 1)
    if len(data) > most:
        raise StoreError(
            f"{path}: has more than {most:,} bytes; expected a smaller file, as coterie writes it; "
            "nothing was read from it"
        )
    return data


def read_private(path: Path) -> bytes:
    """The bytes of a secret file; refused if other users can read or write it."""
    check_private(path)
    return read_plain(path)


def check_private(path: Path) -> Path:
    """The path of a secret file; refused if other users can read or write it."""
    files.refuse_links(path.parent, [path.name], depth=0)
    try:
        mode = stat.S_IMODE(path.lstat().st_mode)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror or error}); expected a secret that coterie "
            "made; restore it from a backup, or make new keys"
        ) from None
    if os.name == "posix" and mode & _OTHERS:
        raise StoreError(
            f"{path}: other users have access to this secret (mode {mode:o}); expected mode 600; "
            f"chmod 600 {path}, and make new keys if somebody else may have read it"
        )
    return path


def read_document(path: Path, kind: type[_Kind]) -> _Kind:
    """The checked fields of a TOML file that holds no secret."""
    data = read_plain(path)
    if b"PRIVATE KEY" in data:
        raise StoreError(
            f"{path}: holds a private key; expected public fields alone; a private key never "
            "leaves the folder it was made in: delete this copy, and make new keys there"
        )
    try:
        return kind.model_validate(tomllib.loads(data.decode("utf-8")))
    except ValidationError as error:
        fault = _fault(kind, error)
    except (ValueError, RecursionError) as error:
        fault = f"is no TOML file ({error}); expected one as coterie writes it"
    raise StoreError(f"{path}: {fault}")


def _fault(kind: type[BaseModel], error: ValidationError) -> str:
    """The first fault of a document: the field, what was found and what was expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    *tables, field = [str(part) for part in first["loc"]]
    name, found = ".".join([*tables, field]), repr(first["input"])[:200]
    if first["type"] == "missing":
        return f"{name}: missing; expected it as coterie writes it"
    if first["type"] == "extra_forbidden":
        for table in tables:
            inner = kind.model_fields[table].annotation
            kind = inner if isinstance(inner, type) else kind
        return f"{name}: there is no such field; {did_you_mean(field, kind.model_fields)}"
    wanted = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{name}: found {found}; expected {wanted}"


def opened(folder: Path, name: str, command: str) -> Path:
    """The path of a folder's main file; refused if there is none."""
    if not (path := files.folder_of(folder, "folder") / name).is_file():
        raise ConfigError(
            f"{folder}: has no {name}; expected a folder that '{command}' made; name that folder"
        )
    return path


# ---- writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder of mode 700 to fill; it becomes ``path``, or is removed on an error."""
    files.folder_of(path, "folder")
    path = Path(os.path.abspath(path))  # noqa: PTH100  a link is not followed: it is refused
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ConfigError(
            f"{path}: exists already; expected a new or an empty folder, so that no key is "
            "overwritten; choose another"
        )
    making = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with files.writing(path):
            making.mkdir(mode=0o700, parents=True)
            yield making
            files.install(making, path)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def write_private(path: Path, data: bytes) -> None:
    """Write a secret atomically, with mode 600 whatever the umask is."""
    with files.whole(path) as temporary:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with os.fdopen(handle, "wb") as file:
            if os.name == "posix":
                os.fchmod(handle, PRIVATE)
            file.write(data)


def write_public(path: Path, data: bytes) -> None:
    """Write a file that is no secret atomically."""
    with files.whole(path) as temporary:
        temporary.write_bytes(data)


def write_document(path: Path, document: Document, comment: str) -> None:
    """Write the fields of a document as TOML, below one line of comment."""
    files.write_text(path, f"# {comment}\n{to_toml(document.model_dump(exclude_none=True))}")


def filled(template: str, fields: Mapping[str, str]) -> str:
    """A template of this package with its fields filled in."""
    text = (resources.files(__package__) / "templates" / template).read_text("utf-8")
    return Template(text).substitute(fields)


def to_toml(table: dict[str, Any], name: str = "") -> str:
    """TOML text of a table of texts, numbers, truth values, times, lists of these, and tables.

    >>> print(to_toml({"name": "a", "limits": {"seconds": 60}}), end="")
    name = "a"
    <BLANKLINE>
    [limits]
    seconds = 60
    """
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            full = f"{name}.{_key(key)}".removeprefix(".")
            lines.append(f"\n[{full}]\n{to_toml(value, full)}")
    return "".join(lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _text(value)


def _text(value: str) -> str:
    """A text in quotes; one of several plain lines, such as PEM, keeps its lines."""
    if "\n" in value and re.fullmatch(r"[A-Za-z0-9+/=\n -]*", value):
        return f'"""\n{value}"""'
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
