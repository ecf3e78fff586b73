"""A blind relay: keeps sealed messages in memory until their receivers fetch them.

It sees who sends to whom, when, and the size of each message in blocks. It holds no key, opens
nothing, writes nothing to disk and logs nothing. A message is forgotten when it is fetched, or when
it is too old: sites ask again for what they miss. A site may have no more bytes waiting than one
message of the largest size has.

Over HTTP these are two more requests of sites to the coordinator of the direct transport:
``POST /v1/mail/TO`` leaves a message for another site, ``POST /v1/mail?wait=SECONDS`` fetches one.
Who asks follows from the pinned certificate: the coordinator's gate has put the site's name into
the state of the request. Bodies are neither decoded nor logged nor written to disk.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Condition
from typing import Literal, NamedTuple

from ...errors import ConfigError

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package starlette cannot be imported ({error}); expected it where a relay runs; pip "
        "install 'coterie[peers]'"
    ) from error


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


# ---- over HTTP -----------------------------------------------------------------------------------


PATIENCE, RATE = 30.0, 16 * 1024.0  # seconds for a body, and bytes per second that add to them


def relay_routes(relay: Relay, peers: Callable[[], Collection[str]]) -> list[Route]:
    """The relay's requests, for these sites alone; other sites are refused."""
    surface = _Surface(relay, peers)
    return [
        Route("/v1/mail/{to}", surface.leave, methods=["POST"]),
        Route("/v1/mail", surface.fetch, methods=["POST"]),
    ]


class _Surface:
    """The two requests; all of them are answered in one event loop."""

    def __init__(self, relay: Relay, peers: Callable[[], Collection[str]]) -> None:
        self._relay, self._peers = relay, peers
        self._bells: dict[str, asyncio.Event] = {}

    async def leave(self, request: Request) -> Response:
        """Keep the body for another site."""
        sender, to = str(request.state.site), str(request.path_params["to"])
        if not {sender, to} <= {*self._peers()}:
            return Response(status_code=404)
        try:
            body = await _bounded(request, self._relay.limits.each)
        except (TimeoutError, ClientDisconnect):
            return Response(status_code=408)
        unwanted: Unwanted | None = "size" if body is None else self._relay.put(sender, to, body)
        if unwanted is not None:
            return Response(status_code=ANSWERS[unwanted], headers={"connection": "close"})
        self._bell(to).set()
        return Response(status_code=202)

    async def fetch(self, request: Request) -> Response:
        """The oldest message for the site that asks; 204 if none comes in time."""
        name = str(request.state.site)
        if name not in self._peers():
            return Response(status_code=404)
        end, blob = time.monotonic() + _wait(request), self._relay.take(name)
        while blob is None and (left := end - time.monotonic()) > 0:
            bell = self._bell(name)
            bell.clear()
            try:
                async with asyncio.timeout(left):
                    await bell.wait()
            except TimeoutError:
                break
            if await request.is_disconnected():
                break  # its site dials again, and gets the message then
            blob = self._relay.take(name)
        return Response(status_code=204) if blob is None else Response(blob)

    def _bell(self, name: str) -> asyncio.Event:
        return self._bells.setdefault(name, asyncio.Event())


def _wait(request: Request) -> float:
    """The seconds that a request wants to wait for mail."""
    try:
        asked = float(request.query_params.get("wait", POLL))
    except ValueError:
        return POLL
    return asked if 0 <= asked <= POLL else POLL


async def _bounded(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it has more than ``most`` bytes."""
    body, begun = bytearray(), asyncio.get_running_loop().time()
    async with asyncio.timeout(PATIENCE) as limit:
        async for part in request.stream():
            body += part
            if len(body) > most:
                return None
            limit.reschedule(begun + PATIENCE + len(body) / RATE)
    return bytes(body)
