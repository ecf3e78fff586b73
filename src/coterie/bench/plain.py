"""The yardstick: what a careful person writes in plain PyTorch, one client after another.

A module and a ``torch.optim.SGD`` a client, tensors in memory, no DataLoader. Making it slower than
it could be is a defect.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..task import Task


def plain_round(task: Task) -> Callable[[], None]:
    """A function that trains every client for one round."""
    recipe, clients = task.recipe, []
    for indices in task.federation.train:
        module: nn.Module = task.factory().to(task.device, task.dtype).train()
        rule = torch.optim.SGD(
            module.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        at = indices.to(task.device)
        clients.append((module, rule, task.x[at].to(task.dtype), task.y[at]))

    def once() -> None:
        for module, rule, x, y in clients:
            for _ in range(recipe.epochs):
                for batch in torch.randperm(len(y), device=y.device).split(recipe.batch):
                    rule.zero_grad(set_to_none=True)
                    F.cross_entropy(module(x[batch]), y[batch]).backward()
                    rule.step()

    return once
