"""FedeRiCo: every client predicts with a mixture of all clients' models, weighted by likelihood.

Client i owns a model φ_i. In a round it evaluates the models of M other clients and its own, all as
they were at the end of the last round (Algorithm 1):

    ℓ_ib = Σ_s ℓ(h_{φ_b}(x_s), y_s)                    for each b that it evaluates
    L̂_ij = (1 − β) L̂_ij + β ℓ_ij                       for every j it has ever seen (ema)
    w_i  = softmax(−L̂_i)                               over those seen           (line 15)
    client i returns to owner b   w_ib (φ_b − φ_b trained on i's data)      (local_epochs)
                            or    w_ib Σ_s ∇ℓ(h_{φ_b}(x_s), y_s)            (gradient, as printed)
    φ_b moves by the sum of the returned vectors
    prediction  Σ_j w_ij softmax(h_{φ_j}(x))

M models are chosen ε-greedily by w_i, unseen clients first. ``form = "centralised"`` is the paper's
section 3.2: a server holds all models, every client weighs all of them in every round, and w is the
exact posterior, ∝ Π_ij exp(−ℓ_ij) with Π the last w.

Travels: M models to every client and M differences (or gradients) back, each with its weight; K of
both in the centralised form. Among peers, a client's use of its own model causes no traffic. For
the choice of the next M a client tells its ranking of the others, and whose models it predicts
with.

Notes:
    The printed pseudocode interleaves clients; here a round has phases, so that order does not
    matter (reading P2-1). The client's own model is always among those it weighs and trains (P2-2).
    Only clients of the round can be chosen: an absent peer can neither send nor receive. A model
    with a non-finite loss counts as not received.
    ``unseen``, ``ema_init``, ``step`` and ``normalise_columns`` default to what works; the literal
    settings are ``zero_loss``, ``zero``, ``gradient`` and ``false`` (P2-3 to P2-7).
    Weights multiply the returned difference, never the loss: Adam would cancel them. With
    ``gradient`` the owner's optimiser is the recipe's and its state persists; gradients are taken
    in evaluation mode, so batch-norm statistics stay as they started. Otherwise the statistics are
    averaged with the weights. A model whose users' weights sum to less than 1e-6 is not changed.
    With ``optimizer_state = "kept"`` and ``local_epochs`` a client has one optimiser state: all
    models that it trains in a round begin with it, and the mean of their last states, weighted by
    w_ib, is kept. ``accumulate`` counts own rounds: a peer first seen in the t-th of them starts at
    t × its loss.
    A client's gradient on a model that another client chose can reveal its samples exactly, at any
    weight: ``[privacy]`` bounds and hides what each sample adds. An owner can be sent any vector.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows
from ..core.client import Client
from ..core.mixing import count_larger, epsilon_greedy, sums_by
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import CountOrZero, Positive, Share, ShareAboveZero
from ..core.tree import Bank, Parcels, Tree, where

# ---- the E-step --------------------------------------------------------------------------------


class Tracked(NamedTuple):
    """What a client keeps."""

    last: Tensor  # [K] the last loss of each client's model
    tracked: Tensor  # [K] L̂
    seen: Tensor  # [K]
    weights: Tensor  # [K] w
    rounds: Tensor  # [] the number of rounds in which the client took part


def posterior(tracked: Tensor, seen: Tensor) -> Tensor:
    """Line 15: softmax of minus the tracked losses over the clients seen; all zero if none is.

    >>> posterior(torch.tensor([2.0, 3.0, 0.0]), torch.tensor([True, True, False]))
    tensor([0.7311, 0.2689, 0.0000])
    """
    known = torch.where(seen, tracked, torch.inf)
    least = known.min(-1, keepdim=True).values
    weight = torch.where(seen, torch.exp(-(torch.where(seen, tracked, 0.0) - least)), 0.0)
    return torch.where(seen, weight / weight.sum(-1, keepdim=True), 0.0)  # line 15


def tracked_losses(
    state: Tracked,
    last: Tensor,
    rounds: Tensor,
    average: tuple[float, Literal["first", "zero"]] | None,
) -> Tensor:
    """L̂ of all clients after a round ``[K]``; the values of clients never seen are meaningless.

    ``average`` is the weight β of the newest loss and the start of the moving average. None sums
    the losses, and counts the loss of a newly seen client once for every round so far.
    """
    if average is None:
        return torch.where(state.seen, state.tracked + last, rounds * last)
    beta, begin = average
    first = last if begin == "first" else torch.zeros_like(last)
    before = torch.where(state.seen, state.tracked, first)
    return (1 - beta) * before + beta * last


def kept_weights(weights: Tensor, least: float) -> Tensor:
    """Which models to download for prediction ``[K]``: weight at least ``least``, or the best."""
    return weights >= weights.max().clamp(max=least)


# ---- state and messages -------------------------------------------------------------------------

Scale = Literal["auto", "sum", "mean"]


class Circle(NamedTuple):
    """The state between rounds, one row per client; the clients or a server hold it."""

    models: Tensor  # [K, P] φ
    optimizer: Tree  # the owners' optimiser states, for ``gradient``
    sizes: Tensor  # [K] training samples
    ranks: Tensor  # [K, K] how many clients each client prefers to this one
    wanted: Tensor  # [K, K] whose models each client predicts with

    def scores(self, clients: Tensor, allowed: Tensor) -> Tensor:
        """How much the clients prefer each model ``[m, K]``; -inf where it is not ``allowed``."""
        return (-self.ranks[clients].to(torch.float64)).masked_fill(~allowed, -torch.inf)


class Held(NamedTuple):
    """One owner's model and optimiser state."""

    model: Tensor  # [P]
    optimizer: Tree


class Returned(NamedTuple):
    """The vectors that users of models return to the owners, one row per vector."""

    owner: Tensor  # [n]
    vector: Tensor  # [n, P]
    weight: Tensor  # [n]


class Inbox(NamedTuple):
    """The sum of what the users of a model returned to its owner."""

    total: Tensor  # [P] the sum of the returned vectors
    mass: Tensor  # [] the sum of the users' weights
    divisor: Tensor  # [] what gradients are divided by


class Sight(NamedTuple):
    """The models that a client receives: its own and its peers'."""

    own: Parcels  # [1, P]
    peers: Bank  # [M]

    def models(self, me: Tensor) -> tuple[Tensor, Tensor]:
        """The models of client ``me`` and its peers ``[1 + M, P]``, and the owner of each."""
        peers, present = self.peers.rows()
        peers = torch.where(present[:, None], peers, self.own.vectors)  # fill the empty slots
        models = torch.cat([self.own.vectors, peers])
        return models, torch.cat([me[None], self.peers.owner])


class Reply(NamedTuple):
    """What a client returns to the owners of the models it evaluated, itself first."""

    change: Parcels  # [1 + M, P] weighted differences or gradients, then weighted buffers
    weight: Tensor  # [1 + M] w_ib
    owner: Tensor  # [1 + M]
    ranks: Tensor  # [K]
    wanted: Tensor  # [K]

    def returned(self) -> Returned:
        """All vectors of some clients' replies, client by client."""
        vectors, weight = self.change.vectors.flatten(0, -2), self.weight.flatten()
        return Returned(self.owner.flatten(), vectors, weight)


# ---- the method ----------------------------------------------------------------------------------


class Serverless(ABC):
    """What a client computes of the server half where it owns its model.

    What is returned to an owner is added in the order of client numbers, so that an owner which
    computes alone gets the bits of :meth:`Algorithm.aggregate`.
    """

    @property
    @abstractmethod
    def serverless(self) -> bool:
        """Whether the method, as it is configured, needs no server."""

    @abstractmethod
    def begin(self, problem: Problem, clients: Tensor) -> tuple[Held, Tracked]:
        """The models and states with which some clients begin, one row per client."""

    @abstractmethod
    def moved(self, held: Held, returned: Returned, sizes: Tensor, round: Round) -> Held:
        """The owners' models after a round; ``held`` and ``sizes`` have one row per owner."""


UNUSED = 1e-6  # a model whose users' weights sum to less is not changed


@dataclass(frozen=True)
class FedeRiCo(Algorithm[Circle, Sight, Reply, Tracked], Serverless):
    """Find your friends: mixtures of peers' models, weighted by their loss on the client's data.

    Fields:
        form: ``decentralised`` (peers, as evaluated in the paper) or ``centralised`` (every client
            weighs all models by the exact posterior; downloads, epsilon and tracking are unused).
        downloads: models M of other clients that a client evaluates in a round.
        epsilon: probability that a slot is filled at random instead of by weight.
        explore: epsilon decides ``per_slot`` or ``per_round`` for all M at once.
        tracking: ``ema`` of the losses, or ``accumulate`` them (the exact posterior).
        beta: weight of the newest loss in the moving average.
        ema_init: the moving average starts at the ``first`` loss or at ``zero`` (as printed).
        loss_reduction: weigh by the ``sum`` of the samples' losses (as printed) or their ``mean``.
        temperature: divides the tracked losses; a higher one spreads the weights.
        unseen: clients never evaluated are left out (``exclude``) or count as loss 0
            (``zero_loss``, as printed).
        step: what is returned: the difference of ``local_epochs`` or a full ``gradient``.
        scale: gradients are summed over samples (``sum``, Eq. 9) or divided by the owner's samples,
            if centralised by the round's clients' (``mean``, Eq. 6); ``auto`` is as printed.
        normalise_columns: divide a model's change by its users' total weight where that exceeds 1.
        start: models start ``independent`` (as printed) or ``common``.
        predict_min_weight: models with less weight are not downloaded for prediction.
    """

    form: Literal["decentralised", "centralised"] = "decentralised"
    downloads: CountOrZero = 3
    epsilon: Share = 0.3
    explore: Literal["per_slot", "per_round"] = "per_slot"
    tracking: Literal["ema", "accumulate"] = "ema"
    beta: ShareAboveZero = 0.6
    ema_init: Literal["first", "zero"] = "first"
    loss_reduction: Literal["sum", "mean"] = "sum"
    temperature: Positive = 1.0
    unseen: Literal["exclude", "zero_loss"] = "exclude"
    step: Literal["local_epochs", "gradient"] = "local_epochs"
    scale: Scale = "auto"
    normalise_columns: bool = True
    start: Literal["independent", "common"] = "independent"
    predict_min_weight: Share = 1e-3

    bibtex: ClassVar[str] = """@article{sui2022federico,
  title={Find Your Friends: Personalized Federated Learning with the Right Collaborators},
  author={Sui, Yi and Wen, Junfeng and Lau, Yenson and Ross, Brendan Leigh and
          Cresswell, Jesse C.},
  journal={arXiv:2210.06597}, year={2022}}"""
    private = Declaration(
        lambda self, when: (Query(times=1 + self.visitors(when.population)),),
        "what training losses decide: weights of changes, and the ranking of the others",
        lambda self: "step = 'gradient' sends exact gradients" if self.step == "gradient" else "",
    )

    @property
    def _central(self) -> bool:
        """Whether a server holds all models, and every client weighs all of them."""
        return self.form == "centralised"

    @property
    def traits(self) -> Traits:
        """The client that a model fits best becomes its main user, whichever client started it."""
        return Traits(models_change_hands=True, several_models=True)

    @property
    def serverless(self) -> bool:
        """Among peers every client holds its own model."""
        return not self._central

    def visitors(self, population: int) -> int:
        """The most models of others that a client evaluates in a round."""
        return min(population if self._central else self.downloads, population - 1)

    # ---- between clients -------------------------------------------------------------------

    def optimizers(self, problem: Problem) -> int:
        """One for all models that a client trains; with ``gradient`` the owners keep theirs."""
        return 1 if self.step == "local_epochs" else 0

    def init(self, problem: Problem) -> tuple[Circle, Tracked]:
        """One model per client; no client has seen another client's model."""
        K, device = problem.population, problem.device
        held, states = self.begin(problem, torch.arange(K, device=device))
        ranks = torch.zeros(K, K, dtype=torch.int32, device=device)
        return Circle(*held, problem.sizes, ranks, states.weights > 0), states

    def begin(self, problem: Problem, clients: Tensor) -> tuple[Held, Tracked]:
        """The models and states with which some clients begin, one row per client."""
        common = rows(problem.start, len(clients))
        models = common if self.start == "common" else problem.fresh(clients)
        optimizer = vmap(problem.recipe.rule().init)(models[:, : problem.model.parameters])
        alone = (clients[:, None] == torch.arange(problem.population).to(clients)).to(torch.float64)
        zero = torch.zeros_like(alone)
        states = Tracked(zero, zero, zero > 0, alone, zero.new_zeros(len(clients)))
        return Held(models, optimizer if self.step == "gradient" else ()), states

    def download(self, server: Circle, round: Round) -> Sight:
        """Each client's own model and the models of the peers chosen among the round's clients."""
        me, K = round.clients[:, None], round.population
        others = torch.arange(K, device=me.device)
        there = torch.isin(others, round.clients) | self._central
        scores = server.scores(round.clients, there & (others != me))
        count = min(K if self._central else self.downloads, int(there.sum()) - 1)
        coins = round.draw("explore", round.clients, count=max(count, 1))
        coins = coins[:, :1].expand(-1, count) if self.explore == "per_round" else coins[:, :count]
        chosen = epsilon_greedy(scores, coins < self.epsilon, round.draw("ties", me, others), count)
        return Sight(self._own(server, round), Bank(server.models, chosen, chosen))

    def _own(self, server: Circle, round: Round) -> Parcels:
        """Each client's own model; it is sent only where a server holds it."""
        models = server.models[round.clients, None]
        return Parcels(models, torch.full(models.shape[:2], self._central, device=models.device))

    def aggregate(self, server: Circle, uploads: Reply, round: Round) -> Circle:
        """Apply the vectors that the users of each model returned to its owner."""
        returned = uploads.returned()
        models, optimizer = self.moved(Held(*server[:2]), returned, server.sizes, round)
        ranks = server.ranks.index_copy(0, round.clients, uploads.ranks)
        wanted = server.wanted.index_copy(0, round.clients, uploads.wanted)
        return Circle(models, optimizer, server.sizes, ranks, wanted)

    def moved(self, held: Held, returned: Returned, sizes: Tensor, round: Round) -> Held:
        """The owners' models after a round; ``held`` and ``sizes`` have one row per owner."""
        count = len(held.model)
        total = sums_by(returned.owner, returned.vector, count)
        mass = sums_by(returned.owner, returned.weight[:, None], count).squeeze(1)
        divisors = self._divisors(sizes.to(torch.float64), round)
        apply = vmap(lambda own, box: self.apply(own, box, round))
        after: Held = apply(held, Inbox(total, mass, divisors))
        return after

    def _divisors(self, sizes: Tensor, round: Round) -> Tensor:
        """The number by which every owner divides gradients ``[K]``."""
        if self._central and self.scale != "sum":
            return sizes[round.clients].sum().expand(len(sizes))  # Eq. 6
        return sizes if self.scale == "mean" else torch.ones_like(sizes)  # Eq. 9

    def apply(self, own: Held, inbox: Inbox, round: Round) -> Held:
        """One owner's model after a round; a model without users is not changed."""
        w, buffers = own.model[: round.parameters], own.model[round.parameters :]
        total, state = inbox.total, own.optimizer
        change = total[: round.parameters]
        if self.normalise_columns:
            change = change / inbox.mass.to(change.dtype).clamp(min=1)
        if self.step == "gradient":
            rule = round.recipe.rule()
            w, state = rule.step(w, change / inbox.divisor.to(change.dtype), state, round.lr)
        else:
            w = w - change
            buffers = total[round.parameters :] / inbox.mass.to(total.dtype)
        moved: Held = where(inbox.mass > UNUSED, Held(torch.cat([w, buffers]), state), own)
        return moved

    # ---- one client ------------------------------------------------------------------------

    def local(self, client: Client, received: Sight, state: Tracked) -> tuple[Reply, Tracked]:
        models, owners = received.models(client.id)
        losses = client.map(lambda w: client.loss(w, "train"), models).to(torch.float64)
        if self.loss_reduction == "sum":
            losses = losses * client.size
        arrived = losses.isfinite()
        is_of = owners[:, None] == torch.arange(client.population, device=owners.device)
        state = self._track(client, state, torch.where(arrived, losses, 0.0), is_of, arrived)
        weight = torch.where(arrived, is_of.to(torch.float64) @ state.weights, 0.0)
        w = weight.to(models.dtype)[:, None]
        change = torch.where(w > 0, w * self._change(client, models, weight), 0.0)
        travels = (w > 0).squeeze(1) & (self._central | (owners != client.id))
        order = count_larger(torch.where(state.seen, -state.tracked, torch.inf))  # unseen first
        wanted = kept_weights(state.weights, self.predict_min_weight)
        return Reply(Parcels(change, travels), weight, owners, order, wanted), state

    def _track(
        self, client: Client, state: Tracked, losses: Tensor, is_of: Tensor, arrived: Tensor
    ) -> Tracked:
        """The E-step: losses of the received models, tracked losses of all seen ones, weights."""
        here = (is_of & arrived[:, None]).any(0)
        last = torch.where(here, losses @ is_of.to(losses.dtype), state.last)
        seen, rounds = state.seen | here, state.rounds + 1
        summed = self._central or self.tracking == "accumulate"
        average = None if summed else (self.beta, self.ema_init)
        tracked = torch.where(seen, tracked_losses(state, last, rounds, average), 0.0)
        weights = posterior(tracked / self.temperature, seen | (self.unseen == "zero_loss"))
        alone = torch.arange(client.population, device=seen.device) == client.id
        weights = torch.where(weights.sum() > 0, weights, alone.to(weights.dtype))
        return Tracked(last, tracked, seen, weights, rounds)

    def _change(self, client: Client, models: Tensor, weight: Tensor) -> Tensor:
        """The change of every received model, not yet weighted, and its buffers after training."""
        if self.step == "gradient":
            g = client.map(lambda w: client.gradient(w, "train"), models)
            moves, buffers = g * client.size, torch.zeros_like(models)
        else:
            buffers = client.map(client.train, models, shares=weight)
            moves = models - buffers
        return torch.cat([client.trainable(moves), buffers[:, client.model.parameters :]], 1)

    # ---- prediction ------------------------------------------------------------------------

    def serve(self, server: Circle, round: Round) -> Sight:
        """The newest versions of the models that each client predicts with."""
        me, others = round.clients[:, None], torch.arange(round.population).to(server.sizes.device)
        fetched = server.wanted[round.clients] & (others != me)
        scores = server.scores(round.clients, fetched)
        count = int(fetched.sum(1).max())
        never = torch.zeros(len(me), count, dtype=torch.bool, device=me.device)
        chosen = epsilon_greedy(scores, never, round.draw("ties", me, others), count)
        return Sight(self._own(server, round), Bank(server.models, chosen, chosen))

    def predictor(self, client: Client, served: Sight, state: Tracked) -> Mixture:
        """The mixture of the models with enough weight, the client's own first."""
        models, owners = served.models(client.id)
        is_of = owners[:, None] == torch.arange(client.population, device=owners.device)
        wanted = kept_weights(state.weights, self.predict_min_weight)
        weights = is_of.to(torch.float64) @ torch.where(wanted, state.weights, 0.0)
        total = weights.cumsum(0)[-1]  # in the order of slots: empty ones at the end change no bit
        return Mixture((weights / total).to(models.dtype), models)

    def shown(self, state: Tracked) -> Tensor:
        return state.weights

    def collaboration(self, server: Circle, shown: Tensor, round: Round) -> Tensor:
        return shown
