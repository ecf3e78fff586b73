"""A blind relay: keeps sealed messages in memory until their receivers fetch them.

It sees who sends to whom, when, and the size of each message in blocks. It holds no key, opens
nothing, writes nothing to disk and logs nothing. A message is forgotten when it is fetched, or when
it is too old: sites ask again for what they miss.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

Unwanted = Literal["size", "full"]  # why a message was not taken
ANSWERS: dict[Unwanted, int] = {"size": 413, "full": 429}
POLL = 25.0  # seconds that a request for mail waits at most


@dataclass(frozen=True)
class RelayLimits:
    """Bounds on what waits for one receiver.

    Fields:
        count: messages.
        total: bytes of all messages.
        each: bytes of one message.
        age: seconds after which a message is dropped.
    """

    count: int = 1000
    total: int = 4 << 30
    each: int = 1 << 30
    age: float = 86400.0


class _Held(NamedTuple):
    blob: bytes
    since: float


class Relay:
    """Sealed messages by receiver, oldest first. It may be used from several threads."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self._boxes: dict[str, deque[_Held]] = {}
        self._changed = Condition()

    def put(self, to: str, blob: bytes) -> Unwanted | None:
        """Keep a message for a receiver; the reason if it was not taken."""
        if len(blob) > self.limits.each:
            return "size"
        with self._changed:
            box = self._fresh(to)
            held = sum(len(each.blob) for each in box)
            if len(box) >= self.limits.count or held + len(blob) > self.limits.total:
                return "full"
            box.append(_Held(blob, time.monotonic()))
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


Who = Callable[["Request"], str | None]


def relay_app(relay: Relay, who: Who, sites: Callable[[], Collection[str]]) -> "Starlette":
    """The relay over HTTP: ``POST /v1/mail/TO`` leaves a message, ``POST /v1/mail`` fetches one.

    ``who`` names the site whose pinned certificate a request came with, or None; ``sites`` are all
    names that may receive. A request without a known certificate is answered with 403.
    """
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(
            "the relay needs starlette, which is not installed; install it with: pip install "
            "'coterie[peers]'"
        ) from error
    surface = _Surface(relay, who, sites)
    return Starlette(
        routes=[
            Route("/v1/mail/{to}", surface.leave, methods=["POST"]),
            Route("/v1/mail", surface.fetch, methods=["POST"]),
        ]
    )


class _Surface:
    """The two requests; all of them are answered in one event loop."""

    def __init__(self, relay: Relay, who: Who, sites: Callable[[], Collection[str]]) -> None:
        self._relay, self._who, self._sites = relay, who, sites
        self._bells: dict[str, asyncio.Event] = {}

    async def leave(self, request: "Request") -> Any:
        """Keep the body for another site."""
        from starlette.responses import Response

        to = str(request.path_params["to"])
        if self._who(request) is None:
            return Response(status_code=403)
        if to not in self._sites():
            return Response(status_code=404)
        body = await _bounded(request, self._relay.limits.each)
        unwanted: Unwanted | None = "size" if body is None else self._relay.put(to, body)
        if unwanted is not None:
            return Response(status_code=ANSWERS[unwanted])
        self._bell(to).set()
        return Response(status_code=202)

    async def fetch(self, request: "Request") -> Any:
        """The oldest message for the site that asks; 204 if none comes in time."""
        from starlette.responses import Response

        name = self._who(request)
        if name is None:
            return Response(status_code=403)
        end, blob = time.monotonic() + _wait(request), self._relay.take(name)
        while blob is None and (left := end - time.monotonic()) > 0:
            bell = self._bell(name)
            bell.clear()
            try:
                async with asyncio.timeout(left):
                    await bell.wait()
            except TimeoutError:
                break
            blob = self._relay.take(name)
        return Response(
            blob, media_type="application/octet-stream", status_code=200 if blob else 204
        )

    def _bell(self, name: str) -> asyncio.Event:
        return self._bells.setdefault(name, asyncio.Event())


def _wait(request: "Request") -> float:
    """The seconds that a request wants to wait for mail."""
    try:
        asked = float(request.query_params.get("wait", POLL))
    except ValueError:
        return POLL
    return asked if 0 <= asked <= POLL else POLL


async def _bounded(request: "Request", most: int) -> bytes | None:
    """The body of a request; None if it has more than ``most`` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
