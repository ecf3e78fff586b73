"""A lock on a folder of results: only one process at a time writes to it.

The lock is ``flock`` on the file ``.lock`` of the folder, so that it ends with its process, however
the process ends. The file names the process that holds the lock, for the error message of a second
process. A file that a killed process has left behind is not locked and is taken over. Where the
file system has no ``flock``, the content of the file decides: a process of this machine that no
longer runs holds no lock; a process on another machine cannot be checked, and the error asks the
user to do so.
"""

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InUseError
from . import files

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_MOST = 4096  # bytes of a lock file that are read
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Owner(NamedTuple):
    """The process that holds a lock, and since when."""

    pid: int
    host: str
    started: str  # the start time of the process, which differs if its pid is used again
    since: str

    @classmethod
    def me(cls) -> "Owner":
        """This process, now."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(os.getpid(), platform.node(), _started(os.getpid()), since)

    @property
    def gone(self) -> bool:
        """Whether this is a process of this machine that no longer runs."""
        return self.host == platform.node() and _started(self.pid) != self.started


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
        with contextlib.suppress(OSError):
            if os.name != "posix":
                (folder / NAME).unlink()  # Windows does not remove a file that is open
            if new:
                folder.rmdir()  # fails, and keeps the folder, if something was written


def _locked(folder: Path) -> int:
    """The handle of the lock file, locked and with this process's :class:`Owner` in it."""
    path = folder / NAME
    files.refuse_links(folder, [NAME])
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            _take(handle, path)
            if _is_at(handle, path):
                os.ftruncate(handle, 0)
                os.lseek(handle, 0, os.SEEK_SET)
                os.write(handle, json.dumps(Owner.me()._asdict()).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the last holder has just removed this file: try again with a new one


def _take(handle: int, path: Path) -> None:
    """Lock the file, or raise an error that names the process that holds it."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "there is no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(handle)
        if error.errno in _TAKEN:
            raise _in_use(path, owner, "wait until it ends, or stop it") from None
        if owner is not None and not owner.gone:
            raise _in_use(path, owner, f"if it no longer runs, delete {path}") from None


def _is_at(handle: int, path: Path) -> bool:
    """Whether the locked file is still the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _owner(handle: int) -> Owner | None:
    """The owner that a lock file names; None if its content is not one that we write."""
    try:
        said: dict[str, Any] = json.loads(os.read(handle, _MOST))
        found = Owner(**said)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if type(found.pid) is int and found.pid > 0 else None


def _in_use(path: Path, owner: Owner | None, advice: str) -> InUseError:
    who = "another process"
    if owner is not None:
        who = f"process {owner.pid} on {owner.host} since {owner.since}"
    return InUseError(
        f"{path.parent}: is in use by {who}; expected a folder that nobody else writes to, as two "
        f"processes would mix their rounds; nothing was changed; {advice}, or choose another "
        "folder with --out"
    )


def _started(pid: int) -> str:
    """A text that differs between processes that use the same pid; empty if none runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]  # the time it was started, in clock ticks
    except (OSError, IndexError):
        return _alive(pid)


def _alive(pid: int) -> str:
    """As :func:`_started` on systems without start times: only whether the process exists."""
    if os.name != "posix":
        return "unknown"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        pass
    return "alive"
