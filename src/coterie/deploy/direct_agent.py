"""A site's agent for the direct transport: dials the coordinator, answers one message at a time.

The agent opens no port. It trusts the CA of its invitation alone and checks the coordinator's name.
If the coordinator cannot be reached, the agent tries again for ever. A proxy that the environment
names (HTTPS_PROXY) is used; TLS goes through it to the coordinator.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import ssl
import threading
from collections.abc import Callable

from ..engines.remote import Answering
from ..errors import ConfigError, printable
from .mailbox import SiteMessage, pieces
from .site_folder import SiteFolder

try:
    import httpx
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package httpx cannot be imported ({error}); expected it where a site of the direct "
        "transport runs; pip install 'coterie[direct]'"
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
        self._address, self._most = folder.address, folder.limits.message_mib * 2**20
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
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > self._most:
                    self._answer = SiteMessage(key, b"")  # the coordinator is told at once
                    _LOG.warning("a message has more than %s bytes and is not read", self._most)
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
