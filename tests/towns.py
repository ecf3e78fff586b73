"""Sites that run FedeRiCo among themselves, as threads of one process with a relay between them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from nacl.public import PrivateKey

from coterie.core.algorithm import AnyAlgorithm, Mixture
from coterie.core.optim import Recipe
from coterie.data.simulation import Simulation
from coterie.deploy.peers.peer import PeerPlan, PeerResult, PeerSite
from coterie.deploy.peers.relay import Relay
from coterie.deploy.peers.sealing import PeerIdentity, PeerKeys
from coterie.deploy.peers.talk import InProcessLink, Link, PeerFolder
from coterie.deploy.peers.work import Mine, OwnPart
from coterie.engines.codec import vocabulary
from coterie.runs.stored import client_digest
from coterie.training.guard import Guard
from coterie.training.rounds import Record, train
from support import engine_of, federation, task

NAMES = ("ahus", "berg", "caen", "dorn", "elba")
EXPERIMENT = "0" * 64
SECRETS = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}
PINNED = PeerKeys({n: bytes(PrivateKey(s).public_key) for n, s in SECRETS.items()})
SPREAD = {"temperature_per": "sample"}  # weights that are not one-hot
RECIPE = Recipe(lr=0.1, epochs=1, batch=10, momentum=0.5)


def identity(name: str) -> PeerIdentity:
    return PeerIdentity(name, SECRETS[name], PINNED)


def simulation(algorithm: AnyAlgorithm, **options: Any) -> Simulation:
    known = {"recipe": RECIPE, "dtype": torch.float32, "sizes": (9, 6, 8, 5, 7)}
    known |= options
    broken = known.pop("broken", None)  # a site with a sample that makes training diverge
    federated = replace(federation(known.pop("sizes")), clients=NAMES)
    if broken is not None:
        x = federated.dataset.x.clone()
        x[federated.train[NAMES.index(broken)][0]] = 1e25
        federated = replace(federated, dataset=replace(federated.dataset, x=x))
    return task(algorithm, federated=federated, **known)


@dataclass
class Town:
    """Sites as threads of this process, with one relay between them."""

    path: Path
    algorithm: AnyAlgorithm
    plan: PeerPlan
    options: Mapping[str, Any] = field(default_factory=dict)  # of the simulation
    relay: Relay = field(default_factory=Relay)
    guard: Guard = field(default_factory=Guard)
    notes: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in NAMES})
    links: dict[str, Link] = field(default_factory=dict)  # links of their own, by name
    again: dict[str, Callable[[], PeerResult]] = field(default_factory=dict)  # after a death

    def peer(self, name: str) -> PeerSite:
        """A site with a problem of its own: a network is not to be used by two threads."""
        at, on = NAMES.index(name), simulation(self.algorithm, **self.options)
        part = OwnPart(on.problem, on.shards.of(at), self.algorithm, at, self.guard)
        folder = self.folder(name)
        link = self.links.get(name, InProcessLink(self.relay, name))
        return PeerSite(part, self.plan, identity(name), link, folder, self.notes[name].append)

    def run(self, names: tuple[str, ...] = NAMES) -> dict[str, PeerResult | BaseException]:
        found: dict[str, PeerResult | BaseException] = {}
        peers = {name: self.peer(name) for name in names}

        def one(name: str) -> None:
            try:
                found[name] = peers[name].run()
            except BaseException as error:
                found[name] = error
            if isinstance(found[name], BaseException) and name in self.again:
                found[name] = self.again[name]()

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), self.notes
        return found

    def folder(self, name: str) -> PeerFolder:
        return PeerFolder(self.path / name, self.plan.experiment, vocabulary(self.algorithm))

    def kept(self, name: str) -> Mine:
        """The state that a site has on its disk."""
        found = self.folder(name).open()
        assert found is not None
        return Mine(*found.body)

    def record(self) -> Record:
        """The last round of the simulator's run of the same experiment."""
        on, plan = simulation(self.algorithm, **self.options), self.plan
        share, engine = plan.participation, engine_of("loop", on)
        guard = self.guard
        rounds = train(
            self.algorithm, on.problem, engine, plan.rounds, participation=share, guard=guard
        )
        return list(rounds)[-1]

    def simulated(self) -> list[str]:
        """Every client's digest after the same rounds in the simulator."""
        mixture = self.record().mixture
        each = zip(mixture.weights, mixture.models, strict=True)
        return [client_digest(Mixture(*predictor)) for predictor in each]

    def digests(self) -> list[str]:
        found = self.run()
        for result in found.values():
            if isinstance(result, BaseException):
                raise result
        return [client_digest(found[name].mixture) for name in NAMES]


def plan(rounds: int = 3, **options: Any) -> PeerPlan:
    return PeerPlan(EXPERIMENT, rounds, **{"nudge": 0.5, "patience": 30.0, **options})
