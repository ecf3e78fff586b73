"""The door between the sites and the SuperLink: passes on a site's own fleet calls, nothing else.

The link serves its Control, Runtime and Fleet interfaces on one port, and Control has no
authentication: whoever reaches that port can register keys and start runs. So the link listens on
loopback, and sites reach this door instead, over TLS with the certificate that the coordinator has
pinned. A call passes if it is one of CALLS and names the public key of that certificate. The door
sends the path of its own list, never the caller's, and no header that it does not know.

A site that asks for messages waits at the door until one was sent to it: an idle site costs the
link next to nothing, and a message is fetched at once.
"""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Protocol

from ..errors import StoreError
from .flower_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    PROTOBUF_MEDIA_TYPE,
    TIMESTAMP_HEADER,
    ClientDisconnect,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    httpx,
)
from .flower_calls import MOST

# The fleet calls of an agent that runs no apps. Left out on purpose: register-node,
# unregister-node (keys are admitted by the coordinator alone), get-run, get-fab (apps' code).
CALLS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)
PULL, PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-messages"
HOLD = 10.0  # seconds that a pull waits for a message; an agent waits 30 for its answer
_KEY = FLEET_HTTP_PUBLIC_KEY_HEADER
_PASSED = (_KEY, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
_PATIENCE = 60.0  # seconds for one call's body


class Notices(Protocol):
    """What the door and the mailbox tell each other, so that nobody asks the link in vain."""

    async def mail(self, site: str, seconds: float) -> None:
        """Wait until a message was sent to the site, or until this time has passed."""

    def answered(self) -> None:
        """Note that a site sends an answer."""


class Door:
    """Passes calls of admitted sites on to the link. ``keys`` gives the sites' public keys (PEM).

    The request's state holds the name of the site whose certificate the connection has.
    """

    def __init__(
        self, link: httpx.AsyncClient, keys: Callable[[], Mapping[str, bytes]], notices: Notices
    ) -> None:
        self._link, self._keys, self._notices = link, keys, notices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = next((call for call in CALLS if call == request.url.path), None)
        if path is None or request.method != "POST" or request.url.query:
            return _refusal(404)
        try:
            key = self._keys().get(request.state.site, b"")
        except StoreError:  # the gate has logged it
            return _refusal(503)
        if not key or request.headers.get(_KEY) != b64encode(key).decode("ascii"):
            return _refusal(403)
        body = await _body(request)
        if body is None:
            return _refusal(413)
        if path == PULL:
            await self._notices.mail(request.state.site, HOLD)
            if await request.is_disconnected():  # a message would be delivered to nobody
                return _refusal(408)
        response = await self._passed(path, request, body)
        if path == PUSH:
            self._notices.answered()
        return response

    async def _passed(self, path: str, request: Request, body: bytes) -> Response:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers |= {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        try:
            told = await self._link.post(path, content=body, headers=headers)
        except httpx.HTTPError:
            return _refusal(503)
        return Response(told.content, told.status_code, media_type=told.headers["content-type"])


async def _body(request: Request) -> bytes | None:
    """The request's body; None if it is too large, too slow or cut short."""
    body = bytearray()
    try:
        async with asyncio.timeout(_PATIENCE):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return bytes(body)


def _refusal(status: int) -> Response:
    return Response(status_code=status, headers={"connection": "close"})
