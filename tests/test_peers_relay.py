"""Peers without a server: sealed messages over a blind relay, bit for bit as the simulator."""

import base64
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nacl")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from nacl.public import PrivateKey

from coterie.algorithms.federico import FedeRiCo
from coterie.core import tree
from coterie.core.optim import Recipe
from coterie.deploy.folders import FederationFolder
from coterie.deploy.peers.relay import Relay, RelayLimits
from coterie.deploy.peers.sealing import REFUSALS, Opener, PeerIdentity, PeerKeys, Sealer, SealError
from coterie.deploy.peers.talk import Correspondence, HttpLink
from coterie.errors import ConfigError, StoreError
from loopback import LIMITS, Loopback
from support import normed
from towns import EXPERIMENT, NAMES, PINNED, SECRETS, SPREAD, Town, identity, plan


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("step", ["local_epochs", "gradient"])
@pytest.mark.parametrize("downloads", [1, 2, 3])
def test_peers_equal_the_simulator_bit_for_bit(
    tmp_path: Path, downloads: int, step: Any, participation: float
) -> None:
    method = FedeRiCo(downloads=downloads, step=step, **SPREAD)
    town = Town(tmp_path, method, plan(participation=participation))
    assert town.digests() == town.simulated()
    assert not any(town.notes.values())


def test_buffers_and_adam_are_equal_too(tmp_path: Path) -> None:
    method = FedeRiCo(downloads=2, step="gradient", scale="mean", **SPREAD)
    adam = Recipe(lr=0.01, epochs=1, batch=6, optimizer="adam")
    town = Town(tmp_path, method, plan(2), {"factory": normed, "recipe": adam})
    assert town.digests() == town.simulated()


# ---- the seal ------------------------------------------------------------------------------------

NOW = {"model": range(3, 4)}


def sealed(**changes: Any) -> bytes:
    """A message of round 3 from ahus to berg, or a variant of it."""
    told = {"sender": "ahus", "to": "berg", "experiment": EXPERIMENT, "boot": 1, "round": 3}
    told |= {"kind": "model", **changes}
    sealer = Sealer(identity(told["sender"]), told["experiment"], told["boot"])
    return sealer.seal(told["to"], told["round"], told["kind"], b"payload")


def opener(name: str = "berg", **counters: int) -> Opener:
    return Opener(identity(name), EXPERIMENT, counters)


def readdressed(data: bytes, sender: str, to: str) -> bytes:
    """The same box with other names outside of it."""
    magic, _, _, box = data.split(b"\n", 3)
    return b"\n".join([magic, sender.encode(), to.encode(), box])


def other_key() -> bytes:
    """A message in the name of ahus, sealed by another key."""
    wrong = {**SECRETS, "ahus": bytes([99]) * 32}
    keys = PeerKeys({n: bytes(PrivateKey(s).public_key) for n, s in wrong.items()})
    return Sealer(PeerIdentity("ahus", wrong["ahus"], keys), EXPERIMENT, 1).seal(
        "berg", 3, "model", b""
    )


def test_a_sealed_message_is_opened_once_by_its_receiver() -> None:
    opens = opener()
    assert opens.open(sealed(), NOW) == ("ahus", 3, "model", b"payload")
    with pytest.raises(SealError, match="replayed"):
        opens.open(sealed(), NOW)
    assert opens.open(sealed(boot=2), NOW).payload == b"payload"
    with pytest.raises(SealError, match="replayed"):  # a later one has been accepted
        opens.open(sealed(), NOW)
    again = opener(**opens.counters)  # after a restart
    with pytest.raises(SealError, match="replayed"):
        again.open(sealed(boot=2), NOW)


ATTACKS: dict[str, list[Callable[[], bytes]]] = {
    "unreadable": [lambda: b"", lambda: b"hello", lambda: b"coterie sealed\nahus\nberg"],
    "readdressed": [lambda: sealed(to="caen")],
    "unknown": [lambda: readdressed(sealed(), "zora", "berg")],
    "tampered": [
        lambda: sealed()[:-1] + bytes([sealed()[-1] ^ 1]),
        lambda: sealed()[:60],
        lambda: readdressed(sealed(), "caen", "berg"),
        lambda: readdressed(sealed(to="caen"), "ahus", "berg"),
        other_key,
    ],
    "reflected": [lambda: readdressed(sealed(sender="berg", to="ahus"), "ahus", "berg")],
    "experiment": [lambda: sealed(experiment="1" * 64)],
    "replayed": [lambda: sealed(boot=0)],
    "kind": [lambda: sealed(kind="change")],
    "wrong_round": [lambda: sealed(round=2), lambda: sealed(round=4), lambda: sealed(round=-1)],
}


@pytest.mark.parametrize(
    ("reason", "attack"), [(reason, a) for reason, attacks in ATTACKS.items() for a in attacks]
)
def test_every_attack_on_a_message_has_its_own_reason(
    reason: str, attack: Callable[[], bytes]
) -> None:
    with pytest.raises(SealError) as refused:
        opener(ahus=1 << 31).open(attack(), NOW)
    assert refused.value.reason == reason
    assert REFUSALS[reason] in str(refused.value)


def test_a_version_and_names_that_only_a_peer_can_forge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.deploy.peers.sealing.VERSION", 2)
    later = sealed()
    monkeypatch.undo()
    with pytest.raises(SealError, match="version"):
        opener().open(later, NOW)
    liar = Sealer(identity("ahus"), EXPERIMENT, 1)
    inside = replace(identity("ahus"))
    object.__setattr__(inside, "name", "caen")  # the box is ahus's, the names inside are not
    liar._identity = inside
    with pytest.raises(SealError) as refused:
        opener().open(readdressed(liar.seal("berg", 3, "model", b""), "ahus", "berg"), NOW)
    assert refused.value.reason == "forged"
    assert ATTACKS.keys() | {"version", "forged"} == REFUSALS.keys()


def test_no_changed_byte_of_a_message_passes() -> None:
    whole = sealed()
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :]
        with pytest.raises(SealError):
            opener().open(changed, NOW)


def test_sizes_are_whole_blocks() -> None:
    seal = Sealer(identity("ahus"), EXPERIMENT, 1).seal
    assert len(seal("berg", 0, "want", b"")) == len(seal("berg", 700, "change", bytes(500)))
    assert len(seal("berg", 0, "want", bytes(2000))) - len(seal("berg", 0, "want", b"")) == 2048


def test_a_roster_pins_one_key_for_each_site(tmp_path: Path) -> None:
    lines = [f'{n} = "{base64.b64encode(k).decode()}"' for n, k in PINNED.keys.items()]
    (tmp_path / "roster.toml").write_text("\n".join(["[peers]", *lines]))
    assert PeerKeys.read(tmp_path / "roster.toml") == PINNED
    told = PINNED.fingerprints()
    assert told["berg"] == hashlib.sha256(PINNED.keys["berg"]).hexdigest()
    with pytest.raises(ConfigError, match="same box key"):
        PeerKeys({**PINNED.keys, "zora": PINNED.keys["ahus"]})
    with pytest.raises(ConfigError, match="31 bytes"):
        PeerKeys({"ahus": bytes(31)})
    with pytest.raises(ConfigError, match="found 31 bytes"):
        PeerIdentity("ahus", bytes(31), PINNED)
    with pytest.raises(ConfigError, match="not the one of this site"):
        PeerIdentity("ahus", SECRETS["berg"], PINNED)
    for text in ("[peers]\na = 1", "a = 2", "[peers", '[peers]\na = "?"'):
        (tmp_path / "roster.toml").write_text(text)
        with pytest.raises(StoreError, match="expected a table"):
            PeerKeys.read(tmp_path / "roster.toml")


def test_a_site_shows_the_fingerprints_of_its_roster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from coterie.commands.site_commands import peers

    net, roster = Loopback(tmp_path, NAMES[:2]), tmp_path / "roster.toml"
    keys = {site.name: site.box for site in net.folder.sites()}
    roster.write_text("\n".join(["[peers]", *(f'{n} = "{k}"' for n, k in keys.items())]))
    peers(net.sites["ahus"].path, roster)
    said = capsys.readouterr().out.replace(" ", "").lower()
    for name, key in keys.items():
        assert name + hashlib.sha256(base64.b64decode(key)).hexdigest() in said
    roster.write_text(roster.read_text().replace(keys["ahus"], keys["berg"][::-1]))
    with pytest.raises((ConfigError, StoreError)):
        peers(net.sites["ahus"].path, roster)


# ---- the relay -----------------------------------------------------------------------------------


def test_the_relay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender holds no more than one message of the largest size, whoever it is for."""
    relay = Relay(RelayLimits(count=2, each=60, age=10))
    assert relay.put("ahus", "berg", bytes(61)) == "size"
    assert relay.put("ahus", "berg", bytes(58)) is None
    assert relay.put("ahus", "dorn", bytes(3)) == "full"
    assert relay.put("ahus", "berg", b"b") is None
    assert relay.put("ahus", "caen", b"c") == "full"
    assert relay.put("dorn", "caen", b"c") is None
    assert [relay.take("berg"), relay.take("berg"), relay.take("berg")] == [bytes(58), b"b", None]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert relay.take("caen") is None


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Loopback]:
    """A running coordinator with the sites ahus and berg."""
    made = Loopback(tmp_path, NAMES[:2])
    let_peers(made.folder, NAMES[:2])
    made.start()
    yield made
    made.end()


def let_peers(folder: FederationFolder, names: Sequence[str]) -> None:
    """Name the sites that may use the relay."""
    path = folder.path / "federation.toml"
    path.write_text(path.read_text().replace("sites = []", f"sites = {json.dumps([*names])}"))


def test_the_relay_is_off_for_sites_that_no_peers_are_named_of(tmp_path: Path) -> None:
    made = Loopback(tmp_path, NAMES[:3])
    let_peers(made.folder, NAMES[1:3])
    made.start()
    try:
        ahus, berg, _ = made.sites.values()
        assert made.request(ahus, "/v1/mail/berg", b"x")[0] == 404
        assert made.request(ahus, "/v1/mail?wait=0")[0] == 404
        assert made.request(berg, "/v1/mail/ahus", b"x")[0] == 404
        assert made.request(berg, "/v1/mail/caen", b"x")[0] == 202
    finally:
        made.end()


def test_the_relay_knows_sites_by_their_certificates(net: Loopback) -> None:
    ahus, berg = (net.sites[name] for name in NAMES[:2])
    assert net.request(ahus, "/v1/mail/berg", b"x")[0] == 202
    assert net.request(ahus, "/v1/mail/zora", b"x")[0] == 404
    assert net.request(ahus, "/v1/mail/berg", bytes(LIMITS.message + 1))[0] == 413
    with net.dial(net.context(ahus)) as endless:  # it is refused before all of it is there
        head = b"POST /v1/mail/berg HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n"
        endless.sendall(head + bytes(LIMITS.message + 1))
        assert endless.recv(12) == b"HTTP/1.1 413"
    assert net.request(ahus, "/v1/mail?wait=0")[0] == 204
    assert net.request(berg, "/v1/mail?wait=0")[::2] == (200, b"x")
    assert net.request(berg, "/v1/mail?wait=0")[0] == 204
    with pytest.raises((OSError, EOFError)):  # no certificate
        net.request(None, "/v1/mail?wait=0")
    with pytest.raises((OSError, EOFError)):  # one that was never admitted
        net.request(net.make_site("caen"), "/v1/mail?wait=0")
    net.folder.revoke("berg")
    assert net.request(ahus, "/v1/mail/berg", b"x")[0] == 404


def test_a_site_that_hangs_up_while_it_waits_loses_no_mail(net: Loopback) -> None:
    ahus, berg = (net.sites[name] for name in NAMES[:2])
    for _ in range(3):
        with net.dial(net.context(berg)) as waiting:
            waiting.sendall(
                b"POST /v1/mail?wait=20 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            )
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)  # the request has begun
        assert net.request(ahus, "/v1/mail/berg", b"x")[0] == 202
        assert net.request(berg, "/v1/mail?wait=0")[::2] == (200, b"x")


def test_links_wait_for_mail_and_for_the_relay(net: Loopback) -> None:
    notes: list[str] = []
    ahus, berg = (HttpLink.dial(net.sites[name], notes.append) for name in NAMES[:2])
    fetched: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: fetched.append(berg.fetch(20)))
    waiting.start()
    assert ahus.send("berg", b"1")
    waiting.join(20)
    assert fetched == [b"1"]
    assert not ahus.send("zora", b"1")
    assert notes == ["the relay refused a message to 'zora' with status 404"]
    net.stop()
    assert berg.fetch(0.1) is None
    sending = threading.Thread(target=lambda: ahus.send("berg", b"2"))
    sending.start()
    net.start()
    sending.join(20)
    assert berg.fetch(20) == b"2"
    ahus.close()
    berg.close()


# ---- what the relay sees -------------------------------------------------------------------------

WINDOW = 12  # bytes: three numbers of a model in a row occur nowhere else


def windows(vector: torch.Tensor) -> list[bytes]:
    """Pieces of a vector's bytes; those that are mostly zeros say nothing and are left out."""
    data = vector.numpy().tobytes()
    parts = (data[at : at + WINDOW] for at in range(0, len(data) - WINDOW, WINDOW))
    return [part for part in parts if len(set(part)) > WINDOW // 2]


def test_the_relay_and_its_logs_hold_no_bytes_of_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    exchanged: dict[str, list[torch.Tensor]] = {"model": [], "change": []}
    kept: list[bytes] = []
    unsealed: list[bytes] = []
    put, send, seal = Relay.put, Correspondence.send, Sealer.seal

    def keeping(relay: Relay, who: str, to: str, blob: bytes) -> Any:
        kept.append(to.encode() + blob)
        return put(relay, who, to, blob)

    def noting(talk: Any, to: str, round: int, kind: str, head: Any, body: Any = ()) -> None:
        exchanged.setdefault(kind, []).extend(leaf for leaf in tree.leaves(body) if leaf.dim())
        send(talk, to, round, kind, head, body)

    def sealing(sealer: Sealer, to: str, round: int, kind: str, payload: bytes) -> bytes:
        unsealed.append(payload)
        return seal(sealer, to, round, kind, payload)

    monkeypatch.setattr(Relay, "put", keeping)
    monkeypatch.setattr(Sealer, "seal", sealing)
    monkeypatch.setattr(Correspondence, "send", noting)
    caplog.set_level("DEBUG")
    town = Town(tmp_path, FedeRiCo(downloads=2, **SPREAD), plan(2))
    town.digests()
    out = capfd.readouterr()
    seen = b"".join([*kept, caplog.text.encode(), out.out.encode(), out.err.encode()])
    pieces = [part for each in exchanged.values() for vector in each for part in windows(vector)]
    assert len(exchanged["model"]) >= 20
    assert len(exchanged["change"]) >= 15
    assert len(pieces) > 1000
    assert all(part in b"".join(unsealed) for part in pieces)  # what the search would find
    assert not any(part in seen for part in pieces)
    assert not any(word in seen for word in (b"model", b"change", b"want", EXPERIMENT.encode()))


# ---- real processes over TLS ---------------------------------------------------------------------


@pytest.mark.slow
def test_processes_over_tls_with_kills_of_sites_and_of_the_relay_equal_the_simulator(
    tmp_path: Path,
) -> None:
    net = Loopback(tmp_path, NAMES)
    let_peers(net.folder, NAMES)
    net.start()
    roster = tmp_path / "roster.toml"
    keys = [f'{site.name} = "{site.box}"' for site in net.folder.sites()]
    roster.write_text("\n".join(["[peers]", *keys]))
    script = Path(__file__).parent / "peer_process.py"

    def started(name: str) -> subprocess.Popen[str]:
        site, work = net.sites[name].path, tmp_path / "work" / name
        command = [sys.executable, str(script), str(site), str(roster), str(work), "4"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def sent(name: str) -> int:
        log = tmp_path / "work" / name / "sent.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def waits(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not true():
            assert time.monotonic() < end
            time.sleep(0.01)

    running = {name: started(name) for name in NAMES}
    try:
        for lines, victim in ((9, "caen"), (18, "ahus"), (30, "relay"), (36, "caen")):
            waits(lambda lines=lines: sent("caen") >= lines)
            if victim == "relay":
                net.stop()
                net.start()
            else:
                running[victim].kill()
                running[victim].communicate()
                running[victim] = started(victim)
        found = [running[name].communicate(timeout=120)[0].strip() for name in NAMES]
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
        net.end()
    assert found == Town(tmp_path, FedeRiCo(downloads=2, **SPREAD), plan(4)).simulated()
