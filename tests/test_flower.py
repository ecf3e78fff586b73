"""coterie on Flower: the transport over a grid of this process, the shim, the socket of a site."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import coterie
from coterie import api
from coterie.deploy import flower, flower_client, keys, site_socket
from coterie.deploy.flower import GridTransport
from coterie.deploy.flower_client import BODY, RECORD
from coterie.deploy.folders import FederationFolder, write_app
from coterie.deploy.local_federation import local_sites
from coterie.deploy.protocol import HEAD, Signed, signed
from coterie.deploy.site_socket import checked_answer, hello, serve, signed_answer
from coterie.engines.codec import refused_by
from coterie.errors import ConfigError, StoreError
from flower_net import until
from loopback import LIMITS, Background, Echo, free_port
from sites import FAST, handler_of

DIGITS = {**FAST, "data": {"name": "digits"}, "partition": {"name": "iid", "clients": 3}}


@dataclass
class Said:
    """A message of Flower's, which its own class makes only inside of one of its tasks."""

    content: object
    dst_node_id: int = 0
    message_type: str = ""
    group_id: str = ""
    ttl: float = 0.0
    reply_to: "Said | None" = None
    key: str = ""

    @property
    def metadata(self):
        return SimpleNamespace(reply_to_message_id=self.reply_to.key)

    def has_error(self) -> bool:
        return self.content is None


@dataclass
class Nodes:
    """A grid whose nodes call the ClientApp in this process; ``down`` nodes have no ClientApp."""

    sockets: dict[int, Path]
    down: set[int] = field(default_factory=set)
    spoil: object = None  # (node, body) -> body
    asked: list[tuple[int, bytes]] = field(default_factory=list)
    _replies: dict[str, Said] = field(default_factory=dict)

    def get_node_ids(self):
        return list(self.sockets)

    def push_messages(self, messages):
        for message in messages:
            message.key = f"message {len(self.asked)}"
            self.asked.append((message.dst_node_id, message.content[RECORD][BODY]))
            self._replies[message.key] = self._answer(message)
        return [message.key for message in messages]

    def _answer(self, message):
        node = message.dst_node_id
        context = SimpleNamespace(node_config={"socket": str(self.sockets[node])})
        try:
            if node in self.down:
                raise OSError("its ClientApp was killed")
            reply = flower_client.pass_on(message, context)
        except OSError:
            return Said(None, reply_to=message)
        if self.spoil is not None:
            record = reply.content[RECORD]
            record[BODY] = self.spoil(node, record[BODY])
        return reply

    def pull_messages(self, keys):
        return [self._replies.pop(key) for key in keys if key in self._replies]


class Read(Echo):
    """An echo of what is inside of a signed message."""

    def answer(self, data):
        return super().answer(data[HEAD:])

    def largest(self):
        return LIMITS.message


class Net:
    """Three sites behind their sockets, each behind a node."""

    def __init__(self, home, monkeypatch, handler):
        for module in (flower, flower_client):
            monkeypatch.setattr(module, "Message", Said)
        for name in ("AGAIN", "MEET", "LONGEST"):
            monkeypatch.setattr(flower, name, 0.02)
        self.folders, self.asked = local_sites(api.configure(DIGITS), home, "flower")
        self.fed = FederationFolder.open(home / "fed")
        (home / "s").mkdir(mode=0o700)
        self.sockets = {at: home / "s" / str(at) for at in range(3)}
        self.serving = [
            Background(
                lambda stop, at=at, site=site: serve(site, self.sockets[at], handler(site), stop)
            )
            for at, site in enumerate(self.folders)
        ]
        self.grid = Nodes(dict(self.sockets))
        until(lambda: all(path.is_socket() for path in self.sockets.values()))

    @property
    def names(self):
        return [site.name for site in self.folders]

    def transport(self, deadline=20.0):
        made = GridTransport(self.grid, self.fed, deadline=deadline)
        return Signed(made, self.fed.operator_key(), self.fed.name)

    def signed(self, data, at=0):
        return signed(data, self.fed.operator_key(), self.fed.name, self.names[at])


@pytest.fixture
def net(tmp_path, monkeypatch):
    made = Net(tmp_path, monkeypatch, lambda site: Read(site.name))
    yield made
    for each in made.serving:
        each.end()


# ---- what a run gives ----------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "participation"), [("fedfomo", 1.0), ("scaffold", 0.67)])
def test_the_digest_is_that_of_the_simulation(tmp_path, monkeypatch, method, participation):
    net = Net(tmp_path, monkeypatch, handler_of)
    asked = {"method": method, "participation": participation}
    there = api.run_config(api.configure(net.asked, **asked), transport=net.transport()._transport)
    here = coterie.run(DIGITS, engine="loop", **asked)
    assert there.summary["digest"] == here.summary["digest"]
    for each in net.serving:
        each.end()


# ---- the transport -------------------------------------------------------------------------------


def test_every_site_gets_its_own_message_and_its_answer_comes_back(net):
    transport = net.transport()
    for round in range(2):
        bodies = {name: os.urandom(100_000) for name in net.names}
        answers = transport.ask(bodies, round)
        assert answers == {name: name.encode() + body for name, body in bodies.items()}
    assert all(state.online for state in transport.sites().values())
    assert transport.ask({}, 0) == {}


def test_a_node_that_fails_is_asked_again(net):
    transport = net.transport()
    transport.sites()
    net.grid.down = {1}
    killed = Background(lambda stop: (time.sleep(0.3), net.grid.down.clear()))
    assert transport.ask({net.names[1]: b"?"}, 0) == {net.names[1]: net.names[1].encode() + b"?"}
    killed.end()


def test_a_site_is_found_again_behind_another_node(net):
    """As when a SuperNode without a key was started anew."""
    transport = net.transport()
    asked = dict.fromkeys(net.names, b"?")
    assert transport.ask(asked, 0) == {name: name.encode() + b"?" for name in asked}
    net.grid.sockets[7] = net.grid.sockets.pop(0)
    assert transport.ask(asked, 1) == {name: name.encode() + b"?" for name in asked}
    assert net.grid.asked[-1][0] == 7 or 7 in dict(net.grid.asked)


def test_a_site_without_a_node_is_lost_long_before_the_deadline(net, monkeypatch):
    monkeypatch.setattr(flower, "SILENCE", 0.2)
    del net.grid.sockets[1]
    answers = net.transport(deadline=1000.0).ask(dict.fromkeys(net.names, b"?"), 0)
    assert answers[net.names[1]] == "lost"
    assert sorted(answers.values(), key=str)[-1] == "lost"
    assert len({*answers.values()}) == 3


def test_an_answer_that_is_not_the_sites_own_is_unreadable(net):
    """A node that changes the answer of its site, or gives that of another message."""
    transport = net.transport()
    transport.sites()
    net.grid.spoil = lambda node, body: body[:-1] + b"x" if node == 2 else body
    answers = transport.ask(dict.fromkeys(net.names, b"?"), 0)
    assert answers[net.names[2]] == "unreadable"
    assert answers[net.names[0]] == net.names[0].encode() + b"?"


def test_an_answer_of_another_form_takes_no_other_answer_with_it(net):
    """Replies that were fetched together with that of a stranger's app were lost."""
    transport = net.transport(deadline=3.0)
    transport.sites()
    right = net.grid._answer
    net.grid._answer = lambda m: Said({}, reply_to=m) if m.dst_node_id == 0 else right(m)
    answers = transport.ask(dict.fromkeys(net.names, b"?"), 0)
    assert answers[net.names[1]] == net.names[1].encode() + b"?"
    assert answers[net.names[2]] == net.names[2].encode() + b"?"


def test_a_node_cannot_pose_as_a_site_whose_key_it_has_not(net):
    """Node 2 says that it is site 0: nothing is sent to it, and site 0 is asked behind its own."""
    other = keys.make_site(net.names[0])[1]
    bodies = {}

    def spoil(node, body):
        if node != 2:
            return body
        question = net.grid.asked[-1][1]
        return signed_answer(other, question, net.names[0].encode())

    net.grid.spoil = spoil
    bodies = dict.fromkeys(net.names[:2], b"a model")
    answers = net.transport().ask(bodies, 0)
    assert answers == {name: name.encode() + b"a model" for name in bodies}
    assert not any(node == 2 and body.endswith(b"a model") for node, body in net.grid.asked)


def test_a_revoked_site_is_asked_no_more(net):
    transport = net.transport(deadline=0.5)
    transport.sites()
    net.fed.revoke(net.names[0])
    asked = dict.fromkeys(net.names, b"?")
    assert transport.ask(asked, 0)[net.names[0]] == "lost"
    assert net.names[0] not in transport.sites()


def test_a_link_that_fails_is_asked_again(net):
    transport, right = net.transport(), net.grid.get_node_ids
    fails = iter([ConnectionError("gone")] * 3)

    def get_node_ids():
        for error in fails:
            raise error
        return right()

    net.grid.get_node_ids = get_node_ids
    assert transport.ask({net.names[0]: b"?"}, 0) == {net.names[0]: net.names[0].encode() + b"?"}


# ---- the socket of a site ------------------------------------------------------------------------


def told(path, data, close=True):
    """What a site answers to these bytes; empty if it closes the connection."""
    with socket.socket(socket.AF_UNIX) as site:
        site.settimeout(20.0)
        site.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            site.sendall(data)
            if close:
                site.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: site.recv(1 << 20), b""))
    return b""


def test_a_site_signs_request_and_answer(net):
    site, certificate = net.folders[0], net.folders[0].certificate.read_bytes()
    asked, other = net.signed(b"a question"), net.signed(b"another")
    answer = told(net.sockets[0], asked)
    assert checked_answer(certificate, asked, answer) == site.name.encode() + b"a question"
    for request, data in ((other, answer), (asked, answer + b"x"), (asked, b"")):
        with pytest.raises(StoreError):
            checked_answer(certificate, request, data)
    with pytest.raises(StoreError):
        checked_answer(net.folders[1].certificate.read_bytes(), asked, answer)


def test_a_site_says_who_it_is_to_its_operator_alone(net, tmp_path):
    """The same question from another operator, or of another federation, is no such question."""
    asked = hello(net.fed.operator_key(), net.fed.name)
    assert told(net.sockets[0], asked).partition(b"\n")[2] == net.folders[0].name.encode()
    other = keys.make_operator()[0]
    for question in (hello(other, net.fed.name), hello(net.fed.operator_key(), "another")):
        assert b"unsigned" in told(net.sockets[0], question)


def test_only_the_group_may_use_the_socket_and_a_folder_for_everybody_is_refused(net, tmp_path):
    assert stat.S_IMODE(net.sockets[0].stat().st_mode) == 0o660
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="chmod 750"):
        serve(net.folders[0], tmp_path / "open" / "socket", Echo(), threading.Event())


def test_a_request_that_is_too_slow_is_not_read(net, monkeypatch):
    monkeypatch.setattr(site_socket, "PATIENCE", 0.2)
    whole = net.signed(b"whole")
    assert told(net.sockets[0], whole[:-1], close=False) == b""
    assert told(net.sockets[0], whole).endswith(b"whole")


def test_a_request_that_is_too_large_is_refused_with_the_reason(net):
    large = net.signed(bytes(LIMITS.message + 1))
    said = checked_answer(
        net.folders[0].certificate.read_bytes(), large, told(net.sockets[0], large)
    )
    assert refused_by(said)[0] == "policy"


@pytest.mark.parametrize("who", ["stranger", "replayed"])
def test_half_sent_messages_fill_no_memory(net, monkeypatch, who):
    """Whoever has the socket's group held as many whole messages as there are connections."""
    monkeypatch.setattr(site_socket, "PATIENCE", 2.0)
    size = LIMITS.message - 1
    data = (bytes(size + HEAD) if who == "stranger" else net.signed(bytes(size)))[:-1]
    tracemalloc.start()

    def half():
        with socket.socket(socket.AF_UNIX) as site, contextlib.suppress(OSError):
            site.settimeout(3.0)
            site.connect(str(net.sockets[0]))
            site.sendall(data)
            site.recv(1)

    try:
        flood = [threading.Thread(target=half) for _ in range(site_socket.MOST_OPEN)]
        for each in flood:
            each.start()
        for each in flood:
            each.join()
        assert tracemalloc.get_traced_memory()[1] < 3 * size
    finally:
        tracemalloc.stop()
    until(lambda: told(net.sockets[0], net.signed(b"?")) != b"", 20)


def test_more_connections_than_places_are_closed_and_places_come_back(net, monkeypatch):
    asked = net.signed(b"?")
    with contextlib.ExitStack() as held:
        for _ in range(site_socket.MOST_OPEN):
            idle = held.enter_context(socket.socket(socket.AF_UNIX))
            idle.connect(str(net.sockets[0]))
        until(lambda: told(net.sockets[0], asked) == b"", 20)
    until(lambda: told(net.sockets[0], asked) != b"", 20)


HOSTILE = """
import os, pathlib, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(65534)
found = []
for path in [*pathlib.Path(sys.argv[1]).rglob("*"), *map(pathlib.Path, sys.argv[4:])]:
    try:
        found.append((str(path), path.read_bytes()[:20]))
    except OSError:
        pass
try:
    os.kill(int(os.environ["SITE"]), 0)
    found.append("a signal")
except OSError:
    pass
for proc in ("environ", "mem", "maps", "cwd"):
    try:
        found.append((proc, open(f"/proc/{os.environ['SITE']}/{proc}", "rb").read(10)))
    except OSError:
        pass
for data in (b"", b"who are you", b"x" * 100000, bytes.fromhex(os.environ["REPLAYED"])):
    site = socket.socket(socket.AF_UNIX)
    site.connect(sys.argv[2]); site.sendall(data); site.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: site.recv(1 << 20), b""))
    print("answered", answer.partition(b"\\n")[2].hex())
print("found", found)
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root to become others")
def test_a_hostile_app_under_another_user_finds_no_file_no_key_and_no_answer(tmp_path):
    """It has the SuperNode's user and group: it may use the socket, and that is all."""
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o111)
    home = tmp_path / "home"
    home.mkdir()
    (site, *_), _ = local_sites(api.configure(DIGITS), home, "flower")
    home.chmod(0o755)
    place = tmp_path / "run"
    place.mkdir()
    os.chown(place, 0, 12345)
    place.chmod(0o2750)
    command = [sys.executable, "-P", "-m", "coterie", "site", "serve", site.path]
    serving = subprocess.Popen([*command, "--socket", place / "site"], stderr=subprocess.PIPE)
    try:
        until((place / "site").is_socket, 60)
        fed = FederationFolder.open(home / "fed")
        other = hello(
            keys.make_operator()[0], fed.name
        )  # as the operator would ask, unsigned by it
        done = subprocess.run(
            [sys.executable, "-I", "-c", HOSTILE, home, place / "site", "12345", site.key],
            env={"SITE": str(serving.pid), "REPLAYED": other.hex(), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
        )
    finally:
        serving.terminate()
        serving.communicate()
    assert done.returncode == 0, done.stderr
    *answers, found = done.stdout.splitlines()
    assert found == "found []"
    assert len(answers) == 4
    for line in answers:
        answer = bytes.fromhex(line.removeprefix("answered").strip())
        assert b"unsigned" in answer
        assert b"data" not in answer


# ---- the app -------------------------------------------------------------------------------------


def test_the_app_names_a_serverapp_and_a_clientapp_that_exist(tmp_path):
    import importlib
    import tomllib

    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    write_app(tmp_path / "app", tmp_path / "fed")
    said = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert said["config"]["federation"] == str(tmp_path / "fed")
    for kind, name in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        module, _, member = said["components"][kind].partition(":")
        assert isinstance(getattr(importlib.import_module(module), member), name)
    with pytest.raises(ConfigError, match="without quotes"):
        write_app(tmp_path / "b", Path('a"b'))


def test_only_public_modules_of_flower_are_imported():
    import ast

    places = Path(flower.__file__).parent.parent.rglob("*.py")
    found = {
        name
        for path in places
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if (name or "").partition(".")[0] == "flwr"
    }
    assert found == {"flwr.app", "flwr.serverapp", "flwr.clientapp"}


def test_the_shim_imports_nothing_heavy():
    code = (
        "import sys, coterie.deploy.flower_client\n"
        "print(*{'torch', 'coterie.engines', 'coterie.data'} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_a_federation_on_flower_is_run_by_flower(tmp_path):
    fed = FederationFolder.create(tmp_path / "fed", f"localhost:{free_port()}", "flower")
    with pytest.raises(ConfigError, match="flwr run"):
        coterie.run(federation=fed.path)
