"""The plain PyTorch loop that engines are compared with: careful code, one client after another.

Each client has a module and a ``torch.optim.SGD``; tensors are in memory, without a DataLoader. It
is a defect if this loop is slower than it could be: whatever was tried and helps is here. Module i
keeps its parameters in row i of one matrix, so that loading and averaging models are single
operations; the samples of an epoch are gathered at once; splits are evaluated in blocks that suit
the caches; the faster memory layout and number of threads are taken.

The choice of models to download is given, not computed: its cost is negligible. The server half of
WAFFLE is that of the method itself, because it is the same operations on the same rows.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.federico import UNUSED, FedeRiCo
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.waffle import Waffle, Work
from coterie.core.algorithm import AnyAlgorithm
from coterie.data.simulation import Simulation
from coterie.engines.process import settings
from workloads import Steady

Minibatches = list[tuple[Tensor, Tensor]]
Order = Callable[[int], Tensor]  # a client's samples in the order of this epoch

BLOCK = {"cpu": 50, "cuda": 500}  # samples per batch of an evaluation
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
TRIED, TRIED_SECONDS = 5, 2.0  # least turns and seconds of each way; its fastest step counts


class Clients:
    """A module, an optimiser and the samples of every client."""

    def __init__(self, on: Simulation, layout: str, order: Order | None = None) -> None:
        self.on, self.order = on, order or self._shuffled
        problem = on.problem
        self.w = problem.start.new_empty(problem.population, problem.model.size)
        self.modules = [self._module(row) for row in self.w]
        self.rules = [
            torch.optim.SGD(module.parameters(), lr=problem.recipe.lr) for module in self.modules
        ]
        splits = {"train": on.federation.train, "val": on.federation.val}
        self.data = {name: self._samples(parts, layout) for name, parts in splits.items()}

    def _module(self, row: Tensor) -> nn.Module:
        problem = self.on.problem
        module = problem.factory().to(problem.device, problem.dtype).train()
        vector_to_parameters(row, module.parameters())
        return module

    def _samples(self, parts: tuple[Tensor, ...], layout: str) -> Minibatches:
        shards, form = self.on.shards, LAYOUTS[layout]
        places = [part.to(shards.device) for part in parts]
        return [
            (shards.x[at].to(shards.dtype).contiguous(memory_format=form), shards.y[at])
            for at in places
        ]

    def _shuffled(self, i: int) -> Tensor:
        return torch.randperm(len(self.data["train"][i][1]), device=self.on.problem.device)

    def minibatches(self, i: int) -> Minibatches:
        """The minibatches of one epoch of a client."""
        (x, y), order, batch = self.data["train"][i], self.order(i), self.on.problem.recipe.batch
        return list(zip(x[order].split(batch), y[order].split(batch), strict=True))

    def load(self, i: int, model: Tensor) -> None:
        """Put a model into the client's module."""
        self.w[i] = model

    def average(self) -> Tensor:
        """The mean of all models, weighted by samples."""
        sizes = self.on.problem.sizes.to(self.w.dtype)
        return sizes / sizes.sum() @ self.w

    def train(self, i: int, batches: Minibatches, correction: Tensor | None = None) -> None:
        """Train the client's module with SGD; add a correction, if given, to every gradient."""
        module, rule = self.modules[i], self.rules[i]
        added = [] if correction is None else self._shaped(module, correction)
        for x, y in batches:
            rule.zero_grad(set_to_none=True)
            F.cross_entropy(module(x), y).backward()
            if added:
                met = [p.grad for p in module.parameters() if p.grad is not None]
                for gradient, more in zip(met, added, strict=True):
                    gradient.add_(more)
            rule.step()

    @staticmethod
    def _shaped(module: nn.Module, vector: Tensor) -> list[Tensor]:
        parameters = list(module.parameters())
        parts = vector.split([p.numel() for p in parameters])
        return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    @torch.no_grad()
    def loss(self, i: int, model: Tensor, split: str) -> Tensor:
        """The mean loss of a model on one of the client's splits."""
        self.load(i, model)
        x, y = self.data[split][i]
        block = BLOCK[self.on.problem.device.type]
        losses = [
            F.cross_entropy(self.modules[i](a), b, reduction="sum")
            for a, b in zip(x.split(block), y.split(block), strict=True)
        ]
        return torch.stack(losses).sum() / len(y)


class Plain(ABC):
    """One round of a method in plain PyTorch. Calling it returns the models after the round."""

    def __init__(self, start: Steady, clients: Clients) -> None:
        self.start, self.clients = start, clients
        self.received = start.method.download(start.server, start.round)

    @abstractmethod
    def client(self, i: int) -> None:
        """Everything that one client computes."""

    @abstractmethod
    def finish(self) -> Tensor:
        """The server half of the round; returns the models after the round."""

    def __call__(self) -> Tensor:
        """Execute the whole round."""
        for i in range(self.start.on.problem.population):
            self.client(i)
        return self.finish()


class PlainFedAvg(Plain):
    """Train the global model on every client, and average."""

    def client(self, i: int) -> None:
        """An epoch from the global model."""
        self.clients.load(i, self.received[i])
        self.clients.train(i, self.clients.minibatches(i))

    def finish(self) -> Tensor:
        """The average by samples."""
        return self.clients.average()


class PlainFedFomo(Plain):
    """Weigh the received models on validation data, mix, train."""

    def client(self, i: int) -> None:
        """Weigh the client's own model and the received ones, mix them, and train."""
        theta, old, affinity, _ = (part[i] for part in self.start.states)
        models = torch.cat([theta[None], self.received.models[self.received.slot[i]]])
        base = self.clients.loss(i, old, "val")
        losses = torch.stack([self.clients.loss(i, model, "val") for model in models])
        apart = models - old
        raw = (base - losses) / apart.norm(dim=1)
        positive = raw.clamp(min=0)
        shares = positive / positive.sum().clamp(min=torch.finfo(raw.dtype).tiny)
        owners = torch.cat([torch.tensor([i], device=raw.device), self.received.owner[i]])
        affinity.index_add(0, owners, raw).argsort(descending=True)
        self.clients.load(i, old + shares @ apart)
        self.clients.train(i, self.clients.minibatches(i))

    def finish(self) -> Tensor:
        """The models of all clients."""
        return self.clients.w


class PlainFedeRiCo(Plain):
    """Weigh the own and the downloaded models by their likelihood, and train all of them."""

    @cached_property
    def models(self) -> Tensor:
        """The models of all clients ``[K, P]``."""
        found: Tensor = self.received.own.vectors.squeeze(1)
        return found

    @cached_property
    def sight(self) -> Tensor:
        """The owners of the models that each client sees ``[K, 1 + M]``, itself first."""
        everybody = torch.arange(len(self.models), device=self.models.device)
        return torch.cat([everybody[:, None], self.received.peers.owner], 1)

    @cached_property
    def total(self) -> Tensor:
        """The sum of weighted changes that is returned to each owner ``[K, P]``."""
        return torch.zeros_like(self.models)

    @cached_property
    def mass(self) -> Tensor:
        """The sum of the weights on each model ``[K]``."""
        return self.models.new_zeros(len(self.models))

    def client(self, i: int) -> None:
        """Compute losses and weights, and train every model in sight for an epoch."""
        sight, batches = self.sight[i], self.clients.minibatches(i)
        losses = [self.clients.loss(i, self.models[b], "train") for b in sight.tolist()]
        weights = self._weights(i, torch.stack(losses) * len(self.clients.data["train"][i][1]))
        for b, weight in zip(sight.tolist(), weights, strict=True):
            self.clients.load(i, self.models[b])
            self.clients.train(i, batches)
            self.total[b] += weight * (self.models[b] - self.clients.w[i])
        self.mass[sight] += weights

    def _weights(self, i: int, losses: Tensor) -> Tensor:
        last, tracked, seen, _, _ = (part[i] for part in self.start.states)
        sight, beta = self.sight[i], self.start.method.beta
        last = last.index_copy(0, sight, losses.to(last.dtype))
        tracked = (1 - beta) * torch.where(seen, tracked, last) + beta * last
        known = seen.index_fill(0, sight, True)
        weights = torch.where(known, -tracked, -torch.inf).softmax(0)
        return weights[sight].to(losses.dtype)

    def finish(self) -> Tensor:
        """Move each model by the changes that were returned to its owner."""
        moved = self.models - self.total / self.mass.clamp(min=1)[:, None]
        moved = torch.where(self.mass[:, None] > UNUSED, moved, self.models)
        self.total.zero_()
        self.mass.zero_()
        return moved


class PlainWaffle(Plain):
    """SCAFFOLD's client step for every requester; controls are computed from the displacement."""

    @cached_property
    def change(self) -> Work:
        """The uploads of all clients ``[K, R, P]``."""
        dy, dc = (torch.empty(self.start.states.c.shape).to(self.clients.w) for _ in range(2))
        return Work(dy, dc, torch.ones(dy.shape[:2], dtype=torch.bool, device=dy.device))

    def client(self, i: int) -> None:
        """An epoch for every requester, each on the same minibatches."""
        own, batches = self.start.states.c, self.clients.minibatches(i)
        rate = self.start.on.problem.recipe.lr * len(batches)
        for r, (x, c) in enumerate(zip(self.received.x[i], self.received.c[i], strict=True)):
            correction = c - own[i, r]
            self.clients.load(i, x)
            self.clients.train(i, batches, correction)
            dy = self.clients.w[i] - x
            self.change.dy[i, r] = dy
            self.change.dc[i, r] = -dy / rate - c

    def finish(self) -> Tensor:
        """The models of all requesters."""
        method, server, round = self.start.method, self.start.server, self.start.round
        found: Tensor = method.aggregate(server, self.change, round).x
        return found


PLAIN: dict[type[AnyAlgorithm], type[Plain]] = {
    FedAvg: PlainFedAvg,
    FedFomo: PlainFedFomo,
    FedeRiCo: PlainFedeRiCo,
    Waffle: PlainWaffle,
}


def plain_round(start: Steady, layout: str, order: Order | None = None) -> Plain:
    """The round of the method in plain PyTorch."""
    return PLAIN[type(start.method)](start, Clients(start.on, layout, order))


def fastest(start: Steady, cores: int) -> tuple[Plain, dict[str, Any]]:
    """The round with the fastest memory layout and number of threads, and what these are.

    Steps of one client are timed for each combination, in turns, because the speed of a machine
    changes over time.
    """
    images = start.on.shards.x.dim() == 4
    rounds = {name: plain_round(start, name) for name in (LAYOUTS if images else ("contiguous",))}
    ways = list(product(rounds, sorted({1, cores})))
    first = {name: plain.clients.minibatches(0)[:1] for name, plain in rounds.items()}
    for plain in rounds.values():
        plain.clients.load(0, start.on.problem.start)
    spent: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    began, turns = time.perf_counter(), 0
    while turns <= TRIED or time.perf_counter() - began < TRIED_SECONDS:
        for name, threads in ways:
            spent[name, threads].append(_step(rounds[name].clients, first[name], threads))
        turns += 1
    layout, threads = min(ways, key=lambda way: min(spent[way][1:]))  # the first warms up
    return rounds[layout], {"layout": layout, "threads": threads}


def _step(clients: Clients, batches: Minibatches, threads: int) -> float:
    """Seconds that one client takes to train on these batches."""
    with settings(threads=threads):
        began = time.perf_counter()
        clients.train(0, batches)
        if clients.w.is_cuda:
            torch.cuda.synchronize(clients.w.device)
        return time.perf_counter() - began
