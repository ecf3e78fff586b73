"""The server's own samples, for methods that compute on them (``data.aux``)."""

import torch

from . import random, tree
from .batches import Shape, View
from .client import Client, Clock
from .problem import Problem


def of_server(problem: Problem, round_index: int, horizon: int) -> Client | None:
    """The server's own samples as one more client; None where the server holds none."""
    if problem.aux is None:
        return None
    held = tree.row(problem.aux.splits["train"].rows([0]), 0)
    view = View(
        id=torch.tensor(problem.population, device=problem.device),
        stream=random.bits(problem.seed, round_index, "server").to(problem.device),
        lr=torch.tensor(
            problem.recipe.rate(round_index), dtype=problem.dtype, device=problem.device
        ),
        train=held,
        val=held,
        relabel=problem.aux.relabel[0],
    )
    shape = Shape(len(problem.aux.x), {"train": True, "val": True}, batched=True)
    return Client(problem, problem.aux, view, shape, Clock(round_index, horizon))
