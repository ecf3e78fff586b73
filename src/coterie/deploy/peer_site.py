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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..algorithms.federico import Reply, Tracked
from ..core.algorithm import Mixture, Round, round_of
from ..core.messages import REASONS, Rejection
from ..core.tree import Tree
from ..engines.codec import Message, decode, encode, refusal, vocabulary
from ..engines.site import Site
from ..errors import EngineError, StoreError
from ..storage.files import strict
from ..training.guard import Guard
from . import keys
from .peer_part import Change, Mine, OwnPart, change_of, checked_change, checked_model
from .protocol import as_array

BLOCK = 1024  # sizes of sealed messages are multiples of this, so that small ones look alike
_LOG = logging.getLogger(__name__)


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


class PeerSite:
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
                return refusal("stale_state")
            self._work = _Work(key, Mine(*decode(stored, self._types).body))
        if self._work is None or self._work.key != key:
            return refusal("stale_state")  # the site was started anew: the round begins again
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
            return refusal("stale_state")
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
        if self._base is not None:  # else it was kept when the message came first
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
