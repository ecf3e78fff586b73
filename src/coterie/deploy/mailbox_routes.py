"""The requests of the direct transport: those of the sites, and those of the operator.

Sites poll for messages (``POST /v1/poll``), answer them (``/v1/answer/ID``) and say that they are
alive while they compute (``/v1/alive``). The operator's process asks a site (``POST
/ask/SITE/SECONDS``) and sees which sites are there (``GET /sites``). Bodies are neither decoded nor
logged nor written to disk.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError, CoterieError
from .mailbox import Asking, Body, Mailbox, ReplacedError, pieces
from .mailbox_registry import Registry

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package starlette cannot be imported ({error}); expected it where a coordinator of "
        "the direct transport runs; pip install 'coterie[direct]'"
    ) from error

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_CLOSE = {"connection": "close"}  # the rest of a refused request is not read
_STATUS = {"lost": 504, "unreadable": 502}


class Limits(NamedTuple):
    """What one site may cost the coordinator; times are in seconds."""

    message: int  # bytes of a message or an answer
    silence: float = 30.0  # without a sign of life, after which a site is offline
    poll: float = 25.0  # the longest wait of one poll
    patience: float = 30.0  # with a connection without a request, a slow body, a slow reader
    rate: float = 16 * 1024.0  # bytes per second by which a body is allowed more time
    requests: int = 8  # that one site has open at once
    connections: int = 16  # that one site has open at once


class Peer(NamedTuple):
    """The certificate of a connection: the sha256 of its bytes, and when it expires."""

    sha256: str
    expires: float


class Gate:
    """Lets requests of admitted sites through; their state then holds the site's name."""

    def __init__(self, app: ASGIApp, registry: Registry, mailbox: Asking, limits: Limits) -> None:
        self._app, self._registry, self._mailbox, self._limits = app, registry, mailbox, limits
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it."""
        peer: Peer = scope["state"]["peer"]
        try:
            site = self._registry.site(peer.sha256)
        except (CoterieError, OSError) as error:
            _LOG.error("no request is taken: %s", error)
            return await _refusal(503, "the coordinator cannot read its sites")(
                scope, receive, send
            )
        if site is None or time.time() > peer.expires:
            return await _refusal(403, "this certificate is not admitted")(scope, receive, send)
        if self._open[site] >= self._limits.requests:
            return await _refusal(429, "too many open requests")(scope, receive, send)
        if not self._mailbox.online(site):
            _LOG.info("site %s is online", site)
        self._mailbox.sign(site)
        self._open[site] += 1
        try:
            await self._app({**scope, "state": {"site": site}}, receive, send)
        finally:
            self._open[site] -= 1


class SiteRoutes:
    """What sites may ask for."""

    def __init__(self, mailbox: Mailbox, limits: Limits) -> None:
        self._mailbox, self._limits = mailbox, limits
        self._reading: set[str] = set()  # ids of the messages whose answers are on their way

    def all(self) -> list[Route]:
        """The routes on the TLS port."""
        return [
            Route("/v1/poll", self._poll, methods=["POST"]),
            Route("/v1/alive", self._alive, methods=["POST"]),
            Route("/v1/answer/{key}", self._answer, methods=["POST"]),
        ]

    async def _poll(self, request: Request) -> ASGIApp:
        site = request.state.site
        await _body(request, self._limits, 0)
        try:
            polled = self._mailbox.poll(site, self._limits.poll)
            message = await _unless_gone(request, polled)
        except ReplacedError:
            _LOG.warning("site %s polls twice; the newer poll is answered", site)
            return _refusal(409, "another process polls with this site's key")
        if message is None:
            return Response(status_code=204)
        return _in_pieces(message.body, {"message": message.id}, self._limits, self._signs(site))

    async def _alive(self, request: Request) -> ASGIApp:
        await _body(request, self._limits, 0)
        return Response(status_code=204)

    async def _answer(self, request: Request) -> ASGIApp:
        site, key = request.state.site, request.path_params["key"]
        if not self._mailbox.expects(site, key):
            return _refusal(410, "no message of this id waits for an answer")
        if key in self._reading:
            return _refusal(409, "an answer to this message is being read")
        self._reading.add(key)
        try:
            body = await _body(request, self._limits, self._limits.message, self._signs(site))
        except HTTPException as error:
            if error.status_code == 413:
                self._mailbox.answer(site, key, "unreadable")
            raise
        finally:
            self._reading.discard(key)
        self._mailbox.answer(site, key, body)
        return Response(status_code=204)

    def _signs(self, site: str) -> Callable[[], None]:
        return lambda: self._mailbox.sign(site)


class OperatorRoutes:
    """What the operator may ask for, of whichever mailbox."""

    def __init__(self, mailbox: Asking, registry: Registry, limits: Limits) -> None:
        self._mailbox, self._registry, self._limits = mailbox, registry, limits

    def all(self) -> list[Route]:
        """The routes on the unix socket."""
        return [
            Route("/ask/{site}/{seconds:float}", self._ask, methods=["POST"]),
            Route("/sites", self._sites, methods=["GET"]),
        ]

    async def _ask(self, request: Request) -> ASGIApp:
        site, seconds = request.path_params["site"], request.path_params["seconds"]
        if site not in self._registry.names():
            return _refusal(404, "no such site is admitted")
        if self._mailbox.full(site):
            return _refusal(503, "too many messages wait for this site")
        body = await _body(request, self._limits, self._limits.message)
        answer = await _unless_gone(request, self._mailbox.ask(site, body, seconds))
        if isinstance(answer, str):
            _LOG.warning("site %s: a message is %s", site, answer)
            return _refusal(_STATUS[answer], answer)
        return _in_pieces(answer, {}, self._limits, lambda: None)

    async def _sites(self, request: Request) -> ASGIApp:
        box, names = self._mailbox, self._registry.names()
        return JSONResponse({name: [box.online(name), box.seen(name)] for name in names})


def _refusal(status: int, text: str) -> ASGIApp:
    return PlainTextResponse(text, status, _CLOSE)


async def _body(
    request: Request, limits: Limits, most: int, progress: Callable[[], None] = lambda: None
) -> bytearray:
    """The request's body; refused if it is too large, comes too slowly or is cut short."""
    body, begun = bytearray(), asyncio.get_running_loop().time()
    if int(request.headers.get("content-length", "0")) > most:
        raise HTTPException(413, f"the body has more than {most:,} bytes", _CLOSE)
    try:
        async with asyncio.timeout(limits.patience) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise HTTPException(413, f"the body has more than {most:,} bytes", _CLOSE)
                limit.reschedule(begun + limits.patience + len(body) / limits.rate)
                progress()
    except TimeoutError:
        raise HTTPException(408, "the body came too slowly", _CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut short", _CLOSE) from None
    return body


def _in_pieces(
    body: Body, headers: dict[str, str], limits: Limits, progress: Callable[[], None]
) -> ASGIApp:
    """A response that is sent piece by piece; a reader that is too slow is cut off."""
    start = Response(headers={**headers, "content-length": str(len(body))})

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
        try:
            async for piece in pieces(body):
                async with asyncio.timeout(limits.patience):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                progress()
        except TimeoutError:
            return  # the server closes a connection whose response is not complete
        await send({"type": "http.response.body", "body": b""})

    return send_all


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of the work, which is cancelled if the other side hangs up before."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(400, "the connection was closed", _CLOSE)
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def app_of(routes: list[Route]) -> ASGIApp:
    """An application with exactly these paths and methods; others get 404 and 405."""
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app
