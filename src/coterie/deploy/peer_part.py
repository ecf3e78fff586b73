"""What one site computes among peers: its own part of both halves of decentralised FedeRiCo.

The simulator holds all models, rankings and states; here every function gets one site's rows. Sums
over what other sites returned are in the order of client numbers, as in the simulator, and what
arrives is checked by the simulator's guard.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.federico import Circle, Held, Reply, Returned, Serverless, Sight, Tracked
from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, round_of
from ..core.answers import Answers, Outcomes
from ..core.messages import Rejection, difference, layout
from ..core.policies import Private, governed, privately
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Bank, Parcels, Tree
from ..engines.base import Predicted
from ..engines.evaluation import outcomes
from ..engines.loop import LoopBackend
from ..errors import ConfigError
from ..training.guard import Guard, remember, screen


class Change(NamedTuple):
    """What a user of a model returns to its owner."""

    vector: Tensor  # [P]
    weight: Tensor  # []


def change_of(reply: Reply, slot: int) -> Tree:
    """What is sent to the owner of a slot: its weight and, unless it is zero, the vector."""
    vector, travels = reply.change.vectors[slot], bool(reply.change.sent[slot])
    return (reply.weight[slot], *([vector] if travels else []))


def checked_change(body: Tree, like: Tensor) -> tuple[Change | None, str | None]:
    """A change that arrived, or the reason to refuse it; both None if its sender has none.

    ``like`` is a model ``[P]``.
    """
    if isinstance(body, tuple) and not body:
        return None, None
    weight, whole = torch.zeros((), dtype=torch.float64), isinstance(body, tuple) and len(body) > 1
    reason = _unlike(body, (weight, like) if whole else (weight,))
    if reason is not None:
        return None, reason
    return Change(body[1] if whole else torch.zeros_like(like), body[0]), None


def checked_model(body: Tree, own: Tensor, guard: Guard) -> tuple[Tensor, str | None]:
    """A model that arrived, and the reason to leave it out; ``own`` is the site's own model."""
    reason = _unlike(body, own)
    if reason is not None or not guard.on:
        return body, reason
    length, usual = (float(torch.linalg.vector_norm(w.double())) for w in (body, own))
    if not math.isfinite(length):
        return body, "not_finite"
    outsized = guard.bound is not None and length > guard.bound * max(usual, 1.0)
    return body, "outsized" if outsized else None


def _unlike(body: Tree, expected: Tree) -> str | None:
    """The reason to refuse a message that has not the expected layout."""
    try:
        return difference(layout(body), layout(expected))
    except TypeError:
        return "fields"


# ---- a site's own part ---------------------------------------------------------------------------


FINITE = Guard(bound=None)  # a site checks of its own numbers only that they are finite


class Mine(NamedTuple):
    """What a site keeps between rounds: its rows of what a simulation holds for everybody."""

    held: Held  # its model and its optimiser's state
    tracked: Tracked
    ranks: Tensor  # [K] how many clients it prefers to each
    wanted: Tensor  # [K] whose models it predicts with
    accepted: Tensor  # [K] the largest norm of a vector accepted from each client


def serverless(method: AnyAlgorithm) -> Serverless:
    """The method, if it can be run among peers; a ConfigError otherwise."""
    method = method.algorithm if isinstance(method, Private) else method
    if not isinstance(method, Serverless) or not method.serverless:
        raise ConfigError(
            f"algorithm: {type(method).__name__} as configured needs a server that computes for "
            "everybody; among peers only federico with form = 'decentralised' and without an "
            "adaptation can be run"
        )
    return method


@dataclass(frozen=True, eq=False)
class OwnPart:
    """The computations of the client ``me``."""

    problem: Problem
    shards: Shards
    algorithm: AnyAlgorithm
    me: int
    guard: Guard

    def __post_init__(self) -> None:
        serverless(self.algorithm)
        if governed(self.algorithm, self.problem).optimizers(self.problem) and (
            self.problem.recipe.continues
        ):
            raise ConfigError(
                "train.optimizer_state: found 'kept', but among peers a client's optimiser begins "
                "anew in every round; use optimizer_state = 'round'"
            )
        if self.problem.aux is not None:
            raise ConfigError(
                "data.aux: found samples of a server, but peers have no server; use data.aux = 0"
            )
        if self.problem.privacy is not None and self.problem.secret is None:
            raise ConfigError(
                "privacy: noise would be derived from the seed, which all peers know, so that they "
                "could subtract it; use no [privacy], or a problem with the site's own secret"
            )

    @property
    def _method(self) -> Serverless:
        return serverless(self.algorithm)

    def begin(self) -> Mine:
        """The state before round 0."""
        K = self.problem.population
        held, tracked = self._method.begin(self.problem, self._alone)
        alone = torch.arange(K, device=self.problem.device) == self.me
        ranks = torch.zeros(K, dtype=torch.int32, device=self.problem.device)
        accepted = torch.zeros(K, dtype=torch.float64)
        held, tracked = tree.row((held, tracked), 0)
        return Mine(held, tracked, ranks, alone, accepted)

    # ---- one round -------------------------------------------------------------------------

    def chosen(self, mine: Mine, round: Round) -> tuple[int, ...]:
        """The clients whose models this one evaluates in the round."""
        sight: Sight = self.algorithm.download(self._circle(mine), round)
        at = int((round.clients == self.me).nonzero())
        return tuple(sight.peers.owner[at].tolist())

    def local(
        self, mine: Mine, owners: Sequence[int], models: Mapping[int, Tensor], round: Round
    ) -> tuple[Reply, Tracked]:
        """Weigh and train the own model and those that arrived; the others are empty slots."""
        received = self._sight(mine, owners, models)
        states = _stacked(mine.tracked)
        method = privately(self.algorithm, self.problem)
        found = self._backend.local(method, received, states, self._only_me(round))
        reply, tracked = tree.row(found, 0)
        return reply, tracked

    def sound(self, reply: Reply, round: Round) -> bool:
        """Whether all numbers of the site's own reply are finite, so that it may be sent."""
        sizes, alone = self.problem.sizes, self._only_me(round)
        return bool(len(screen(_stacked(reply), alone, sizes, FINITE)[0]))

    def after(
        self,
        mine: Mine,
        reply: Reply,
        tracked: Tracked | None,
        changes: Mapping[int, Change],
        round: Round,
    ) -> tuple[Mine, tuple[Rejection, ...]]:
        """The state after the round, and which clients' changes were refused.

        ``tracked`` is None where the site's own reply was not sound: then its part does not count.
        """
        own = Change(reply.change.vectors[0], reply.weight[0])
        arrived = dict(changes) if tracked is None else {self.me: own, **changes}
        senders = sorted(arrived)
        part = round._replace(clients=torch.tensor(senders, dtype=torch.int64))
        returned = self._returned(arrived, senders)
        kept, rejected = self._screened(mine, reply, returned, part)
        part, returned = part._replace(clients=part.clients[kept]), tree.take(returned, kept)
        sizes = self.problem.sizes[self.me][None]
        moved = self._method.moved(_stacked(mine.held), returned, sizes, part)
        if not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(moved)):
            left_out = [Rejection(client, "overflow") for client in part.clients.tolist()]
            return mine, (*rejected, *left_out)
        accepted = remember(mine.accepted, returned, part.clients)
        mine = mine._replace(held=tree.row(moved, 0), accepted=accepted)
        if tracked is None:
            return mine, (*rejected, Rejection(self.me, "not_finite"))
        return mine._replace(tracked=tracked, ranks=reply.ranks, wanted=reply.wanted), rejected

    def _returned(self, arrived: Mapping[int, Change], senders: Sequence[int]) -> Returned:
        like = self.problem.start
        vectors = [arrived[sender].vector for sender in senders]
        weights = [arrived[sender].weight for sender in senders]
        return Returned(
            torch.zeros(len(senders), dtype=torch.int64),
            torch.stack(vectors) if vectors else like.new_zeros(0, len(like)),
            torch.stack(weights) if weights else like.new_zeros(0, dtype=torch.float64),
        )

    def _screened(
        self, mine: Mine, reply: Reply, returned: Returned, round: Round
    ) -> tuple[Tensor, tuple[Rejection, ...]]:
        """The rows that may be added; lengths are compared with the model and the own changes."""
        known = torch.cat([mine.held.model[None], reply.change.vectors])
        known = torch.where(known.isfinite().all(1, keepdim=True), known, 0.0)
        sent = known.expand(len(returned.weight), *known.shape)
        sizes = self.problem.sizes
        kept, rejected = screen(returned, round, sizes, self.guard, sent, mine.accepted)
        weight = returned.weight[kept]
        outside = ~((weight >= 0) & (weight <= 1 + 1e-9))
        refused = [Rejection(int(c), "outsized") for c in round.clients[kept[outside]]]
        return kept[~outside], (*rejected, *refused)

    # ---- prediction ------------------------------------------------------------------------

    def predicts_with(self, mine: Mine, rounds: int) -> tuple[int, ...]:
        """The clients whose models the predictor needs after the last round."""
        sight: Sight = self.algorithm.serve(self._circle(mine), self._end(rounds))
        return tuple(sight.peers.owner[0].tolist())

    def predicted(
        self,
        mine: Mine,
        owners: Sequence[int],
        models: Mapping[int, Tensor],
        rounds: int,
        metric: str,
    ) -> Predicted:
        """The site's predictor after the last round, and its scores on the site's own samples."""
        served, states = self._sight(mine, owners, models), _stacked(mine.tracked)
        return self._backend.predict(self.algorithm, served, states, self._end(rounds), metric)

    def answered(self, predictor: Mixture, rounds: int, metric: str) -> Outcomes | None:
        """What a predictor answers to the site's own test samples."""
        said: dict[int, Answers] = {}
        self._backend.judged(predictor, self.me, metric, said)
        return outcomes(said, self._end(rounds))

    # ---- rows ------------------------------------------------------------------------------

    @property
    def _backend(self) -> LoopBackend:
        return LoopBackend(self.problem, self.shards)

    @property
    def _alone(self) -> Tensor:
        return torch.tensor([self.me], device=self.problem.device)

    def _only_me(self, round: Round) -> Round:
        return round._replace(clients=self._alone)

    def _end(self, rounds: int) -> Round:
        return round_of(self.problem, rounds, rounds, self._alone)

    def _circle(self, mine: Mine) -> Circle:
        """The simulator's state with this site's rankings and no models: enough to choose by."""
        K, sizes = self.problem.population, self.problem.sizes
        ranks = torch.zeros(K, K, dtype=torch.int32, device=sizes.device)
        wanted = torch.zeros(K, K, dtype=torch.bool, device=sizes.device)
        ranks, wanted = (
            table.index_copy(0, self._alone, row[None])
            for table, row in ((ranks, mine.ranks), (wanted, mine.wanted))
        )
        return Circle(mine.held.model.new_zeros(K, 0), (), sizes, ranks, wanted)

    def _sight(self, mine: Mine, owners: Sequence[int], models: Mapping[int, Tensor]) -> Sight:
        """The site's own model and its peers', as one row; a model that is missing leaves a gap."""
        own = mine.held.model
        there = torch.tensor([owner in models for owner in owners], dtype=torch.bool)
        table = torch.stack([models.get(owner, own) for owner in owners] or [own])
        slot = torch.where(there, torch.arange(len(owners)), -1)
        owner = torch.where(there, torch.tensor(owners, dtype=torch.int64), -1)
        kept = Parcels(own[None], torch.zeros(1, dtype=torch.bool))
        return Sight(_stacked(kept), Bank(table, slot[None], owner[None]))


def _stacked(row: Tree) -> Tree:
    """A tree of one client with a leading dimension of one row."""
    return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), row)
