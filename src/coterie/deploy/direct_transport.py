"""The operator's side of the direct transport: asks sites over the coordinator's unix socket."""

import contextlib
from typing import TypeVar

from ..errors import ConfigError, EngineError
from .folders import FederationFolder

try:
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
_SLACK = 10.0  # seconds that the coordinator's own "lost" may come late


class DirectTransport:
    """Asks the sites of a folder whose coordinator runs on this machine.

    A site that has not answered after ``deadline`` seconds is lost. While the coordinator is away,
    the transport waits for it within that time and asks again.
    """

    def __init__(self, folder: FederationFolder, deadline: float = 600.0) -> None:
        self._folder, self._deadline = folder, deadline
        self._client = httpx.AsyncClient(
            base_url="http://coordinator",
            transport=httpx.AsyncHTTPTransport(
                uds=str(folder.socket),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            ),
            headers={"accept-encoding": "identity"},
        )
        self._stack = contextlib.ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())  # a thread with a loop
        if self._reached() is None:
            self.close()
            raise EngineError(...)
