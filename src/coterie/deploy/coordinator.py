"""The coordinator of the direct transport: a TLS port for sites, a unix socket for the operator.

Both are served by one process from one mailbox in memory. Who a site is follows from its TLS
certificate alone. The certificate's hash is looked up at every request, so that a certificate which
another site's key has signed is worth nothing. This process imports no torch.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from ..errors import ConfigError, StoreError
from .documents import host_and_port
from .folders import FederationFolder
from .mailbox import Gate, Limits, Mailbox, OperatorRoutes, Peer, SiteRoutes
from .service import Measure, monitored, stopping, unix_socket

try:
    from starlette.types import ASGIApp
    from uvicorn import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package uvicorn cannot be imported ({error}); expected it where a coordinator of the "
        "direct transport runs; pip install 'coterie[direct]'"
    ) from error

_LOG = logging.getLogger(__name__)
_TICK = 50_000_000  # nanoseconds within which two changes of a folder may bear the same time
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def run_coordinator(
    folder: FederationFolder, monitor: str | None = None, json_lines: bool = False
) -> None:
    """Carry messages between the operator and the sites until a signal ends it."""
    with stopping(json_lines=json_lines) as stop:
        for line in folder.warnings():
            _LOG.warning("%s", line)
        coordinator = Coordinator(folder, Limits(folder.limits.message_mib * 2**20))
        with monitored(monitor, stop, coordinator.measures):
            asyncio.run(coordinator.serve(stop))


class Coordinator:
    """One mailbox, the public port by which sites reach it, the unix socket of the operator."""

    def __init__(self, folder: FederationFolder, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._mailbox, self._registry = Mailbox(limits.silence), Registry(folder)
        self._state = ServerState()
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest is the first

    async def serve(self, stop: threading.Event) -> None:
        """Serve admitted sites and the operator until ``stop`` is set."""
        folder, limits, loop = self._folder, self._limits, asyncio.get_running_loop()
        app = SiteRoutes(self._mailbox, limits).app()
        sites = _config(Gate(app, self._registry.site, self._mailbox, limits.requests))
        operator = _config(OperatorRoutes(self._mailbox, self._registry.names, limits).app())
        with _public_socket(folder.address) as public, unix_socket(folder.socket, 0o600) as private:
            server = await loop.create_server(
                lambda: H11Protocol(operator, self._state, {}), sock=private
            )
            door = asyncio.create_task(self._take(public, sites))
            _LOG.info("sites can dial %s; the operator uses %s", folder.address, folder.socket)
            try:
                while not stop.is_set():
                    await asyncio.sleep(0.1)
            finally:
                folder.socket.unlink(missing_ok=True)
                server.close()
                for task in (door, *self._strangers):
                    task.cancel()
                for connection in list(self._state.connections):
                    connection.transport.abort()  # sites and operator dial again
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=5)
        _LOG.info("the coordinator has stopped")

    async def _take(self, public: socket.socket, app: Config) -> None:
        """Take connections. Whoever has not shown an admitted certificate yet is a stranger.

        There is a place for a number of strangers; one more ends the oldest of them.
        """
        loop, context = asyncio.get_running_loop(), self._registry.context()
        public.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(public)
            except OSError as error:  # too many files are open
                _LOG.warning("a connection is not taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= self._limits.strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = loop.create_task(self._shake_hands(connection, app, context))
            self._strangers[task] = None
            task.add_done_callback(lambda done: self._strangers.pop(done, None))
            await asyncio.sleep(0)  # it begins: only then does it close what is cancelled

    async def _shake_hands(
        self, connection: socket.socket, app: Config, context: ssl.SSLContext
    ) -> None:
        with contextlib.suppress(OSError):  # TLS errors and timeouts among them
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _SiteConnection(app, self._state, {"limits": self._limits}),
                connection,
                ssl=context,
                ssl_handshake_timeout=self._limits.patience / 3,
            )

    def measures(self) -> Iterator[Measure]:
        """What Prometheus may know."""
        yield from self._mailbox.measures(self._registry.names())
        for who, count in (
            ("known", len(self._state.connections)),
            ("strangers", len(self._strangers)),
        ):
            said = "Open connections, by whether a certificate was shown"
            yield Measure("coterie_connections", "gauge", said, {"who": who}, count)


class _SiteConnection(H11Protocol):
    """A connection of a site: the state of its requests holds the site's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits: Limits = self.app_state["limits"]
        tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
        sha256 = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
        expires = ssl.cert_time_to_seconds(str((tls.getpeercert() or {})["notAfter"]))
        self.app_state = {"peer": Peer(sha256, expires)}
        same = [each for each in self.connections if each.app_state == self.app_state]
        if len(same) > limits.connections:
            transport.abort()
        self.loop.call_later(limits.patience, self._close_if_unused)

    def _close_if_unused(self) -> None:
        cycle: object = self.cycle
        if cycle is None:  # no request has begun
            self.transport.abort()


def _config(app: ASGIApp) -> Config:
    """How uvicorn serves an application: no log of requests, no websockets, no proxy headers."""
    config = Config(app, log_config=None, access_log=False, ws="none", proxy_headers=False)
    config.timeout_keep_alive = 75  # seconds; agents close unused connections before
    config.load()
    return config


def _public_socket(address: str) -> socket.socket:
    """A socket at the port that sites dial; on this machine alone if sites dial this machine."""
    host, port = host_and_port(address)
    dual = host not in _LOOPBACK and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    here = (host if host in _LOOPBACK else "", port)
    try:
        found = socket.create_server(here, family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be opened ({error.strerror or error}); expected that no other "
            "coordinator or service uses it; stop that one, or choose another address"
        ) from None
    # Connections inherit it: without it a body waits 40 ms for the head to be acknowledged.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


class Registry:
    """The admitted sites by the sha256 of their certificates, and the TLS settings that fit.

    The folder is looked at for every new connection and for every request, so that
    ``coterie deploy add-site`` and ``revoke`` take effect at once.
    """

    def __init__(self, folder: FederationFolder) -> None:
        self._folder = folder
        self._version: list[tuple[int, int]] | None = None
        self._names: dict[str, str] = {}
        self._context = self._new_context([])
        self._refresh()

    def site(self, sha256: str) -> str | None:
        """The name of the site whose certificate has this hash; None if it is not admitted."""
        self._refresh()
        return self._names.get(sha256)

    def names(self) -> list[str]:
        """The names of all admitted sites that are not revoked."""
        self._refresh()
        return sorted(self._names.values())

    def context(self) -> ssl.SSLContext:
        """TLS settings for a listening socket: every handshake uses those of its moment."""
        context = self._new_context([])
        context.sni_callback = self._use_newest  # called whether or not a name was sent
        return context

    def _use_newest(
        self, connection: ssl.SSLObject, _name: str, _old: ssl.SSLContext
    ) -> ssl.AlertDescription | None:
        try:
            self._refresh()
        except StoreError as error:
            _LOG.error("no connection is taken: %s", error)
            return ssl.AlertDescription.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._context
        return None

    def _refresh(self) -> None:
        """Read the folder again if a file in it was added, replaced or removed."""
        places = [self._folder.path / "sites", self._folder.server]
        try:
            version = [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, places)]
            if version != self._version:
                self._read()
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder.path}: cannot be read ({error})") from None
        settled = time.time_ns() - max(changed for _, changed in version) > _TICK
        self._version = version if settled else None

    def _read(self) -> None:
        admitted = [site for site in self._folder.sites() if site.revoked is None]
        found = {site.name: ssl.PEM_cert_to_DER_cert(site.certificate) for site in admitted}
        self._context = self._new_context(list(found.values()))
        self._names = {hashlib.sha256(der).hexdigest(): name for name, der in found.items()}

    def _new_context(self, certificates: list[bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # every connection shows its certificate
        context.load_cert_chain(self._folder.server, self._folder.server_key)
        if certificates:
            context.load_verify_locations(cadata=b"".join(certificates))
        return context
