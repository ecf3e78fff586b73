"""What may enter an aggregation, and why something may not."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import tree
from .algorithm import Round
from .tree import Tree


class Rejection(NamedTuple):
    """An upload that was left out."""

    client: int
    reason: str


def screen(uploads: Tree, round: Round) -> tuple[Tensor, tuple[Rejection, ...]]:
    """Positions of the uploads that may be aggregated, and the others with their reason."""
    fine = torch.ones(len(round.clients), dtype=torch.bool, device=round.clients.device)
    for leaf in tree.leaves(uploads):
        if leaf.is_floating_point():
            fine &= leaf.flatten(1).isfinite().all(1) if leaf.dim() > 1 else leaf.isfinite()
    bad = round.clients[~fine].tolist()
    return fine.nonzero().flatten(), tuple(Rejection(client, "not_finite") for client in bad)
