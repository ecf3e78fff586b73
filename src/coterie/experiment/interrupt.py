"""Stopping a run: once ends it cleanly after the round, twice at once.

Either way it can be resumed: the first writes a checkpoint, the second leaves the last one.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..errors import StoppedError, printable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Whether somebody has asked to stop, and by which signal."""

    resume: object = None  # the folder to resume
    asked: int | None = None

    def here(self) -> None:
        """Stop now, between two rounds or two runs, if that was asked for."""
        if self.asked is not None:
            raise StoppedError(
                "stopped after a whole round, as asked; continue with "
                f"'coterie resume {self.resume}'",
                self.asked,
            )


@contextlib.contextmanager
def held(resume: object) -> Iterator[Stop]:
    """Take SIGINT and SIGTERM as wishes while rounds are running; a second one is an order.

    Where nothing is written (``resume`` is None) there is nothing to save, and signals do what they
    always do. Only the main thread can handle signals.
    """
    stop = Stop(resume)
    if resume is None or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked is None:
            stop.asked = number
            _say("stopping after this round; once more to stop at once")
            return
        _say(f"stopped at once; continue with 'coterie resume {resume}'")
        for name, handler in usual.items():
            signal.signal(name, handler)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    os.write(
        2, f"coterie: {printable(text)}\n".encode()
    )  # print() may be what the signal has interrupted
