"""Circle: clients whose moves agree beyond chance share a model; the method if you do not know.

A client's round, from its circle's mean u_i and everybody's mean g:

    w_i ← LocalTrain(u_i);   a, b ← LocalTrain(g) on two disjoint halves of its data
    D_i ← mean over its rounds of (a + b)/2 − g;   v_i ← ‖mean over its rounds of a − b‖² / 4
    p_i ← w_i in the first half of the run, LocalTrain(p_i) in the second
    w̄_i ← w_i in the first half, the mean over its rounds of w_i in the second

v_i estimates the part of ‖D_i‖² that sampling explains. From both the server forms the circles
(module ``agreement``). u_i is the circle's mean of w, weighted by samples, and nobody else's. In
the first half of the run w_i starts from u_i's last layer on g's other layers: what clients see
may be alike where what they conclude differs.

Prediction: u_i, w̄_i and p_i, in the shares in which they explain samples that trained none of them:
those for validation where they are kept apart from training, else each half's under the other
half's model, which costs no data. EM fits the shares, with one sample more for u_i.

Travels: u_i and g down; w_i, D_i, v_i and another number up.

Notes:
    Moves are compared at the common point g, so that a wrong circle cannot feed on itself. A client
    without evidence gets g. The weight of an absent client's last model halves in every round. The
    D_i of clients that took part in n of T rounds differ by the choice of the rounds, too: v_i has
    1 − n/T of the variance of D_i that the single moves show. An implausible upload counts as
    absent. With ``every`` above 1 the other rounds have no evidence and no g, and cost FedAvg's
    bytes. Without validation data w̄_i and p_i divide the share of the half's model.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import Algorithm, Mixture, Round, rows
from ..core.client import Client
from ..core.mixing import gram, last_applied, mix, nobody_yet
from ..core.privacy import TRAIN, Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Count
from ..core.rows import Rows, dense, updated
from ..core.tree import Tree
from .agreement import TINY, circles, plausible
from .fedem import fitted_shares
from .lgfedavg import parts


class Server(NamedTuple):
    """The server: every client's last upload, and the circles."""

    w: Rows  # [K, P]
    moves: Rows  # [K, P] D, without buffers
    noise: Tensor  # [K, 2] v, and the variance of D by the choice of rounds
    rounds: Tensor  # [K] with evidence
    size: Tensor  # [K] training samples, as counted before round 0
    last: Tensor  # [K] the round of the last upload, -1 before the first
    circle: Tensor  # [K, K] who is in each client's circle; everybody until there is evidence
    start: Tensor  # [P]
    applied: Rows  # [K, K]


class Down(NamedTuple):
    u: Tensor  # [P]
    g: Tree  # [P]; () in a round without evidence


class Up(NamedTuple):
    w: Tensor  # [P]
    move: Tree = ()  # [P] D, without buffers; () in a round without evidence
    noise: Tree = ()  # [2] v, and the variance of D by the choice of rounds


class Own(NamedTuple):
    w: Tensor  # [P] w̄
    late: Tensor  # [] rounds of the second half
    p: Tensor  # [P]
    move: Tensor  # [P] D
    halves: Tensor  # [P] the mean of a − b
    square: Tensor  # [] the mean of ‖(a + b)/2 − g‖²
    rounds: Tensor  # [] with evidence
    shares: Tensor  # [3] of u, w and p, by the halves


@dataclass(frozen=True)
class Circle(Algorithm[Server, Down, Up, Own]):
    """Circles of clients whose moves agree, found without a setting.

    Fields:
        every: rounds from one comparison of the clients to the next.
        without: an ingredient to leave out, for its ablation: ``clusters`` (average with all with
            whom there is a gain), ``common`` (compare at u), ``means`` (compare single rounds),
            ``body`` (no common layers), ``apart`` (p stays w) or ``tail`` (w̄ is the last w).
    """

    every: Count = 1
    without: Literal["nothing", "clusters", "common", "means", "body", "apart", "tail"] = "nothing"
    paper: ClassVar[str] = "coterie's own; no paper"
    private = Declaration(lambda self, when: self.queries(when.index, when.horizon))

    def trace_key(self, index: int, horizon: int) -> tuple[bool, bool]:
        """Whether the round has evidence, and whether the run's second half has begun."""
        return index % self.every == 0, 2 * index >= horizon

    def queries(self, index: int, horizon: int) -> tuple[Query, ...]:
        """The gradients of a round: of the disjoint halves each sample is in one only."""
        evidence, late = self.trace_key(index, horizon)
        own = TRAIN * (2 if late and self.without != "apart" else 1)
        return (*own, Query(half=1), Query(half=2)) if evidence else own

    def optimizers(self, problem: Problem) -> int:
        return 2  # of w and of p

    def init(self, problem: Problem) -> tuple[Server, Own]:
        start, K = problem.start, problem.population
        w, zero = rows(start, K), rows(torch.zeros_like(start[: problem.model.parameters]), K)
        count, noise = torch.zeros_like(problem.sizes), start.new_zeros(K, 2)
        everybody = torch.ones(K, K, dtype=torch.bool, device=problem.device)
        rest = problem.sizes, count - 1, everybody, start, nobody_yet(start, K)
        none, u_alone = noise[:, 0], rows(torch.eye(3).to(start)[0], K)
        own = Own(w, none, w, zero, zero, none, none, u_alone)
        return Server(w, zero, noise, count, *rest), own

    def _weights(self, server: Server, circle: Tensor) -> Tensor:
        """The weights ``[m, K]`` of the clients' last models in the means of some circles."""
        aged = torch.exp2((server.last - server.last.max()).clamp(min=-60).to(torch.float64))
        n = circle * torch.where(server.last >= 0, server.size * aged, 0.0)
        return n / n.sum(1, keepdim=True).clamp(min=TINY)

    def _means(self, server: Server, circle: Tensor) -> Tensor:
        """The means of some circles ``[m, P]``; the start where nobody has uploaded."""
        different, place = circle.unique(dim=0, return_inverse=True)
        p = self._weights(server, different)
        return torch.where(p.sum(1, keepdim=True) > 0, mix(p, dense(server.w)), server.start)[place]

    def download(self, server: Server, round: Round) -> Down:
        """The circle's mean and, in a round with evidence, everybody's."""
        u, everybody = self.serve(server, round), torch.ones_like(server.circle[round.clients])
        g = u if self.without == "common" else self._means(server, everybody)
        return Down(u, g if self.trace_key(round.index, round.horizon)[0] else ())

    def local(self, client: Client, received: Down, state: Own) -> tuple[Up, Own]:
        """Train the circle's model, and the common one on both halves of the data."""
        u, g = received
        evidence, late = self.trace_key(client.round, client.horizon)
        body = parts(client.model, 1)
        together = evidence and not late and self.without != "body"
        w = client.train(body.join(u[body.upper], g[body.lower]) if together else u)
        p = w
        if late and self.without != "apart":
            p = client.train(torch.where(state.rounds > 0, state.p, u))
        count = state.late + late
        mean = state.w + (w - state.w) / count if late and self.without != "tail" else w
        if not evidence:
            return Up(w), state._replace(w=mean, late=count, p=p)
        one, two = client.halves()
        a, b = one.train(g), two.train(g)
        once, apart = client.trainable((a + b) / 2 - g), client.trainable(a - b)
        n = state.rounds + 1 if self.without != "means" else torch.ones_like(state.rounds)
        move = state.move + (once - state.move) / n
        halves = state.halves + (apart - state.halves) / n
        square = state.square + ((once**2).sum() - state.square) / n
        spread = (square - (move**2).sum()).clamp(min=0) / (n - 1).clamp(min=1)
        noise = torch.stack([(halves**2).sum() / 4, torch.where(n > 1, spread, square)])
        shares = judged_by_halves(one, two, u, a, b)
        return Up(w, move, noise), Own(mean, count, p, move, halves, square, n, shares)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """Store what is sound and, where there is evidence, form the circles anew."""
        sound = plausible(uploads.w - server.start)
        if isinstance(uploads.noise, Tensor):
            sound &= plausible(uploads.move) & uploads.noise.isfinite().all(1)
        at, up = round.clients[sound], tree.take(uploads, sound.nonzero().flatten())
        new = server._replace(
            w=updated(server.w, at, up.w), last=server.last.index_fill(0, at, round.index)
        )
        if isinstance(up.noise, Tensor):
            noise = server.noise.index_copy(0, at, up.noise)
            counted = server.rounds.index_add(0, at, torch.ones_like(at))
            new = new._replace(
                noise=noise, rounds=counted, moves=updated(server.moves, at, up.move)
            )
            new = new._replace(circle=self._circles(new, round.index // self.every + 1))
        weights = self._weights(new, new.circle[at]).to(up.w.dtype)
        return new._replace(applied=updated(server.applied, at, weights))

    def _circles(self, server: Server, rounds: int) -> Tensor:
        """Who is in each client's circle ``[K, K]``, after so many rounds with evidence."""
        ids = ((server.rounds > 0) & (server.size > 0)).nonzero().flatten()
        v, by_rounds = server.noise[ids].to(torch.float64).T
        v = v + (1 - server.rounds[ids] / rounds) * by_rounds
        found = circles(gram(server.moves[ids]), v, pairwise=self.without == "clusters")
        circle = torch.ones_like(server.circle)
        circle[ids] = False
        circle[ids[:, None], ids] = found
        return circle

    def serve(self, server: Server, round: Round) -> Tensor:
        return self._means(server, server.circle[round.clients])

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        """u, w̄ and p, in the shares in which they explain unseen samples."""
        models = torch.stack([served, state.w, state.p])
        losses, masks = client.map(lambda w: client.each_loss(w, "val"), models)
        judged = fitted_shares(losses, masks[0])
        return Mixture(torch.where(client.validated, judged, state.shares), models)

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        """The weights of the clients' last models in each client's u after its last round."""
        return last_applied(server.applied)


def judged_by_halves(one: Client, two: Client, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The shares ``[3]`` of u, w and p: of u, and of each half's model on the other half."""
    first, here = one.map(lambda m: one.each_loss(m, "train"), torch.stack([u, b]))
    second, there = two.map(lambda m: two.each_loss(m, "train"), torch.stack([u, a]))
    shares = fitted_shares(torch.cat([first, second], 1), torch.cat([here[0], there[0]]))
    return torch.cat([shares[:1], shares[1:] / 2, shares[1:] / 2])
