"""The relay over HTTP, as two more requests of sites to the coordinator of the direct transport.

``POST /v1/mail/TO`` leaves a message for another site, ``POST /v1/mail?wait=SECONDS`` fetches one.
Who asks follows from the pinned certificate: the coordinator's gate has put the site's name into
the state of the request. Bodies are neither decoded nor logged nor written to disk.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from ..errors import ConfigError
from .relay import ANSWERS, POLL, Relay, Unwanted

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package starlette cannot be imported ({error}); expected it where a relay runs; pip "
        "install 'coterie[peers]'"
    ) from error

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
