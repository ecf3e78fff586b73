"""Sites that join decentralised FedeRiCo with their own data, over a blind relay."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("nacl")

from coterie.core.algorithm import Mixture, client_digest, combined_digest
from coterie.deploy.folders import FederationFolder
from coterie.deploy.peers.joining import (
    JoinedResult,
    JoiningSite,
    SealedTransport,
    SetupTalk,
    roster_hash,
)
from coterie.deploy.peers.relay import Relay
from coterie.deploy.peers.sealing import PeerIdentity, PeerKeys
from coterie.deploy.peers.talk import InProcessLink, Link
from coterie.deploy.protocol import (
    JudgeRequest,
    Nothing,
    Proposal,
    refused_by,
    setup_message,
)
from coterie.deploy.running import holdings_of, withdraw
from coterie.deploy.site_model import export_site
from coterie.deploy.site_report import described
from coterie.deploy.terms import Agreement
from coterie.engines.codec import Message, encode
from coterie.engines.site import ANSWERS, MODEL
from coterie.errors import ConfigError, StoreError
from coterie.runs.config.loading import load, merge
from coterie.runs.config.schema import Config
from loopback import free_port, until
from sites import FAST, NAMES, exported, simulated, site_folders, write_tables
from test_peers_faults import Dying, KilledError
from test_peers_relay import let_peers, windows

ASKED = merge(FAST, {"algorithm.name": "federico", "run.rounds": 2, "algorithm.downloads": 1})
Notes = dict[str, list[str]]


class Recording(Relay):
    """Keeps a copy of all that it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def put(self, who: str, to: str, blob: bytes) -> Any:
        self.seen.append(blob)
        return super().put(who, to, blob)


class Federation:
    """Sites as threads of this process, each with its own folder and table, and a relay."""

    def __init__(self, home: Path, tables: Path, address: str = "localhost:9092") -> None:
        self.folders = site_folders(home, tables, address=address)
        lines = [f'{n} = "{f.public_part().box}"' for n, f in self.folders.items()]
        self.roster = home / "roster.toml"
        self.roster.write_text("\n".join(["[peers]", *lines]))
        self.relay = Recording()
        self.notes: Notes = {name: [] for name in NAMES}
        self.links: dict[str, Link] = {name: InProcessLink(self.relay, name) for name in NAMES}

    def identity(self, name: str) -> PeerIdentity:
        return PeerIdentity(name, self.folders[name].box_key(), PeerKeys.read(self.roster))

    def site(self, name: str, link: Link | None = None) -> JoiningSite:
        folder = self.folders[name]
        return JoiningSite(
            folder,
            holdings_of(folder, None, None),
            self.identity(name),
            link or self.links[name],
            self.notes[name].append,
            nudge=0.3,
        )

    def config(self, name: str, asked: dict[str, Any]) -> Config | None:
        return load(asked, {"run.federation": "a"}) if name == NAMES[0] else None

    def run(
        self, asked: dict[str, Any] = ASKED, links: dict[str, list[Link]] | None = None
    ) -> dict[str, JoinedResult | BaseException]:
        """Start all sites; ``links`` are those of starts before the last one, which die."""
        found: dict[str, JoinedResult | BaseException] = {}

        def one(name: str) -> None:
            for link in [*(links or {}).get(name, []), self.links[name]]:
                try:
                    found[name] = self.site(name, link).run(self.config(name, asked))
                except KilledError:
                    continue
                except BaseException as error:
                    found[name] = error

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), (found, self.notes)
        return found


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are built from torch's generator, which all threads of this process share."""
    lock, forked = threading.RLock(), torch.random.fork_rng

    @contextlib.contextmanager
    def alone(**options: Any) -> Iterator[None]:
        with lock, forked(**options):
            yield

    monkeypatch.setattr(torch.random, "fork_rng", alone)


@pytest.fixture
def sites(tmp_path: Path, tables: Path) -> Federation:
    return Federation(tmp_path, tables)


def alike(sites: Federation, asked: dict[str, Any] = ASKED) -> Any:
    """The simulator's run of the same files, divided as the sites have."""
    return simulated(exported(sites.folders, sites.roster.parent / "exported"), asked)


def whole(found: dict[str, JoinedResult | BaseException]) -> dict[str, JoinedResult]:
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return found  # type: ignore[return-value]


def digest_of(found: dict[str, JoinedResult | BaseException]) -> str:
    return combined_digest(whole(found)[name].digest for name in NAMES)


# ---- the whole way -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.67])
def test_sites_with_their_own_tables_give_the_simulators_digests(
    sites: Federation, tables: Path, share: float
) -> None:
    asked = merge(ASKED, {"run.participation": share})
    assert digest_of(sites.run(asked)) == alike(sites, asked).summary["digest"]


def test_a_site_keeps_its_own_model_score_and_log(
    sites: Federation, tables: Path, tmp_path: Path
) -> None:
    found, run = whole(sites.run()), alike(sites)
    assert [found[name].score for name in NAMES] == pytest.approx(list(run.last))
    for name, result in found.items():
        folder = sites.folders[name]
        export_site(folder, tmp_path / f"export-{name}")
        shown = described(folder)
        assert f"{result.experiment[:12]}: model:" in shown
        assert "divide: 1 answers" in shown
    birch = sites.folders["birch"]
    assert any("rounds of this site's updates were sent" in line for line in withdraw(birch))
    kept = found["birch"].model.parent
    assert not (kept / "peers" / "state.bin").exists()
    assert (kept / MODEL).exists()
    with pytest.raises(ConfigError, match="has withdrawn"):
        sites.site("birch")


def test_the_relay_sees_no_model_and_no_schema(sites: Federation) -> None:
    found = whole(sites.run())
    seen = b"".join(sites.relay.seen)
    for result in found.values():
        pieces = windows(load_file(result.model)["models"].flatten())
        assert len(pieces) > 5
        assert not any(piece in seen for piece in pieces)
        assert result.experiment.encode() not in seen
    words = (b"kind", b"label", b"well", b"federico", b"squares", b"agree", b"counts", b"hidden")
    assert not any(word in seen for word in words)


def test_noise_comes_from_the_sites_own_secrets(sites: Federation, tables: Path) -> None:
    asked = merge(ASKED, {"privacy.noise": 0.1})
    assert digest_of(sites.run(asked)) != alike(sites, asked).summary["digest"]


# ---- what a site refuses -------------------------------------------------------------------------


class Ended(InProcessLink):
    """A link whose site stops when it is told to."""

    def __init__(self, relay: Relay, name: str) -> None:
        super().__init__(relay, name)
        object.__setattr__(self, "over", threading.Event())

    def fetch(self, seconds: float) -> bytes | None:
        if self.over.is_set():  # type: ignore[attr-defined]
            raise KilledError
        return super().fetch(seconds)


class Asker:
    """One site's end of the setup messages, by hand, while 'birch' waits for the convener."""

    def __init__(self, sites: Federation, me: str) -> None:
        identity, link, note = sites.identity(me), sites.links[me], sites.notes[me].append
        path = sites.folders[me].path / "peers" / roster_hash(identity.pinned)
        self.talk = SetupTalk(identity, path, link, note)
        self._transport = SealedTransport(self.talk, link, None, note, 0.3)  # type: ignore[arg-type]
        self.notes, self._link = sites.notes["birch"], Ended(sites.relay, "birch")
        self._thread = threading.Thread(target=self._wait, args=(sites,), daemon=True)

    def _wait(self, sites: Federation) -> None:
        with contextlib.suppress(KilledError):
            sites.site("birch", self._link).run(None)

    def __enter__(self) -> "Asker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.over.set()  # type: ignore[attr-defined]
        self._thread.join(20)
        assert not self._thread.is_alive()

    def refused(self, message: bytes) -> str:
        answer = self._transport.ask({"birch": message}, -1)["birch"]
        found = refused_by(bytes(answer))  # type: ignore[arg-type]
        assert found is not None
        return found[1]


def agreement_of(sites: Federation) -> Agreement:
    """An agreement to which all sites have agreed."""
    result = whole(sites.run())["ash"]
    return Agreement.from_json((result.model.parent / "agreement.json").read_text())


def with_table(terms: Agreement, table: str, **fields: Any) -> Agreement:
    """The agreement with other fields in one table of its config."""
    tables = json.loads(terms.config)
    return replace(terms, config=json.dumps({**tables, table: {**tables.get(table, {}), **fields}}))


def test_a_site_refuses_terms_that_it_does_not_accept(sites: Federation) -> None:
    good = agreement_of(sites)
    first, second, third = good.counts
    named = json.loads(good.config)["algorithm"]
    assert named["name"] == "federico"
    other = {key: value for key, value in json.loads(good.config).items() if key != "algorithm"}
    changed = [
        (
            "needs a server",
            replace(good, config=json.dumps(other | {"algorithm": {"name": "ditto"}})),
        ),
        ("needs a server", with_table(good, "algorithm", form="centralised")),
        ("needs a server", with_table(good, "adapt", name="ft")),
        ("site's roster", replace(good, clients=("ash", "birch", "zelkova"))),
        ("its data gives", replace(good, counts=(first, replace(second, train=7), third))),
        ("cannot set at a site", with_table(good, "partition", name="iid")),
        ("cannot set at a site", with_table(good, "data", name="/etc/passwd")),
    ]
    with Asker(sites, "ash") as asker:
        for why, terms in changed:
            assert why in asker.refused(setup_message("agree", Proposal(terms.to_json())))
            assert not (sites.folders["birch"].experiments / terms.hash).exists()
        judge = setup_message("judge", JudgeRequest("accuracy", ((good.hash, good.hash),)))
        assert "a peer answers who, ask" in asker.refused(judge)
        assert "a peer answers who, ask" in asker.refused(encode(Message({"kind": "local"})))


def test_a_site_answers_nobody_but_the_convener(sites: Federation) -> None:
    asked = setup_message("who", Nothing())
    with Asker(sites, "cedar") as asker:
        asker.talk.send("birch", "ask", 1, asked)
        until(lambda: any("of 'cedar' is refused: the convener is 'ash'" in n for n in asker.notes))
    assert sites.relay.take("cedar", 0.3) is None
    assert not sites.folders["birch"].sent.exists()


def test_a_setup_message_is_answered_once_even_after_a_restart(sites: Federation) -> None:
    with Asker(sites, "ash") as asker:
        asker.talk.send("birch", "ask", 1, setup_message("who", Nothing()))
        until(lambda: sites.folders["birch"].sent.exists())
    (sealed,) = sites.relay.seen[:1]
    sites.relay.put("ash", "birch", sealed)
    with Asker(sites, "ash") as asker:
        until(lambda: any("(replayed)" in note for note in asker.notes))
    assert len(sites.folders["birch"].sent.read_text().splitlines()) == 1


def test_a_changed_agreement_is_not_continued(sites: Federation) -> None:
    path = next(iter(whole(sites.run()).values())).model
    folder = sites.folders["birch"].experiments / path.parent.name
    (folder / ANSWERS).unlink()  # as if birch had been killed before its end
    text = (folder / "agreement.json").read_text()
    (folder / "agreement.json").write_text(text.replace('"seed\\": 0', '"seed\\": 1'))
    with pytest.raises(StoreError, match="has changed since it was agreed to"):
        sites.site("birch").run(None)


def test_who_proposes_the_experiment(sites: Federation) -> None:
    asked = load(ASKED, {"run.federation": "a"})
    with pytest.raises(ConfigError, match="found one at 'birch'; expected one at 'ash'"):
        sites.site("birch").run(asked)
    with pytest.raises(ConfigError, match="found none at 'ash'; expected one at 'ash'"):
        sites.site("ash").run(None)
    for changes, why in (
        ({"algorithm.name": "fedavg"}, "needs a server"),
        ({"algorithm.name": "federico", "guard.norm": 3.0}, "leave .guard. out"),
    ):
        other = load(merge(FAST, changes), {"run.federation": "a"})
        with pytest.raises(ConfigError, match=why):
            sites.site("ash").run(other)
    assert not sites.relay.seen


# ---- kills ---------------------------------------------------------------------------------------

SLOW = [pytest.param(turns, marks=pytest.mark.slow) for turns in range(1, 60, 3)]


@pytest.mark.parametrize("turns", [5, 12, *SLOW])
@pytest.mark.parametrize("name", ["ash", "cedar"])  # the convener, and another site
def test_a_site_that_is_killed_joins_again_and_nothing_changes(
    sites: Federation, name: str, turns: int
) -> None:
    link = Dying(sites.relay, name, turns)
    assert digest_of(sites.run(links={name: [link]})) == alike(sites).summary["digest"]
    assert link._left[0] <= 0  # type: ignore[attr-defined]


def test_the_convener_may_propose_another_experiment(sites: Federation, tables: Path) -> None:
    """It is killed when the others have agreed to the first one."""
    other = merge(ASKED, {"run.rounds": 1})
    link = Dying(sites.relay, "ash", 30)
    first: list[Any] = [ASKED]

    def config(name: str, asked: dict[str, Any]) -> Config | None:
        mine = first.pop() if name == "ash" and first else asked
        return load(mine, {"run.federation": "a"}) if name == "ash" else None

    sites.config = config  # type: ignore[method-assign]
    assert digest_of(sites.run(other, {"ash": [link]})) == alike(sites, other).summary["digest"]
    agreed = [*sites.folders["birch"].experiments.iterdir()]
    assert len(agreed) == 2


# ---- real processes over TLS ---------------------------------------------------------------------


class Typed:
    """The commands of an administrator, each a process."""

    def __init__(self, home: Path) -> None:
        self.home, self.running = home, dict[str, subprocess.Popen[str]]()

    def start(self, name: str, *command: object) -> None:
        arguments = [sys.executable, "-P", "-m", "coterie", *map(str, command)]
        with self.log(name).open("a") as log:
            self.running[name] = subprocess.Popen(
                arguments,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def end(self, name: str, number: int) -> int:
        """Send a signal, and return the exit code."""
        self.running[name].send_signal(number)
        self.running[name].communicate(timeout=60)
        return self.running[name].returncode

    def output(self, name: str) -> str:
        said = self.running[name].communicate(timeout=120)[0]
        assert self.running[name].returncode == 0, self.log(name).read_text()
        return said

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_the_commands_of_administrators_with_stops_and_kills(tables: Path, tmp_path: Path) -> None:
    asked = merge(ASKED, {"run.rounds": 12, "train.epochs": 4})
    sites = Federation(tmp_path, tables, address=f"localhost:{free_port()}")
    expected = alike(sites, asked)
    let_peers(FederationFolder.open(tmp_path / "fed"), NAMES)
    (tmp_path / "config.toml").write_text(
        '[model]\nname = "mlp"\nhidden = [6]\n[train]\nlr = 0.1\nepochs = 4\nbatch = 8\n'
        '[algorithm]\nname = "federico"\ndownloads = 1\n[run]\nrounds = 12\n'
    )
    typed = Typed(tmp_path)

    def join(name: str) -> None:
        config = ("--config", tmp_path / "config.toml") if name == "ash" else ()
        typed.start(name, "site", "join", tmp_path / name, "--roster", sites.roster, *config)

    def sent(name: str) -> int:
        logs = (tmp_path / name / "experiments").glob("*/peers/sent.jsonl")
        return sum(len(log.read_text().splitlines()) for log in logs)

    try:
        for name in NAMES:
            join(name)
        until(lambda: "cannot be reached" in typed.log("cedar").read_text(), 60)
        assert typed.end("cedar", signal.SIGTERM) == 128 + signal.SIGTERM  # no relay yet
        typed.start("coordinator", "coordinator", tmp_path / "fed")
        join("cedar")
        for lines, victim, number in (
            (4, "birch", signal.SIGKILL),
            (12, "ash", signal.SIGKILL),
            (20, "ash", signal.SIGTERM),
            (28, "cedar", signal.SIGTERM),
        ):
            until(lambda lines=lines: sent("birch") >= lines, 60)
            typed.end(victim, number)
            join(victim)
        said = {name: typed.output(name) for name in NAMES}
    finally:
        typed.close()
    predictors = []
    for name, score in zip(NAMES, expected.last, strict=True):
        (model,) = (tmp_path / name / "experiments").glob(f"*/{MODEL}")
        predictors.append(client_digest(Mixture(**load_file(model))))
        assert f"accuracy: {score:.4g} on" in said[name]
        assert str(model) in said[name]
    assert combined_digest(predictors) == expected.summary["digest"]
