"""A federation of the direct transport on loopback, in threads of the test's process."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from coterie.deploy.coordinator import Coordinator
from coterie.deploy.direct import DirectTransport, serve
from coterie.deploy.folders import FederationFolder, SiteFolder
from coterie.deploy.mailbox import Limits

PATIENT = 20.0  # seconds after which a test that waits has failed
LIMITS = Limits(message=2**22, silence=10.0, poll=5.0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until(true: Callable[[], object], seconds: float = PATIENT) -> None:
    """Wait until this holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


class Echo:
    """A handler that answers by the message itself, and remembers what it was asked."""

    def __init__(self, name: str = "") -> None:
        self.name, self.asked = name.encode(), 0

    def answer(self, data: bytes) -> bytes:
        self.asked += 1
        return self.name + data

    def largest(self) -> int:
        return 2**25


class Background:
    """Work in a thread that ends when its event is set; an error in it fails the test."""

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        self.stop, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        try:
            work(self.stop)
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        self.stop.set()
        self._thread.join(PATIENT)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error


class Loopback:
    """One coordinator's folder, the folders of its sites, and what runs of them."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path = path
        self.folder = FederationFolder.create(path / "fed", f"127.0.0.1:{free_port()}")
        self.port = int(self.folder.address.rpartition(":")[2])
        self.sites = {name: self.admit(name) for name in names}
        self.running: list[Background] = []
        self.coordinator: Background | None = None

    def make_site(self, name: str) -> SiteFolder:
        return SiteFolder.create(self.path / f"site-{name}", self.folder.invite, name)

    def admit(self, name: str) -> SiteFolder:
        site = self.make_site(name)
        self.folder.add_site(site.public, name)
        return site

    def start(self, limits: Limits = LIMITS) -> None:
        def work(stop: threading.Event) -> None:
            asyncio.run(Coordinator(self.folder, limits).serve(stop))

        self.coordinator = Background(work)
        until(self.listens)

    def listens(self) -> bool:
        """Whether the coordinator takes connections on both sockets."""
        with socket.socket(socket.AF_UNIX) as operator, socket.socket() as site:
            operator.settimeout(1.0)
            site.settimeout(1.0)
            try:
                operator.connect(str(self.folder.socket))
                site.connect(("127.0.0.1", self.port))
            except OSError:
                return False
            return True

    def stop(self) -> None:
        self.coordinator.end()
        self.coordinator = None

    def agent(self, name: str, handler: object = None) -> Background:
        handler, site = handler or Echo(name), self.sites[name]
        agent = Background(lambda stop: serve(site, handler, stop))
        self.running.append(agent)
        return agent

    @contextlib.contextmanager
    def operator(self, deadline: float = PATIENT) -> Iterator[DirectTransport]:
        with contextlib.closing(DirectTransport(self.folder, deadline)) as transport:
            yield transport

    def end_agents(self) -> None:
        for agent in self.running:
            agent.stop.set()
        while self.running:
            self.running.pop().end()

    def end(self) -> None:
        self.end_agents()
        if self.coordinator:
            self.stop()

    # ---- a site by hand

    def context(self, site: SiteFolder | None, ca: Path | None = None) -> ssl.SSLContext:
        """The TLS settings of an agent; without a site, those of an outsider."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(ca or self.folder.ca)
        if site is not None:
            context.load_cert_chain(site.certificate, site.key)
        return context

    def dial(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENT)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def request(
        self,
        site: SiteFolder | None,
        path: str,
        body: bytes = b"",
        method: str = "POST",
        on: ssl.SSLSocket | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request that a site makes."""
        connection = on or self.dial(self.context(site))
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            return read_response(connection)
        finally:
            if on is None:
                connection.close()


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response with a content-length or without a body; EOFError if there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
    body = bytearray(rest)
    while len(body) < int(headers.get("content-length", 0)):
        body += received(connection)
    return int(first.split()[1]), headers, bytes(body)


def received(connection: socket.socket) -> bytes:
    try:
        piece = connection.recv(2**16)
    except TimeoutError:
        raise AssertionError("neither an answer nor an end of the connection came") from None
    if not piece:
        raise EOFError("the connection was closed")
    return piece


class Proxy:
    """A TCP proxy that counts bytes, and cuts one connection that has sent too many upwards.

    With ``tunnel`` it expects a CONNECT request first, as the proxies of hospitals do.
    """

    def __init__(self, target: int, cut_after: int | None = None, tunnel: bool = False) -> None:
        self.up = self.down = self.cuts = self.dialled = 0
        self._target, self._cut, self._tunnel = target, cut_after, tunnel
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self.dialled += 1
                if self._tunnel:
                    assert near.recv(2**16).startswith(b"CONNECT ")
                    near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                far = socket.create_connection(("127.0.0.1", self._target))
                for work in (self._upwards, self._downwards):
                    threading.Thread(target=work, args=(near, far), daemon=True).start()

    def _upwards(self, near: socket.socket, far: socket.socket) -> None:
        sent = 0
        with near, far, contextlib.suppress(OSError):
            while data := near.recv(2**16):
                sent, self.up = sent + len(data), self.up + len(data)
                if self._cut is not None and sent > self._cut and not self.cuts:
                    self.cuts += 1
                    break
                far.sendall(data)
            for each in (near, far):
                each.shutdown(socket.SHUT_RDWR)

    def _downwards(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(2**16):
                self.down += len(data)
                near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
