"""LG-FedAvg: every client has its own lower layers, and all clients share the upper layers.

    w_i = (own lower layers, global upper layers);   w_i ← LocalTrain(w_i)     all layers together
    upper ← upper + Σ_i p_i (upper_i − upper)                                  on the server

Travels: the upper layers, both ways. The lower layers never leave the client.

Notes:
    Layers near the *input* are local here; the direction is often reversed (reading B-1).
    ``global_layers = "auto"`` is the last two, and all but one in a network of fewer than three
    layers; a network of a single layer shares nothing. The server averages uniformly, as the
    authors' code does.
    The authors start from a trained FedAvg model; here clients start at the common point.
    Batch-norm statistics belong to their layer, a weight that two layers share to the later one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.flat import FlatModel
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Auto, CountOrZero, MinLen
from .fedavg import Update, Weighting, average

Layers = CountOrZero | Annotated[tuple[str, ...], MinLen(1)]  # the number of last layers, or names


class Parts(NamedTuple):
    """The positions of the two parts of a model in its vector."""

    upper: Tensor  # positions of the upper part
    lower: Tensor  # all other positions
    order: Tensor  # the index of each position of the vector in (upper, lower)

    @property
    def is_upper(self) -> Tensor:
        """Whether each position belongs to the upper part ``[P]``."""
        return torch.zeros_like(self.order, dtype=torch.bool).index_fill(0, self.upper, True)

    def join(self, upper: Tensor, lower: Tensor) -> Tensor:
        """The whole vector."""
        return torch.cat([upper, lower], -1)[..., self.order]


@lru_cache(maxsize=8)
def parts(model: FlatModel, upper: Layers) -> Parts:
    """Split a model into its last layers, or the named ones, and the rest, with their buffers."""
    if isinstance(upper, int):
        names = model.layers()[max(0, len(model.layers()) - upper) :]
        mine = [s for s in model.slots if model.owner(s) in names]
        at = torch.cat([torch.arange(0), *(torch.arange(s.start, s.stop) for s in mine)])
    else:
        at = model.positions(upper)
    rest = torch.ones(model.size, dtype=torch.bool).index_fill(0, at, False).nonzero().flatten()
    device = next(model.module.parameters()).device
    at, rest = at.to(device), rest.to(device)
    return Parts(at, rest, torch.cat([at, rest]).argsort())


class Own(NamedTuple):
    lower: Tensor  # [P - s]


@dataclass(frozen=True)
class LGFedAvg(Algorithm[Tensor, Tensor, Update, Own]):
    """Local representations, global upper layers.

    Fields:
        global_layers: the layers that are shared: the number of last layers, or names; ``auto`` is
            the last two, as long as one stays local.
    """

    global_layers: Layers | Auto = "auto"
    weighting: Weighting = "uniform"

    title: ClassVar[str] = "LG-FedAvg"
    bibtex: ClassVar[str] = """@article{liang2020lgfedavg,
  title={Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author={Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and
          Auerbach, Randy P. and Brent, David and Salakhutdinov, Ruslan and
          Morency, Louis-Philippe},
  journal={arXiv:2001.01523}, year={2020}}"""
    private = Declaration()

    def _parts(self, model: FlatModel) -> Parts:
        layers = self.global_layers
        return parts(model, min(2, len(model.layers()) - 1) if layers == "auto" else layers)

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        upper, lower, _ = self._parts(problem.model)
        return problem.start[upper], Own(rows(problem.start[lower], problem.population))

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Update, Own]:
        upper, lower, _ = at = self._parts(client.model)
        w = client.train(at.join(received, state.lower))
        return Update(w[upper], client.size), Own(w[lower])

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, 1.0)

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        return single(self._parts(client.model).join(served, state.lower))

    def check(self, problem: Problem, rounds: int) -> None:
        self._parts(problem.model)
