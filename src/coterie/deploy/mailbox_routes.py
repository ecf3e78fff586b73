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
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError, StoreError
from .mailbox import Asking, Body, Mailbox, ReplacedError, pieces
from .mailbox_registry import Registry

try:
    from starlette import types
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package starlette cannot be imported ({error}); expected it where a coordinator of "
        "the direct transport runs; pip install 'coterie[direct]'"
    ) from error

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_STATUS = {"lost": 504, "unreadable": 502}


class Limits(NamedTuple):
    """What one site may cost the coordinator; times are in seconds."""

    message: int  # bytes of a message or an answer
    silence: float = 30.0  # without a sign of life, after which a site is offline
    poll: float = 15.0  # the longest wait of one poll
    patience: float = 30.0  # with a connection without a request, a slow body, a slow reader
    rate: float = 16 * 1024.0  # bytes per second by which a body is allowed more time
    requests: int = 4  # that one site has open at once; each may hold one message in memory
    connections: int = 16  # that one site has open at once


class Peer(NamedTuple):
    """The certificate of a connection: the sha256 of its bytes, and when it expires."""

    sha256: str
    expires: float


class Gate:
    """Lets requests of admitted sites through; the state of a request then holds the site's name.

    Everything that a site sends or takes is a sign of its life.
    """

    def __init__(self, app: types.ASGIApp, registry: Registry, box: Asking, most: int) -> None:
        self._app, self._registry, self._mailbox, self._most = app, registry, box, most
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Handle one request, or refuse it."""
        try:
            site = self._admitted(scope["state"]["peer"])
        except HTTPException as error:
            refusal = PlainTextResponse(error.detail, error.status_code, error.headers)
            return await refusal(scope, receive, send)

        async def received() -> types.Message:
            self._mailbox.sign(site)
            return await receive()

        async def sent(message: types.Message) -> None:
            await send(message)
            self._mailbox.sign(site)

        self._open[site] += 1
        try:
            await self._app({**scope, "state": {"site": site}}, received, sent)
        finally:
            self._open[site] -= 1

    def _admitted(self, peer: Peer) -> str:
        try:
            site = self._registry.site(peer.sha256)
        except StoreError as error:
            raise _unreadable(error) from None
        if site is None or time.time() > peer.expires:
            raise _refusal(403, "this certificate is not admitted")
        if self._open[site] >= self._most:
            raise _refusal(429, "too many open requests")
        if not self._mailbox.online(site):
            _LOG.info("site %s is online", site)
        return site


class SiteRoutes:
    """What sites may ask for; ``more`` are further routes."""

    def __init__(self, mailbox: Mailbox, limits: Limits, more: Sequence[Route] = ()) -> None:
        self._mailbox, self._limits, self._more = mailbox, limits, more

    def app(self) -> types.ASGIApp:
        """The paths on the TLS port; others get 404, other methods 405."""
        paths = {"poll": self._poll, "alive": self._alive, "answer/{key}": self._answer}
        own = [Route(f"/v1/{path}", end, methods=["POST"]) for path, end in paths.items()]
        return _app([*own, *self._more])

    async def _poll(self, request: Request) -> types.ASGIApp:
        await _body(request, self._limits, 0)
        polled = self._mailbox.poll(request.state.site, self._limits.poll)
        try:
            message = await _unless_gone(request, polled)
        except ReplacedError:
            _LOG.warning("site %s polls twice; the newer poll is answered", request.state.site)
            raise _refusal(409, "another process polls with this site's key") from None
        if message is None:
            return Response(status_code=204)
        return _in_pieces(message.body, self._limits, {"message": message.id})

    async def _alive(self, request: Request) -> types.ASGIApp:
        await _body(request, self._limits, 0)
        return Response(status_code=204)

    async def _answer(self, request: Request) -> types.ASGIApp:
        site, key = request.state.site, request.path_params["key"]
        if not self._mailbox.expects(site, key):
            raise _refusal(410, "no message of this id waits for an answer")
        try:
            body = await _body(request, self._limits, self._limits.message)
        except HTTPException as error:
            if error.status_code == 413:
                self._mailbox.answer(site, key, "unreadable")
            raise
        self._mailbox.answer(site, key, body)
        return Response(status_code=204)


class OperatorRoutes:
    """What the operator may ask for, of whichever mailbox."""

    def __init__(self, mailbox: Asking, registry: Registry, limits: Limits) -> None:
        self._mailbox, self._registry, self._limits = mailbox, registry, limits

    def app(self) -> types.ASGIApp:
        """The paths on the unix socket."""
        ask = Route("/ask/{site}/{seconds:float}", self._ask, methods=["POST"])
        return _app([ask, Route("/sites", self._sites, methods=["GET"])])

    async def _ask(self, request: Request) -> types.ASGIApp:
        site, seconds = request.path_params["site"], request.path_params["seconds"]
        if site not in self._names():
            raise _refusal(404, "no such site is admitted")
        if self._mailbox.full(site):
            raise _refusal(503, "too many messages wait for this site")
        body = await _body(request, self._limits, self._limits.message)
        answer = await _unless_gone(request, self._mailbox.ask(site, body, seconds))
        if isinstance(answer, str):
            _LOG.warning("site %s: a message is %s", site, answer)
            raise _refusal(_STATUS[answer], answer)
        return _in_pieces(answer, self._limits, {})

    async def _sites(self, request: Request) -> types.ASGIApp:
        box = self._mailbox
        return JSONResponse({name: [box.online(name), box.seen(name)] for name in self._names()})

    def _names(self) -> list[str]:
        try:
            return self._registry.names()
        except StoreError as error:
            raise _unreadable(error) from None


def _app(routes: list[Route]) -> types.ASGIApp:
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app


def _refusal(status: int, text: str) -> HTTPException:
    """A refusal after which the connection is closed: the rest of the request is not read."""
    return HTTPException(status, text, {"connection": "close"})


def _unreadable(error: StoreError) -> HTTPException:
    _LOG.error("no request is taken: %s", error)
    return _refusal(503, "the coordinator cannot read its folder")


async def _body(request: Request, limits: Limits, most: int) -> bytearray:
    """The request's body; refused if it is too large, comes too slowly or is cut short."""
    body, begun = bytearray(), asyncio.get_running_loop().time()
    too_large = _refusal(413, f"the body has more than {most:,} bytes")
    if int(request.headers.get("content-length", "0")) > most:
        raise too_large
    try:
        async with asyncio.timeout(limits.patience) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_large
                limit.reschedule(begun + limits.patience + len(body) / limits.rate)
    except TimeoutError:
        raise _refusal(408, "the body came too slowly") from None
    except ClientDisconnect:
        raise _refusal(400, "the body was cut short") from None
    return body


def _in_pieces(body: Body, limits: Limits, headers: dict[str, str]) -> types.ASGIApp:
    """A response that is sent piece by piece; a reader that is too slow is cut off."""
    begin = Response(headers={**headers, "content-length": str(len(body))})

    async def respond(scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": begin.raw_headers})
        try:
            async for piece in pieces(body):
                async with asyncio.timeout(limits.patience):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            return  # the server closes a connection whose response is not complete
        await send({"type": "http.response.body", "body": b""})

    return respond


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of the work, which is cancelled if the other side hangs up before."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _refusal(400, "the connection was closed")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
