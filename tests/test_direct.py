"""The direct transport on real loopback sockets: what arrives, what is refused, what comes back."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.deploy import coordinator, direct, keys, mailbox
from coterie.deploy.coordinator import Coordinator, Registry
from coterie.deploy.direct import DirectTransport
from coterie.deploy.folders import FederationFolder
from coterie.deploy.protocol import HEAD
from coterie.errors import ConfigError, EngineError, StoreError
from coterie.storage.files import write_text
from loopback import LIMITS, PATIENT, Background, Echo, Loopback, Proxy, read_response, until

REFUSED = (OSError, EOFError)  # a TLS alert, a closed connection
STOPPED = threading.Event()  # of a coordinator that should not even start
STOPPED.set()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def idle(tmp_path):
    """The folders of a coordinator and of its sites a and b; nothing runs."""
    made = Loopback(tmp_path, "ab")
    yield made
    made.end()


@pytest.fixture
def own(idle):
    """The same with a running coordinator."""
    idle.start()
    return idle


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The same for several tests."""
    made = Loopback(tmp_path_factory.mktemp("shared"), "ab")
    made.start()
    yield made
    made.end()


@pytest.fixture
def net(shared):
    """A running coordinator for tests that change nothing in its folder; agents end with them."""
    sites = dict(shared.sites)
    yield shared
    shared.end_agents()
    shared.sites = sites


def coordinate(folder):
    """A coordinator that stops as soon as it has started."""
    asyncio.run(Coordinator(folder, LIMITS).serve(STOPPED))


class Asked:
    """One message to one site, asked in the background."""

    def __init__(self, net, site="a", body=b"question", deadline=PATIENT):
        self.answer = None
        self._net, self._site, self._body, self._deadline = net, site, body, deadline
        self._thread = Background(self._ask)

    def _ask(self, stop):
        with self._net.operator(self._deadline) as operator:
            self.answer = operator.ask({self._site: self._body}, 0)[self._site]

    def end(self):
        self._thread.end()
        return self.answer


def polled(net, site="a"):
    """The id and the body of the message that a site gets."""
    status, headers, body = net.request(net.sites[site], "/v1/poll")
    assert status == 200
    return headers["message"], body


# ---- what arrives --------------------------------------------------------------------------------


def test_every_site_gets_its_own_message_and_its_answer_comes_back(net):
    for name in "ab":
        net.agent(name)
    with net.operator() as operator:
        for round in range(3):
            asked = {name: bytes([i + 1]) * 300_000 * round for i, name in enumerate("ab")}
            answers = operator.ask(asked, round)
            assert answers == {name: name.encode() + body for name, body in asked.items()}
        assert operator.ask({}, 0) == {}
        assert all(
            state.online and state.seen < LIMITS.silence for state in operator.sites().values()
        )


def test_a_site_that_is_not_there_is_lost_and_the_others_answer(own):
    own.agent("a")
    with own.operator(deadline=0.5) as operator:
        assert operator.ask({"a": b"?", "b": b"?", "nobody": b"?", "../x": b"?"}, 0) == {
            "a": b"a?",
            "b": "lost",
            "nobody": "lost",
            "../x": "lost",
        }
        states = operator.sites()
        assert list(states) == ["a", "b"]
        assert states["a"].online
        assert states["b"] == (False, None)


def test_a_dead_site_is_lost_long_before_the_deadline(idle):
    idle.start(LIMITS._replace(silence=0.3, poll=0.1))
    with idle.operator(deadline=1000 * PATIENT) as operator:
        assert operator.ask({"a": b"?"}, 0) == {"a": "lost"}


def test_a_site_that_computes_longer_than_the_silence_says_that_it_is_alive(idle, monkeypatch):
    monkeypatch.setattr(direct, "HEARTBEAT", 0.1)
    idle.start(LIMITS._replace(silence=1.0, poll=0.3))

    class Slow(Echo):
        def answer(self, data):
            time.sleep(1.6)
            return super().answer(data)

    idle.agent("a", Slow())
    with idle.operator() as operator:
        until(lambda: operator.sites()["a"].online)
        assert operator.ask({"a": b"?"}, 0) == {"a": b"?"}


def test_a_handler_that_fails_is_unreadable_and_the_agent_goes_on(net, caplog):
    class Failing(Echo):
        def answer(self, data):
            if data == b"bad":
                raise ValueError("a fault of the handler")
            return data

    net.agent("a", Failing())
    with net.operator() as operator:
        assert operator.ask({"a": b"bad"}, 0) == {"a": "unreadable"}
        assert operator.ask({"a": b"good"}, 0) == {"a": b"good"}
    assert "a message could not be answered" in caplog.text


@pytest.mark.parametrize("who", ["operator", "site"])
def test_what_is_too_large_is_unreadable_at_once_and_the_next_message_arrives(net, who):
    class Large(Echo):
        def answer(self, data):
            return bytes(LIMITS.message + 1) if data == b"large" else data

    net.agent("a", Large())
    with net.operator() as operator:
        large = bytes(LIMITS.message + 1) if who == "operator" else b"large"
        assert operator.ask({"a": large}, 0) == {"a": "unreadable"}
        assert operator.ask({"a": b"small"}, 0) == {"a": b"small"}


def test_a_site_reads_no_message_beyond_its_own_limit(net):
    handler = Echo()
    handler.largest = lambda: 2**20
    net.agent("a", handler)
    most = 2**20 + HEAD
    with net.operator() as operator:
        assert operator.ask({"a": bytes(most + 1)}, 0) == {"a": "unreadable"}
        assert handler.asked == 0
        assert operator.ask({"a": bytes(most)}, 0) == {"a": bytes(most)}


@pytest.fixture
def proxied(idle):
    """A running coordinator, and a proxy through which the site a dials it."""
    idle.start(LIMITS._replace(poll=0.1))
    proxy = Proxy(idle.port)
    idle.sites["a"] = replace(idle.sites["a"], address=f"127.0.0.1:{proxy.port}")
    yield idle, proxy
    proxy.close()


def test_an_agent_uses_one_connection_for_everything(proxied):
    net, proxy = proxied
    net.agent("a")
    with net.operator() as operator:
        for round in range(3):
            assert operator.ask({"a": b"?"}, round) == {"a": b"a?"}
            polls = proxy.down
            until(lambda: proxy.down > polls + 100)  # noqa: B023  several polls without a message
    assert proxy.dialled == 1


def test_messages_of_a_megabyte_cost_few_bytes_more_on_the_wire(proxied):
    net, proxy = proxied
    net.agent("a")
    body = os.urandom(2**20)
    with net.operator() as operator:
        for round in range(3):
            assert operator.ask({"a": body}, round) == {"a": b"a" + body}
    print(f"\nup {proxy.up / 3 / 2**20 - 1:+.3%}, down {proxy.down / 3 / 2**20 - 1:+.3%}")
    assert 3 * 2**20 < proxy.up < 1.01 * 3 * 2**20
    assert 3 * 2**20 < proxy.down < 1.01 * 3 * 2**20


def test_connections_of_sites_send_without_delay(own, monkeypatch):
    """A body that waits for its head to be acknowledged waits 40 ms."""
    found, made = [], coordinator._SiteConnection.connection_made

    def connection_made(self, transport):
        made(self, transport)
        accepted = transport.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(coordinator._SiteConnection, "connection_made", connection_made)
    assert own.request(own.sites["a"], "/v1/alive")[0] == 204
    assert found == [1]


def test_an_agent_dials_through_the_proxy_that_its_environment_names(net, monkeypatch):
    proxy, body = Proxy(net.port, tunnel=True), os.urandom(100_000)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    net.agent("a")
    with net.operator() as operator:
        assert operator.ask({"a": body}, 0) == {"a": b"a" + body}
    assert proxy.up > len(body)
    proxy.close()


def test_bodies_are_neither_logged_nor_written(own, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    secret = b"a-body-that-nobody-keeps"
    own.agent("a")
    with own.operator() as operator:
        assert operator.ask({"a": secret}, 0) == {"a": b"a" + secret}
    own.end()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    said = caplog.text + "".join(capfd.readouterr())
    assert secret not in written
    assert secret.decode() not in said
    assert "is online" in said


# ---- who is refused ------------------------------------------------------------------------------


def refused(net, context):
    """Whether a connection with these settings gets no answer to a poll."""
    with pytest.raises(REFUSED), net.dial(context) as connection:
        net.request(None, "/v1/alive", on=connection)
    return True


def identity(folder: Path, certificate: bytes, key: bytes, chain: bytes = b"") -> tuple[Path, Path]:
    folder.mkdir()
    (folder / "cert.pem").write_bytes(certificate + chain)
    (folder / "key.pem").write_bytes(key)
    return folder / "cert.pem", folder / "key.pem"


def signed_by(name: str, signer_name: str, signer_key: bytes) -> tuple[bytes, bytes]:
    """A site's certificate that another key has signed."""
    from cryptography.hazmat.primitives import hashes, serialization

    signer = serialization.load_pem_private_key(signer_key, None)
    key = keys.ec.generate_private_key(keys.ec.SECP384R1())
    use = keys.ExtendedKeyUsageOID.CLIENT_AUTH
    subject, issuer = keys._named(name), keys._named(signer_name)
    made = keys._builder(subject, issuer, key.public_key(), 30, use).sign(signer, hashes.SHA384())
    return made.public_bytes(serialization.Encoding.PEM), keys._private(key)


def test_an_outsider_who_holds_only_the_ca_certificate_gets_nothing(own, tmp_path):
    before = sorted(own.folder.path.rglob("*"))
    assert refused(own, own.context(None))
    forged = own.context(None)
    forged.load_cert_chain(*identity(tmp_path / "outsider", *keys.make_site("a")))
    for path in ("/v1/alive", "/v1/poll", "/v1/register", "/ask/a/1", "/sites"):
        with pytest.raises(REFUSED), own.dial(forged) as connection:
            own.request(None, path, on=connection)
    assert sorted(own.folder.path.rglob("*")) == before
    with own.operator() as operator:
        assert operator.sites() == {"a": (False, None), "b": (False, None)}


def test_plaintext_gets_nothing(net):
    with socket.create_connection(("127.0.0.1", net.port), timeout=PATIENT) as connection:
        connection.sendall(b"POST /v1/poll HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in connection.recv(100)


def test_tls_1_2_gets_nothing(net):
    old = net.context(net.sites["a"])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert refused(net, old)


def test_a_site_that_is_not_admitted_gets_nothing_until_it_is(own, caplog):
    caplog.set_level(logging.INFO)
    stranger = own.make_site("c")
    assert refused(own, own.context(stranger))
    own.sites["c"] = stranger
    own.agent("c")
    until(lambda: "may not admit this site's key" in caplog.text)
    own.folder.add_site(stranger.public, "c")  # while the coordinator runs
    with own.operator() as operator:
        until(lambda: operator.sites()["c"].online)
        assert operator.ask({"c": b"?"}, 0) == {"c": b"c?"}


def test_a_revoked_site_is_refused_on_open_and_on_new_connections(own):
    site = own.sites["a"]
    with own.dial(own.context(site)) as connection, own.operator(deadline=1.0) as operator:
        assert own.request(site, "/v1/alive", on=connection)[0] == 204
        own.folder.revoke("a")
        assert own.request(site, "/v1/alive", on=connection)[0] == 403
        assert refused(own, own.context(site))
        assert operator.ask({"a": b"?"}, 0) == {"a": "lost"}
        assert list(operator.sites()) == ["b"]
    assert own.request(own.sites["b"], "/v1/alive")[0] == 204


def test_a_revoked_site_comes_back_with_new_keys_alone(own, tmp_path):
    site, old = own.sites["a"], own.context(own.sites["a"])
    own.folder.revoke("a")
    site.renew()
    own.folder.add_site(site.public, "a")
    assert refused(own, old)
    assert own.request(site, "/v1/alive")[0] == 204


def test_a_renewed_certificate_of_the_coordinator_is_used_at_once(own):
    def serial():
        with own.dial(own.context(own.sites["a"])) as connection:
            assert own.request(None, "/v1/alive", on=connection)[0] == 204
            return connection.getpeercert()["serialNumber"]

    before = serial()
    own.folder.renew()
    assert serial() != before


def test_two_changes_of_the_folder_with_the_same_time_are_both_seen(idle):
    """File systems write times in steps of some milliseconds."""
    sites, now = idle.folder.path / "sites", time.time_ns() + 10**10
    os.utime(sites, ns=(now, now))
    registry = Registry(idle.folder)
    idle.admit("c")
    os.utime(sites, ns=(now, now))
    assert registry.names() == ["a", "b", "c"]


def test_a_folder_that_has_not_changed_is_not_read_again(idle, monkeypatch):
    os.utime(idle.folder.path / "sites", ns=(0, 0))
    os.utime(idle.folder.server, ns=(0, 0))
    registry = Registry(idle.folder)
    monkeypatch.setattr(FederationFolder, "sites", None)
    assert registry.names() == ["a", "b"]


def test_a_certificate_that_another_site_signed_in_a_victims_name_is_refused(net, tmp_path):
    attacker = net.sites["b"]
    forged, key = signed_by("a", "b", attacker.key.read_bytes())
    for chain in (b"", attacker.certificate.read_bytes()):
        context = net.context(None)
        context.load_cert_chain(*identity(tmp_path / f"f{len(chain)}", forged, key, chain))
        assert refused(net, context)


def test_a_certificate_that_tls_trusts_is_refused_unless_it_is_a_sites(idle, tmp_path, monkeypatch):
    forged, key = keys.make_site("z")
    made = Registry._new_context

    def careless(self, certificates):
        return made(self, [*certificates, ssl.PEM_cert_to_DER_cert(forged.decode())])

    monkeypatch.setattr(Registry, "_new_context", careless)
    idle.start()
    context = idle.context(None)
    context.load_cert_chain(*identity(tmp_path / "forged", forged, key))
    with idle.dial(context) as connection:
        assert idle.request(None, "/v1/poll", on=connection)[0] == 403


def test_an_expired_certificate_is_refused_on_new_and_on_open_connections(idle, monkeypatch):
    now, past = keys._now, timedelta(days=keys.SITE_DAYS + 1)
    with monkeypatch.context() as then:
        then.setattr(keys, "_now", lambda: now() - past)
        then.setattr(keys, "check_ca", lambda *_: None)
        then.setattr(keys, "check_site", lambda *_: None)
        expired = idle.admit("old")
    idle.start()
    assert refused(idle, idle.context(expired))
    site = idle.sites["a"]
    with idle.dial(idle.context(site)) as connection:
        assert idle.request(site, "/v1/alive", on=connection)[0] == 204
        later = time.time() + past.total_seconds()
        monkeypatch.setattr(
            mailbox, "time", SimpleNamespace(time=lambda: later, monotonic=time.monotonic)
        )
        assert idle.request(site, "/v1/alive", on=connection)[0] == 403


def test_an_agent_refuses_a_coordinator_of_another_ca_and_of_another_name(own, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    other = FederationFolder.create(tmp_path / "other", "127.0.0.1:1")
    (own.sites["a"].path / "coordinator.pem").write_bytes(other.ca.read_bytes())
    own.sites["b"] = replace(own.sites["b"], address=f"localhost:{own.port}")
    for name in "ab":
        own.agent(name)
    until(lambda: "self-signed" in caplog.text or "unable to get local issuer" in caplog.text)
    until(lambda: "Hostname mismatch" in caplog.text)
    with own.operator(deadline=0.3) as operator:
        assert operator.ask({"a": b"?", "b": b"?"}, 0) == {"a": "lost", "b": "lost"}


def test_a_registry_that_cannot_be_read_admits_nobody(own, caplog):
    site, file = own.sites["a"], own.folder.path / "sites" / "b.toml"
    good = file.read_text()
    with own.dial(own.context(site)) as connection:
        assert own.request(site, "/v1/alive", on=connection)[0] == 204
        write_text(file, "broken")
        assert own.request(site, "/v1/alive", on=connection)[0] == 503
    assert refused(own, own.context(site))
    assert "b.toml" in caplog.text
    write_text(file, good)
    assert own.request(site, "/v1/alive")[0] == 204


# ---- what is refused of an admitted site ---------------------------------------------------------


def test_answers_that_nobody_waits_for_are_refused_without_reading_them(net):
    asked = Asked(net, "a")
    message, _ = polled(net)
    a, b = net.sites["a"], net.sites["b"]
    assert net.request(b, f"/v1/answer/{message}", b"forged")[0] == 410  # another site's message
    assert net.request(a, "/v1/answer/unknown", b"forged")[0] == 410
    with net.dial(net.context(a)) as connection:
        connection.sendall(b"POST /v1/answer/no HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n")
        assert read_response(connection)[0] == 410  # before the body
    assert net.request(a, f"/v1/answer/{message}", b"answer")[0] == 204
    assert net.request(a, f"/v1/answer/{message}", b"doubled")[0] == 410
    assert asked.end() == b"answer"


def test_a_newer_poll_of_a_site_replaces_the_older(net):
    site = net.sites["a"]
    with net.dial(net.context(site)) as older:
        older.sendall(b"POST /v1/poll HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        asked = []
        newer = Background(lambda stop: asked.append(polled(net)))
        assert read_response(older)[0] == 409
        answer = Asked(net, "a")
        newer.end()
        assert net.request(site, f"/v1/answer/{asked[0][0]}", b"x")[0] == 204
        assert answer.end() == b"x"


def test_two_agents_of_one_site_disturb_nobody_else(net):
    for name in "aab":
        net.agent(name)
    with net.operator() as operator:
        for round in range(5):
            assert operator.ask({"a": b"?", "b": b"?"}, round) == {"a": b"a?", "b": b"b?"}


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_are_too_large_are_refused(idle, declared):
    idle.start(LIMITS._replace(message=1000))
    asked = Asked(idle, "a")
    message, _ = polled(idle)
    with idle.dial(idle.context(idle.sites["a"])) as connection:
        size = "content-length: 1001" if declared else "transfer-encoding: chunked"
        head = f"POST /v1/answer/{message} HTTP/1.1\r\nhost: x\r\n{size}\r\n\r\n"
        connection.sendall(head.encode() + (b"" if declared else b"3e9\r\n" + bytes(1001)))
        assert read_response(connection)[0] == 413
    assert asked.end() == "unreadable"
    assert idle.request(idle.sites["a"], "/v1/poll", b"x")[0] == 413  # a poll has no body


@pytest.mark.parametrize("number", [0, 8])
def test_a_body_that_comes_too_slowly_is_cut_off(idle, number):
    idle.start(LIMITS._replace(patience=0.4))
    asked = Asked(idle, "a")
    message, _ = polled(idle)
    with idle.dial(idle.context(idle.sites["a"])) as connection:
        head = f"POST /v1/answer/{message} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        with contextlib.suppress(OSError):
            for _ in range(number):  # a byte at a time is no progress
                connection.sendall(b"x")
                time.sleep(0.1)
        assert read_response(connection)[0] == 408
    assert idle.request(idle.sites["a"], f"/v1/answer/{message}", b"answer")[0] == 204
    assert asked.end() == b"answer"


def test_a_site_sends_one_answer_at_a_time(idle, caplog):
    """Each of its requests could hold a whole message in the coordinator's memory."""
    idle.start()
    asked = Asked(idle, "a")
    message, _ = polled(idle)
    head = f"POST /v1/answer/{message} HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\n"
    with contextlib.ExitStack() as scope:
        opened = [scope.enter_context(idle.dial(idle.context(idle.sites["a"]))) for _ in "123"]
        opened[0].sendall(head.encode() + b"abc")
        for older, newer in itertools.pairwise(opened):
            until(lambda older=older: idle.request(idle.sites["a"], "/v1/alive")[0] == 204)
            newer.sendall(head.encode() + b"abc")
            assert read_response(older)[0] == 409
        opened[-1].sendall(b"def")
        assert read_response(opened[-1])[0] == 204
    assert asked.end() == b"abcdef"
    assert "Traceback" not in caplog.text


def test_a_reader_that_is_too_slow_is_cut_off_and_the_message_comes_again(idle, caplog):
    idle.start(LIMITS._replace(patience=0.5, message=2**25))
    asked = Asked(idle, "a", body=bytes(2**24))
    with idle.dial(idle.context(idle.sites["a"])) as connection:
        connection.sendall(b"POST /v1/poll HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        until(lambda: "without completing response" in caplog.text)
        with pytest.raises(REFUSED):
            read_response(connection)
    idle.agent("a", Echo())
    assert asked.end() == bytes(2**24)


def test_open_requests_of_a_site_are_bounded_and_others_are_served(idle):
    idle.start(LIMITS._replace(requests=1))
    asked = Asked(idle, "a")
    message, _ = polled(idle)
    site, path = idle.sites["a"], f"/v1/answer/{message}"
    with idle.dial(idle.context(site)) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
        connection.sendall(head.encode())
        until(lambda: idle.request(site, "/v1/alive")[0] == 429)
        assert idle.request(idle.sites["b"], "/v1/alive")[0] == 204
        connection.sendall(b"xx")
        assert read_response(connection)[0] == 204
    assert asked.end() == b"xx"
    assert idle.request(site, "/v1/alive")[0] == 204


def test_open_connections_of_a_site_are_bounded_and_others_are_served(idle):
    idle.start(LIMITS._replace(connections=2))
    site = idle.sites["a"]
    with idle.dial(idle.context(site)) as first, idle.dial(idle.context(site)) as second:
        assert idle.request(site, "/v1/alive", on=first)[0] == 204
        assert idle.request(site, "/v1/alive", on=second)[0] == 204
        assert refused(idle, idle.context(site))
        assert idle.request(idle.sites["b"], "/v1/alive")[0] == 204
    until(lambda: not_refused(idle, site))


def not_refused(net, site):
    with contextlib.suppress(*REFUSED):
        return net.request(site, "/v1/alive")[0] == 204
    return False


def test_a_connection_without_a_request_is_closed(idle):
    idle.start(LIMITS._replace(patience=0.3))
    with idle.dial(idle.context(idle.sites["a"])) as unused, pytest.raises(REFUSED):
        read_response(unused)


def test_messages_that_wait_for_a_site_are_bounded(net, monkeypatch):
    monkeypatch.setattr(mailbox, "MOST_WAITING", 1)
    first = Asked(net, "a", b"first")
    polled(net)
    with socket.socket(socket.AF_UNIX) as operator:
        operator.connect(str(net.folder.socket))
        operator.sendall(b"POST /ask/a/1.0 HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert read_response(operator)[0] == 503  # before the body
    second = Asked(net, "a", b"second")  # waits for its turn
    net.agent("a", Echo())
    assert (first.end(), second.end()) == (b"first", b"second")


def test_other_paths_and_methods_are_not_there(net):
    site = net.sites["a"]
    with net.dial(net.context(site)) as connection:
        for method in ("GET", "PUT", "BREW"):
            assert net.request(site, "/v1/poll", method=method, on=connection)[0] == 405
        for path in ("/", "/v1/poll/", "//v1/poll", "/v1/../v1/poll", "/v1/answer/x/y", "/docs"):
            assert net.request(site, path, on=connection)[0] == 404
        for path in ("/ask/b/1", "/ask/b/1.0", "/sites", "/v1/register"):  # the operator's
            assert net.request(site, path, on=connection)[0] == 404
            assert net.request(site, path, method="GET", on=connection)[0] == 404


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/poll HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/poll HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/poll HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_malformed_requests_end_their_connection_alone(net, data):
    site = net.sites["a"]
    with net.dial(net.context(site)) as connection, contextlib.suppress(*REFUSED):
        connection.sendall(data)
        assert read_response(connection)[0] in (400, 431)
    assert net.request(site, "/v1/alive")[0] == 204


def test_strangers_take_no_more_places_than_there_are_and_give_them_back(idle):
    """One that only connects, or begins a handshake, waits; the oldest gives way to a newer one."""
    idle.start(LIMITS._replace(strangers=8, patience=6.0))
    pid = os.getpid()
    before = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    with contextlib.ExitStack() as held:
        strangers = [
            held.enter_context(socket.create_connection(("127.0.0.1", idle.port)))
            for _ in range(40)
        ]
        strangers[-1].sendall(b"\x16\x03\x01")  # the beginning of a handshake
        until(lambda: sum(ended(each) for each in strangers) >= 32)
        assert idle.request(idle.sites["a"], "/v1/alive")[0] == 204
        until(lambda: all(map(ended, strangers)))  # a handshake has two seconds
    until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) <= before + 1)


def ended(connection):
    """Whether the other side has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# ---- the operator's socket -----------------------------------------------------------------------


def test_the_operators_socket_is_this_users_alone(own):
    assert stat.S_IMODE(own.folder.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(own.folder.path.stat().st_mode) == 0o700
    own.stop()
    assert not own.folder.socket.exists()
    own.folder.path.chmod(0o750)
    with pytest.raises(StoreError, match=r"mode 750.*chmod 700"):
        coordinate(own.folder)


def test_a_second_coordinator_is_refused_and_the_first_goes_on(net):
    with pytest.raises(ConfigError, match="cannot be opened"):
        coordinate(net.folder)
    net.agent("a")
    with net.operator() as operator:
        assert operator.ask({"a": b"?"}, 0) == {"a": b"a?"}


def test_a_socket_that_a_killed_coordinator_left_is_replaced(idle):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(idle.folder.socket))
    idle.start()
    with idle.operator() as operator:
        assert list(operator.sites()) == ["a", "b"]


def test_what_lies_at_the_sockets_place_is_not_removed(idle):
    idle.folder.socket.write_text("a file")
    with pytest.raises(StoreError, match="cannot be opened"):
        coordinate(idle.folder)
    assert idle.folder.socket.read_text() == "a file"


def test_without_a_coordinator_the_operator_is_told_to_start_one(idle):
    with pytest.raises(EngineError, match="coterie coordinator"):
        DirectTransport(idle.folder)


def test_an_interrupted_ask_is_withdrawn(idle, monkeypatch):
    net = idle
    net.start(LIMITS._replace(poll=0.2))
    with net.operator(deadline=100 * PATIENT) as operator:
        future = operator._portal.start_task_soon(operator._ask_all, {"a": b"?"})
        assert polled(net)[1] == b"?"

        def interrupted():
            raise KeyboardInterrupt

        monkeypatch.setattr(operator._portal, "start_task_soon", lambda *_: future)
        monkeypatch.setattr(future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            operator.ask({"a": b"?"}, 0)
        monkeypatch.undo()
        site = net.sites["a"]
        until(lambda: net.request(site, "/v1/poll")[0] == 204)  # nothing waits any more


# ---- what comes back -----------------------------------------------------------------------------


def test_agents_and_an_open_ask_go_on_when_the_coordinator_is_back(own):
    release, handler = threading.Event(), Echo()

    class Waiting(Echo):
        def answer(self, data):
            release.wait(PATIENT)
            return handler.answer(data)

    own.agent("a", Waiting())
    asked = Asked(own, "a")
    with own.operator() as operator:
        until(lambda: operator.sites()["a"].online)
        own.stop()
        assert operator.sites() == {"a": (False, None), "b": (False, None)}
        release.set()
        own.start()
        assert asked.end() == b"question"
        assert operator.ask({"a": b"next"}, 0) == {"a": b"next"}


def test_a_coordinator_that_does_not_come_back_loses_all_sites(own):
    own.agent("a")
    with own.operator(deadline=0.5) as operator:
        own.stop()
        assert operator.ask({"a": b"?", "b": b"?"}, 0) == {"a": "lost", "b": "lost"}


def test_a_message_whose_site_died_reaches_the_site_when_it_is_back(net):
    asked = Asked(net, "a")
    polled(net)  # and the site dies
    net.agent("a", handler := Echo())
    assert asked.end() == b"question"
    assert handler.asked == 1


def test_an_answer_whose_connection_broke_is_sent_again_and_not_computed_again(net):
    proxy = Proxy(net.port, cut_after=300_000)
    net.sites["a"] = replace(net.sites["a"], address=f"127.0.0.1:{proxy.port}")
    net.agent("a", handler := Echo())
    body = os.urandom(1_000_000)
    with net.operator() as operator:
        assert operator.ask({"a": body}, 0) == {"a": body}
    assert (proxy.cuts, handler.asked) == (1, 1)
    proxy.close()


def test_an_agent_that_is_asked_to_stop_finishes_what_it_computes(net):
    computing = threading.Event()

    class Slow(Echo):
        def answer(self, data):
            computing.set()
            time.sleep(0.5)
            return data

    agent, asked = net.agent("a", Slow()), Asked(net, "a")
    computing.wait(PATIENT)
    agent.end()
    assert asked.end() == b"question"


def test_an_agent_that_computes_for_too_long_stops_without_an_answer(net, monkeypatch, caplog):
    monkeypatch.setattr(direct, "GRACE", 0.1)
    computing, release = threading.Event(), threading.Event()

    class Endless(Echo):
        def answer(self, data):
            computing.set()
            release.wait(PATIENT)
            return b"too late"

    agent, asked = net.agent("a", Endless()), Asked(net, "a")
    computing.wait(PATIENT)
    agent.end()
    assert "stops without an answer" in caplog.text
    net.agent("a", Echo())
    assert asked.end() == b"question"
    release.set()


def test_an_agent_without_a_coordinator_stops_at_once_when_asked(idle):
    agent = idle.agent("a")
    time.sleep(0.2)
    agent.end()


# ---- real numbers and real processes -------------------------------------------------------------


def counts(pid):
    """How many files a process has open, and how many MB of memory it uses."""
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return files, pages * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("size", [20_000, 2**20])
@pytest.mark.parametrize("number", [3, 50])
def test_many_sites_and_rounds_leave_memory_and_open_files_as_they_were(tmp_path, number, size):
    net = Loopback(tmp_path, [f"s{i:02}" for i in range(number)])
    coordinator, body, seconds, found = None, os.urandom(size), [], []
    try:
        coordinator = process("coordinator", net.folder.path)
        until(net.listens)
        for name in net.sites:
            net.agent(name)
        with net.operator(deadline=300.0) as operator:
            until(lambda: all(state.online for state in operator.sites().values()))
            for round in range(23):
                begun = time.monotonic()
                answers = operator.ask(dict.fromkeys(net.sites, body), round)
                seconds.append(time.monotonic() - begun)
                assert answers == {name: name.encode() + body for name in net.sites}
                found.append((*counts(coordinator.pid), counts("self")[0]))
    finally:
        net.end()
        coordinator.terminate()
        coordinator.communicate(timeout=PATIENT)
    middle = sorted(seconds[3:])[10]
    print(f"\n{number} sites, {size:,} bytes: {middle:.3f} s per round (median of 20)")
    for at in (2, 12, 22):
        print("round {}: coordinator {} files, {:.0f} MB; agents {} files".format(at, *found[at]))
    early, late = found[2], found[22]
    assert late[0] <= early[0] + 2
    assert late[2] <= early[2] + 2
    # The allocator keeps what the fullest moment needed: at most one round's messages.
    assert late[1] <= early[1] + 2 + number * size / 2**20


PROCESS = """
import logging, signal, sys, threading, time
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
kind, path = sys.argv[1], Path(sys.argv[2])
if kind == "coordinator":
    from coterie.deploy.folders import FederationFolder
    from coterie.deploy.coordinator import run_coordinator
    run_coordinator(FederationFolder.open(path))
else:
    from coterie.deploy.direct import serve
    from coterie.deploy.folders import SiteFolder
    class Slow:
        def answer(self, data):
            time.sleep(0.2)
            return path.name.encode() + data

        def largest(self):
            return 2**20

    serve(SiteFolder.open(path), Slow(), stop)
print("clean", flush=True)
"""


def process(kind, path):
    return subprocess.Popen([sys.executable, "-c", PROCESS, kind, path], stdout=subprocess.PIPE)


@pytest.mark.slow
def test_after_kill_9_of_coordinator_and_agents_every_message_is_still_answered(idle):
    coordinator = process("coordinator", idle.folder.path)
    agents = {name: process("site", site.path) for name, site in idle.sites.items()}
    try:
        until(idle.listens)
        asked, again = Background(lambda stop: rounds(idle, stop)), []
        for victim in ("coordinator", "a", "coordinator", "b"):
            time.sleep(1.5)
            killed = coordinator if victim == "coordinator" else agents[victim]
            killed.kill()
            killed.communicate()
            begun = time.monotonic()
            if victim == "coordinator":
                coordinator = process("coordinator", idle.folder.path)
            else:
                agents[victim] = process("site", idle.sites[victim].path)
            with contextlib.closing(waiting_for(idle)) as operator:
                until(lambda: all(state.online for state in operator.sites().values()))
                assert operator.ask({"a": b"?", "b": b"?"}, 0) == ANSWERS
            again.append(f"{victim} {time.monotonic() - begun:.1f} s")
        asked.end()
        print("\nkilled, and everything answered again after:", ", ".join(again))
    finally:
        ended = [coordinator, *agents.values()]
        for each in ended:
            each.terminate()
        said = [each.communicate(timeout=PATIENT)[0] for each in ended]
    assert said == [b"clean\n"] * 3
    assert [each.returncode for each in ended] == [0] * 3


ANSWERS = {"a": b"site-a?", "b": b"site-b?"}


def rounds(net, stop):
    """Ask all sites again and again; every answer must come, whoever is killed meanwhile."""
    with net.operator(deadline=60.0) as operator:
        while not stop.is_set():
            assert operator.ask({"a": b"?", "b": b"?"}, 0) == ANSWERS


def waiting_for(net):
    """A transport as soon as a coordinator answers."""
    made = []

    def reached():
        with contextlib.suppress(EngineError):
            made.append(DirectTransport(net.folder, 60.0))
        return made

    until(reached)
    return made[0]
