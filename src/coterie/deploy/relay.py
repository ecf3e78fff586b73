"""A blind relay: keeps sealed messages in memory until their receivers fetch them.

It sees who sends to whom, when, and the size of each message in blocks. It holds no key, opens
nothing, writes nothing to disk and logs nothing. A message is forgotten when it is fetched, or when
it is too old: sites ask again for what they miss. A site may have no more bytes waiting than one
message of the largest size has.
"""

import time
from collections import deque
from dataclasses import dataclass
from threading import Condition
from typing import Literal, NamedTuple

Unwanted = Literal["size", "full"]  # why a message was not taken
ANSWERS: dict[Unwanted, int] = {"size": 413, "full": 429}  # the same over HTTP
POLL = 25.0  # seconds that a request for mail waits at most


@dataclass(frozen=True)
class RelayLimits:
    """Bounds on what one sender may have waiting, whoever it is for.

    Fields:
        count: messages.
        each: bytes of all of them together, and so of one message.
        age: seconds after which a message is dropped.
    """

    count: int = 1000
    each: int = 1 << 30
    age: float = 3600.0


class _Held(NamedTuple):
    blob: bytes
    since: float
    sender: str


class Relay:
    """Sealed messages by receiver, oldest first. It may be used from several threads."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self._boxes: dict[str, deque[_Held]] = {}
        self._changed = Condition()

    def put(self, sender: str, to: str, blob: bytes) -> Unwanted | None:
        """Keep a message for a receiver; the reason if it was not taken."""
        if len(blob) > self.limits.each:
            return "size"
        with self._changed:
            waiting = [one for box in [*self._boxes] for one in self._fresh(box)]
            own = [len(one.blob) for one in waiting if one.sender == sender]
            if len(own) >= self.limits.count or sum(own) + len(blob) > self.limits.each:
                return "full"
            self._fresh(to).append(_Held(blob, time.monotonic(), sender))
            self._changed.notify_all()
        return None

    def take(self, to: str, seconds: float = 0.0) -> bytes | None:
        """The oldest message for a receiver, which is forgotten; None if none comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._fresh(to)), seconds)
            box = self._fresh(to)
            return box.popleft().blob if box else None

    def _fresh(self, to: str) -> deque[_Held]:
        """The messages for a receiver without those that are too old."""
        box = self._boxes.setdefault(to, deque())
        while box and time.monotonic() - box[0].since > self.limits.age:
            box.popleft()
        return box
