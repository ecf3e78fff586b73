"""A lock on a folder of results: only one process at a time writes to it.

The lock is ``flock`` on the file ``.lock`` of the folder, so that it ends with its process, however
the process ends; a file that a killed process has left behind is not locked and is taken over. The
file names the process that holds the lock, for the error message of a second process. A folder on a
disk without file locks is refused.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import InUseError, StoreError
from . import files

NAME = ".lock"
_MOST = 4096  # bytes of a lock file that are read
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if missing; InUseError if another process has it."""
    new = not folder.exists()
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()  # before the lock ends: the next process makes a new file
        os.close(handle)
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails, and keeps the folder, if something was written


def _locked(folder: Path) -> int:
    """The handle of the lock file, locked and with the name of this process in it."""
    path = folder / NAME
    files.refuse_links(folder, [NAME])
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _take(handle, path)
            if _is_at(handle, path):
                since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                me = {"pid": os.getpid(), "host": platform.node(), "since": since}
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, json.dumps(me).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the last holder has just removed this file: try again with a new one


def _take(handle: int, path: Path) -> None:
    """Lock the file, or raise an error that names the process that holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise StoreError(
                f"{path.parent}: is on a disk without file locks ({error.strerror}), so that two "
                "processes could mix their rounds; choose a folder on another disk with --out"
            ) from error
        raise InUseError(
            f"{path.parent}: is in use by {_owner(handle)}; expected a folder that nobody else "
            "writes to, as two processes would mix their rounds; nothing was changed; wait until "
            "it ends, or stop it, or choose another folder with --out"
        ) from None


def _is_at(handle: int, path: Path) -> bool:
    """Whether the locked file is still the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _owner(handle: int) -> str:
    """The process that a lock file names; its content may be anything."""
    try:
        said = json.loads(os.read(handle, _MOST))
        return f"process {int(said['pid'])} on {said['host']} since {said['since']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another process"
