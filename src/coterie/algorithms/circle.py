"""Circle: the clients whose moves agree beyond chance share a model; the method if you do not know.

A client's round, from its circle's mean u_i and everybody's mean g:

    w_i ← LocalTrain(u_i);   a, b ← LocalTrain(g) on two disjoint halves of its data
    D_i ← mean over its rounds of (a + b)/2 − g;   v_i ← ‖mean over its rounds of a − b‖² / 4

v_i estimates the part of ‖D_i‖² that sampling explains. The server rescales the moves to unit
signal, ℓ_i² = max(‖D_i‖² − v_i, ‖D_i‖²/4), x_i = D_i/ℓ_i with noise min(v_i, ‖D_i‖²)/ℓ_i², and
merges clusters S, T of s, t members with means M and noise V, from single clients on:

    δ² = max(0, ‖M_S − M_T‖² − V_S − V_T);   V = (s² V_S + t² V_T)/(s + t)²
    gain = s V_S + t V_T − (s + t) V − st/(s + t) δ²      what the mean saves less its bias

Of the pairs with positive gain the one of the highest cosine is merged, until none is left. u_i is
the mean of w over the circle, weighted by samples; a client outside of it has weight zero.

Prediction: u_i, and w_i in the share in which it explains samples that did not train it. These
are validation samples where they are kept apart from training; else each half's samples under the
other half's model, which costs no data. The share is fitted by EM, with ``prior`` samples for u_i.

Travels: u_i and g down; w_i, D_i, v_i and the sample count up.

Notes:
    This method is ours. Moves are compared at the common point g, so that a wrong circle cannot
    feed on itself. A client that has not taken part, or has no data, gets g.
    An absent client stands in the means with its last model, which counts half per round of age.
    With ``every`` above 1, g and the halves come in every so many rounds only; the other rounds
    cost as much as FedAvg's.
    v_i is bounded by ‖D_i‖², so that a false one cannot attract anybody. A client whose model or
    move is not finite, or ``OUTSIZED`` times longer than the median, is alone and not part of g.
    ``without`` leaves out one ingredient, for the ablation in docs/results/arena.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import Algorithm, Mixture, Round, rows
from ..core.client import Client
from ..core.mixing import gram, last_applied, mix, nobody_yet, sums_by
from ..core.problem import Problem
from ..core.ranges import Count, NotNegative
from ..core.rows import Rows, dense, updated
from ..core.tree import Tree

OUTSIZED = 100.0  # a model's or move's length in units of the median, from which it is left out
STEPS = 20  # of EM
TINY = 1e-30


class Server(NamedTuple):
    """The server: the last upload of every client, and the circles."""

    w: Rows  # [K, P]
    moves: Rows  # [K, P] D, without buffers
    noise: Tensor  # [K] v; -1 before the first evidence
    size: Tensor  # [K] training samples
    age: Tensor  # [K] the round of the last upload, -1 before the first
    circle: Tensor  # [K] the smallest member of each client's circle; -1: g
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
    move: Tree  # [P] D, without buffers; () in a round without evidence
    noise: Tree  # [] v, or ()


class Own(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P]
    move: Tensor  # [P] D
    halves: Tensor  # [P] the mean of a − b
    rounds: Tensor  # [] with evidence
    share: Tensor  # [2] of u and w, from the halves


def circles(products: Tensor, noise: Tensor) -> Tensor:
    """The smallest member of each client's circle ``[n]``, from ``⟨D_i, D_j⟩`` and v.

    >>> D = torch.tensor([[3.0, 0.0], [0.0, 2.0], [3.0, 0.2], [0.1, 2.0]])
    >>> circles(D @ D.T, torch.full((4,), 0.5))
    tensor([0, 1, 0, 1])
    """
    square = products.diagonal().to(torch.float64)
    v = torch.minimum(noise.to(torch.float64).clamp(min=0), square)
    signal = torch.maximum(square - v, square / 4).clamp(min=TINY)
    B = products.to(torch.float64) / signal.sqrt()[:, None] / signal.sqrt()
    V, s = v / signal, torch.ones_like(v)
    norm = B.diagonal().clone()
    group = torch.arange(len(B), device=B.device)

    def pairs(at: Tensor) -> Tensor:
        """The cosines of some clusters with all others, −inf where merging has no gain."""
        n, t, noisy = s[at, None], s, V[at, None]
        apart = (norm[at, None] + norm - 2 * B[at] - noisy - V).clamp(min=0)
        together = (n**2 * noisy + t**2 * V) / (n + t)
        found = B[at] / (norm[at, None] * norm).clamp(min=TINY).sqrt()
        gain = n * noisy + t * V - together - n * t / (n + t) * apart
        found = found.masked_fill((gain <= 0) | (t == 0), -torch.inf)
        return found.scatter(1, at[:, None], -torch.inf)

    best, partner = pairs(group).max(1)
    while best.max() > -torch.inf:
        a = int(best.argmax())
        i, j = sorted((a, int(partner[a])))
        n, t = s[i].item(), s[j].item()
        m = n + t
        norm[i] = (n**2 * norm[i] + t**2 * norm[j] + 2 * n * t * B[i, j]) / m**2
        V[i] = (n**2 * V[i] + t**2 * V[j]) / m**2
        B[i] = B[:, i] = (n * B[i] + t * B[j]) / m
        s[i], s[j], best[j] = m, 0, -torch.inf
        group[group == j] = i
        new = pairs(torch.tensor([i], device=B.device))[0]
        best[i], partner[i] = new.max(0)
        lost = ((partner == i) | (partner == j)) & (new < best) & (s > 0)
        nearer = (new >= best) & (s > 0)
        nearer[i] = lost[i] = False
        best, partner = torch.where(nearer, new, best), torch.where(nearer, i, partner)
        at = lost.nonzero().flatten()
        if len(at):
            best[at], partner[at] = pairs(at).max(1)
    return group


def shares_by_losses(losses: Tensor, mask: Tensor, prior: float) -> Tensor:
    """The shares ``[r]`` of models in a mixture by EM, from their losses ``[r, n]``.

    The first model has ``prior`` samples more than there are.
    """
    first = torch.zeros_like(losses[:, 0])
    first[0] = prior
    pi = torch.full_like(first, 1 / len(first))
    for _ in range(STEPS):
        q = (pi.clamp(min=TINY).log()[:, None] - losses).softmax(0)
        pi = ((q * mask).sum(1) + first) / (mask.sum() + prior).clamp(min=TINY)
    return pi


@dataclass(frozen=True)
class Circle(Algorithm[Server, Down, Up, Own]):
    """Circles of clients whose moves agree, found without a setting.

    Fields:
        every: rounds from one comparison of the clients to the next.
        prior: samples by which a circle's model leads when a client weighs it against its own.
        without: leave out an ingredient: ``clusters`` (each client averages those with whom it has
            a gain), ``halves`` (noise from one half), ``common`` (compare at u_i) or ``means``
            (compare single rounds).
    """

    every: Count = 1
    prior: NotNegative = 10.0
    without: Literal["nothing", "clusters", "halves", "common", "means"] = "nothing"

    def optimizers(self, problem: Problem) -> int:
        """One of w; the halves begin with it too."""
        return 1

    def trace_key(self, index: int, horizon: int) -> bool:
        """Whether the round has evidence."""
        return index % self.every == 0

    def init(self, problem: Problem) -> tuple[Server, Own]:
        """The common start."""
        start, K = problem.start, problem.population
        none = torch.full((K,), -1, device=problem.device)
        zero = torch.zeros_like(start[: problem.model.parameters])
        w, moves = rows(start, K), rows(zero, K)
        rest = problem.sizes, none, none, start, nobody_yet(start, K)
        first = torch.stack([start.new_ones(()), start.new_zeros(())])
        own = Own(w, moves, moves, start.new_zeros(K), rows(first, K))
        return Server(w, moves, none.to(torch.float64), *rest), own

    def download(self, server: Server, round: Round) -> Down:
        """The circle's mean and, in a round with evidence, everybody's."""
        u = self.serve(server, round)
        g = u if self.without == "common" else rows(self._mean(server), len(u))
        return Down(u, g if self.trace_key(round.index, 0) else ())

    def serve(self, server: Server, round: Round) -> Tensor:
        """The newest mean of each client's circle."""
        circle, w = server.circle, dense(server.w)
        if self.without == "clusters":
            return mix(self._weights(server, round.clients), w)
        means = sums_by(circle, self._within(server, circle).to(w.dtype)[:, None] * w, len(w))
        mine = circle[round.clients]
        return torch.where(mine[:, None] < 0, self._mean(server), means[mine])

    def _mean(self, server: Server) -> Tensor:
        """g: the mean of all clients' last models; the start before any."""
        p = self._within(server, torch.zeros_like(server.circle))
        return mix(p, dense(server.w)) if bool(p.any()) else server.start

    def _within(self, server: Server, groups: Tensor) -> Tensor:
        """Every client's weight in the mean of its group ``[K]``, float64; 0 without upload."""
        aged = torch.exp2((server.age - server.age.max()).clamp(min=-60).to(torch.float64))
        n = torch.where(server.age >= 0, server.size * aged, 0.0)
        total = sums_by(groups, n[:, None], len(n))[:, 0]
        return torch.where(groups < 0, 0.0, n / total[groups].clamp(min=TINY))

    def _weights(self, server: Server, clients: Tensor) -> Tensor:
        """The weights ``[m, K]`` of all last models in some clients' u."""
        mine = server.circle[clients, None]
        if self.without == "clusters":
            return self._pairwise(server, clients)
        p = self._within(server, server.circle), self._within(server, server.circle.clamp(max=0))
        return torch.where(mine < 0, p[1], torch.where(mine == server.circle, p[0], 0.0))

    def local(self, client: Client, received: Down, state: Own) -> tuple[Up, Own]:
        """Train the circle's model, and the common one on both halves of the data."""
        w = client.train(received.u)
        if not self.trace_key(client.round if self.every > 1 else 0, 0):
            return Up(w, client.size, (), ()), state._replace(w=w)
        one, two = client.halves()
        a, b = one.train(received.g), two.train(received.g)
        share = self._unseen(one, two, (received.u, a, b), state.share)
        n = state.rounds + 1 if self.without != "means" else torch.ones_like(state.rounds)
        half, apart = (a + b) / 2, a - b
        if self.without == "halves":
            half = client.train(received.g)
            apart = 2 * (half - b)
        move = state.move + (client.trainable(half - received.g) - state.move) / n
        halves = state.halves + (client.trainable(apart) - state.halves) / n
        v = (halves.to(torch.float64) ** 2).sum() / 4
        return Up(w, client.size, move, v.to(w.dtype)), Own(w, move, halves, n, share)

    def _unseen(self, one: Client, two: Client, models: tuple[Tensor, ...], held: Tensor) -> Tensor:
        """The shares by each half's losses under u and under the other half's model."""
        u, a, b = models
        found = [h.each_loss(w, "train") for h, w in ((one, u), (two, u), (one, b), (two, a))]
        losses = torch.stack([torch.cat([found[i][0], found[i + 1][0]]) for i in (0, 2)])
        return shares_by_losses(losses, torch.cat([found[0][1], found[1][1]]), self.prior)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        """Store what is sound, and form the circles anew where there is evidence."""
        sound = _sound(uploads, server.start)
        at, up = round.clients[sound], tree.take(uploads, sound.nonzero().flatten())
        new = server._replace(
            w=updated(server.w, at, up.w),
            size=server.size.index_copy(0, at, up.size),
            age=server.age.index_fill(0, at, round.index),
        )
        if isinstance(up.noise, Tensor):
            noise = server.noise.index_copy(0, at, up.noise.to(torch.float64))
            new = new._replace(moves=updated(server.moves, at, up.move), noise=noise)
            ids = ((noise >= 0) & (new.size > 0)).nonzero().flatten()
            found = circles(gram(new.moves[ids]), noise[ids])
            circle = torch.full_like(server.circle, -1).index_copy(0, ids, ids[found])
            new = new._replace(circle=circle)
        weights = self._weights(new, at).to(server.start.dtype)
        return new._replace(applied=updated(server.applied, at, weights))

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        """u and w, in the shares that unseen samples give them."""
        models = torch.stack([served, state.w])
        losses, masks = client.map(lambda w: client.each_loss(w, "val"), models)
        judged = shares_by_losses(losses, masks[0], self.prior)
        return Mixture(torch.where(client.validated, judged, state.share), models)

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        """The weights of the clients' last models in each client's u after its last round."""
        return last_applied(server.applied)


def _sound(uploads: Up, start: Tensor) -> Tensor:
    """Whether each upload is finite and not outsized ``[m]``."""
    vectors = [uploads.w - start, *([uploads.move] if isinstance(uploads.move, Tensor) else [])]
    passed = torch.ones_like(uploads.size, dtype=torch.bool)
    for vector in vectors:
        length = vector.norm(dim=1)
        moved = length[length.isfinite() & (length > 0)]
        most = OUTSIZED * moved.median() if len(moved) else length.new_zeros(())
        passed &= length <= most
    return passed if uploads.noise == () else passed & uploads.noise.isfinite()
