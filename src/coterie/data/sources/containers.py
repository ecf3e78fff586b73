"""Reads files from a folder, a tar or a zip archive, without unpacking anything to disk."""

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from ...errors import DataError

ARCHIVES = (".tgz", ".tar", ".tar.gz", ".zip")


def is_archive(path: Path) -> bool:
    """Whether the file name is that of a supported archive."""
    return path.is_file() and path.name.endswith(ARCHIVES)


def names(path: Path) -> list[str]:
    """The base names of all files in a folder or archive, sorted."""
    return sorted({name for name, _ in _walk(path)})


def read(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Read the files whose base name is wanted, in one pass; returns contents by base name."""
    return {name: content() for name, content in _walk(path) if wanted(name)}


def _walk(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.name, file.read_bytes
    elif not is_archive(path):
        raise DataError(f"{path}: expected a folder or one of {', '.join(ARCHIVES)}")
    else:
        try:
            yield from _walk_zip(path) if path.suffix == ".zip" else _walk_tar(path)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise DataError(f"{path}: broken archive ({error}); fetch it again") from error


def _walk_zip(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                yield PurePosixPath(name).name, partial(archive.read, name)


def _walk_tar(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                yield PurePosixPath(member.name).name, stream.read
