"""FedFomo: each client mixes others' models, weighted by how much they reduce its own loss.

For every downloaded model θ_n and the client's own model, on validation data:

    w_n  = (L_i(θ_i^old) − L_i(θ_n)) / ‖θ_n − θ_i^old‖                          (Eq. 3)
    w*_n = max(w_n, 0) / Σ_m max(w_m, 0)
    θ_i  = θ_i^old + Σ_n w*_n (θ_n − θ_i^old);   affinity P[i,n] += w_n
    θ_i^old ← θ_i;   θ_i ← LocalTrain(θ_i);   upload θ_i

θ_i^old is the model that the client held before its last local training. If no model helps, the
client returns to θ_i^old: that is the method's early stopping.

Travels: M models down, one model up. Affinities stay on the client; the client uploads only its
ranking of the others, and the server fills the M slots ε-greedily by this ranking.

Notes:
    The client's own model is a candidate in addition to the M downloads (reading P1-1). Before
    round 0 there are no uploads, so round 0 is local training; the evaluated model is the one after
    a further weighing (P1-4). A client uploads the rank of every other client rather than M
    requested ids, because at upload time it cannot know whose models will be available in the next
    round in which it takes part (P1-7). The server breaks ties at random. A non-finite w_n counts
    as 0 and leaves P unchanged; so does a model that differs from θ_i^old by rounding only (P1-2).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.client import Client
from ..core.mixing import count_larger, epsilon_greedy
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import CountOrZero, Share
from ..core.rows import Rows, updated
from ..core.tree import Bank, bank

Distance = Literal["l2", "l1", "sq_l2"]


class Pool(NamedTuple):
    """The server: the last upload and ranking of every client."""

    models: Rows  # [K, P]
    uploaded: Tensor  # [K] whether the client has uploaded
    ranks: Rows  # [K, K] how many clients each client prefers to this one


class Upload(NamedTuple):
    theta: Tensor  # [P]
    ranks: Tensor  # [K]


class Kept(NamedTuple):
    theta: Tensor  # [P] after its last local training
    old: Tensor  # [P] before it
    affinity: Tensor  # [K] its row of P
    weights: Tensor  # [K] its last w*, its own share on itself


def fomo_weights(base_loss: Tensor, losses: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 3, clipped and normalised: raw weights and shares, both ``[M]``.

    A model at distance zero and a non-finite weight count as 0. Shares sum to one, or are all zero
    where no model helps.

    >>> raw, shares = fomo_weights(torch.tensor(1.0), torch.tensor([0.0, 0.5, 1.3]),
    ...                            torch.tensor([5.0, 2.0, 1.0]))
    >>> raw
    tensor([ 0.2000,  0.2500, -0.3000])
    >>> shares
    tensor([0.4444, 0.5556, 0.0000])
    """
    raw = torch.where(distances > 0, (base_loss - losses) / (distances + 1e-12), 0.0)  # Eq. 3
    raw = torch.where(raw.isfinite(), raw, 0.0)
    positive = raw.clamp(min=0)
    largest = positive.max(-1, keepdim=True).values  # sums of huge weights must not overflow
    scaled = torch.where(largest > 0, positive / largest, 0.0)
    total = scaled.sum(-1, keepdim=True)
    return raw, torch.where(total > 0, scaled / total.clamp(min=1.0), 0.0)


def same(apart: Tensor, old: Tensor) -> Tensor:
    """Which models equal the old one up to rounding: Eq. 3 would divide noise by noise."""
    return apart.abs().amax(-1) <= 64 * torch.finfo(old.dtype).eps * old.abs().amax(-1)


def norm(apart: Tensor, distance: Distance) -> Tensor:
    """The norm of every row, accumulated in float64."""
    wide = apart.to(torch.float64)
    if distance == "l1":
        return wide.abs().sum(-1).to(apart.dtype)
    square = (wide**2).sum(-1)
    return (square if distance == "sq_l2" else square.sqrt()).to(apart.dtype)


@dataclass(frozen=True)
class FedFomo(Algorithm[Pool, Bank, Upload, Kept]):
    """First-order model optimisation.

    Fields:
        downloads: models M of other clients that a client may download in a round.
        epsilon: probability in round 0 that a slot is filled at random instead of by affinity.
        decay: decrease of epsilon per round, as ``eps_decay`` says.
        eps_decay: ``subtractive`` (ε − decay·t) or ``multiplicative`` (ε·(1 − decay)^t).
        distance: the norm of Eq. 3: ``l2``, ``l1`` (public code) or ``sq_l2``.
        matrix: the collaboration matrix has the applied ``weights`` w*, or the ``affinity`` P,
            whose rows then leave the clients.
    """

    downloads: CountOrZero = 5
    epsilon: Share = 0.3
    decay: Share = 0.05
    eps_decay: Literal["subtractive", "multiplicative"] = "subtractive"
    distance: Distance = "l2"
    matrix: Literal["weights", "affinity"] = "weights"

    bibtex: ClassVar[str] = """@inproceedings{zhang2021fedfomo,
  title={Personalized Federated Learning with First Order Model Optimization},
  author={Zhang, Michael and Sapra, Karan and Fidler, Sanja and Yeung, Serena and
          Alvarez, Jose M.},
  booktitle={ICLR}, year={2021}}"""
    private = Declaration(leaves="what validation losses decide: its next start, and whom it asks")

    @property
    def traits(self) -> Traits:
        """Models are weighed on validation data, and once more before a prediction."""
        return Traits(uses_validation=True, weighs_again=True)

    def init(self, problem: Problem) -> tuple[Pool, Kept]:
        K = problem.population
        identity = torch.eye(K, dtype=problem.dtype, device=problem.device)
        nobody = torch.zeros(K, dtype=torch.bool, device=problem.device)
        models = rows(problem.start, K)
        equal = torch.zeros(1, 1, dtype=torch.int32, device=problem.device).expand(K, K)
        return Pool(models, nobody, equal), Kept(models, models, identity, identity)

    def download(self, server: Pool, round: Round) -> Bank:
        """The M models sent to each client, chosen ε-greedily among the available ones."""
        me, everybody = round.clients[:, None], torch.arange(round.population)
        others = everybody.to(server.uploaded.device)
        candidate = server.uploaded & (others != me)
        scores = -server.ranks[round.clients].to(torch.float64)
        scores = scores.masked_fill(~candidate, -torch.inf)
        count = min(self.downloads, round.population - 1)
        explore = round.draw("explore", round.clients, count=count) < self._chance(round.index)
        chosen = epsilon_greedy(scores, explore, round.draw("ties", me, others), count)
        return bank(server.models, chosen)

    def _chance(self, t: int) -> float:
        if self.eps_decay == "multiplicative":
            return self.epsilon * (1 - self.decay) ** t
        return max(0.0, self.epsilon - self.decay * t)

    def local(self, client: Client, received: Bank, state: Kept) -> tuple[Upload, Kept]:
        theta, raw, shares = self.weigh(client, received, state)
        everybody = torch.arange(client.population, device=client.id.device)
        owners = torch.cat([client.id[None], torch.where(received.slot >= 0, received.owner, -1)])
        place = (owners[:, None] == everybody).to(raw.dtype)  # [M + 1, K], no row for empty slots
        affinity = state.affinity + raw @ place
        kept_old = 1 - shares.sum()
        weights = shares @ place + kept_old * (everybody == client.id)
        trained = client.train(theta)
        return Upload(trained, count_larger(affinity)), Kept(trained, theta, affinity, weights)

    def weigh(self, client: Client, received: Bank, state: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """The client's model, raw weights and shares, after steps 3 and 4 of the method."""
        peers, present = received.rows()
        models = torch.cat([state.theta[None], peers])
        usable = torch.cat([present.new_ones(1), present])
        base = client.loss(state.old, "val")
        losses = client.map(lambda w: client.loss(w, "val"), models)
        losses = torch.where(usable, losses, base)  # no gain, hence no weight
        apart = models - state.old
        apart = torch.where(same(apart, state.old)[:, None], 0.0, apart)
        raw, shares = fomo_weights(base, losses, norm(client.trainable(apart), self.distance))
        return state.old + shares @ apart, raw, shares

    def aggregate(self, server: Pool, uploads: Upload, round: Round) -> Pool:
        at = round.clients
        return Pool(
            updated(server.models, at, uploads.theta),
            server.uploaded.index_fill(0, at, True),
            updated(server.ranks, at, uploads.ranks),
        )

    def predictor(self, client: Client, served: Bank, state: Kept) -> Mixture:
        return single(self.weigh(client, served, state)[0])

    def shown(self, state: Kept) -> Tensor:
        return state.affinity if self.matrix == "affinity" else state.weights

    def collaboration(self, server: Pool, shown: Tensor, round: Round) -> Tensor:
        return shown
