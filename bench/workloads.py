"""The workloads that are timed: one round of a method with one local epoch, on synthetic data."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.waffle import Waffle
from coterie.core.algorithm import AnyAlgorithm, Round, round_of
from coterie.core.optim import Recipe
from coterie.core.tree import Tree
from coterie.data.federation import Dataset, Federation
from coterie.data.simulation import Simulation, simulate
from coterie.engines.loop import LoopBackend
from coterie.networks import registry

CLASSES, FEW = 10, 10
BEFORE, HORIZON = 2, 100  # rounds before the timed one, and of the whole run


class Workload(NamedTuple):
    """A method with its number of clients and samples, network and batch size.

    In a round each client trains ``trains`` models for an epoch, and evaluates ``judges`` models on
    its ``judged_on`` split.
    """

    name: str
    about: str
    method: AnyAlgorithm
    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    clients: int
    samples: int  # training samples per client; it has a fifth as many validation samples
    batch: int
    trains: int = 1
    judges: int = 0
    judged_on: str = "val"
    holders: int | None = None  # clients with samples of their own; the others share these samples

    @property
    def steps(self) -> int:
        """Optimiser steps per client and trained model."""
        return -(-self.samples // self.batch)

    @property
    def judged(self) -> int:
        """Samples per evaluation of a client."""
        return self.samples if self.judged_on == "train" else _fifth(self.samples)

    def simulation(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Simulation:
        """The workload's problem and shards."""
        data = federation(self)
        factory = registry.factory(self.model, data.dataset, **self.options)
        recipe = Recipe(lr=0.01, batch=self.batch)
        return simulate(data, factory, recipe, device=device, dtype=dtype)


def federation(work: Workload) -> Federation:
    """Synthetic clients of equal sizes."""
    generator = torch.Generator().manual_seed(0)
    holders = work.holders or work.clients
    total = holders * work.samples
    x = torch.randn(total, *work.shape, generator=generator)
    data = Dataset(work.name, x, torch.arange(total) % CLASSES, CLASSES)
    own = torch.arange(total).split(work.samples)
    parts = tuple(own[i % holders] for i in range(work.clients))
    val = tuple(part[: _fifth(work.samples)] for part in parts)
    test = tuple(part[:FEW] for part in parts)
    names = tuple(f"client-{i}" for i in range(work.clients))
    return Federation(data, "even", names, parts, val, test)


def _fifth(samples: int) -> int:
    return -(-samples // 5)


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
MLP: dict[str, Any] = {"hidden": (200,)}
UNPADDED: dict[str, Any] = {"padding": 0}
GROUPED: dict[str, Any] = {"norm": "group"}

# fmt: off
WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "FedAvg, MLP 784-200-10", FedAvg(), "mlp", MLP, GREY, 100, 100, 10),
        Workload("W2", "FedAvg, LeNet-5", FedAvg(), "lenet5", {}, GREY, 100, 100, 10),
        Workload("W3", "FedAvg, its paper's CNN", FedAvg(), "fedavg_cnn", {}, GREY, 20, 500, 50),
        Workload("W4", "FedFomo with 5 downloads, LeNet-5", FedFomo(downloads=5), "lenet5", {},
                 GREY, 20, 500, 10, judges=7),  # 5 received, its own, and that before training
        Workload("W5", "FedAvg, its paper's CNN unpadded on colour", FedAvg(), "fedavg_cnn",
                 UNPADDED, COLOUR, 100, 640, 64),
        Workload("W6", "FedAvg, ResNet-18 with group norm", FedAvg(), "resnet18", GROUPED, COLOUR,
                 8, 500, 50),
        Workload("W7", "FedeRiCo with 3 downloads, its paper's CNN", FedeRiCo(downloads=3),
                 "p2_cnn", {}, COLOUR, 8, 500, 50, trains=4, judges=4, judged_on="train"),
        Workload("W8", "WAFFLE for all, LeNet-5", Waffle(requesters="all"), "lenet5", {}, GREY,
                 10, 500, 32, trains=10),
    )
}
# fmt: on


class Steady(NamedTuple):
    """Everything that the timed round starts from."""

    on: Simulation
    method: AnyAlgorithm
    server: Tree
    states: Tree
    round: Round


def steady(method: AnyAlgorithm, on: Simulation) -> Steady:
    """The state of a run after a few short rounds of one step per client.

    The timed round is then like the later ones: every client has uploaded, and receives the models
    that it asks for.
    """
    problem = on.problem
    short = replace(problem, recipe=replace(problem.recipe, steps=1))
    backend = LoopBackend(short, on.shards)
    everybody = torch.arange(problem.population, device=problem.device)
    server, states = method.init(short)
    for index in range(BEFORE):
        round = round_of(short, index, HORIZON, everybody)
        received = method.download(server, round)
        uploads, states = backend.local(method, received, states, round)
        server = method.aggregate(server, uploads, round)
    return Steady(on, method, server, states, round_of(problem, BEFORE, HORIZON, everybody))
