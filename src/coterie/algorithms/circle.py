"""Circle: clients whose moves agree beyond chance share a model; the method if you do not know.

A client's round, from its circle's mean u_i and everybody's mean g:

    w_i ← LocalTrain(u_i);   a, b ← LocalTrain(g) on two disjoint halves of its data
    D_i ← mean over its rounds of (a + b)/2 − g;   v_i ← ‖mean over its rounds of a − b‖² / 4

v_i estimates the part of ‖D_i‖² that sampling explains. From both the server forms the circles
(module ``agreement``). u_i is the mean of w over the circle, weighted by samples; a client outside
of it has weight zero.

Prediction: u_i and w_i, in the shares in which they explain samples that did not train w_i: those
for validation where they are kept apart from training, else each half's under the other half's
model, which costs no data. EM fits the shares, with ``prior`` samples more for u_i.

Travels: u_i and g down; w_i, D_i, v_i and the sample count up.

Notes:
    This method is ours. Moves are compared at the common point g, so that a wrong circle cannot
    feed on itself. Until there is evidence of a client, it gets g.
    An absent client stands in the means with its last model, whose weight halves in every round.
    The D_i of clients that took part in n of T rounds differ by the choice of the rounds, too: v_i
    has 1 − n/T of the variance that its single moves show.
    With ``every`` above 1, g and the halves come in every so many rounds alone; the other rounds
    cost as much as FedAvg's.
    A client whose model or move is not finite, or ``OUTSIZED`` times longer than the median, counts
    as absent.
    ``without`` leaves out one ingredient, for the ablation in docs/results/arena.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import Algorithm, Mixture, Round, rows
from ..core.client import Client
from ..core.mixing import gram, last_applied, mix, nobody_yet
from ..core.problem import Problem
from ..core.ranges import Count, NotNegative
from ..core.rows import Rows, dense, updated
from ..core.tree import Tree
from .agreement import circles
from .fedem import fitted_shares

OUTSIZED = 100.0
TINY = 1e-300


class Server(NamedTuple):
    """The server: every client's last upload, and the circles."""

    w: Rows  # [K, P]
    moves: Rows  # [K, P] D, without buffers
    noise: Tensor  # [K, 2] v, and the variance of D by the choice of rounds
    rounds: Tensor  # [K] with evidence
    size: Tensor  # [K] training samples
    last: Tensor  # [K] the round of the last upload, -1 before the first
    circle: Tensor  # [K, K] who is in each client's circle; everybody until there is evidence
    start: Tensor  # [P]
    applied: Rows  # [K, K]


class Down(NamedTuple):
    """What a client receives."""

    u: Tensor  # [P]
    g: Tree  # [P]; () in a round without evidence


class Up(NamedTuple):
    """What a client sends."""

    w: Tensor  # [P]
    size: Tensor  # []
    move: Tree = ()  # [P] D, without buffers; () in a round without evidence
    noise: Tree = ()  # [2] v, and the variance of D by the choice of rounds


class Own(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P]
    move: Tensor  # [P] D
    halves: Tensor  # [P] the mean of a − b
    square: Tensor  # [] the mean of ‖(a + b)/2 − g‖²
    rounds: Tensor  # [] with evidence
    shares: Tensor  # [2] of u and w, by the halves


@dataclass(frozen=True)
class Circle(Algorithm[Server, Down, Up, Own]):
    """Circles of clients whose moves agree, found without a setting.

    Fields:
        every: rounds from one comparison of the clients to the next.
        prior: samples by which u leads when a client weighs it against its own model.
        without: an ingredient to leave out: ``clusters`` (each client averages all with whom it
            alone has a gain), ``halves`` (noise by one half), ``common`` (compare at u) or
            ``means`` (compare single rounds).
    """

    every: Count = 1
    prior: NotNegative = 10.0
    without: Literal["nothing", "clusters", "halves", "common", "means"] = "nothing"

    def optimizers(self, problem: Problem) -> int:
        """One of w; the halves begin with it, too."""
        return 2 if self.without == "halves" else 1

    def trace_key(self, index: int, horizon: int) -> bool:
        """Whether the round has evidence."""
        return index % self.every == 0

    def _lead(self, like: Tensor) -> Tensor:
        return torch.tensor([self.prior, 0.0], dtype=like.dtype, device=like.device)

    def init(self, problem: Problem) -> tuple[Server, Own]:
        """The common start."""
        start, K = problem.start, problem.population
        none = torch.full((K,), -1, device=problem.device)
        w, zero = rows(start, K), rows(torch.zeros_like(start[: problem.model.parameters]), K)
        first = torch.stack([start.new_ones(()), start.new_zeros(())])
        noise, circle = rows(torch.zeros(2).to(first), K), none[:, None] < none.new_zeros(K)
        rest = problem.sizes, none, circle, start, nobody_yet(start, K)
        zeros = start.new_zeros(K)
        server = Server(w, zero, noise, torch.zeros_like(none), *rest)
        return server, Own(w, zero, zero, zeros, zeros, rows(first, K))

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
        mine = server.circle[round.clients]
        u = self._means(server, mine)
        if not self.trace_key(round.index, 0):
            return Down(u, ())
        return Down(u, u if self.without == "common" else self._means(server, mine | True))

    def local(self, client: Client, received: Down, state: Own) -> tuple[Up, Own]:
        """Train the circle's model, and the common one on both halves of the data."""
        u, g = received
        w = client.train(u)
        if not self.trace_key(client.round if self.every > 1 else 0, 0):
            return Up(w, client.size), state._replace(w=w)
        one, two = client.halves()
        a, b = one.train(g), two.train(g)
        whole = client.train(g) if self.without == "halves" else (a + b) / 2
        n = state.rounds + 1 if self.without != "means" else torch.ones_like(state.rounds)
        once = client.trainable(whole - g)
        move = state.move + (once - state.move) / n
        halves = state.halves + (client.trainable(2 * (whole - b)) - state.halves) / n
        square = state.square + ((once**2).sum() - state.square) / n
        signal = (move**2).sum()
        by_rounds = torch.where(
            n > 1, (square - signal).clamp(min=0) / (n - 1).clamp(min=1), signal
        )
        noise = torch.stack([(halves**2).sum() / 4, by_rounds])
        first, here = one.map(lambda m: one.each_loss(m, "train"), torch.stack([u, b]))
        second, there = two.map(lambda m: two.each_loss(m, "train"), torch.stack([u, a]))
        losses, mask = torch.cat([first, second], 1), torch.cat([here[0], there[0]])
        shares = fitted_shares(losses, mask, self._lead(w))
        return Up(w, client.size, move, noise), Own(w, move, halves, square, n, shares)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """Store what is sound and, where there is evidence, form the circles anew."""
        sound = _sound(uploads, server.start)
        at, up = round.clients[sound], tree.take(uploads, sound.nonzero().flatten())
        new = server._replace(
            w=updated(server.w, at, up.w),
            size=server.size.index_copy(0, at, up.size),
            last=server.last.index_fill(0, at, round.index),
        )
        if isinstance(up.noise, Tensor):
            new = new._replace(
                noise=server.noise.index_copy(0, at, up.noise),
                moves=updated(server.moves, at, up.move),
                rounds=server.rounds.index_add(0, at, torch.ones_like(at)),
            )
            new = new._replace(circle=self._circles(new, round.index // self.every + 1))
        weights = self._weights(new, new.circle[at]).to(server.start.dtype)
        return new._replace(applied=updated(server.applied, at, weights))

    def _circles(self, server: Server, rounds: int) -> Tensor:
        """Who is in each client's circle ``[K, K]``, after so many rounds with evidence."""
        ids = ((server.rounds > 0) & (server.size > 0)).nonzero().flatten()
        v, by_rounds = server.noise[ids].to(torch.float64).T
        v = v + (1 - server.rounds[ids] / rounds) * by_rounds
        found = circles(gram(server.moves[ids]), v, pairwise=self.without == "clusters")
        circle = (server.rounds == 0)[:, None].expand_as(server.circle).clone()
        circle[ids[:, None], ids] = found
        return circle

    def serve(self, server: Server, round: Round) -> Tensor:
        """The newest mean of each client's circle."""
        return self._means(server, server.circle[round.clients])

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        """u and w, in the shares in which they explain unseen samples."""
        models = torch.stack([served, state.w])
        losses, masks = client.map(lambda w: client.each_loss(w, "val"), models)
        judged = fitted_shares(losses, masks[0], self._lead(served))
        return Mixture(torch.where(client.validated, judged, state.shares), models)

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        """The weights of the clients' last models in each client's u after its last round."""
        return last_applied(server.applied)


def _sound(uploads: Up, start: Tensor) -> Tensor:
    """Whether each upload is finite and not outsized ``[m]``."""
    sound = torch.ones_like(uploads.size, dtype=torch.bool)
    for vectors in (uploads.w - start, uploads.move):
        if isinstance(vectors, Tensor):
            length = torch.linalg.vector_norm(vectors, dim=1)
            usual = length[length.isfinite() & (length > 0)]
            sound &= length <= OUTSIZED * (usual.median() if len(usual) else 0.0)
    return sound & uploads.noise.isfinite().all(1) if isinstance(uploads.noise, Tensor) else sound
