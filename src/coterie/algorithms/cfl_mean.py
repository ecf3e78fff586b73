"""Clustered FL that splits where updates are opposed on average: ours.

As CFL, but a cluster need not have come to rest. Q splits where

    max_Q ‖Δ_i‖ > ε_2,  and over the pairs across the cut the mean of cos(Δ_i, Δ_j) is at most 0

Travels: as CFL.

Notes:
    An average of unlike clients nears its stationary point slowly, while opposite updates show
    after a few rounds (reading B-4). ε_2 is in units of the first round's largest ‖Δ_i‖.
    Where a group has converged, its Δ_i are only noise and differ by chance. So the median member
    must have an ally, another member with a cosine of at least ``allies``, and the mean cosine
    inside the parts must exceed that across by ``gap``. Noise nears the first limit where clients
    are many and the second where they are few, but not both at once; docs/methods/cfl_mean.md has
    the numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.ranges import Cosine, NotNegative
from .cfl import CFL, Dividing


def opposed(similarity: Tensor, part: Tensor, allies: float, gap: float) -> bool:
    """Whether the updates of two parts oppose each other and those within each part agree."""
    across = similarity[part][:, ~part].mean()
    others = similarity.clone().fill_diagonal_(-torch.inf)
    inside = others[(part[:, None] == part) & others.isfinite()].mean()
    allied = others.max(1).values.median() >= allies
    return bool((across <= 0) & allied & (inside - across >= gap))


@dataclass(frozen=True)
class CFLMean(Dividing):
    """Clustered federated learning that splits where parts are opposed on average.

    Fields:
        allies: least cosine of the median member with its most similar other one.
        gap: least difference of the mean cosines inside and across the parts.
    """

    eps2: NotNegative = 0.1
    allies: Cosine = 0.4
    gap: NotNegative = 0.2

    title: ClassVar[str] = "CFL by mean cosine"
    bibtex: ClassVar[str] = CFL.bibtex

    def _divides(self, average: Tensor, similarity: Tensor, part: Tensor, scale: Tensor) -> bool:
        """Whether the parts are opposed on average."""
        return opposed(similarity, part, self.allies, self.gap)
