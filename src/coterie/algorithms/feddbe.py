"""FedDBE: each client keeps the mean of its own features apart, so that shared ones carry no bias.

With f the body, h the head and m_i the client's own shift of the features, in every local round:

    loss = CE(h(f(x) + m_i), y) + κ mean_k ½ (r_k − g_k)²
    r  ← (1 − μ) r + μ mean_batch f(x)            the client's running mean of its features
    g  = Σ_i p_i mean f(x) over client i's data   once, at the common start
    (f, h) ← (f, h) + Σ_i p_i ((f, h)_i − (f, h));   m_i ← m_i − η ∇_m loss, and stays

Travels: as FedAvg and g down; in the first round also the mean of the client's features up.

Notes:
    g is made in the first round by the clients that take part in it, at the model with which they
    begin, and is fixed; that round trains with κ = 0 (reading B-15).
    The head's first layer must be linear with a bias: h(f(x) + m) is then h(f(x)) with another
    bias, so that a client predicts with one model of the usual form. r begins every round at g.
    m_i takes plain gradient steps, as in public code; it starts at zero.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.func import grad

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.mixing import mix, shares
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import NotNegative, ShareAboveZero
from ..core.tree import Tree
from .features import Entrance, average_of, entrance
from .fedavg import Update, Weighting, average
from .lgfedavg import Layers


class Server(NamedTuple):
    theta: Tensor  # [P]
    mean: Tensor  # [d] g; zero in the first round


class Up(NamedTuple):
    update: Update
    mean: Tensor  # [d] of its features in the first round, then [0]


class Own(NamedTuple):
    m: Tensor  # [d]


class Working(NamedTuple):
    w: Tensor  # [P]
    m: Tensor  # [d]
    running: Tensor  # [d] r
    of_w: Tree  # optimiser state


def bias(running: Tensor, common: Tensor, kappa: float) -> Tensor:
    """``κ mean_k ½ (r_k − g_k)²``."""
    return kappa * (0.5 * (running - common) ** 2).mean()


@dataclass(frozen=True)
class FedDBE(Algorithm[Server, Server, Up, Own]):
    """Domain bias elimination.

    Fields:
        head: the layers on top of the features: the number of last layers, or names.
        kappa: strength κ of the pull of the client's mean features towards everybody's.
        momentum: weight μ of the newest batch in the running mean.
    """

    head: Layers = 1
    kappa: NotNegative = 50.0
    momentum: ShareAboveZero = 1.0
    weighting: Weighting = "samples"

    bibtex: ClassVar[str] = """@inproceedings{zhang2023feddbe,
  title={Eliminating Domain Bias for Federated Learning in Representation Space},
  author={Zhang, Jianqing and Hua, Yang and Cao, Jian and Wang, Hao and Song, Tao and
          Xue, Zhengui and Ma, Ruhui and Guan, Haibing},
  booktitle={NeurIPS}, year={2023}}"""
    private = Declaration(refused="the mean of the features leaves the clients")

    @property
    def traits(self) -> Traits:
        return Traits(discloses="feature_mean")

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        """Whether the round is the first, in which features are measured."""
        return index == 0

    def init(self, problem: Problem) -> tuple[Server, Own]:
        zero = problem.start.new_zeros(entrance(problem.model, self.head, "feddbe.head").width)
        return Server(problem.start, zero), Own(rows(zero, problem.population))

    def download(self, server: Server, round: Round) -> Server:
        return Server(*(rows(part, len(round.clients)) for part in server))

    def local(self, client: Client, received: Server, state: Own) -> tuple[Up, Own]:
        at, first = entrance(client.model, self.head, "feddbe.head"), client.round == 0
        found = state.m.new_zeros(0)
        if first:
            found = average_of(client, lambda b: at.features(client, received.theta, b)[1])
        kappa = 0.0 if first else self.kappa

        def step(now: Working, batch: Batch) -> Working:
            def loss(w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
                output, features = at.features(client, at.shifted(w, m), batch)
                here = at.mean(features, batch)
                running = (1 - self.momentum) * now.running + self.momentum * here
                own = mean(client.losses_of(output, batch), batch.mask)
                return own + bias(running, received.mean, kappa), running

            (of_w, of_m), running = grad(loss, argnums=(0, 1), has_aux=True)(now.w, now.m)
            w, rule = client.step(now.w, of_w, now.of_w, batch)
            return Working(w, now.m - client.lr * of_m, running, rule)

        begin = Working(received.theta, state.m, received.mean, client.begin(received.theta))
        end = client.scan(step, begin)
        client.end(end.of_w)
        return Up(Update(end.w, client.size), found), Own(end.m)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        theta = average(server.theta, uploads.update, self.weighting, 1.0)
        if round.index:
            return Server(theta, server.mean)
        return Server(theta, mix(shares(uploads.update.size), uploads.mean))

    def serve(self, server: Server, round: Round) -> Tensor:
        return rows(server.theta, len(round.clients))

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        at: Entrance = entrance(client.model, self.head, "feddbe.head")
        return single(at.shifted(served, state.m))

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a head that does not begin with a linear layer with a bias."""
        entrance(problem.model, self.head, "feddbe.head")
