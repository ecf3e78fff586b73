"""Stops a run on SIGINT or SIGTERM: the first signal after the current round, the second at once.

Either way the run can be resumed: the first signal writes a checkpoint; after the second, the last
checkpoint is still there.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..errors import StoppedError, printable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _Stop:
    """Whether a signal has asked the runs of a block to stop, and which signal."""

    again: str  # the command that continues
    asked: int | None = None


_STOP: ContextVar[_Stop | None] = ContextVar("coterie_stop", default=None)


def asked() -> int | None:
    """The signal that asked the runs of this context to stop, or None."""
    stop = _STOP.get()
    return None if stop is None else stop.asked


def here() -> None:
    """Raise StoppedError if a stop was asked for; called between two rounds or two runs."""
    stop = _STOP.get()
    if stop is not None and stop.asked is not None:
        text = f"stopped after a whole round, as asked; continue with '{stop.again}'"
        raise StoppedError(text, stop.asked)


@contextlib.contextmanager
def held(resume: object, again: str | None = None) -> Iterator[None]:
    """Handle SIGINT and SIGTERM in this block: the first signal asks to stop, the second stops.

    ``again`` is the command that continues, if it is not ``coterie resume``. If nothing is written
    (``resume`` is None), there is nothing to save and the usual handlers stay
    in place. So they do outside the main thread, which alone can handle signals.
    """
    stop = _Stop(again or f"coterie resume {resume}")
    if resume is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked is None:
            stop.asked = number
            _say("stopping after this round; once more to stop at once")
            return
        _say(f"stopped at once; continue with '{stop.again}'")
        for name, handler in usual.items():
            signal.signal(name, handler)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in SIGNALS:
        signal.signal(number, handle)
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)
        for number, handler in usual.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    os.write(
        2, f"coterie: {printable(text)}\n".encode()
    )  # print() may be what the signal has interrupted
