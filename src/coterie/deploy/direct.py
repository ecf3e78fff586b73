"""The direct transport's two ends: a site's agent, and the operator's side.

The agent dials the coordinator and answers one message at a time. It opens no port. It trusts the
CA of its invitation alone and checks the coordinator's name. If the coordinator cannot be reached,
the agent tries again for ever. A proxy that the environment names (HTTPS_PROXY) is used; TLS goes
through it to the coordinator. The operator asks over the unix socket of the coordinator, which runs
on the same machine (:mod:`coterie.deploy.coordinator`).
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

from ..engines.remote import Answering, SiteState
from ..errors import ConfigError, EngineError, printable
from .folders import FederationFolder
from .mailbox import SiteMessage, pieces
from .protocol import HEAD
from .site_folder import SiteFolder

try:
    import anyio
    import httpx
    from anyio.from_thread import start_blocking_portal
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package httpx cannot be imported ({error}); expected it at a site and where a "
        "federation is run; pip install 'coterie[direct]'"
    ) from error

HEARTBEAT = 10.0  # seconds between signs of life while an answer is computed
SILENCE = 40.0  # seconds without a byte from the coordinator, whose polls end after 15
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before the agent tries again
GRACE = 20.0  # seconds that a computation may still take when the agent is asked to stop

_LOG = logging.getLogger(__name__)
_NOTHING = SiteMessage("", b"")


class _RefusedError(Exception):
    """A request that the coordinator refused, or a message that is not taken."""


def serve(folder: SiteFolder, handler: Answering, stop: threading.Event) -> None:
    """Answer the coordinator's messages by the handler until ``stop`` is set."""
    asyncio.run(_Agent(folder, handler, stop).run())


class _Agent:
    def __init__(self, folder: SiteFolder, handler: Answering, stop: threading.Event) -> None:
        self._handler, self._stop = handler, stop
        self._address = folder.address
        self._client = httpx.AsyncClient(
            base_url=f"https://{folder.address}",
            verify=trust(folder),
            headers={"accept-encoding": "identity"},
            timeout=httpx.Timeout(30.0, read=SILENCE),
            limits=httpx.Limits(keepalive_expiry=60.0),
        )
        self._answer = _NOTHING  # the last answer, with its message's id, until it is delivered
        self._busy = False
        self._said = ""

    async def run(self) -> None:
        """Poll and answer until the agent is asked to stop; a short computation is finished."""
        async with self._client:
            work = asyncio.create_task(self._work())
            while not self._stop.is_set() and not work.done():
                await asyncio.sleep(0.1)
            await asyncio.wait([work], timeout=GRACE if self._busy else 0.0)
            if self._busy:
                _LOG.warning("the agent stops without an answer; it will be asked again")
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        _LOG.info("the agent has stopped")

    async def _work(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            try:
                await self._turn()
                pause = FIRST_PAUSE
            except (httpx.HTTPError, OSError, _RefusedError) as error:
                self._say(logging.WARNING, f"{_reason(error)}; the agent tries again")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _turn(self) -> None:
        """Fetch one message, if there is one, compute its answer and deliver it."""
        message = await self._poll()
        self._say(logging.INFO, f"connected to {self._address}")
        if message is None:
            return
        self._busy = True
        try:
            if message.id != self._answer.id:  # else it comes again: its answer did not arrive
                self._answer = SiteMessage(message.id, await self._computed(bytes(message.body)))
            await self._deliver(self._answer)
            self._answer = _NOTHING
        finally:
            self._busy = False

    async def _poll(self) -> SiteMessage | None:
        async with self._client.stream("POST", "/v1/poll") as response:
            if response.status_code == 204:
                await response.aread()  # else the connection would be closed
                return None
            if response.status_code != 200:
                raise await _refused(response)
            key, body = response.headers.get("message", ""), bytearray()
            most = self._handler.largest() + HEAD
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > most:
                    self._answer = SiteMessage(key, b"")  # the coordinator is told at once
                    _LOG.warning("a message has more than %s bytes and is not read", most)
                    break
            return SiteMessage(key, body)

    async def _computed(self, data: bytes) -> bytes:
        """The handler's answer; empty if the handler failed, which the operator sees."""
        answer = _in_thread(self._handler.answer, data)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=HEARTBEAT)
                if not answer.done():
                    with contextlib.suppress(httpx.HTTPError, OSError):
                        await self._client.post("/v1/alive", timeout=5.0)
            return answer.result()
        except Exception:
            _LOG.exception("a message could not be answered")
            return b""
        finally:
            answer.cancel()

    async def _deliver(self, answer: SiteMessage) -> None:
        path, size = f"/v1/answer/{answer.id}", {"content-length": str(len(answer.body))}
        response = await self._client.post(path, content=pieces(answer.body), headers=size)
        if response.status_code in (410, 413):
            _LOG.warning("the coordinator does not take an answer: %s", printable(response.text))
        elif response.status_code != 204:
            raise await _refused(response)

    def _say(self, level: int, text: str) -> None:
        """Log what has changed, once."""
        if text != self._said:
            _LOG.log(level, "%s", text)
        self._said = text


def trust(folder: SiteFolder) -> ssl.SSLContext:
    """TLS settings: the CA of the invitation alone, the site's own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(folder.coordinator)
    context.load_cert_chain(folder.certificate, folder.key)
    return context


def _in_thread(work: Callable[[bytes], bytes], data: bytes) -> "asyncio.Future[bytes]":
    """The work's result, computed in a thread that does not keep the process from ending."""
    result: concurrent.futures.Future[bytes] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work(data))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="coterie-site", daemon=True).start()
    return asyncio.wrap_future(result)


async def _refused(response: httpx.Response) -> _RefusedError:
    await response.aread()
    return _RefusedError(f"the coordinator refused ({response.status_code}): {response.text[:200]}")


def _reason(error: Exception) -> str:
    """Why there is no answer, in one line."""
    said = printable(error) or type(error).__name__
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError | ssl.SSLError):
        return f"the coordinator ended the connection ({said}): it may not admit this site's key"
    return said if isinstance(error, _RefusedError) else f"no coordinator is reached ({said})"


# ---- the operator's side -------------------------------------------------------------------------

_Result = TypeVar("_Result")
_FINAL = {404: "lost", 504: "lost", 413: "unreadable", 502: "unreadable"}
_PAUSE = 0.2  # seconds before a coordinator that is gone is tried again
_SLACK = 10.0  # seconds that the coordinator may take longer than it was given


class DirectTransport:
    """Asks the sites of a folder, whose coordinator runs on this machine.

    A site that has not answered after ``deadline`` seconds (by default the longest time that the
    folder allows for a message) is lost. If the coordinator is stopped
    and started again within that time, the transport waits for it and asks again.
    """

    def __init__(self, folder: FederationFolder, deadline: float | None = None) -> None:
        self._folder, self._deadline = folder, deadline or folder.limits.seconds
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._stack = contextlib.ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())  # a thread with a loop
        self._stack.callback(self._call, self._close)
        if self._call(self._known) is None:
            self.close()
            raise EngineError(
                f"{folder.socket}: no coordinator answers; expected it to run on this machine; "
                f"start it with 'coterie coordinator {folder.path}'"
            )

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        """Each named site's answer, or "lost" or "unreadable"."""
        return self._call(self._ask_all, requests)

    def sites(self) -> dict[str, SiteState]:
        """Every admitted site: whether it is online, and seconds since its last sign of life."""
        known = self._call(self._known) or {}
        names = [site.name for site in self._folder.sites() if site.revoked is None]
        return {name: SiteState(*known.get(name, (False, None))) for name in names}

    def close(self) -> None:
        """End the connections to the coordinator."""
        self._stack.close()

    def _call(self, work: Callable[..., Awaitable[_Result]], *arguments: object) -> _Result:
        """Run the work in the transport's thread; an interrupted caller ends it."""
        future = self._portal.start_task_soon(work, *arguments)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _ask_all(self, requests: Mapping[str, bytes]) -> dict[str, bytes | str]:
        answers: dict[str, bytes | str] = dict.fromkeys(requests, "lost")

        async def ask(site: str, body: bytes) -> None:
            answers[site] = await self._ask(site, body)

        async with anyio.create_task_group() as group:
            for site, body in requests.items():
                group.start_soon(ask, site, body)
        return answers

    async def _ask(self, site: str, body: bytes) -> bytes | str:
        end, size = time.monotonic() + self._deadline, {"content-length": str(len(body))}
        while (left := end - time.monotonic()) > 0:
            path, limit = f"/ask/{quote(site)}/{left:.3f}", httpx.Timeout(30.0, read=left + _SLACK)
            with contextlib.suppress(httpx.TransportError):
                reply = await self._client(site).post(
                    path, content=pieces(body), headers=size, timeout=limit
                )
                if reply.status_code == 200:
                    return reply.content or "unreadable"  # a handler that failed answers nothing
                if reply.status_code in _FINAL:
                    return _FINAL[reply.status_code]
            await anyio.sleep(_PAUSE)
        return "lost"

    async def _known(self) -> dict[str, tuple[bool, float | None]] | None:
        """What the coordinator knows of its sites; None if no coordinator answers."""
        try:
            reply = await self._client("").get("/sites")
            return dict(reply.raise_for_status().json())
        except httpx.HTTPError:
            return None

    def _client(self, site: str) -> httpx.AsyncClient:
        """One connection per site: a client looks at all its connections for every request."""
        if site not in self._clients:
            self._clients[site] = httpx.AsyncClient(
                base_url="http://coordinator",
                transport=httpx.AsyncHTTPTransport(verify=False, uds=str(self._folder.socket)),
                headers={"accept-encoding": "identity"},
                trust_env=False,
            )
        return self._clients[site]

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
