"""Attention between similar clients, for FedAMP and HeurFedAMP: who is alike, and the exchange.

Another client's model is alike where it would bring a client nearer to the model of unlimited data.
Two models trained from the same point on two samples of the same distribution differ, because the
samples differ. A client measures this difference on its own data: in every round it trains a second
model w_i' on every second sample only (as many steps, each on half as many samples), and uploads
with w_i the mean v_i of ‖w_i − w_i'‖² over its rounds. v_i estimates how far sampling alone moves
w_i from the model of unlimited data, as w_i is about the mean of w_i' and the other half's model.

    z_ij = ‖w_i − w_j‖² / 2v_i        1 where i and j hold equally large samples of the same data
    alike_ij = 1 for z ≤ 1,  2 − z for 1 < z < 2,  0 for z ≥ 2

On average ‖w_i − w_j‖² is v_i + v_j plus the squared difference of the two ideal models. The mean
of w_i and w_j is a quarter of that away from the ideal model of i, and w_i itself is v_i away. So
the mean is nearer exactly as long as z < 2. From z = 2 on j counts as a stranger to i, and gets
weight zero. Each client judges by its own noise: a client that is sure of its model may be alike to
one that is unsure, and regard it as a stranger.

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

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.client import Client
from ..core.mixing import distances_between, last_applied, mix, nobody_yet
from ..core.problem import Problem
from ..core.rows import Rows, updated
from ..core.tree import Tree
from ..errors import ConfigError
from .fedprox import proximal

Initial = Literal["common", "independent"]
PredictWith = Literal["own", "cloud", "both", "validation"]
STRANGER = 2.0  # from this z on the mean of two models is worse than the client's own
TINY = 1e-300  # the reciprocal of a smaller number may overflow

Weigh = Callable[[Tensor], Tensor]  # clients [m] that have uploaded -> their weights [m, m]


class Uploads(NamedTuple):
    """The server: the last upload of every client, and the z of the pairs."""

    models: Rows  # [K, P]
    seen: Tensor  # [K] whether the client has uploaded
    start: Tensor  # [P] the common start, or [K, P] every client's own
    sigma: Tensor  # [] the width of the first exchange, for ``sigma_freeze``
    applied: Rows  # [K, K] the weights of each client's last round; zeros before its first
    first: Rows  # [K, P] the first uploads, for comparison; [0, P] once all clients have uploaded
    noise: Tensor  # [K] v of the first uploads, in the same units
    apart: Rows  # [K, K] z of the pairs, -1 if not compared yet; [0, K] if likeness is not measured
    losses: Tree = ()  # [K] F_i of the last uploads, or () where clients do not report it
    objective: Tree = ()  # [] the objective after the round, or () where it is not asked for


class Upload(NamedTuple):
    """What a client sends."""

    w: Tensor  # [P]
    noise: Tree  # [] v, or () where likeness is not measured
    loss: Tree = ()  # [] F_i(w_i) on its training data, where the method asks for it


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


def unlikeness(distances: Tensor, noise: Tensor) -> Tensor:
    """z from squared distances ``[m, n]`` and the noise v of the clients of the rows.

    >>> unlikeness(torch.tensor([[6.0, 0.0], [6.0, 2.0]]), torch.tensor([1.0, 3.0]))
    tensor([[3.0000, 0.0000],
            [1.0000, 0.3333]])
    """
    return torch.where(distances > 0, distances / (2 * noise[:, None]).clamp(min=TINY), 0.0)


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
    z[:, at] = unlikeness(between, found.noise).to(z.dtype)
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
    z[:, all_of] = unlikeness(between, found.noise).to(z.dtype)
    kept = first if len(all_of) < len(server.seen) else first[:0]  # all clients have uploaded
    return server._replace(first=kept, noise=noise, apart=updated(server.apart, at, z))


def alike(server: Uploads, members: Tensor) -> Tensor:
    """Who is alike to each of some clients that have uploaded ``[m, m]``, 0 on the diagonal."""
    z = server.apart[members][:, members].to(torch.float64)
    v = server.noise[members].clamp(min=TINY)
    # Of a first upload and an earlier one the newer row alone has z, in that client's noise.
    return likeness(torch.where(z < 0, z.T * v / v[:, None], z)).fill_diagonal_(0)


# ---- weights ---------------------------------------------------------------------------------


def weights(slopes: Tensor, alpha: Tensor | float) -> Tensor:
    """The weights ξ from the slopes A' ``[m, m]``."""
    A = alpha * slopes  # Eq. 5
    return A + torch.diag(1 - A.sum(1))  # Eq. 7


def shared(slopes: Tensor, most: Tensor | float, rows: bool) -> Tensor:
    """ξ from the slopes A' ``[m, m]``, where a client's own model counts as one at distance 0.

    ``most`` is A'(0). α_k is the largest step at which no other model gets more weight than a
    client's own: one for all clients, or with ``rows`` one per client.

    >>> shared(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.5, 0.0]]), 1.0, rows=True)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.4000, 0.4000, 0.2000],
            [0.0000, 0.3333, 0.6667]])
    """
    total = slopes.sum(1, keepdim=True)
    return weights(slopes, 1 / (most + (total if rows else total.max())))


def safe(A: Tensor, most: float = 1.0) -> Tensor:
    """Scale down the rows whose off-diagonal weights sum to more than ``most``."""
    others = A.clone().fill_diagonal_(0)
    total = others.sum(1, keepdim=True)
    others = torch.where(total > most, most * others / total.clamp(min=TINY), others)
    return others + torch.diag(1 - others.sum(1))


# ---- the exchange ----------------------------------------------------------------------------


def refuse_unrelated(method: str, field: str, value: Any, initial: Initial) -> None:
    """Refuse independent starts where models are compared as if they had begun at one point."""
    if initial == "independent" and value in ("auto", "delta"):
        raise ConfigError(
            f"{method}: initial = 'independent' and {field} = '{value}', which compares models "
            f"trained from the same point; expected another {field}, or initial = 'common'"
        )


def mixed(server: Uploads, clients: Tensor, among: Tensor, weigh: Weigh) -> Tensor:
    """``u_i = Σ_j ξ_ij w_j`` of some clients, over the clients ``among`` that have uploaded.

    A client that has not uploaded yet gets the model that it starts with.
    """
    own = server.start.dim() == 2
    u = server.start[clients] if own else server.start.repeat(len(clients), 1)
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
    """The server with the round's models and losses stored."""
    at, losses = round.clients, server.losses
    if isinstance(losses, Tensor):
        losses = losses.index_copy(0, at, uploads.loss)
    models, seen = updated(server.models, at, uploads.w), server.seen.index_fill(0, at, True)
    return server._replace(models=models, seen=seen, losses=losses)


class Attentive(Algorithm[Uploads, Cloud, Upload, Own]):
    """Base of methods that mix the models of similar clients; a subclass defines the similarity.

    Concrete methods are dataclasses with at least these fields.
    """

    sigma: Any  # "auto" where likeness is measured
    start: str
    predict_with: PredictWith
    initial: Initial

    @property
    def traits(self) -> Traits:
        """Clients may choose between their two models by validation data."""
        return Traits(uses_validation=self.predict_with == "validation")

    @property
    def reports(self) -> bool:
        """Whether clients upload the loss of their trained model on their training data."""
        return False

    @abstractmethod
    def _weigh(self, server: Uploads, round: Round) -> Weigh:
        """A function that computes the weights ξ between some clients in this round."""

    @abstractmethod
    def seen(self, W: Tensor, start: Tensor, noise: Tensor) -> Seen:
        """Trained parameters ``[m, P]`` and their noise v ``[m]``, as they are compared."""

    def init(self, problem: Problem) -> tuple[Uploads, Own]:
        """The common start, or independent ones."""
        K, start, measured = problem.population, problem.start, self.sigma == "auto"
        common = self.initial == "common"
        models = rows(start, K) if common else problem.fresh(torch.arange(K))
        zero = torch.zeros(K, dtype=torch.float64, device=problem.device)
        first = rows(torch.zeros_like(start[: problem.model.parameters]), K if measured else 0)
        apart = start.new_full((1,), -1.0).expand(K if measured else 0, K)
        server = Uploads(
            models=models,
            seen=zero > 0,
            start=start if common else models,
            sigma=zero[:1].sum(),
            applied=nobody_yet(start, K),
            first=first,
            noise=zero,
            apart=apart,
            losses=start.new_zeros(K) if self.reports else (),
            objective=zero.sum() if self.reports else (),
        )
        none = start.new_zeros(K)
        return server, Own(models, none, none) if measured else Own(models)

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
        """Train near u_i; where they are asked for, measure the client's noise and its loss."""
        w = self._near(client, received, state)
        loss = client.loss(w, "train") if self.reports else ()
        if self.sigma != "auto":
            return Upload(w, (), loss), Own(w)
        once = (client.trainable(w - self._near(client.halves()[1], received, state)) ** 2).sum()
        rounds = state.rounds + 1
        noise = state.noise + (once - state.noise) / rounds
        return Upload(w, noise, loss), Own(w, noise, rounds)

    def _near(self, client: Client, received: Cloud, state: Own) -> Tensor:
        """``argmin F_i(w) + (λ/2α_k)‖w − u_i‖²`` by local training."""
        begin = received.u if self.start == "cloud" else state.w
        return client.train(begin, penalty=lambda w: proximal(w, received.u, received.prox))

    def predictor(self, client: Client, served: Any, state: Own) -> Mixture:
        """w_i, u_i, both, or the better on validation data."""
        if self.predict_with == "own":
            return single(state.w)
        if self.predict_with == "cloud":
            return single(served)
        both = torch.stack([state.w, served])
        if self.predict_with == "both":
            return Mixture(state.w.new_full((2,), 0.5), both)
        losses = client.map(lambda model: client.loss(model, "val"), both)
        return single(torch.where(losses[1] < losses[0], served, state.w))
