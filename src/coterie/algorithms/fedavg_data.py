"""FedAvg + Data: FedAvg whose clients also train on a small pool of shared raw samples.

    G   = 5 % of the training data, formed once, the same for all clients
    θ_i = LocalTrain(θ) on D_i ∪ G;   θ⁺ = θ + η_g Σ_i p_i (θ_i − θ),   p_i by |D_i| alone

Travels: raw samples, once to every client, at its first round; otherwise as FedAvg.

RAW SAMPLES LEAVE THEIR OWNERS. The method is included because P1 compares with it. An engine on a
network refuses it, because of its trait ``sharing``, unless every site has consented.

Notes:
    P1 only says "5% data sharing" (reading P1-15). ``pool = "from_clients"`` (ours) copies 5 % of
    every client's training samples, drawn uniformly; a client is not sent its own. ``held_out`` is
    the construction of the method's authors: equally many samples of every class, 5 % of all, which
    are removed from the clients' own data (all samples of a class that has too few).
    The pool is made of training data only, and samples are sent with their owners' labels. n_i does
    not count the pool. The upload of the clients' samples to the pool is not counted as traffic, as
    in the paper's cost. In a simulation the pool is in every client's training data from the start;
    the server sends the same samples as bytes, which is what a site would store.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import GlobalModel, Round, Sharing, Traits, rows
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import ShareBelowOne
from ..core.tree import Bank, Tree
from ..errors import EngineError
from .fedavg import ServerLr, Update, Weighting, average


class Server(NamedTuple):
    theta: Tensor  # [P]
    samples: Tensor  # [n, bytes] the pool: inputs and targets
    owner: Tensor  # [n] the client that has the sample already; -1 for none
    sent: Tensor  # [K] whether the client has been sent the pool


class Sent(NamedTuple):
    theta: Tensor  # [P]
    pool: Tree  # a Bank of samples, filled at a client's first round; () where nothing is shared


@dataclass(frozen=True)
class FedAvgData(GlobalModel[Server, Sent, Update, tuple[()]]):
    """Federated averaging with a shared pool of raw samples.

    Fields:
        share: size of the pool, as a share of the training data; 0 is FedAvg.
        pool: ``from_clients`` copies that share of every client's samples; ``held_out`` removes
            equally many samples of every class from the clients.
        weighting: ``samples`` weighs clients by their own training samples, ``uniform`` equally.
    """

    share: ShareBelowOne = 0.05
    pool: Literal["from_clients", "held_out"] = "from_clients"
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    title: ClassVar[str] = "FedAvg+Data"
    bibtex: ClassVar[str] = """@article{zhao2018noniid,
  title={Federated Learning with Non-{IID} Data},
  author={Zhao, Yue and Li, Meng and Lai, Liangzhen and Suda, Naveen and Civin, Damon and
          Chandra, Vikas},
  journal={arXiv:1806.00582}, year={2018}}"""
    private = Declaration(refused="raw samples leave the clients")

    @property
    def traits(self) -> Traits:
        return Traits(sharing=Sharing(self.pool, self.share))

    def init(self, problem: Problem) -> tuple[Server, tuple[()]]:
        """The common start, and the pool ready to be sent; clients keep nothing."""
        nobody = torch.zeros(problem.population, dtype=torch.bool, device=problem.device)
        pool = problem.pool
        if pool is None:
            raise EngineError("fedavg_data: the clients' pool of shared samples was not formed")
        owner, samples = pool.owner, torch.cat([_bytes(pool.x), _bytes(pool.y)], 1)
        owner = torch.full_like(owner, -1) if self.pool == "held_out" else owner
        return Server(problem.start, samples, owner, nobody), ()

    def download(self, server: Server, round: Round) -> Sent:
        """The global model and, in a client's first round, the pool samples of other clients."""
        theta = rows(server.theta, len(round.clients))
        if not len(server.owner):
            return Sent(theta, ())
        lacking = ~server.sent[round.clients, None] & (server.owner != round.clients[:, None])
        every = torch.arange(len(server.owner), device=lacking.device)
        return Sent(
            theta,
            Bank(server.samples, torch.where(lacking, every, -1), rows(server.owner, len(theta))),
        )

    def local(self, client: Client, received: Sent, state: tuple[()]) -> tuple[Update, tuple[()]]:
        return Update(client.train(received.theta), client.own), ()

    def aggregate(self, server: Server, uploads: Update, round: Round) -> Server:
        theta = average(server.theta, uploads, self.weighting, self.server_lr)
        return server._replace(theta=theta, sent=server.sent.index_fill(0, round.clients, True))

    def model(self, server: Server) -> Tensor:
        return server.theta


def _bytes(values: Tensor) -> Tensor:
    """The values as bytes, one row per sample."""
    return values.reshape(len(values), values.shape[1:].numel()).contiguous().view(torch.uint8)
