"""CoBo: clients whose gradients agree halfway between their models pull each other.

Every step of a local round, and once a round for some pairs of clients, with z = (x_i + x_j)/2:

    x_i  ← x_i − η (∇F_i(x_i) + ρ Σ_j W_ij (x_i − x_j))          x_j as it was before the round
    W_ij ← clip(W_ij + γ ⟨∇F_i(z), ∇F_j(z)⟩, 0, 1)               on the server;   W_ij = 1 at first

Travels: Σ_j W_ij x_j, its weight and two midpoints down; x_i and two gradients up.

Notes:
    The paper takes one step between two exchanges. Here a client takes a round's steps towards the
    others' models of the round before, and its own optimiser takes them (reading B-14).
    The paper draws every pair with probability 2/K. Here the round's clients stand in a random
    ring and each is paired with both neighbours, which has the same expectation and gives every
    client as much work; two clients are one pair. Gradients are those of all training samples.
    Clients that have not trained yet pull towards the common start, as in the paper.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import OwnModel, Round, check_pull, rows
from ..core.client import Client
from ..core.mixing import mix, nobody_yet
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import NotNegative
from ..core.rows import Rows, dense, updated
from ..core.tree import Parcels, Tree


class Server(NamedTuple):
    x: Tensor  # [K, P] the last upload of each client
    W: Tensor  # [K, K] zero on the diagonal
    applied: Rows  # [K, K] the rows of W in each client's last round; zero before its first


class Sent(NamedTuple):
    pull: Tensor  # [P] Σ_j W_ij x_j
    total: Tensor  # [] Σ_j W_ij
    middle: Parcels  # [2, P] halfway to the next client of the ring and to the one before


class Up(NamedTuple):
    x: Tensor  # [P]
    gradients: Parcels  # [2, P] at the midpoints


class Own(NamedTuple):
    x: Tensor  # [P]


def coupling(w: Tensor, pull: Tensor, total: Tensor, rho: float) -> Tensor:
    """The penalty with gradient ``ρ Σ_j W_ij (w − x_j)``, from Σ_j W_ij x_j and Σ_j W_ij."""
    return rho * (0.5 * total * (w * w).sum() - (w * pull).sum())


def agreed(W: Tensor, products: Tensor, step: float) -> Tensor:
    """``clip(W + γ ⟨g_i, g_j⟩, 0, 1)``."""
    return (W + step * products).clamp(0, 1)


def ring(round: Round) -> Tensor:
    """The next client of a random ring and the one before ``[n, 2]``, for ``round.asked``.

    -1 where there is none: of two clients only the first has a next one.
    """
    asked = round.asked
    place = round.draw("ring", asked).argsort(stable=True)
    around = asked[place]
    pairs = torch.stack([around.roll(-1), around.roll(1)], 1)
    if len(asked) < 3:
        pairs[-1:, 0], pairs[:1, 1] = -1, -1
    return torch.empty_like(pairs).index_copy(0, place, pairs)


@dataclass(frozen=True)
class CoBo(OwnModel[Server, Sent, Up, Own]):
    """Collaborative learning by bilevel optimisation.

    Fields:
        rho: strength ρ of the pull towards collaborators; 0 is Local.
        step: the step γ of the weights W.
    """

    rho: NotNegative = 0.01
    step: NotNegative = 0.01

    title: ClassVar[str] = "CoBo"
    bibtex: ClassVar[str] = """@inproceedings{hashemi2024cobo,
  title={{CoBo}: Collaborative Learning via Bilevel Optimization},
  author={Hashemi, Diba and He, Lie and Jaggi, Martin},
  booktitle={NeurIPS}, year={2024}}"""
    private = Declaration(refused="it sends exact gradients of all training data")

    def init(self, problem: Problem) -> tuple[Server, Own]:
        K = problem.population
        W = torch.ones(K, K, dtype=torch.float64, device=problem.device).fill_diagonal_(0)
        return Server(rows(problem.start, K), W, nobody_yet(W, K)), Own(rows(problem.start, K))

    def download(self, server: Server, round: Round) -> Sent:
        """What pulls each client, and the midpoints to its neighbours in the ring."""
        at, mine = round.clients, server.W[round.clients]
        other = ring(round)
        middle = (server.x[at, None] + server.x[other.clamp(min=0)]) / 2
        total = mine.sum(1).to(server.x.dtype)
        return Sent(mix(mine, server.x), total, Parcels(middle, other >= 0))

    def local(self, client: Client, received: Sent, state: Own) -> tuple[Up, Own]:
        pull = client.trainable(received.pull)

        def penalty(w: Tensor) -> Tensor:
            return coupling(client.trainable(w), pull, received.total, self.rho)

        g = client.map(lambda z: client.gradient(z, "train"), received.middle.vectors)
        x = client.train(state.x, penalty=penalty)
        return Up(x, Parcels(g, received.middle.sent)), Own(x)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """Store the models; learn the weights of the pairs that both replied."""
        at, W = round.clients, server.W
        row = torch.full((round.population,), -1, device=at.device)
        row = row.index_copy(0, at, torch.arange(len(at), device=at.device))
        asked, after = round.asked, ring(round)[:, 0]
        both = (after >= 0) & (row[asked] >= 0) & (row[after.clamp(min=0)] >= 0)
        i, j = asked[both], after[both]
        g = round.trainable(uploads.gradients.vectors).to(torch.float64)
        new = agreed(W[i, j], (g[row[i], 0] * g[row[j], 1]).sum(1), self.step)
        W = W.index_put((i, j), new).index_put((j, i), new)
        applied = updated(server.applied, at, server.W[at])
        return Server(server.x.index_copy(0, at, uploads.x), W, applied)

    def model(self, state: Own) -> Tensor:
        return state.x

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        """Each client's row of W in its last round, with 1 on the diagonal; rows sum to one."""
        A = dense(server.applied).clone().fill_diagonal_(1)
        return A / A.sum(1, keepdim=True)

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a pull that overshoots where everybody collaborates with everybody."""
        check_pull(problem, rounds, "cobo.rho", self.rho * (problem.population - 1))
