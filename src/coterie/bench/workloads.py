"""What is timed: one local epoch of SGD for every client, on data made up here."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .. import models
from ..data.federation import Dataset, Federation
from ..task import Recipe, Task


class Workload(NamedTuple):
    """Clients × samples, a network and a batch size."""

    name: str
    about: str
    model: str
    options: dict[str, object]
    shape: tuple[int, ...]
    clients: int
    samples: int
    batch: int

    def task(self, device: torch.device) -> Task:
        """The workload as a task."""
        federation = _federation(self)
        factory: Callable[[], nn.Module] = models.factory(
            self.model, federation.dataset, **self.options
        )
        return Task(federation, factory, Recipe(lr=0.01, batch=self.batch), device=device)


def _federation(work: Workload) -> Federation:
    generator = torch.Generator().manual_seed(0)
    total = work.clients * work.samples
    x = torch.randn(total, *work.shape, generator=generator)
    data = Dataset(work.name, x, torch.arange(total) % 10, 10)
    parts = torch.arange(total).split(work.samples)
    few = tuple(part[:10] for part in parts)
    names = tuple(f"client-{i}" for i in range(work.clients))
    return Federation(data, "even", names, parts, few, few)


GREY, COLOUR = (1, 28, 28), (3, 32, 32)

WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "MLP 784-200-10", "mlp", {"hidden": (200,)}, GREY, 100, 100, 10),
        Workload("W2", "LeNet-5", "lenet5", {}, GREY, 100, 100, 10),
        Workload("W3", "the FedAvg paper's CNN", "fedavg_cnn", {}, GREY, 20, 500, 50),
        Workload("W6", "ResNet-18, group norm", "resnet18", {"norm": "group"}, COLOUR, 8, 500, 50),
    )
}
