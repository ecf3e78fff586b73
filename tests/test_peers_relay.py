"""Peers without a server: sealed messages over a blind relay, equal to the simulator bit for bit."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nacl")

from nacl.public import PrivateKey  # noqa: E402
from support import engine_of, federation, normed, task  # noqa: E402

from coterie.algorithms.fedavg import FedAvg  # noqa: E402
from coterie.algorithms.federico import FedeRiCo  # noqa: E402
from coterie.core.algorithm import AnyAlgorithm, Mixture  # noqa: E402
from coterie.core.recipe import Recipe  # noqa: E402
from coterie.data.simulation import Simulation  # noqa: E402
from coterie.deploy.peer import Peer, PeerPlan, PeerResult  # noqa: E402
from coterie.deploy.peer_folder import PeerFolder  # noqa: E402
from coterie.deploy.peer_keys import Identity, PeerKeys  # noqa: E402
from coterie.deploy.peer_link import InProcessLink, Link  # noqa: E402
from coterie.deploy.peer_work import OwnPart  # noqa: E402
from coterie.deploy.relay import Relay, RelayLimits  # noqa: E402
from coterie.deploy.roll_call import Decision, RollCall  # noqa: E402
from coterie.deploy.sealing import REFUSALS, Opener, Sealer, SealError  # noqa: E402
from coterie.engines.codec import vocabulary  # noqa: E402
from coterie.errors import ConfigError, StoreError  # noqa: E402
from coterie.experiment.run_folder.stored_models import client_digest  # noqa: E402
from coterie.training.guard import Guard  # noqa: E402
from coterie.training.rounds import train  # noqa: E402

NAMES = ("ahus", "berg", "caen", "dorn", "elba")
EXPERIMENT = "0" * 64
SECRETS = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}
PINNED = PeerKeys({n: bytes(PrivateKey(s).public_key) for n, s in SECRETS.items()})
SPREAD = {"temperature_per": "sample"}  # weights that are not one-hot


def identity(name: str) -> Identity:
    return Identity(name, SECRETS[name], PINNED)


def simulation(algorithm: AnyAlgorithm, **options: Any) -> Simulation:
    return task(algorithm, federated=replace(federation(), clients=NAMES), **options)


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

    def peer(self, name: str) -> Peer:
        """A site with a problem of its own: a network is not to be used by two threads."""
        at, on = NAMES.index(name), simulation(self.algorithm, **self.options)
        part = OwnPart(on.problem, on.shards.of(at), self.algorithm, at, self.guard)
        folder = PeerFolder(
            self.path / name, self.plan.experiment, vocabulary(self.algorithm)
        )
        link = self.links.get(name, InProcessLink(self.relay, name))
        return Peer(part, self.plan, identity(name), link, folder, self.notes[name].append)

    def run(self, names: tuple[str, ...] = NAMES) -> dict[str, PeerResult | BaseException]:
        found: dict[str, PeerResult | BaseException] = {}
        peers = {name: self.peer(name) for name in names}

        def one(name: str) -> None:
            try:
                found[name] = peers[name].run()
            except BaseException as error:
                found[name] = error

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), self.notes
        return found

    def simulated(self, **options: Any) -> list[str]:
        """Every client's digest after the same rounds in the simulator."""
        on, plan = simulation(self.algorithm, **self.options), self.plan
        share, engine = plan.participation, engine_of("loop", on)
        records = train(
            self.algorithm, on.problem, engine, plan.rounds, participation=share, **options
        )
        mixture = list(records)[-1].mixture
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


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("step", ["local_epochs", "gradient"])
@pytest.mark.parametrize("downloads", [1, 2, 3])
def test_peers_equal_the_simulator_bit_for_bit(
    tmp_path: Path, downloads: int, step: Any, participation: float
) -> None:
    method = FedeRiCo(downloads=downloads, step=step, **SPREAD)
    same = plan(participation=participation)
    town = Town(tmp_path, method, same, {"dtype": torch.float32})
    assert town.digests() == town.simulated()
    assert not any(town.notes.values())
