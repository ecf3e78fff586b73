"""The coordinator's mailbox, and the requests by which sites and the operator use it.

It keeps each message for a site in memory until the site answers it. Sites poll for messages
(``POST /v1/poll``), answer them (``/v1/answer/ID``) and say that they are alive while they compute
(``/v1/alive``). The operator's process asks a site (``POST /ask/SITE/SECONDS``) and sees which
sites are there (``GET /sites``). Bodies are neither decoded nor logged nor written to disk. A
message is dropped as soon as it is answered or given up. All of it runs in one event loop.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from ..errors import ConfigError, StoreError
from .service import Measure

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

Body = bytes | bytearray
SiteOf = Callable[[str], str | None]  # the admitted site whose certificate has this sha256
Reason = Literal["lost", "unreadable"]  # why there is no answer, as in Transport.ask

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
PIECE = 256 * 1024  # bytes that are handed to the network at once
MOST_WAITING = 8  # messages that wait for one site


class SiteMessage(NamedTuple):
    """A message on its way to a site. Only the site that gets it learns its id."""

    id: str
    body: Body


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
        self._ended: Counter[tuple[str, str]] = Counter()  # messages by site and result
        self._bytes: Counter[tuple[str, str]] = Counter()  # by site and direction

    def measures(self, sites: Iterable[str]) -> Iterator[Measure]:
        """What Prometheus may know of these sites."""
        for site in sites:
            box, at = self._box(site), {"site": site}
            online = float(self.online(site))
            yield Measure("coterie_site_online", "gauge", "Whether a site is there", at, online)
            said, waiting = "Messages that wait for a site", len(box.waiting)
            yield Measure("coterie_messages_waiting", "gauge", said, at, waiting)
        for (site, result), count in [*self._ended.items()]:
            said, labels = "Messages to sites, by what became of them", {"site": site}
            yield Measure("coterie_messages", "counter", said, labels | {"result": result}, count)
        for (site, way), size in [*self._bytes.items()]:
            labels = {"site": site, "direction": way}
            yield Measure("coterie_message_bytes", "counter", "Bytes of messages", labels, size)

    async def ask(self, site: str, body: Body, seconds: float) -> Body | Reason:
        """Put a message into the site's box and wait for its answer, or for a reason."""
        answer = await self._asked(site, body, seconds)
        self._ended[site, answer if isinstance(answer, str) else "answered"] += 1
        self._bytes[site, "down"] += len(body)
        self._bytes[site, "up"] += 0 if isinstance(answer, str) else len(answer)
        return answer

    async def _asked(self, site: str, body: Body, seconds: float) -> Body | Reason:
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


# ---- requests ------------------------------------------------------------------------------------

_STATUS = {"lost": 504, "unreadable": 502}


class Limits(NamedTuple):
    """What one site may cost the coordinator; times are in seconds."""

    message: int  # bytes of a message or an answer
    # without a sign of life, after which a site is offline: on a busy machine it starts within 40
    silence: float = 90.0
    poll: float = 15.0  # the longest wait of one poll
    patience: float = 30.0  # with a connection without a request, a slow body, a slow reader
    rate: float = 16 * 1024.0  # bytes per second by which a body is allowed more time
    requests: int = 4  # that one site has open at once; one of them may bring an answer
    connections: int = 16  # that one site has open at once
    strangers: int = 128  # connections that have not shown an admitted certificate


class Peer(NamedTuple):
    """The certificate of a connection: the sha256 of its bytes, and when it expires."""

    sha256: str
    expires: float


class Gate:
    """Lets requests of admitted sites through; the state of a request then holds the site's name.

    Everything that a site sends or takes is a sign of its life.
    """

    def __init__(self, app: types.ASGIApp, site_of: SiteOf, box: Mailbox, most: int) -> None:
        self._app, self._site_of, self._mailbox, self._most = app, site_of, box, most
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
            site = self._site_of(peer.sha256)
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
    """What sites may ask for."""

    def __init__(self, mailbox: Mailbox, limits: Limits) -> None:
        self._mailbox, self._limits = mailbox, limits
        self._arriving: dict[str, asyncio.Event] = {}  # by site that is sending an answer

    def app(self) -> types.ASGIApp:
        """The paths on the TLS port; others get 404, other methods 405."""
        paths = {"poll": self._poll, "alive": self._alive, "answer/{key}": self._answer}
        return _app([Route(f"/v1/{path}", end, methods=["POST"]) for path, end in paths.items()])

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
        if (older := self._arriving.pop(site, None)) is not None:
            older.set()  # one answer of a site is in memory, not as many as it has requests
        self._arriving[site] = newer = asyncio.Event()
        read = _body(request, self._limits, self._limits.message)
        try:
            body = await _unless(newer.wait(), read, _refusal(409, "a newer answer has begun"))
        except HTTPException as error:
            if error.status_code == 413:
                self._mailbox.answer(site, key, "unreadable")
            raise
        finally:
            if self._arriving.get(site) is newer:
                del self._arriving[site]
        self._mailbox.answer(site, key, body)
        return Response(status_code=204)


class OperatorRoutes:
    """What the operator may ask for, of whichever mailbox."""

    def __init__(self, mailbox: Mailbox, names: Callable[[], list[str]], limits: Limits) -> None:
        self._mailbox, self._admitted, self._limits = mailbox, names, limits

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
            return self._admitted()
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

    return await _unless(hung_up(), work, _refusal(400, "the connection was closed"))


async def _unless(
    ends: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, _Result], refusal: HTTPException
) -> _Result:
    """The result of the work; if the other coroutine ends first it is cancelled and refused."""
    task, ending = asyncio.create_task(work), asyncio.create_task(ends)
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise refusal
        return task.result()
    finally:
        task.cancel()
        ending.cancel()
        await asyncio.gather(task, ending, return_exceptions=True)
