"""The coordinator of the direct transport: a TLS port for sites, a unix socket for the operator.

Both are served by one process from one mailbox in memory. Who a site is follows from its TLS
certificate alone. The certificate's hash is looked up at every request, so that a certificate which
another site's key has signed is worth nothing.
"""

import asyncio
import hashlib
import logging
import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, StoreError
from .documents import host_and_port
from .folders import FederationFolder
from .mailbox import Asking, Mailbox
from .mailbox_registry import Registry
from .mailbox_routes import Gate, Limits, OperatorRoutes, Peer, SiteRoutes
from .peers.relay import Relay, RelayLimits, relay_routes

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
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def coordinate(folder: FederationFolder, stop: threading.Event, silence: float = 30.0) -> None:
    """Carry messages between the operator and the sites of a folder until ``stop`` is set.

    A site without a sign of life for ``silence`` seconds is offline, and what waits for it is lost;
    agents give a sign every 15 seconds or more often.
    """
    limits = Limits(folder.limits.message_mib * 2**20, silence, min(15.0, silence / 2))
    asyncio.run(serve_mailbox(folder, limits, stop))


async def serve_mailbox(folder: FederationFolder, limits: Limits, stop: threading.Event) -> None:
    """As :func:`coordinate`, with all limits."""
    mailbox, registry = Mailbox(limits.silence), Registry(folder)
    relay = relay_routes(Relay(RelayLimits(each=limits.message)), folder.peers)
    app = SiteRoutes(mailbox, limits, relay).app()
    await serve_sites(folder, Served(app, mailbox, registry, limits), stop)


class Served(NamedTuple):
    """What a coordinator serves: an application for the sites, a mailbox for the operator."""

    app: ASGIApp
    mailbox: Asking
    registry: Registry
    limits: Limits


async def serve_sites(folder: FederationFolder, served: Served, stop: threading.Event) -> None:
    """Serve admitted sites on the public port, and the operator on the unix socket."""
    app, mailbox, registry, limits = served
    sites = _config(Gate(app, registry, mailbox, limits.requests))
    operator = _config(OperatorRoutes(mailbox, registry, limits).app())
    state, loop = ServerState(), asyncio.get_running_loop()
    with _public_socket(folder.address) as public, _private_socket(folder.socket) as private:
        servers = [
            await loop.create_server(
                lambda: _SiteConnection(sites, state, {"limits": limits}),
                sock=public,
                ssl=registry.context(),
                ssl_handshake_timeout=limits.patience / 3,
            ),
            await loop.create_server(lambda: H11Protocol(operator, state, {}), sock=private),
        ]
        _LOG.info("sites can dial %s; the operator uses %s", folder.address, folder.socket)
        try:
            while not stop.is_set():
                await asyncio.sleep(0.1)
        finally:
            folder.socket.unlink(missing_ok=True)
            for server in servers:
                server.close()
            for connection in list(state.connections):
                connection.transport.abort()  # sites and operator dial again
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=5)
    _LOG.info("the coordinator has stopped")


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


def _private_socket(path: Path) -> socket.socket:
    """A unix socket that this user alone can use; one that a killed coordinator left is removed."""
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StoreError(
            f"{path.parent}: other users have access to this folder (mode {mode:o}); expected mode "
            f"700, because the coordinator is run from it; chmod 700 {path.parent}"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        listening.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listening.close()
        raise StoreError(
            f"{path}: cannot be opened ({error.strerror or error}); expected a short path (about "
            "100 characters) at which nothing lies; move the folder, or remove what lies there"
        ) from None
    return listening
