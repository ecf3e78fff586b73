"""Two robust averages to compare with: they know nothing of who helps whom."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..algorithms.fedavg import FedAvg, Update
from ..core.algorithm import Round
from ..core.mixing import squared_distances
from ..core.ranges import Interval
from ..runs.config.methods import Method

Fewer = Annotated[float, Interval(ge=0, lt=0.5)]


@dataclass(frozen=True)
class TrimmedMean(FedAvg):
    """FedAvg with the coordinate-wise trimmed mean.

    Fields:
        trim: the share of clients whose values are left out at each end.
    """

    trim: Fewer = 0.2

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """Leave out the largest and the smallest values of each coordinate."""
        m = len(uploads.w)
        out = min(int(self.trim * m), (m - 1) // 2)
        return uploads.w.sort(0).values[out : m - out].mean(0)


@dataclass(frozen=True)
class MultiKrum(FedAvg):
    """FedAvg over the clients whose models are nearest to others.

    Fields:
        trim: the share of clients that may attack, and are left out.
    """

    trim: Fewer = 0.2

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """Average the m - f models with the smallest sums of m - f - 2 squared distances."""
        m = len(uploads.w)
        out = int(self.trim * m)
        near = max(1, m - out - 2)
        D = squared_distances(uploads.w).fill_diagonal_(torch.inf)
        score = D.sort(1).values[:, :near].sum(1)
        return uploads.w[score.argsort()[: m - out]].mean(0)


REFERENCES = tuple(
    Method(f"fedavg@{name}", f"fedavg@{name}", kind, {}, None, {}, {})
    for name, kind in (("trimmed_mean", TrimmedMean), ("multi_krum", MultiKrum))
)
