"""The workloads that are timed: one round of a method with one local epoch, on synthetic data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ...algorithms.fedavg import FedAvg
from ...algorithms.federico import FedeRiCo
from ...algorithms.fedfomo import FedFomo
from ...algorithms.waffle import Waffle
from ...core.algorithm import AnyAlgorithm
from ...core.optim import Recipe
from ...data.federation import Dataset, Federation
from ...data.simulation import Simulation, simulate
from ...networks import registry
from .clipped import ClippedFedAvg

CLASSES, FEW = 10, 10


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
        federation = _federation(self)
        factory: Callable[[], nn.Module] = registry.factory(
            self.model, federation.dataset, **self.options
        )
        recipe = Recipe(lr=0.01, batch=self.batch)
        return simulate(federation, factory, recipe, device=device, dtype=dtype)


def _federation(work: Workload) -> Federation:
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
        Workload("W9", "FedAvg with clipped samples, LeNet-5", ClippedFedAvg(), "lenet5", {}, GREY,
                 100, 100, 10),
    )
}
# fmt: on
