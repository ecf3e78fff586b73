"""The Flower transport as real processes on loopback: kills, outsiders, revoked sites, traces."""

import contextlib
import hashlib
import io
import os
import signal
import ssl
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.control_pb2 import (
    RegisterNodeRequest,
    RegisterNodeResponse,
    StartRunRequest,
    StartRunResponse,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, RegisterNodeFleetResponse
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from coterie.deploy import keys
from coterie.deploy.direct_transport import DirectTransport
from coterie.deploy.flower_calls import Calls, LinkLostError, LinkRefusedError, as_node, nobody
from coterie.deploy.flower_door import CALLS
from coterie.deploy.folders import FederationFolder, SiteFolder
from loopback import Background, Proxy, free_port

pytestmark = pytest.mark.slow

BACK = 120.0  # seconds in which a node is back after any kill
COORDINATOR = """
import sys, threading
from pathlib import Path
from coterie.deploy.flower_coordinator import coordinate
from coterie.deploy.folders import FederationFolder
coordinate(FederationFolder.open(Path(sys.argv[1])), threading.Event())
"""
SITE = """
import logging, sys, threading, time
from pathlib import Path
from coterie.deploy.flower_agent import serve
from coterie.deploy.site_folder import SiteFolder
logging.basicConfig(level=logging.INFO)
class Echo:
    def answer(self, data):
        if data.startswith(b"slowly"):
            (Path(sys.argv[1]) / "working").touch()
            time.sleep(3)
        return data[::-1]
serve(SiteFolder.open(Path(sys.argv[1])), Echo(), threading.Event())
"""


class Net:
    """A coordinator and its sites a, b and c, each a process; all files are in one folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.running, self.clients = path, {}, []
        address = f"127.0.0.1:{free_port()}"
        self.folder = FederationFolder.create(path / "fed", address, "flower")
        self.sites = {name: self.make(name) for name in "abc"}
        for name, site in self.sites.items():
            self.folder.add_site(site.public, name)

    def make(self, name: str) -> SiteFolder:
        return SiteFolder.create(self.path / f"site-{name}", self.folder.invite, name)

    def start(self, *names: str) -> None:
        for name in names:
            code, folder = (SITE, self.path / f"site-{name}")
            if name == "coordinator":
                code, folder = COORDINATOR, self.folder.path
            with (self.path / f"{name}.log").open("ab") as log:
                self.running[name] = subprocess.Popen(
                    [sys.executable, "-c", code, str(folder)], stdout=log, stderr=log
                )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running.pop(name).wait()

    def kill_and_restart(self, what: str) -> None:
        if what == "link":
            os.kill(self.link(), signal.SIGKILL)  # the coordinator starts it again
        else:
            self.kill(what)
            self.start(what)

    def link(self) -> int:
        """The process of the SuperLink."""
        parent = self.running["coordinator"].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        (found,) = (int(each) for each in children if "flower_link" in command_of(each))
        return found

    def link_address(self) -> str:
        command = command_of(str(self.link())).split("\0")
        return f"127.0.0.1:{command[command.index('--port') + 1]}"

    def ask(self, body: bytes, names: str = "abc") -> dict[str, bytes | str]:
        until(self.folder.socket.exists)
        transport = until(lambda: operator(self.folder))
        with contextlib.closing(transport):
            return transport.ask(dict.fromkeys(names, body), 0)

    def end(self) -> None:
        for client in self.clients:
            client.close()
        for name in reversed(list(self.running)):  # sites first: they would dial again
            self.kill(name)

    def calls(self, site: SiteFolder | None, key: bytes | None = None) -> Calls:
        """Calls of the door, as somebody with this site's certificate; None: with the CA alone."""
        context = ssl.create_default_context(cafile=str(self.folder.ca))
        if site is not None:
            context.load_cert_chain(site.certificate, site.key)
        http = self.client(f"https://{self.folder.address}", context)
        return Calls(http, as_node(key)[0] if key else nobody)

    def client(self, url: str, context: ssl.SSLContext | bool = True) -> httpx.Client:
        self.clients.append(httpx.Client(base_url=url, verify=context))
        return self.clients[-1]


def operator(folder: FederationFolder) -> DirectTransport | None:
    try:
        return DirectTransport(folder, deadline=BACK)
    except Exception:
        return None


def command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def until(found, seconds: float = BACK):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    made = Net(tmp_path_factory.mktemp("flower"))
    made.start("coordinator", *"abc")
    try:
        yield made
    finally:
        made.end()
        patch.undo()


def expected(body: bytes, names: str = "abc") -> dict[str, bytes | str]:
    return dict.fromkeys(names, body[::-1])


@pytest.mark.parametrize("size", [1, 20_000, 9_000_001])
def test_three_sites_answer_through_door_and_link(net, size):
    body = os.urandom(size)
    assert net.ask(body) == expected(body)


@pytest.mark.parametrize("what", ["a", "link", "coordinator"])
def test_after_a_kill_the_next_round_succeeds(net, what):
    assert net.ask(b"before") == expected(b"before")
    begun = time.monotonic()
    net.kill_and_restart(what)
    assert net.ask(b"after") == expected(b"after")
    print(f"\n{what} was killed: answers after {time.monotonic() - begun:.1f} s")


@pytest.mark.parametrize("what", ["a", "link", "coordinator"])
def test_a_kill_while_a_site_works_costs_time_and_nothing_else(net, what):
    mark = net.path / "site-a" / "working"
    mark.unlink(missing_ok=True)
    net.ask(b"all are there")

    def kill(_stop):
        until(mark.exists)
        net.kill_and_restart(what)

    begun, killing = time.monotonic(), Background(kill)
    assert net.ask(b"slowly") == expected(b"slowly")
    killing.end()
    print(f"\n{what} was killed at work: answers after {time.monotonic() - begun:.1f} s")


def test_the_link_ends_with_the_coordinator(net):
    link = net.link()
    net.kill("coordinator")
    until(lambda: not Path(f"/proc/{link}").exists() or "flower_link" not in command_of(str(link)))
    net.start("coordinator")
    assert net.ask(b"again") == expected(b"again")


# ---- an app that carries code --------------------------------------------------------------------


def bundle(canary: Path) -> Fab:
    """An app that leaves a file wherever its code is executed."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pyproject.toml", PROJECT)
        archive.writestr("attack/__init__.py", f"open({str(canary)!r}, 'w').write('executed')\n")
    return Fab(hash_str=hashlib.sha256(made.getvalue()).hexdigest(), content=made.getvalue())


PROJECT = """\
[project]
name = "attack"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "attack"
[tool.flwr.app.components]
serverapp = "attack:app"
clientapp = "attack:app"
[tool.flwr.app.config]
"""


def test_an_outsider_with_the_ca_certificate_gets_nowhere(net, tmp_path):
    canary = tmp_path / "canary"
    outsider = net.make("outsider")
    key = outsider.key.read_bytes()
    for site in (None, outsider):  # without a certificate, and with one that is not admitted
        calls = net.calls(site, key)
        public = as_node(key)[1]
        wanted = RegisterNodeRequest(public_key=public, name="a")
        with pytest.raises(LinkLostError):
            calls("/v1/control/register-node", wanted, RegisterNodeResponse)
        register = RegisterNodeFleetRequest(public_key=public)
        with pytest.raises(LinkLostError):
            calls("/v1/fleet/register-node", register, RegisterNodeFleetResponse)
        run = StartRunRequest(fab=bundle(canary))
        with pytest.raises(LinkLostError):
            calls("/v1/control/start-run", run, StartRunResponse)
    with pytest.raises(httpx.HTTPError):
        net.client(f"http://{net.folder.address}").post("/v1/fleet/pull-messages")
    assert net.ask(b"still") == expected(b"still")
    assert not canary.exists()


def test_an_admitted_site_reaches_its_own_fleet_calls_and_nothing_else(net, tmp_path):
    canary = tmp_path / "canary"
    site, other = net.sites["b"], net.sites["c"]
    calls = net.calls(site, site.key.read_bytes())
    for _, path in PROTOBUF_REQUEST_TYPES:
        if path not in CALLS:
            with pytest.raises(LinkRefusedError, match="status 404"):
                calls(path, StartRunRequest(fab=bundle(canary)), StartRunResponse)
    for path in ("/docs", "/openapi.json", "/health"):
        with pytest.raises(LinkRefusedError, match="status 404"):
            calls(path, StartRunRequest(), StartRunResponse)
    as_other = net.calls(site, other.key.read_bytes())  # c's key over b's connection
    for path in CALLS:
        with pytest.raises(LinkRefusedError, match="status 403"):
            as_other(path, StartRunRequest(), StartRunResponse)
    assert net.ask(b"still") == expected(b"still")
    assert not canary.exists()


def test_a_run_that_somebody_on_the_machine_starts_is_never_executed(net, tmp_path):
    canary = tmp_path / "canary"
    context = ssl.create_default_context(cafile=str(net.folder.path / "link" / "ca.pem"))
    local = Calls(net.client(f"https://{net.link_address()}", context), nobody)
    started = local("/v1/control/start-run", StartRunRequest(fab=bundle(canary)), StartRunResponse)
    assert started.run_id
    foreign = RegisterNodeRequest(public_key=as_node(keys.make_site("a")[1])[1], name="a")
    local("/v1/control/register-node", foreign, RegisterNodeResponse)
    for _ in range(3):
        assert net.ask(b"still") == expected(b"still")
        time.sleep(1.0)
    assert not canary.exists()


# ---- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20_000, 2_300_000])
def test_bytes_on_the_wire_are_those_of_the_bodies(tmp_path, monkeypatch, size):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    net = Net(tmp_path)
    proxy = Proxy(int(net.folder.address.rpartition(":")[2]))
    for site in net.sites.values():
        settings = site.path / "site.toml"
        text = settings.read_text().replace(net.folder.address, f"127.0.0.1:{proxy.port}")
        settings.write_text(text)
    try:
        net.start("coordinator")
        until(lambda: operator(net.folder)).close()  # the proxy needs a coordinator behind it
        net.start(*"abc")
        net.ask(b"all are there")
        with contextlib.closing(operator(net.folder)) as transport:
            down, up = proxy.down, proxy.up
            seconds = []
            for round in range(10):
                bodies = {name: os.urandom(size) for name in "abc"}
                begun = time.monotonic()
                answers = transport.ask(bodies, round)
                seconds.append(time.monotonic() - begun)
                assert answers == {name: body[::-1] for name, body in bodies.items()}
            down, up = (proxy.down - down) / 30 / size, (proxy.up - up) / 30 / size
    finally:
        net.end()
        proxy.close()
    middle = sorted(seconds)[5]
    print(f"\n{size} bytes: wire over body {down:.4f} down, {up:.4f} up; {middle:.2f} s a round")
    if size >= 1_000_000:
        assert down < 1.05
        assert up < 1.05


# ---- what is left --------------------------------------------------------------------------------


def test_no_file_holds_a_byte_of_a_body(net):
    marks = [b"request-" + os.urandom(24).hex().encode() for _ in range(3)]
    for mark in marks:
        body = mark * 20_000
        assert net.ask(body) == expected(body)
    for file in net.path.rglob("*"):
        if file.is_file():
            found = file.read_bytes()
            for mark in marks:
                assert mark not in found, file
                assert mark[::-1] not in found, file
    link = net.link()
    for name in Path(f"/proc/{link}/fd").iterdir():
        target = str(name.readlink())
        assert not target.endswith((".db", ".sqlite")), target


def test_a_revoked_site_is_refused_and_the_others_go_on(net):
    assert net.ask(b"all") == expected(b"all")
    net.folder.revoke("c")
    site = net.sites["c"]
    calls = net.calls(site, site.key.read_bytes())
    with pytest.raises((LinkLostError, LinkRefusedError)):
        calls("/v1/fleet/pull-messages", StartRunRequest(), StartRunResponse)
    assert net.ask(b"rest") == expected(b"rest", "ab") | {"c": "lost"}
