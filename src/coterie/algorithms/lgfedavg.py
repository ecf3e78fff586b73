"""LG-FedAvg: every client has its own lower layers, and all clients share the upper layers.

    w_i = (own lower layers, global upper layers);   w_i ← LocalTrain(w_i)     all layers together
    upper ← Σ_i p_i upper_i                                                    on the server

Travels: the upper layers, both ways. The lower layers never leave the client.

Notes:
    Layers near the *input* are local here; the direction is often reversed (reading B-1).
    ``global_layers = "auto"`` is the last two, and all but one in a network of fewer than three
    layers; a network of a single layer shares nothing. The server averages uniformly, as the
    authors' code does.
    The authors start from a trained FedAvg model: ``pretrain_rounds`` (ours: 0), in which the whole
    model travels. Afterwards every client receives the pretrained lower layers once.
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
from ..core.tree import Bank
from .fedavg import Update, Weighting, average

Layers = CountOrZero | Annotated[tuple[str, ...], MinLen(1)]  # the number of last layers, or names


class Parts(NamedTuple):
    """The positions of the two parts of a model in its vector."""

    upper: Tensor  # positions of the upper part
    lower: Tensor  # all other positions
    order: Tensor  # the index of each position of the vector in (upper, lower)

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


class Shared(NamedTuple):
    """The server."""

    upper: Tensor  # [s]
    lower: Tensor  # [P - s] the pretrained lower layers
    begun: Tensor  # [K] whether the client has lower layers of its own


class Down(NamedTuple):
    upper: Tensor  # [s]
    lower: Bank  # one slot: the pretrained lower layers, for a client that has none of its own


class Up(NamedTuple):
    upper: Tensor  # [s]
    lower: Tensor  # [P - s] while pretraining, then [0]
    size: Tensor  # []


class Own(NamedTuple):
    lower: Tensor  # [P - s]


@dataclass(frozen=True)
class LGFedAvg(Algorithm[Shared, Down, Up, Own]):
    """Local representations, global upper layers.

    Fields:
        global_layers: the layers that are shared: the number of last layers, or names; ``auto`` is
            the last two, as long as one stays local.
        pretrain_rounds: rounds of FedAvg on the whole model before the parts are separated.
    """

    global_layers: Layers | Auto = "auto"
    pretrain_rounds: CountOrZero = 0
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

    def trace_key(self, index: int, horizon: int) -> bool:
        """Whether the round is one of pretraining, in which the whole model is shared."""
        return index < self.pretrain_rounds

    def init(self, problem: Problem) -> tuple[Shared, Own]:
        upper, lower, _ = self._parts(problem.model)
        begun = torch.full((problem.population,), self.pretrain_rounds == 0, device=problem.device)
        own = Own(rows(problem.start[lower], problem.population))
        return Shared(problem.start[upper], problem.start[lower], begun), own

    def download(self, server: Shared, round: Round) -> Down:
        """The upper layers; the lower ones only to clients that have none of their own."""
        slot = torch.where(server.begun[round.clients], -1, 0)[:, None]
        lower = Bank(server.lower[None], slot, slot)
        return Down(rows(server.upper, len(round.clients)), lower)

    def _lower(self, received: Down, state: Own) -> Tensor:
        sent, present = received.lower.rows()
        return torch.where(present, sent[0], state.lower)

    def local(self, client: Client, received: Down, state: Own) -> tuple[Up, Own]:
        upper, lower, _ = at = self._parts(client.model)
        w = client.train(at.join(received.upper, self._lower(received, state)))
        pretraining = self.trace_key(client.round, client.horizon)
        sent = w[lower] if pretraining else w.new_zeros(0)
        return Up(w[upper], sent, client.size), Own(w[lower])

    def aggregate(self, server: Shared, uploads: Up, round: Round) -> Shared:
        def mean(old: Tensor, new: Tensor) -> Tensor:
            return average(old, Update(new, uploads.size), self.weighting, 1.0)

        upper = mean(server.upper, uploads.upper)
        if round.index < self.pretrain_rounds:
            return server._replace(upper=upper, lower=mean(server.lower, uploads.lower))
        return server._replace(upper=upper, begun=server.begun.index_fill(0, round.clients, True))

    def predictor(self, client: Client, served: Down, state: Own) -> Mixture:
        at = self._parts(client.model)
        return single(at.join(served.upper, self._lower(served, state)))

    def check(self, problem: Problem, rounds: int) -> None:
        self._parts(problem.model)
