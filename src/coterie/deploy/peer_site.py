"""One site of an experiment among peers: decentralised FedeRiCo without anybody who sees models.

A round has four steps (:mod:`coterie.deploy.peers`). In each the site answers the operator by one
sealed message for every other site of the round: whose model it wants; its model, for those who
want it; its weighted change of each model that it chose. What it computes is the simulator's: sums
over what other sites returned are in the order of client numbers, and what arrives is checked by
the simulator's guard. A site that was killed begins its round again, and computes the same.
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.federico import Circle, Held, Reply, Returned, Serverless, Sight, Tracked
from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, round_of
from ..core.answers import Answers, Outcomes
from ..core.messages import REASONS, Rejection, difference, layout
from ..core.policies import governed
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Bank, Parcels, Tree
from ..engines.base import Predicted
from ..engines.codec import Message, decode, encode, vocabulary
from ..engines.evaluation import outcomes
from ..engines.loop import LoopBackend
from ..engines.site import Site, refused
from ..errors import ConfigError, EngineError, StoreError
from ..storage.files import strict
from ..training.guard import Guard, remember, screen
from . import keys
from .protocol import as_array

BLOCK = 1024  # sizes of sealed messages are multiples of this, so that small ones look alike
_LOG = logging.getLogger(__name__)


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
        method = self._method
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
        if method.predictable_noise and self.problem.secret is None:
            raise ConfigError(
                "federico.noise: it is derived from the seed, which all peers know, so that they "
                "could subtract it; use noise = 0, or a problem with the site's own secret"
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
        found = self._backend.local(self.algorithm, received, states, self._only_me(round))
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
            torch.tensor([sender != self.me for sender in senders], dtype=torch.bool),
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


# ---- messages ------------------------------------------------------------------------------------


@strict
class PeerStep:
    """What the operator asks of a site: one step of a round with exactly these sites."""

    kind: str  # "peer"
    step: str
    experiment: str
    round: int
    horizon: int
    names: tuple[str, ...]  # the sites of this attempt, in the order of client numbers
    base: str  # sha256 of the site's state before the round


class _MissingError(Exception):
    """Messages of these sites are missing, or cannot be opened."""


@dataclass
class _Work:
    """What a site keeps in memory between the steps of a round."""

    key: tuple[int, tuple[str, ...], str]
    mine: Mine
    chosen: tuple[int, ...] = ()
    users: tuple[str, ...] = ()
    trained: tuple[Reply, Tracked] | None = None


class Peer:
    """One site's part of an experiment; ``secrets`` are those that it shares with other sites."""

    def __init__(
        self, site: Site, secrets: Mapping[str, bytes], experiment: str, metric: str
    ) -> None:
        self._site, self._secrets = site, secrets
        self._experiment, self._metric = experiment, metric
        self._names = site.problem.clients
        self._me = self._names[site.client]
        self._types = vocabulary(site.algorithm)
        self._work: _Work | None = None
        self._base: str | None = None

    @cached_property
    def _part(self) -> OwnPart:
        site = self._site
        return OwnPart(site.problem, site.shards(), site.algorithm, site.client, Guard())

    def start(self) -> str:
        """Store the site's state before round 0, and return its sha256."""
        return self._site.states.write(self._encoded(self._part.begin()), 0)

    def answer(self, data: bytes, asked: PeerStep, *, again: bool) -> bytes:
        """The reply to one step: a sealed message for every other site of the round."""
        body = decode(data, {}).body
        others = [name for name in asked.names if name != self._me]
        known = [name for name in self._names if name in {*asked.names}]
        whole = isinstance(body, tuple) and len(body) == len(others)
        if len(others) != len(asked.names) - 1 or known != [*asked.names] or not whole:
            raise EngineError("a step of a round needs this site, its peers, and a message of each")
        arrived = dict(zip(others, (_bytes(part) for part in body), strict=True))
        ends = asked.round == asked.horizon
        steps = {"want": self._wants, "model": self._models}
        steps |= (
            {"predict": self._predict} if ends else {"train": self._train, "close": self._close}
        )
        if asked.step not in steps:
            raise EngineError(f"a round has no step '{asked.step[:20]}'")
        self._base = None if again else asked.base  # a state is removed by a new message alone
        key = asked.round, asked.names, asked.base
        if asked.step == "want":
            stored = self._site.states.read(asked.base)
            if stored is None:
                return refused("stale_state")
            self._work = _Work(key, Mine(*decode(stored, self._types).body))
        if self._work is None or self._work.key != key:
            return refused("stale_state")  # the site was started anew: the round begins again
        try:
            return steps[asked.step](asked, arrived)
        except _MissingError as error:
            _LOG.warning("round %s: what %s sealed cannot be opened", asked.round, error)
            return encode(Message({"missing": [*error.args]}))

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def _now(self) -> _Work:
        assert self._work is not None
        return self._work

    def _wants(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> bytes:
        work, part = self._now, self._part
        if asked.round == asked.horizon:
            owners = part.predicts_with(work.mine, asked.horizon)
            work.chosen = tuple(o for o in owners if self._names[o] in arrived)
        else:
            work.chosen = part.chosen(work.mine, self._round(asked))
        wanted = {self._names[owner] for owner in work.chosen}
        return self._sent(asked, {name: bytes([name in wanted]) for name in arrived})

    def _models(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> bytes:
        wants = self._opened(asked, "want", arrived)
        self._now.users = tuple(name for name, data in wants.items() if data == b"\1")
        model = encode(Message({}, self._now.mine.held.model))
        return self._sent(asked, dict.fromkeys(self._now.users, model))

    def _train(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> bytes:
        work, part, round = self._now, self._part, self._round(asked)
        models = self._received(asked, arrived)
        work.trained = part.local(work.mine, work.chosen, models, round)
        reply = work.trained[0]
        sound = part.sound(reply, round)
        changes = {
            self._names[owner]: encode(Message({}, change_of(reply, slot) if sound else ()))
            for slot, owner in enumerate(work.chosen, 1)
        }
        return self._sent(asked, changes)

    def _close(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> bytes:
        work, part, round = self._now, self._part, self._round(asked)
        if work.trained is None:
            return refused("stale_state")
        bodies = self._opened(asked, "train", {name: arrived[name] for name in work.users})
        changes: dict[int, Change] = {}
        for name, data in bodies.items():
            change, reason = checked_change(self._body(data), work.mine.held.model)
            if change is not None:
                changes[self._names.index(name)] = change
            elif reason is not None:
                self._tell(asked, [Rejection(self._names.index(name), reason)])
        reply, tracked = work.trained
        kept = tracked if part.sound(reply, round) else None
        after, rejected = part.after(work.mine, reply, kept, changes, round)
        self._tell(asked, rejected)
        sha = self._site.states.write(self._encoded(after), asked.round + 1, base=self._base)
        return encode(Message({"state": sha}))

    def _predict(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> bytes:
        """Keep the predictor and its answers at the site; nothing of them is told."""
        mine, part, rounds, metric = self._now.mine, self._part, asked.horizon, self._metric
        models, owners = self._received(asked, arrived), part.predicts_with(mine, rounds)
        found = part.predicted(mine, owners, models, rounds, metric)
        predictor = Mixture(found.mixture.weights[0], found.mixture.models[0])
        score = float(found.evaluation[0][0])
        served = bool((predictor.weights != 0).any())
        said = part.answered(predictor, rounds, metric)
        self._site.keep(predictor, said, score if served else math.nan)
        _LOG.info("%s: %.4g on this site's own test samples", metric, score)
        return encode(Message({"state": asked.base}))

    def _received(self, asked: PeerStep, arrived: Mapping[str, bytes]) -> dict[int, Tensor]:
        """The models of the chosen clients that may be used."""
        work, models = self._now, {}
        names = {self._names[owner]: owner for owner in work.chosen}
        bodies = self._opened(asked, "model", {name: arrived[name] for name in names})
        for name, data in bodies.items():
            found = checked_model(self._body(data), work.mine.held.model, self._part.guard)
            if found[1] is None:
                models[names[name]] = found[0]
            else:
                self._tell(asked, [Rejection(names[name], found[1])])
        return models

    # ---- parts -----------------------------------------------------------------------------------

    def _round(self, asked: PeerStep) -> Round:
        numbers = torch.tensor([self._names.index(name) for name in asked.names])
        return round_of(self._part.problem, asked.round, asked.horizon, numbers)

    def _encoded(self, mine: Mine) -> bytes:
        return encode(Message({}, tuple(mine)))

    def _body(self, data: bytes) -> Tree:
        """What a peer sent; what is no message has the layout of none."""
        try:
            return decode(data, {}).body
        except EngineError:
            return ((),)

    def _tell(self, asked: PeerStep, rejected: Iterable[Rejection]) -> None:
        for client, reason in rejected:
            said = f"what '{self._names[client]}' sent is left out ({reason})"
            _LOG.warning("round %s: %s: %s", asked.round, said, REASONS[reason])

    def _context(self, asked: PeerStep, step: str, sender: str, to: str) -> bytes:
        """What a seal is good for, and nothing else: one step between two sites of one roll."""
        return json.dumps([self._experiment, asked.round, asked.names, step, sender, to]).encode()

    def _sent(self, asked: PeerStep, told: Mapping[str, bytes]) -> bytes:
        """The sealed messages, by the order of names; an empty one for a site that gets none."""
        sealed = []
        for name in (name for name in asked.names if name != self._me):
            data = told.get(name)
            if data is not None:
                inside = len(data).to_bytes(8, "little") + data
                inside += bytes(-len(inside) % BLOCK)
                context = self._context(asked, asked.step, self._me, name)
                data = keys.sealed(self._secrets[name], context, inside)
            sealed.append(as_array(data or b""))
        return encode(Message({}, tuple(sealed)))

    def _opened(self, asked: PeerStep, step: str, arrived: Mapping[str, bytes]) -> dict[str, bytes]:
        """The messages of the step before; _MissingError names those that cannot be opened."""
        found, missing = {}, []
        for name, data in arrived.items():
            try:
                context = self._context(asked, step, name, self._me)
                inside = keys.opened(self._secrets[name], context, data)
            except StoreError:
                missing.append(name)
            else:
                found[name] = inside[8 : 8 + int.from_bytes(inside[:8], "little")]
        if missing:
            raise _MissingError(*missing)
        return found


def _bytes(part: Tree) -> bytes:
    if not isinstance(part, Tensor) or part.dtype != torch.uint8 or part.dim() != 1:
        raise EngineError("a sealed message is an array of bytes")
    return bytes(part.numpy())
