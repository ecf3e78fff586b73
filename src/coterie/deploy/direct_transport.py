"""The operator's side of the direct transport: asks sites over the coordinator's unix socket."""

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from ..errors import ConfigError, EngineError
from .folders import FederationFolder
from .mailbox import pieces

try:
    import anyio
    import httpx
    from anyio.from_thread import start_blocking_portal
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package httpx cannot be imported ({error}); expected it where a federation is run; "
        "pip install 'coterie[direct]'"
    ) from error

_Result = TypeVar("_Result")
_FINAL = {404: "lost", 504: "lost", 413: "unreadable", 502: "unreadable"}
_PAUSE = 0.2  # seconds before a coordinator that is gone is tried again
_SLACK = 10.0  # seconds that the coordinator may take longer than it was given


class SiteState(NamedTuple):
    """Whether a site is online, and seconds since its last sign of life."""

    online: bool
    seen: float | None


class DirectTransport:
    """Asks the sites of a folder, whose coordinator runs on this machine.

    A site that has not answered after ``deadline`` seconds is lost. If the coordinator is stopped
    and started again within that time, the transport waits for it and asks again.
    """

    def __init__(self, folder: FederationFolder, deadline: float = 600.0) -> None:
        self._folder, self._deadline = folder, deadline
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
