"""Attention between similar clients for FedAMP and HeurFedAMP: similarity and model exchange.

Two models trained from the same point on two samples of the same distribution differ, because the
samples differ. A client measures this difference on its own data: in every round it trains a second
model w_i' on every second sample only (as many steps, each on half as many samples), and uploads
with w_i the mean v_i of ‖w_i − w_i'‖² over its rounds. v_i estimates how far sampling alone moves
w_i from the model of unlimited data, as w_i is about the mean of w_i' and the other half's model.

    z_ij = ‖w_i − w_j‖² / (v_i + v_j)        1 where i and j hold samples of the same data
    alike_ij = 1 for z ≤ 1,  2 − z for 1 < z < 2,  0 for z ≥ 2

z − 1 is the squared difference between the ideal models of i and j, relative to their sampling
noise. As long as z < 2, the mean of the two models is nearer to each client's ideal model than the
client's own model is. From z = 2 on the other client counts as a stranger and gets weight zero.

Models can be compared only if they were trained from about the same point. Every client's first
upload was trained from the common start, so first uploads are compared with each other even if they
came in different rounds. Later uploads are compared within the same round. The newest comparison of
a pair counts.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.mixing import distances_between, last_applied, mix, nobody_yet
from ..core.problem import Problem
from ..core.rows import Rows, updated
from ..core.tree import Tree
from .fedprox import proximal

PredictWith = Literal["own", "cloud", "both", "validation"]
Weigh = Callable[[Tensor], Tensor]  # clients [m] that have uploaded -> their weights [m, m]

STRANGER = 2.0  # from this z on the mean of two models is worse than either model
TINY = 1e-300  # the reciprocal of a smaller number may overflow


class Uploads(NamedTuple):
    """The server: the last upload of every client, and the z of the pairs."""

    models: Rows  # [K, P]
    seen: Tensor  # [K] whether the client has uploaded
    start: Tensor  # [P] the common start
    sigma: Tensor  # [] the width of the first exchange, for ``sigma_freeze``
    applied: Rows  # [K, K] the weights of each client's last round; zeros before its first
    first: Rows  # [K, P] the first uploads, for comparison; [0, P] once all clients have uploaded
    noise: Tensor  # [K] v of the first uploads, in the same units
    apart: Rows  # [K, K] z of the pairs, -1 if not compared yet; [0, K] if likeness is not measured


class Upload(NamedTuple):
    """What a client sends."""

    w: Tensor  # [P]
    noise: Tree  # [] v, or () where likeness is not measured


class Cloud(NamedTuple):
    """What a client receives."""

    u: Tensor  # [P]
    prox: Tensor  # [] the proximal coefficient λ/α_k


class Own(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P]
    noise: Tree = ()  # [] the mean of v over its rounds, or () where likeness is not measured
    rounds: Tree = ()  # [] the number of these rounds


class Seen(NamedTuple):
    """The models of a round, in the form in which they are compared."""

    points: Tensor  # [m, P]
    noise: Tensor  # [m] v, float64


# ---- likeness --------------------------------------------------------------------------------


def unlikeness(distances: Tensor, noise: Tensor, others: Tensor) -> Tensor:
    """z from squared distances ``[m, n]`` and the noise v of the rows and of the columns.

    >>> unlikeness(torch.tensor([[6.0, 0.0]]), torch.tensor([1.0]), torch.tensor([2.0, 0.0]))
    tensor([[2., 0.]])
    """
    expected = noise[:, None] + others
    return torch.where(distances > 0, distances / expected.clamp(min=TINY), 0.0)


def likeness(z: Tensor) -> Tensor:
    """1 where noise explains the whole distance, 0 where it explains at most half of it.

    >>> likeness(torch.tensor([0.3, 1.0, 1.5, 2.0, 7.0]))
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    return (STRANGER - z).clamp(0, 1)


def compared(server: Uploads, found: Seen, round: Round) -> Uploads:
    """The server with the z of the round's uploads added."""
    new = ~server.seen[round.clients]
    server = _met(server, Seen(*(part[~new] for part in found)), round.clients[~new])
    return _introduced(server, Seen(*(part[new] for part in found)), round.clients[new])


def _met(server: Uploads, found: Seen, at: Tensor) -> Uploads:
    """Compare the uploads of clients that have uploaded before with each other."""
    if len(at) < 2:
        return server
    z = server.apart[at]
    between = distances_between(found.points, found.points)
    z[:, at] = unlikeness(between, found.noise, found.noise).to(z.dtype)
    return server._replace(apart=updated(server.apart, at, z))


def _introduced(server: Uploads, found: Seen, at: Tensor) -> Uploads:
    """Compare the round's first uploads with all first uploads so far."""
    if not len(at):
        return server
    first = updated(server.first, at, found.points)
    noise = server.noise.index_copy(0, at, found.noise)
    all_of = server.seen.index_fill(0, at, True).nonzero().flatten()
    between = distances_between(found.points, first[all_of])
    z = server.apart[at]
    z[:, all_of] = unlikeness(between, found.noise, noise[all_of]).to(z.dtype)
    kept = first if len(all_of) < len(server.seen) else first[:0]  # all clients have uploaded
    return server._replace(first=kept, noise=noise, apart=updated(server.apart, at, z))


def alike(server: Uploads, members: Tensor) -> Tensor:
    """The likeness of some clients that have uploaded ``[m, m]``, float64, 0 on the diagonal."""
    z = server.apart[members][:, members].to(torch.float64)
    z = torch.where(z < 0, z.T, z)  # z of a first upload and an earlier one is in the newer row
    return likeness(z).fill_diagonal_(0)


# ---- the exchange ----------------------------------------------------------------------------


def start_together(problem: Problem, measured: bool) -> tuple[Uploads, Own]:
    """The server and the clients before round 0, all at the common start."""
    K, start = problem.population, problem.start
    models, zero = rows(start, K), torch.zeros(K, dtype=torch.float64, device=problem.device)
    nobody = zero > 0
    table = nobody_yet(start, K)
    first = rows(torch.zeros_like(start[: problem.model.parameters]), K if measured else 0)
    apart = start.new_full((1,), -1.0).expand(K if measured else 0, K)
    none = start.new_zeros(K)
    kept = Own(models, none, none) if measured else Own(models)
    return Uploads(models, nobody, start, zero[:1].sum(), table, first, zero, apart), kept


def mixed(server: Uploads, clients: Tensor, among: Tensor, weigh: Weigh) -> Tensor:
    """``u_i = Σ_j ξ_ij w_j`` of some clients, over the clients ``among`` that have uploaded.

    A client that has not uploaded yet gets the common start.
    """
    u = server.start.repeat(len(clients), 1)
    members = among[server.seen[among]].sort().values
    known = server.seen[clients]
    if len(members) and known.any():
        u[known] = mix(_rows_of(members, clients[known], weigh), server.models[members])
    return u


def _rows_of(members: Tensor, clients: Tensor, weigh: Weigh) -> Tensor:
    """The rows of the members' weights that belong to ``clients``; a single member has weight 1."""
    A = weigh(members) if len(members) > 1 else members.new_ones(1, 1, dtype=torch.float64)
    return A[torch.searchsorted(members, clients)]


def remembered(server: Uploads, round: Round, weigh: Weigh) -> Rows:
    """The table of applied weights with this round's added; ``server`` is that before the round."""
    at = round.clients
    applied = server.start.new_zeros(len(at), round.population)
    applied[torch.arange(len(at), device=at.device), at] = 1  # in its first round a client is alone
    members = round.asked[server.seen[round.asked]].sort().values
    known = server.seen[at]
    if len(members) and known.any():
        weights = _rows_of(members, at[known], weigh).to(applied.dtype)
        applied[known] = torch.zeros_like(applied[known]).index_copy(1, members, weights)
    return updated(server.applied, at, applied)


def stored(server: Uploads, uploads: Upload, round: Round) -> Uploads:
    """The server with the round's models stored."""
    models = updated(server.models, round.clients, uploads.w)
    return server._replace(models=models, seen=server.seen.index_fill(0, round.clients, True))


# ---- one client ------------------------------------------------------------------------------


def train_near(client: Client, received: Cloud, state: Own, start: str) -> Tensor:
    """``argmin F_i(w) + (λ/2α_k)‖w − u_i‖²`` by local training."""
    begin = received.u if start == "cloud" else state.w
    return client.train(begin, penalty=lambda w: proximal(w, received.u, received.prox))


def trained(
    client: Client, received: Cloud, state: Own, start: str, measured: bool
) -> tuple[Upload, Own]:
    """A client's round: its trained model and, where likeness is measured, its sampling noise."""
    w = train_near(client, received, state, start)
    if measured:
        other = train_near(client.half(), received, state, start)
        once = (client.trainable(w - other) ** 2).sum()
        rounds = state.rounds + 1
        noise = state.noise + (once - state.noise) / rounds
        return Upload(w, noise), Own(w, noise, rounds)
    return Upload(w, ()), Own(w)


def predicted(client: Client, u: Any, w: Tensor, predict_with: PredictWith) -> Mixture:
    """The client's own model, its cloud model, both, or the better on validation data."""
    if predict_with == "own":
        return single(w)
    if predict_with == "cloud":
        return single(u)
    both = torch.stack([w, u])
    if predict_with == "both":
        return Mixture(w.new_full((2,), 0.5), both)
    losses = client.map(lambda model: client.loss(model, "val"), both)
    return single(torch.where(losses[1] < losses[0], u, w))


# ---- both methods ----------------------------------------------------------------------------


class Attentive(Algorithm[Uploads, Cloud, Upload, Own]):
    """Base of methods that mix the models of similar clients; a subclass defines the similarity.

    Concrete methods are dataclasses with at least these fields.
    """

    sigma: Any  # "auto" where likeness is measured
    start: str
    predict_with: PredictWith

    @abstractmethod
    def _weigh(self, server: Uploads, round: Round) -> Weigh:
        """A function that computes the weights ξ between some clients in this round."""

    def serve(self, server: Uploads, round: Round) -> Tree:
        """The newest u_i, over all clients that have uploaded, where u_i is used to predict."""
        if self.predict_with == "own":
            return ()
        everybody = torch.arange(round.population, device=round.clients.device)
        return mixed(server, round.clients, everybody, self._weigh(server, round))

    def collaboration(self, server: Uploads, shown: Tree, round: Round) -> Tensor:
        """The weights with which each client's last u_i was formed."""
        return last_applied(server.applied)

    def local(self, client: Client, received: Cloud, state: Own) -> tuple[Upload, Own]:
        """Train near u_i."""
        return trained(client, received, state, self.start, measured=self.sigma == "auto")

    def predictor(self, client: Client, served: Tree, state: Own) -> Mixture:
        """w_i, u_i or both."""
        return predicted(client, served, state.w, self.predict_with)
