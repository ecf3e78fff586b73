"""The coordinator's mailbox: keeps each message for a site in memory until the site answers it.

The mailbox knows names and bytes. It has no network, decodes nothing and writes nothing to disk. A
message is dropped as soon as it is answered or given up. All methods are called from one event
loop.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Body = bytes | bytearray
Reason = Literal["lost", "unreadable"]  # why there is no answer, as in Transport.ask

PIECE = 256 * 1024  # bytes that are handed to the network at once
MOST_WAITING = 8  # messages that wait for one site


class SiteMessage(NamedTuple):
    """A message on its way to a site. Only the site that gets it learns its id."""

    id: str
    body: Body


class Asking(Protocol):
    """A mailbox as the operator's side and the gate use it."""

    async def ask(self, site: str, body: Body, seconds: float) -> Body | Reason:
        """The site's answer, or a reason why there is none."""

    def full(self, site: str) -> bool:
        """Whether as many messages wait for the site as may."""

    def sign(self, site: str) -> None:
        """Note a sign of life of a site."""

    def seen(self, site: str) -> float | None:
        """Seconds since the site's last sign of life; None if there was none."""

    def online(self, site: str) -> bool:
        """Whether the site gave a sign of life not long ago."""


class ReplacedError(Exception):
    """A poll that ended because a newer poll of the same site has begun."""


@dataclass
class _Waiting:
    body: Body
    answer: "asyncio.Future[Body | Reason]"


@dataclass
class _Box:
    """What is known of one site: its messages (oldest first), its open poll, its last sign."""

    waiting: dict[str, _Waiting] = field(default_factory=dict)
    poll: "asyncio.Future[bool] | None" = None  # True: a message waits; False: a newer poll began
    seen: float | None = None

    def end_poll(self, message_waits: bool) -> None:
        if self.poll is not None:
            self.seen = time.monotonic()  # the site was there until now
            if not self.poll.done():  # done: its connection is gone, and its task is yet to run
                self.poll.set_result(message_waits)
            self.poll = None


class Mailbox:
    """Messages that wait for their sites, and when each site last gave a sign of life.

    A site without a sign of life for ``silence`` seconds is offline, and messages that wait for it
    are lost. The time begins when the mailbox is made, so that sites can come back after the
    coordinator was started again.
    """

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self._made = time.monotonic()
        self._boxes: dict[str, _Box] = {}

    async def ask(self, site: str, body: Body, seconds: float) -> Body | Reason:
        """Put a message into the site's box and wait for its answer, or for a reason."""
        box, key = self._box(site), secrets.token_hex(16)
        answer: asyncio.Future[Body | Reason] = asyncio.get_running_loop().create_future()
        box.waiting[key] = _Waiting(body, answer)
        box.end_poll(True)
        end = time.monotonic() + seconds
        try:
            while not answer.done():
                left = min(end - time.monotonic(), self.silence - self._quiet(box))
                if left <= 0:
                    return "lost"
                await asyncio.wait([answer], timeout=left)
            return answer.result()
        finally:
            box.waiting.pop(key, None)

    async def poll(self, site: str, seconds: float) -> SiteMessage | None:
        """The oldest message that the site has not answered; None if none came in that time.

        A site that polls again without an answer gets the same message again: it was started anew,
        or the message did not reach it. A newer poll of the site ends this one by ReplacedError.
        """
        box = self._box(site)
        box.end_poll(False)
        box.poll = poll = asyncio.get_running_loop().create_future()
        if box.waiting:
            box.end_poll(True)
        try:
            async with asyncio.timeout(seconds):
                if not await poll:
                    raise ReplacedError
        except TimeoutError:
            return None
        finally:
            self.sign(site)
            if box.poll is poll:
                box.poll = None  # it timed out, or its connection is gone
        return next((SiteMessage(key, each.body) for key, each in box.waiting.items()), None)

    def expects(self, site: str, key: str) -> bool:
        """Whether this site has a message of this id to answer."""
        return key in self._box(site).waiting

    def answer(self, site: str, key: str, body: Body | Reason) -> bool:
        """Take a site's answer; False, and nothing changes, if no such answer is expected."""
        waiting = self._box(site).waiting.pop(key, None)
        if waiting is None:
            return False
        if not waiting.answer.done():
            waiting.answer.set_result(body)
        return True

    def full(self, site: str) -> bool:
        """Whether as many messages wait for the site as may."""
        return len(self._box(site).waiting) >= MOST_WAITING

    def sign(self, site: str) -> None:
        """Note a sign of life of a site."""
        self._box(site).seen = time.monotonic()

    def seen(self, site: str) -> float | None:
        """Seconds since the site's last sign of life; 0 while it polls, None if there was none."""
        box = self._box(site)
        return None if box.seen is None and box.poll is None else self._quiet(box)

    def online(self, site: str) -> bool:
        """Whether the site gave a sign of life within the last ``silence`` seconds."""
        seen = self.seen(site)
        return seen is not None and seen < self.silence

    def _box(self, site: str) -> _Box:
        return self._boxes.setdefault(site, _Box())

    def _quiet(self, box: _Box) -> float:
        since = self._made if box.seen is None else box.seen
        return 0.0 if box.poll is not None else time.monotonic() - since


async def pieces(body: Body) -> AsyncIterator[bytes]:
    """The bytes of a body in pieces, so that time limits apply to each and not to all."""
    for start in range(0, len(body), PIECE):
        yield bytes(memoryview(body)[start : start + PIECE])
