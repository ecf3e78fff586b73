"""pFedGraph: the server infers who should collaborate from where the models went, and mixes them.

With w⁰ the common start, p the shares of training samples and d_ij = −cos(w_i − w⁰, w_j − w⁰):

    a_i = argmin over the simplex of α ‖a − p‖² + d_i · a    = the projection of p − d_i / 2α
    u_i = Σ_j a_ij w_j;   v_i = Σ_j a_ij w_j / ‖w_j‖          on the server
    w_i = argmin F_i(w) − λ cos(w, v_i), trained from u_i     on the client

Travels: w_i and the sample count up; u_i and the direction of v_i down.

Notes:
    A cosine above 0.9 counts as 1, as in public code. Nothing is inferred before the first upload:
    round 0 trains the common start with λ = 0.
    Public code in four frameworks *adds* λ cos, which pushes a client away from its collaborators;
    Eq. 3 subtracts it, and so do we (reading B-13).
    In a round the graph is formed over the clients that replied; an absent client keeps its u_i.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.mixing import cosines, last_applied, mix, nobody_yet, noted, shares
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import NotNegative, Positive
from ..core.rows import Rows, updated
from ..core.tree import Tree
from .fedavg import Update

SAME = 0.9  # a cosine above it counts as 1
TINY = 1e-30


class Graph(NamedTuple):
    """The server."""

    u: Rows  # [K, P] each client's mixture
    v: Rows  # [K, parameters] the direction of Σ a_ij w_j / ‖w_j‖; zero before the first round
    start: Tensor  # [P]
    applied: Rows  # [K, K] the weights of the mixtures


class Sent(NamedTuple):
    u: Tensor  # [P]
    v: Tensor  # [parameters]


class Own(NamedTuple):
    w: Tensor  # [P]


def simplex(points: Tensor) -> Tensor:
    """The Euclidean projection of every row on the simplex: weights of at least 0 that sum to one.

    >>> simplex(torch.tensor([[0.5, 0.9, -1.0]]))
    tensor([[0.3000, 0.7000, 0.0000]])
    """
    ordered = points.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    count = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    kept = (ordered * count > excess).sum(-1, keepdim=True)
    return (points - excess.gather(-1, kept - 1) / kept).clamp(min=0)


def graph(moves: Tensor, p: Tensor, alpha: float) -> Tensor:
    """The weights ``a [m, m]`` from the moves w_i − w⁰ ``[m, P]`` and the shares p, float64.

    >>> graph(torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]]), torch.full((3,), 1 / 3), 0.8)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.1146, 0.1458, 0.7396]], dtype=torch.float64)
    """
    alike = cosines(moves).fill_diagonal_(1)
    alike = torch.where(alike > SAME, 1.0, alike)
    return simplex(p.to(torch.float64) + alike / (2 * alpha))


@dataclass(frozen=True)
class PFedGraph(Algorithm[Graph, Sent, Update, Own]):
    """Personalised federated learning with an inferred collaboration graph.

    Fields:
        alpha: how much the weights keep to the shares of samples; the larger, the nearer to FedAvg.
        lam: strength λ of the pull towards the collaborators' direction.
        predict_with: the client's ``own`` trained model, or its newest mixture (``cloud``).
    """

    alpha: Positive = 0.8
    lam: NotNegative = 0.01
    predict_with: Literal["own", "cloud"] = "own"

    title: ClassVar[str] = "pFedGraph"
    bibtex: ClassVar[str] = """@inproceedings{ye2023pfedgraph,
  title={Personalized Federated Learning with Inferred Collaboration Graphs},
  author={Ye, Rui and Ni, Zhenyang and Wu, Fangzhao and Chen, Siheng and Wang, Yanfeng},
  booktitle={ICML}, year={2023}}"""
    private = Declaration()

    def init(self, problem: Problem) -> tuple[Graph, Own]:
        K, start = problem.population, problem.start
        nowhere = rows(torch.zeros_like(start[: problem.model.parameters]), K)
        return Graph(rows(start, K), nowhere, start, nobody_yet(start, K)), Own(rows(start, K))

    def download(self, server: Graph, round: Round) -> Sent:
        return Sent(server.u[round.clients], server.v[round.clients])

    def local(self, client: Client, received: Sent, state: Own) -> tuple[Update, Own]:
        def pull(w: Tensor) -> Tensor:
            x = client.trainable(w)
            return -self.lam * (x @ received.v) / (x @ x).clamp(min=TINY).sqrt()

        w = client.train(received.u, penalty=pull)
        return Update(w, client.size), Own(w)

    def aggregate(self, server: Graph, uploads: Update, round: Round) -> Graph:
        x = round.trainable(uploads.w)
        A = graph(round.trainable(uploads.w - server.start), shares(uploads.size), self.alpha)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=TINY)
        v = mix(A, x / length)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=TINY)
        at = round.clients
        return server._replace(
            u=updated(server.u, at, mix(A, uploads.w)),
            v=updated(server.v, at, v),
            applied=noted(server.applied, at, A),
        )

    def serve(self, server: Graph, round: Round) -> Tree:
        return server.u[round.clients] if self.predict_with == "cloud" else ()

    def predictor(self, client: Client, served: Tree, state: Own) -> Mixture:
        return single(served if self.predict_with == "cloud" else state.w)

    def collaboration(self, server: Graph, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)
