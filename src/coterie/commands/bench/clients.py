"""Every client's module, optimiser and samples, as a plain PyTorch loop holds them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from ...data.simulation import Simulation

Minibatches = list[tuple[Tensor, Tensor]]
Order = Callable[[int], Tensor]  # a client's samples in the order of this epoch

BLOCK = {"cpu": 50, "cuda": 500}  # samples per batch of an evaluation
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


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
