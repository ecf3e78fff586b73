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
    The standard error of one sample is undefined, so with ``min_gain_se`` a client that weighs on a
    single sample could accept no model, not even its own: such a run is refused.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.client import Client, mean
from ..core.mixing import count_larger, epsilon_greedy
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import CountOrZero, NotNegative, Share
from ..core.rows import Rows, updated
from ..core.tree import Bank, bank
from ..errors import ConfigError

Distance = Literal["l2", "l1", "sq_l2"]


class Pool(NamedTuple):
    """The server: the last upload and ranking of every client."""

    models: Rows  # [K, P]
    age: Tensor  # [K] the round of the upload, -1 before the first
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
        affinity_update: ``raw`` adds w_n; ``abs_sum`` adds w_n / |Σ w| (public code).
        pool: candidates are ``all_uploaded`` models or only those of the ``last_round``.
        min_gain_se: ignore a model whose gain is below this many standard errors; 0 ignores none.
            Above 0 every client needs two validation samples or more.
        matrix: the collaboration matrix has the applied ``weights`` w*, or the ``affinity`` P,
            whose rows then leave the clients.
    """

    downloads: CountOrZero = 5
    epsilon: Share = 0.3
    decay: Share = 0.05
    eps_decay: Literal["subtractive", "multiplicative"] = "subtractive"
    distance: Distance = "l2"
    affinity_update: Literal["raw", "abs_sum"] = "raw"
    pool: Literal["all_uploaded", "last_round"] = "all_uploaded"
    min_gain_se: NotNegative = 0.0
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
        self._check(problem)
        K = problem.population
        identity = torch.eye(K, dtype=problem.dtype, device=problem.device)
        nobody = torch.full((K,), -1, device=problem.device)
        models = rows(problem.start, K)
        equal = torch.zeros(1, 1, dtype=torch.int32, device=problem.device).expand(K, K)
        return Pool(models, nobody, equal), Kept(models, models, identity, identity)

    def _check(self, problem: Problem) -> None:
        """Refuse standard errors of a single validation sample: no gain could ever be shown."""
        sizes, names = problem.counts.val, problem.clients
        short = [name for name, size in zip(names, sizes, strict=True) if size == 1]
        if self.min_gain_se and short:
            raise ConfigError(
                f"fedfomo: min_gain_se is {self.min_gain_se:g}, but {', '.join(short)} would weigh "
                "models on one sample, which has no standard error; expected two samples or more: "
                "raise data.val, or set min_gain_se = 0"
            )

    def download(self, server: Pool, round: Round) -> Bank:
        """The M models sent to each client, chosen ε-greedily among the available ones."""
        me, everybody = round.clients[:, None], torch.arange(round.population)
        others = everybody.to(server.age.device)
        oldest = round.index - 1 if self.pool == "last_round" else 0
        candidate = (server.age >= oldest) & (server.age >= 0) & (others != me)
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
        affinity = state.affinity + self._increment(raw) @ place
        kept_old = 1 - shares.sum()
        weights = shares @ place + kept_old * (everybody == client.id)
        trained = client.train(theta)
        return Upload(trained, count_larger(affinity)), Kept(trained, theta, affinity, weights)

    def weigh(self, client: Client, received: Bank, state: Kept) -> tuple[Tensor, Tensor, Tensor]:
        """The client's model, raw weights and shares, after steps 3 and 4 of the method."""
        peers, present = received.rows()
        models = torch.cat([state.theta[None], peers])
        usable = torch.cat([present.new_ones(1), present])
        if self.min_gain_se:
            usable = usable & self._significant(client, models, state.old)
        base = client.loss(state.old, "val")
        losses = client.map(lambda w: client.loss(w, "val"), models)
        losses = torch.where(usable, losses, base)  # no gain, hence no weight
        apart = models - state.old
        apart = torch.where(self._same(apart, state.old)[:, None], 0.0, apart)
        raw, shares = fomo_weights(base, losses, norm(client.trainable(apart), self.distance))
        return state.old + shares @ apart, raw, shares

    def _same(self, apart: Tensor, old: Tensor) -> Tensor:
        """Which models equal the old one up to rounding: Eq. 3 would divide noise by noise."""
        return apart.abs().amax(-1) <= 64 * torch.finfo(old.dtype).eps * old.abs().amax(-1)

    def _increment(self, raw: Tensor) -> Tensor:
        if self.affinity_update == "raw":
            return raw
        return raw / raw.sum().abs().clamp(min=1e-9)

    def _significant(self, client: Client, models: Tensor, old: Tensor) -> Tensor:
        """Which models gain at least ``min_gain_se`` standard errors of the paired differences."""

        def gain_over_error(w: Tensor) -> Tensor:
            blocks = list(client.blocks("val"))
            gains = torch.cat([client.losses(old, b) - client.losses(w, b) for b in blocks])
            masks = [b.mask for b in blocks if b.mask is not None]
            mask = torch.cat(masks) if masks else None
            centre = mean(gains, mask)
            count = gains.new_tensor(len(gains)) if mask is None else mask.sum()
            spread = mean((gains - centre) ** 2, mask) * count / (count - 1).clamp(min=1)
            ratio = centre / (spread / count.clamp(min=1)).sqrt().clamp(min=1e-12)
            return torch.where(count > 1, ratio, -torch.inf)  # one sample has no standard error

        gains: Tensor = client.map(gain_over_error, models)
        return gains >= self.min_gain_se

    def aggregate(self, server: Pool, uploads: Upload, round: Round) -> Pool:
        at = round.clients
        return Pool(
            updated(server.models, at, uploads.theta),
            server.age.index_fill(0, at, round.index),
            updated(server.ranks, at, uploads.ranks),
        )

    def predictor(self, client: Client, served: Bank, state: Kept) -> Mixture:
        return single(self.weigh(client, served, state)[0])

    def shown(self, state: Kept) -> Tensor:
        return state.affinity if self.matrix == "affinity" else state.weights

    def collaboration(self, server: Pool, shown: Tensor, round: Round) -> Tensor:
        return shown
