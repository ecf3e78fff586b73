"""A lock on a folder of results: one process at a time writes into it.

The lock is ``flock`` on the file ``.lock`` of the folder, so that it ends with its process, however
that ends. The file says who holds it, for the message to a second process. A file that a killed
process has left behind is not locked and is taken over. Where the file system has no ``flock``,
what the file says decides: a process of this machine that is gone holds nothing; of a process on
another machine nothing is known, and the user is asked.
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

from ..errors import StoreError
from . import files

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_MOST = 4096  # bytes that are read of a lock file
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Owner(NamedTuple):
    """Who holds a lock, and since when."""

    pid: int
    host: str
    started: str  # of the process; a number of the system that no other process of this pid has
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
    """Hold the lock of a folder, which is made where it does not exist; a second one is refused."""
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
                folder.rmdir()  # where nothing was written after all


def _locked(folder: Path) -> int:
    """The handle of the lock file, locked and with our name in it."""
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
        os.close(handle)  # whoever held it has removed the file in this moment: try the new one


def _take(handle: int, path: Path) -> None:
    """Lock the file or say who holds it."""
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
    """Whether the file that was locked is still the one that has the name."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _owner(handle: int) -> Owner | None:
    """What the file says; None where it says nothing that we would write."""
    try:
        said: dict[str, Any] = json.loads(os.read(handle, _MOST))
        found = Owner(**said)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if type(found.pid) is int and found.pid > 0 else None


def _in_use(path: Path, owner: Owner | None, advice: str) -> StoreError:
    who = "another process"
    if owner is not None:
        who = f"process {owner.pid} on {owner.host} since {owner.since}"
    return StoreError(
        f"{path.parent}: is in use by {who}; expected a folder that nobody else writes to, as two "
        f"processes would mix their rounds; nothing was changed; {advice}, or choose another "
        "folder with --out"
    )


def _started(pid: int) -> str:
    """What tells a process from another that has had its number; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]  # the time it was started, in clock ticks
    except (OSError, IndexError):
        return _alive(pid)


def _alive(pid: int) -> str:
    """The same where the system does not tell times: whether there is such a process."""
    if os.name != "posix":
        return "unknown"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        pass
    return "alive"
