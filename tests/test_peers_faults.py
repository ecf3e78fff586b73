"""Peers whose relay attacks, whose sites die, stay away, diverge or lie."""

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nacl")

from coterie.adapt import ADAPTATIONS, Adapted
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.federico import FedeRiCo
from coterie.core.algorithm import AnyAlgorithm
from coterie.core.privacy import Privacy
from coterie.deploy.peers.meeting import Meeting, SupersededError
from coterie.deploy.peers.peer import PeerResult, PeerSite
from coterie.deploy.peers.relay import Relay
from coterie.deploy.peers.sealing import Opener, Sealer
from coterie.deploy.peers.talk import (
    Correspondence,
    Decision,
    InProcessLink,
    Letter,
    PeerFolder,
    RollCall,
)
from coterie.deploy.peers.work import OwnPart
from coterie.engines.codec import Message, encode
from coterie.errors import ConfigError, StoreError
from coterie.training import rounds as training_rounds
from coterie.training.guard import Guard
from support import normed
from towns import EXPERIMENT, NAMES, SPREAD, Town, identity, plan, simulation

METHOD = FedeRiCo(downloads=2, **SPREAD)


# ---- a relay that attacks ------------------------------------------------------------------------


class Hostile(Relay):
    """Sends again, changes, redirects, returns, delays and drops messages."""

    def __init__(self) -> None:
        super().__init__()
        self._chance, self._old = random.Random(0), []
        self._lock = threading.Lock()

    def put(self, who: str, to: str, blob: bytes) -> Any:
        magic, sender, receiver, box = blob.split(b"\n", 3)
        with self._lock:
            self._old.append((who, to, blob))
            attack, again = self._chance.randrange(6), self._chance.choice(self._old)
        if attack == 0:
            super().put(*again)  # of any round before
        elif attack == 1:
            super().put(who, to, blob[:-1] + bytes([blob[-1] ^ 1]))
        elif attack == 2:
            super().put(who, again[1], blob)  # to whom it may not be addressed
        elif attack == 3:
            super().put(who, sender.decode(), b"\n".join([magic, receiver, sender, box]))
        dropped = attack == 4 and len(self._old) % 3 == 0
        return None if dropped else super().put(who, to, blob)


@pytest.mark.slow  # it waits for messages that the relay drops
def test_a_relay_that_attacks_changes_nothing(tmp_path: Path) -> None:
    town = Town(tmp_path, METHOD, plan(2, nudge=0.3), relay=Hostile())
    assert town.digests() == town.simulated()
    said = " ".join(line for lines in town.notes.values() for line in lines)
    for reason in ("replayed", "tampered", "readdressed", "reflected"):
        assert f"({reason})" in said


# ---- sites that die ------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for kill -9: nothing is cleaned up."""


class Dying(InProcessLink):
    """The link of a site that dies when it sends or fetches for the n-th time."""

    def __init__(self, relay: Relay, name: str, turns: int) -> None:
        super().__init__(relay, name)
        object.__setattr__(self, "_left", [turns])

    def _turn(self) -> None:
        left: list[int] = self._left  # type: ignore[attr-defined]
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    def send(self, to: str, blob: bytes) -> bool:
        self._turn()
        return super().send(to, blob)

    def fetch(self, seconds: float) -> bytes | None:
        found = super().fetch(seconds)
        self._turn()  # after the relay has forgotten the message
        return found


class Calling(InProcessLink):
    """A link that tells when it was first used."""

    def __init__(self, relay: Relay, name: str, used: threading.Event) -> None:
        super().__init__(relay, name)
        object.__setattr__(self, "_used", used)

    def send(self, to: str, blob: bytes) -> bool:
        sent = super().send(to, blob)
        self._used.set()  # type: ignore[attr-defined]
        return sent


SLOW = [pytest.param(turns, marks=pytest.mark.slow) for turns in range(1, 31)]


@pytest.mark.parametrize("turns", [4, 13, 22, *SLOW])
@pytest.mark.parametrize("name", ["ahus", "caen"])  # the convener, and another site
def test_a_site_that_is_killed_continues_and_nothing_changes(
    tmp_path: Path, name: str, turns: int
) -> None:
    town = Town(tmp_path, METHOD, plan(2, nudge=0.1))
    town.links[name] = Dying(town.relay, name, turns)
    died = []

    def again() -> PeerResult:
        died.append(town.links.pop(name))
        return town.peer(name).run()

    town.again[name] = again
    assert town.digests() == town.simulated()
    assert died


# ---- sites that stay away ------------------------------------------------------------------------


def rolls(town: Town) -> list[tuple[str, ...]]:
    """The sites of every closed round, as the convener kept them."""
    decisions = map(
        Decision.from_json, json.loads((town.path / NAMES[0] / "roll.json").read_text())
    )
    return [decision.names for decision in decisions if decision.closed]


def simulate_rolls(monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, ...]]) -> None:
    """Let the simulator draw exactly these sites for its rounds."""

    def drawn(algorithm: Any, problem: Any, index: int, share: float) -> torch.Tensor:
        return torch.tensor([NAMES.index(name) for name in told[index]])

    monkeypatch.setattr(training_rounds, "participants", drawn)


def same_models(monkeypatch: pytest.MonkeyPatch, town: Town, names: tuple[str, ...]) -> None:
    """Whether sites hold the simulator's models after the rounds that were closed."""
    simulate_rolls(monkeypatch, rolls(town))
    models = town.record().server.models
    for name in names:
        assert torch.equal(town.kept(name).held.model, models[NAMES.index(name)])


@pytest.mark.parametrize("turns", [6, 16])
def test_a_site_that_is_lost_is_left_out_as_if_it_was_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    town = Town(tmp_path, METHOD, plan(3, nudge=0.1, patience=1.0))
    town.links["caen"] = Dying(town.relay, "caen", turns)
    assert isinstance(town.run()["caen"], KilledError)
    assert any("caen" not in names for names in rolls(town)[:3])
    same_models(monkeypatch, town, tuple(name for name in NAMES if name != "caen"))


def test_a_site_that_comes_back_goes_on_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path, METHOD, plan(4, nudge=0.1, patience=1.5))
    town.links["caen"] = Dying(town.relay, "caen", 10)
    missed, back = threading.Event(), threading.Event()

    def again() -> PeerResult:
        assert missed.wait(30)
        town.links["caen"] = Calling(town.relay, "caen", back)
        return town.peer("caen").run()

    town.again["caen"] = again
    keep = PeerFolder.keep_decisions

    def keeping(folder: PeerFolder, decisions: Sequence[Decision]) -> None:
        keep(folder, decisions)
        if any("caen" not in each.names and each.closed for each in decisions):
            missed.set()
            assert back.wait(30)  # the others wait until it is there

    monkeypatch.setattr(PeerFolder, "keep_decisions", keeping)
    town.run()
    told = ["caen" in names for names in rolls(town)]
    assert not all(told)
    assert any(told[told.index(False) :])
    same_models(monkeypatch, town, NAMES)


def test_a_roll_needs_more_than_half_and_waits_for_all_at_first() -> None:
    roll = RollCall(lambda round: NAMES, 3, 10.0, (), 0.0)
    for name in NAMES[:4]:
        roll.heard(name, 0, "here", 0, 1.0)
    assert roll.decide(100.0) is None  # round 0 waits for everybody
    roll.heard("elba", 0, "here", 0, 100.0)
    first = roll.decide(100.0)
    assert first == Decision(0, 0, NAMES)
    for name in NAMES[:2]:
        roll.heard(name, 0, "done", 0, 120.0)
    assert roll.decide(120.0) is None  # only two of five gave a sign
    roll.heard("caen", 0, "working", 0, 121.0)
    second = roll.decide(121.0)
    assert second == Decision(0, 1, NAMES[:3])
    for name in NAMES[:3]:
        roll.heard(name, 0, "done", 0, 122.0)  # of the attempt before
    roll.heard("caen", 0, "done", 1, 122.0)
    assert roll.decide(122.0) is None  # the others were done with the attempt before
    for name in NAMES[:3]:
        roll.heard(name, 0, "done", 1, 122.0)
    assert roll.decide(122.0) == second._replace(closed=True)
    for name in NAMES[:3]:
        roll.heard(name, 1, "here", 0, 123.0)
    assert roll.decide(123.0) == Decision(1, 0, NAMES[:3])  # nobody waits for who is away
    roll.heard("dorn", 0, "here", 0, 124.0)
    assert roll.about(0) == second._replace(closed=True)
    for name in NAMES[:3]:
        roll.heard(name, 1, "done", 0, 124.0)
        roll.heard(name, 2, "here", 0, 125.0)
    assert roll.decide(125.0) == Decision(1, 0, NAMES[:3], closed=True)
    assert roll.decide(125.0) is None  # dorn is back: it is waited for
    roll.heard("dorn", 2, "here", 0, 126.0)
    assert roll.decide(126.0) == Decision(2, 0, NAMES[:4])


def test_a_convener_that_was_restarted_keeps_to_its_decisions() -> None:
    kept = (Decision(0, 0, NAMES, closed=True), Decision(1, 1, NAMES[:4]))
    roll = RollCall(lambda round: NAMES, 3, 10.0, kept, 0.0)
    assert roll.round == 1
    assert roll.decide(5.0) is None
    for name in NAMES[:4]:
        roll.heard(name, 1, "done", 1, 6.0)
    assert roll.decide(6.0) == Decision(1, 1, NAMES[:4], closed=True)
    assert roll.decisions[0] == kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0.02, 0.05, 0.1, 0.2, 0.4] * 4)
def test_impatient_rounds_equal_the_simulator_whoever_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Sites are left out all the time, because nobody is as fast as this convener expects."""
    town = Town(tmp_path, METHOD, plan(5, nudge=patience / 4, patience=patience))
    found = town.run()
    errors = [each for each in found.values() if isinstance(each, BaseException)]
    assert all("was left out when" in str(error) for error in errors)
    same_models(monkeypatch, town, NAMES)


class Stub:
    """Stands for a correspondence: what is to arrive, and what was sent."""

    def __init__(self) -> None:
        self.arrives: list[Letter] = []
        self.sent: list[tuple[str, str]] = []
        self.stages: list[tuple[str, int]] = []

    def receive(self, seconds: float, rounds: Any) -> Letter | None:
        return self.arrives.pop(0) if self.arrives else None

    def send(self, to: str, round: int, kind: str, head: Any, body: Any = ()) -> None:
        self.sent.append((to, kind))
        if kind == "stage":
            self.stages.append((head["stage"], head["attempt"]))


def test_a_site_follows_its_convener_and_no_other_roll() -> None:
    talk, notes = Stub(), []
    meeting = Meeting("berg", "ahus", talk, None, lambda told: None, 60.0, notes.append)
    meeting.enter(0, NAMES[:4], model())
    right, other = Decision(0, 0, NAMES[:3]), Decision(0, 0, NAMES[:4])
    foreign, later = Decision(0, 1, NAMES), Decision(1, 5, NAMES[:3])
    turned = Decision(0, 1, NAMES[2::-1])

    def wants(sender: str, decision: Decision) -> Letter:
        head = {"wants": True, "attempt": decision.attempt, "roll": decision.roll}
        return Letter(sender, 0, "want", head, ())

    talk.arrives = [
        wants("caen", right),  # comes early: it is kept
        Letter("caen", 0, "decision", other.to_json(), ()),
        Letter("ahus", 0, "decision", foreign.to_json(), ()),
        Letter("ahus", 0, "decision", later.to_json(), ()),
        Letter("ahus", 0, "decision", turned.to_json(), ()),
        Letter("ahus", 0, "decision", {"round": 0}, ()),
        Letter("ahus", 0, "decision", right.to_json(), ()),
    ]
    assert meeting.decided() == right
    meeting.begin(right)
    assert ("caen", "model") in talk.sent
    talk.arrives = [
        wants("ahus", other),
        wants("dorn", right),  # not in the roll
        Letter("ahus", 0, "want", {}, ()),
        wants("ahus", right),
    ]
    assert meeting.gather("want", ["ahus", "caen"]).keys() == {"ahus", "caen"}
    assert [to for to, kind in talk.sent if kind == "model"] == ["caen", "ahus"]
    assert len(notes) == 8
    again = Decision(0, 1, NAMES[:2])
    talk.arrives = [Letter("ahus", 0, "decision", again.to_json(), ())]
    with pytest.raises(SupersededError):
        meeting.gather("change", ["caen"])
    assert meeting.decided() == again


def test_a_site_is_done_with_the_attempt_that_it_has_worked_on_and_no_other() -> None:
    """A new attempt comes in while the site reports that it is done with the one before."""
    talk = Stub()
    meeting = Meeting("berg", "ahus", talk, None, lambda told: None, 0.0, print)
    meeting.enter(0, NAMES, model())
    first, second = Decision(0, 0, NAMES), Decision(0, 1, NAMES[:4])
    talk.arrives = [Letter("ahus", 0, "decision", first.to_json(), ())]
    meeting.begin(meeting.decided())
    meeting.done()
    told = Letter("ahus", 0, "decision", second.to_json(), ())
    later = iter([None, None, None, told, None])  # it comes in the second turn of the wait
    talk.receive = lambda seconds, rounds: next(later)
    with pytest.raises(SupersededError):
        meeting.closed()
    assert meeting.decided() == second
    meeting._report()
    assert ("done", 0) in talk.stages
    assert ("done", 1) not in talk.stages
    assert talk.stages[-1] == ("here", 0)


# ---- sites that diverge, and sites that lie ------------------------------------------------------


def test_a_site_that_diverges_is_left_out_as_in_the_simulator(tmp_path: Path) -> None:
    """Its batch-norm statistics overflow: its part of no round counts, for nobody."""
    town = Town(tmp_path, METHOD, plan(2), {"broken": "caen", "factory": normed})
    assert town.digests() == town.simulated()
    assert {reject.reason for reject in town.record().rejected} == {"not_finite"}
    assert not any(town.notes[name] for name in NAMES if name != "caen")
    assert any("'caen'" in line and "not_finite" in line for line in town.notes["caen"])


def model(value: float = 0.01) -> torch.Tensor:
    return torch.full((323,), value)


ONE = torch.ones((), dtype=torch.float64)
LIES = {  # to each site another body, and the reason for which it is left out
    "change": [
        (lambda body: (ONE, model(torch.nan)), "not_finite"),
        (lambda body: (ONE, model()[:1]), "shape"),
        (lambda body: (ONE, model().double()), "dtype"),
        (lambda body: (ONE, model(), ONE), "fields"),
    ],
    "change of any size": [
        (lambda body: (ONE, model(1e7)), "outsized"),
        (lambda body: (5 * ONE, model(0.0)), "outsized"),
        (lambda body: (-ONE, model(0.0)), "outsized"),
        (lambda body: (ONE * torch.nan, model()), "not_finite"),
    ],
    "model": [
        (lambda body: body * torch.nan, "not_finite"),
        (lambda body: body[:1], "shape"),
        (lambda body: 1e9 * body, "outsized"),
        (lambda body: (), "fields"),
    ],
}


@pytest.mark.parametrize("lies", LIES)
def test_what_a_peer_lies_about_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: str
) -> None:
    others = [name for name in NAMES if name != "caen"]
    told, send = dict(zip(others, LIES[lies], strict=True)), Correspondence.send

    def lying(talk: Any, to: str, round: int, kind: str, head: Any, body: Any = ()) -> None:
        if kind == lies.split()[0] and talk._sealer._identity.name == "caen":
            body = told[to][0](body)
        send(talk, to, round, kind, head, body)

    monkeypatch.setattr(Correspondence, "send", lying)
    town = Town(tmp_path, FedeRiCo(downloads=4, **SPREAD), plan(1))
    town.digests()
    assert not town.notes["caen"]
    for name in others:
        kept = town.kept(name).held.model
        assert kept.isfinite().all()
        assert float(kept.norm()) < 100
        (said,) = {line for line in town.notes[name] if line.startswith("round 0")}
        assert f"'caen' sent is left out ({told[name][1]})" in said


# ---- what is refused before anything runs --------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (FedAvg(), "only federico"),
        (FedeRiCo(form="centralised"), "only federico"),
        (Adapted(FedeRiCo(), ADAPTATIONS["ft"]()), "only federico"),
    ],
)
def test_other_methods_are_refused(method: AnyAlgorithm, word: str) -> None:
    on = simulation(method)
    with pytest.raises(ConfigError, match=word):
        OwnPart(on.problem, on.shards.of(0), method, 0, Guard())


def test_noise_that_all_peers_could_compute_is_refused() -> None:
    on = simulation(METHOD)
    problem = replace(on.problem, privacy=Privacy(noise=1.0))
    with pytest.raises(ConfigError, match="the site's own secret"):
        OwnPart(problem, on.shards.of(0), METHOD, 0, Guard())


def test_a_site_that_is_not_in_the_roster_is_refused(tmp_path: Path) -> None:
    town = Town(tmp_path, METHOD, plan())
    on = simulation(METHOD)
    part = OwnPart(on.problem, on.shards.of(1), METHOD, 1, Guard())
    link = InProcessLink(town.relay, "ahus")
    with pytest.raises(ConfigError, match="expected 'berg' among"):
        PeerSite(part, town.plan, identity("ahus"), link, town.folder("ahus"), print)


# ---- state ---------------------------------------------------------------------------------------


def test_lost_flipped_and_foreign_state_is_refused(tmp_path: Path) -> None:
    town = Town(tmp_path, METHOD, plan(1))
    town.digests()
    path = tmp_path / "berg" / "state.bin"
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StoreError, match="sha256 is another"):
            town.peer("berg")
    path.write_bytes(whole)
    with pytest.raises(StoreError, match="another experiment"):
        replace(town.folder("berg"), experiment="1" * 64).open()
    path.unlink()
    with pytest.raises(StoreError, match="has sent messages"):
        town.peer("berg")


def test_a_site_that_was_rolled_back_is_refused(tmp_path: Path) -> None:
    town = Town(tmp_path, METHOD, plan(1))
    berg = town.peer("berg")  # still in round 0, of which the convener says that berg is done
    payload = encode(Message(Decision(0, 0, NAMES, closed=True).to_json()))
    sealer = Sealer(identity("ahus"), EXPERIMENT, 1)
    town.relay.put("ahus", "berg", sealer.seal("berg", 0, "decision", payload))
    with pytest.raises(StoreError, match="older than what the site has sent"):
        berg.run()


def test_counters_grow_even_from_a_backup(tmp_path: Path) -> None:
    town, opener = Town(tmp_path, METHOD, plan(1)), Opener(identity("ahus"), EXPERIMENT)
    state = tmp_path / "berg" / "state.bin"
    old = None
    for _ in range(3):
        town.peer("berg")._meeting.enter(0, NAMES, model())
        assert opener.open(town.relay.take("ahus") or b"", {"stage": range(1)}).sender == "berg"
        old = old or state.read_bytes()
        state.write_bytes(old)


def test_everything_that_left_a_site_is_in_its_log(tmp_path: Path) -> None:
    town = Town(tmp_path, METHOD, plan(2))
    town.digests()
    lines = [
        json.loads(line) for line in (tmp_path / "caen" / "sent.jsonl").read_text().split("\n")[:-1]
    ]
    assert {line["kind"] for line in lines} == {"want", "model", "change"}
    assert {line["experiment"] for line in lines} == {EXPERIMENT}
    assert all(len(line["sha256"]) == 64 and line["bytes"] > 0 for line in lines)
    assert len([line for line in lines if line["kind"] == "change"]) == 2 * 2
