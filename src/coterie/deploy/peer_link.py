"""How a site among peers reaches the relay: in the same process, or over HTTPS."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import StoppedError
from .relay import ANSWERS, POLL, Relay
from .site_folder import SiteFolder

if TYPE_CHECKING:
    import httpx

SLOWEST = 5.0  # seconds between two attempts to reach the relay, at most


class Link(Protocol):
    """Carries sealed messages to other sites and back, through a relay."""

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site; False if the relay does not take it."""

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site; None if none comes in that time."""


@dataclass(frozen=True)
class InProcessLink:
    """A site that shares a process with its relay."""

    relay: Relay
    name: str

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        return self.relay.put(self.name, to, blob) is None

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site."""
        return self.relay.take(self.name, seconds)


class HttpLink:
    """A site that reaches its relay over HTTPS, with its certificate.

    While the relay cannot be reached, :meth:`send` tries again for ever, at least every 5 seconds.
    Once ``stop`` is set, both methods raise a StoppedError.
    """

    def __init__(
        self,
        client: "httpx.Client",
        note: Callable[[str], None],
        stop: threading.Event | None = None,
    ) -> None:
        import httpx

        self._client, self._note, self._stop = client, note, stop or threading.Event()
        self._faults = (httpx.TransportError,)

    @classmethod
    def dial(
        cls, folder: SiteFolder, note: Callable[[str], None], stop: threading.Event | None = None
    ) -> "HttpLink":
        """A link to the relay at the coordinator that the site's folder names."""
        import httpx

        from .direct_agent import trust

        client = httpx.Client(base_url=f"https://{folder.address}", verify=trust(folder))
        return cls(client, note, stop)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        pause = 0.1
        while True:
            self._refuse_stopped()
            try:
                status = self._client.post(f"/v1/mail/{to}", content=blob).status_code
            except self._faults as error:
                self._note(f"the relay cannot be reached ({type(error).__name__}); trying again")
                status = 503
            if status < 500:
                if status not in (202, *ANSWERS.values()):
                    self._note(f"the relay refused a message to '{to}' with status {status}")
                return status == 202
            self._stop.wait(pause)
            pause = min(2 * pause, SLOWEST)

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site."""
        self._refuse_stopped()
        began, wait = time.monotonic(), min(seconds, POLL)
        try:
            answer = self._client.post(f"/v1/mail?wait={wait}", timeout=wait + SLOWEST)
        except self._faults as error:
            self._note(f"the relay cannot be reached ({type(error).__name__}); trying again")
            self._stop.wait(max(0.0, min(seconds, 1.0) - (time.monotonic() - began)))
            return None
        return answer.content if answer.status_code == 200 else None

    def _refuse_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError(
                "stopped, as asked; nothing is lost: the same command continues", signal.SIGTERM
            )
