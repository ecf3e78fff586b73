"""FedALA: every client learns, entry by entry, how much of the global model's top it takes over.

With θ the global model, θ_i the client's model after its last round and W_i in [0, 1], for the
upper layers only; all lower layers are θ's:

    θ̂ = θ_i + (θ − θ_i) ∘ W_i
    W_i ← clip(W_i − η ∇_θ̂ F_i(θ̂) ∘ (θ − θ_i), 0, 1)      over a share s of the client's samples
    θ_i ← LocalTrain(θ̂);   θ ← θ + Σ_i p_i (θ_i − θ)      on the server
    prediction: θ̂ of the newest θ

W_i starts at 1. In a client's first round θ̂ is θ; in its second one it passes over the samples
until the deviation of its last ten losses is below 0.1; from then on W_i is learnt in one pass per
round.

Travels: as FedAvg, and how often a client may pass over its samples. θ_i and W_i stay.

Notes:
    The passes of a client's second round end after ``start_passes``. Whether they have ended is
    known to no trace, so that a round with such a client costs all of them (reading B-12).
    s is drawn anew in every minibatch, sample by sample, and the losses are means over a pass;
    public code draws once a round and takes each pass's last loss.
    A prediction uses W_i as the client's last round left it; public code learns once more.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import Count, NotNegative, ShareAboveZero
from .fedavg import Update, Weighting, average
from .lgfedavg import Layers, parts

LAST, STEADY = 10, 0.1  # losses whose deviation below STEADY ends the passes
UNKNOWN = 1e6  # in place of losses of passes that have not been made


class Server(NamedTuple):
    theta: Tensor  # [P]
    rounds: Tensor  # [K] how many rounds each client took part in


class Sent(NamedTuple):
    theta: Tensor  # [P]
    passes: Tensor  # [n] whether the client makes each of the round's passes for W


class Own(NamedTuple):
    """What a client keeps, of the upper layers."""

    theta: Tensor  # [s] after its last round
    W: Tensor  # [s]


class Learning(NamedTuple):
    """The values that the passes for W carry from step to step."""

    W: Tensor  # [P]
    total: Tensor  # [] the losses of this pass
    losses: Tensor  # [10] the mean losses of the last passes
    ended: Tensor  # [] 1 once they are steady, else 0


def blended(own: Tensor, common: Tensor, W: Tensor) -> Tensor:
    """``θ̂ = θ_i + (θ − θ_i) ∘ W``.

    >>> blended(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0]), torch.tensor([0.5, 1.0]))
    tensor([2., 3.])
    """
    return own + (common - own) * W


def learned(W: Tensor, g: Tensor, own: Tensor, common: Tensor, eta: float) -> Tensor:
    """W after one step, given the gradient of the loss at θ̂."""
    return (W - eta * g * (common - own)).clamp(0, 1)


@dataclass(frozen=True)
class FedALA(Algorithm[Server, Sent, Update, Own]):
    """Adaptive local aggregation.

    Fields:
        layers: the layers that are blended: the number of last layers, or names; a client takes all
            others as they are.
        eta: the rate η at which W is learnt; 0 is FedAvg.
        share: the share s of the client's samples on which W is learnt.
        start_passes: the most passes over the samples in a client's second round.
    """

    layers: Layers = 1
    eta: NotNegative = 1.0
    share: ShareAboveZero = 0.8
    start_passes: Count = 20
    weighting: Weighting = "samples"

    bibtex: ClassVar[str] = """@inproceedings{zhang2023fedala,
  title={{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
  author={Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and
          Ma, Ruhui and Guan, Haibing},
  booktitle={AAAI}, year={2023}}"""
    private = Declaration(refused="exact losses decide how long it learns its weights")

    def init(self, problem: Problem) -> tuple[Server, Own]:
        top = rows(problem.start[parts(problem.model, self.layers).upper], problem.population)
        rounds = torch.zeros(problem.population, dtype=torch.int64, device=problem.device)
        return Server(problem.start, rounds), Own(top, torch.ones_like(top))

    def download(self, server: Server, round: Round) -> Sent:
        """The global model, and as many passes as the client that needs most may make."""
        rounds = server.rounds[round.clients, None]
        count = self.start_passes if (rounds == 1).any() else int((rounds > 0).any())
        first = torch.arange(count, device=rounds.device) == 0
        passes = (rounds == 1) | (first & (rounds > 1))
        return Sent(rows(server.theta, len(rounds)), passes)

    def local(self, client: Client, received: Sent, state: Own) -> tuple[Update, Own]:
        at, theta = parts(client.model, self.layers).upper, received.theta
        own = theta.index_copy(0, at, state.theta)  # the lower layers are the global model's
        W = torch.ones_like(theta).index_copy(0, at, state.W)
        if len(received.passes):
            W = self._learned(client, received, own, W)
        w = client.train(blended(own, theta, W))
        return Update(w, client.size), Own(w[at], W[at])

    def _learned(self, client: Client, received: Sent, own: Tensor, W: Tensor) -> Tensor:
        """W after this round's passes; where own and global model are the same, it stays."""
        theta, passes = received
        again = client.tuned(epochs=len(passes), batches="ala")
        length = (again.steps // len(passes)).clamp(min=1)
        numbers = torch.arange(len(passes), device=passes.device)

        def loss(w: Tensor, batch: Batch) -> Tensor:
            luck = client.draw("ala", (len(batch.y),), 0 if batch.step is None else batch.step)
            mask = (luck < self.share).to(w.dtype)
            mask = mask if batch.mask is None else mask * batch.mask
            return mean(client.losses(w, batch), mask)

        def step(now: Learning, batch: Batch) -> Learning:
            number = 0 if batch.step is None else batch.step
            mine = (passes & (numbers == number // length)).to(own.dtype).sum()
            w = blended(own, theta, now.W)
            new = learned(now.W, client.gradient(w, batch, loss), own, theta, self.eta)
            new = torch.where(mine > now.ended, new, now.W)
            if len(passes) == 1:
                return now._replace(W=new)
            last = (number + 1) % length == 0
            total = now.total + loss(w, batch)
            losses = torch.cat([now.losses[1:], (total / length)[None]])
            losses = torch.where(last, losses, now.losses)
            steady = (losses - losses.mean()).square().mean() < STEADY**2
            ended = torch.where(steady, 1.0, now.ended)
            return Learning(new, torch.where(last, 0.0, total), losses, ended)

        none = own.new_zeros(())
        unknown = UNKNOWN * torch.arange(LAST, dtype=own.dtype, device=own.device)
        return again.scan(step, Learning(W, none, unknown, none)).W

    def aggregate(self, server: Server, uploads: Update, round: Round) -> Server:
        theta = average(server.theta, uploads, self.weighting, 1.0)
        here = torch.ones_like(round.clients)
        return Server(theta, server.rounds.index_add(0, round.clients, here))

    def serve(self, server: Server, round: Round) -> Tensor:
        return rows(server.theta, len(round.clients))

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        """The newest global model, its top blended with the client's own."""
        at = parts(client.model, self.layers)
        top = blended(state.theta, served[at.upper], state.W)
        return single(at.join(top, served[at.lower]))

    def global_model(self, server: Server) -> Tensor | None:
        return server.theta

    def check(self, problem: Problem, rounds: int) -> None:
        parts(problem.model, self.layers)
