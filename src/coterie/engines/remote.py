"""Runs clients that are at other places: the engine of a real federation, without a transport.

A :class:`Transport` carries messages to the sites and their answers back. The engine knows a site's
state by its sha256 alone: states, data, private parts of models and answers on test samples stay at
the sites (see :mod:`coterie.engines.site`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import REASONS, Rejection, Reply, layout
from ..core.problem import Problem
from ..core.tree import Tree
from ..errors import EngineError
from .base import Enrolment, Evaluation, Predicted, Replies
from .codec import Message, Types, decode, encode, vocabulary
from .loop import together

# ---- reads the answers of sites: nothing in them is trusted -------------------------------------


def read_answer(client: int, data: bytes | str, types: Types) -> Message | Rejection:
    """The answer of a site; a rejection if it refused, did not answer, or cannot be read."""
    if isinstance(data, str):
        return Rejection(client, data if data in REASONS else "lost")
    try:
        answer = decode(data, types)
    except EngineError:
        return Rejection(client, "unreadable")
    if "refused" in answer.head:
        reason = str(answer.head["refused"])
        return Rejection(client, reason if reason in REASONS else "refused")
    return answer


class JudgedAnswer(NamedTuple):
    """One client's answer to an evaluation."""

    scores: list[float]
    predictor: Mixture
    digest: str


def judged_answer(answer: Message, scored: int) -> JudgedAnswer | None:
    """One client's scores and predictor; None if the answer has another form.

    ``scored`` is the number of scores that were asked for.
    """
    try:
        scores, predictor = answer.body
        whole = isinstance(predictor, Mixture) and scores.shape == (scored,)
        if not whole or predictor.weights.dim() != 1 or predictor.models.dim() != 2:
            return None
        return JudgedAnswer(scores.double().tolist(), predictor, str(answer.head.get("digest", "")))
    except (TypeError, ValueError, AttributeError):
        return None


def gathered_predictions(
    clients: Sequence[int],
    found: Mapping[int, JudgedAnswer],
    lost: tuple[Rejection, ...],
    scored: int,
    *,
    keep: bool,
) -> Predicted:
    """The scores of all clients; NaN and no predictor for a client that did not answer."""
    table = np.full((len(clients), scored), np.nan)
    predictors: list[Mixture | None] = []
    for at, client in enumerate(clients):
        one = found.get(client)
        predictors.append(None if one is None else one.predictor)
        if one is not None and bool((one.predictor.weights != 0).any()):
            table[at] = one.scores
    digests = tuple(found[c].digest if c in found else "" for c in clients)
    mixture = _padded(predictors)
    scores = Evaluation(*table.T[: len(Evaluation._fields)])
    loss = table[:, -1] if scored > len(scores) else None
    return Predicted(scores, mixture, None, digests if keep else None, lost, loss)


def _padded(predictors: Sequence[Mixture | None]) -> Mixture:
    """Predictors of different widths in one mixture; models only if every client sent its own."""
    known = [one for one in predictors if one is not None]
    width = max((len(one.weights) for one in known), default=1)
    sizes = {one.models.shape[1] for one in known}
    size = sizes.pop() if len(sizes) == 1 and len(known) == len(predictors) else 0
    first = known[0] if known else Mixture(torch.zeros(1), torch.zeros(1, 0))
    weights = first.weights.new_zeros(len(predictors), width)
    models = first.models.new_zeros(len(predictors), width, size)
    for at, one in enumerate(predictors):
        if one is not None:
            weights[at, : len(one.weights)] = one.weights
            models[at, : len(one.models)] = one.models[:, :size]
    return Mixture(weights, models)


SETUP = -1  # the number of a round for messages outside of rounds
TRIES = 2  # an evaluation that is lost is asked for again: it changes nothing at the site
BYTES = 32  # of a sha256


class SiteState(NamedTuple):
    """What a transport knows of a site."""

    online: bool
    seen: float | None  # seconds since its last sign of life; None if there was none


class Transport(Protocol):
    """Carries messages to sites, which are known by their names, and their answers back."""

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """Each site's answer, or the reason why there is none: ``lost`` or ``unreadable``.

        Blocks until every site has answered or its deadline has passed. Asking again is harmless.
        """

    def sites(self) -> Mapping[str, SiteState]:
        """The sites of the federation."""

    def close(self) -> None:
        """Release connections and threads."""


class Answering(Protocol):
    """What a site runs behind a transport."""

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; a refusal where the message is not acceptable."""


class HeldStates(NamedTuple):
    """What the engine knows of the clients' states, one row per client."""

    hashes: Tensor  # [K, 32] the sha256 of each state
    shown: Tree  # what each state shows of its collaboration


def held_states(hashes: Sequence[str], shown: Tree) -> HeldStates:
    """The states with these hashes, in hexadecimal digits."""
    rows = [list(bytes.fromhex(sha)) for sha in hashes]
    return HeldStates(torch.tensor(rows, dtype=torch.uint8), shown)


class RemoteEngine:
    """An engine whose clients are sites behind a transport.

    ``label`` describes the transport in the run's config. ``experiment`` is the hash of what was
    agreed; every message carries it. ``starts`` are the hashes of the clients' first states, which
    the sites made themselves. With ``collect`` the final models are fetched from the sites.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        label: Mapping[str, Any],
        experiment: str,
        starts: Sequence[str] = (),
        collect: bool = False,
    ) -> None:
        self._transport, self._label = transport, dict(label)
        self._experiment, self._starts, self._collect = experiment, tuple(starts), collect
        self._clients: tuple[str, ...] = ()
        self._types: Types = {}
        self._losses = False  # whether clients measure the loss on training data
        self._held: list[str] = []  # the sha256 of every client's state
        self._shown: list[Tree] = []
        self._offered: dict[int, tuple[str, Tree]] = {}  # new state's sha256 and shown, by client

    @property
    def choice(self) -> dict[str, Any]:
        """The resolved settings."""
        return dict(self._label)

    @property
    def forms(self) -> tuple[Form, ...]:
        """Empty: every call is executed as it is written."""
        return ()

    @property
    def hashes(self) -> tuple[str, ...]:
        """The sha256 of every client's state."""
        return tuple(self._held)

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Start with the sites' first states, or continue with the states of a snapshot."""
        self._clients, self._types = problem.clients, vocabulary(algorithm)
        self._losses = problem.training_loss
        if not isinstance(states, HeldStates):
            first = algorithm.init(problem)[1] if states is None else states
            states = held_states(self._starts, first_states(algorithm, first, problem))
        self.restore(states)
        return Enrolment(problem.clients, problem.counts)

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """Send each client of the round its row; a client without an answer misses the round."""
        self._offered = {}
        replies, lost = [], []
        for client, answer in self._ask("local", received, round).items():
            found = answer if isinstance(answer, Rejection) else self._reply(client, answer)
            if isinstance(found, Rejection):
                lost.append(found)
            else:
                replies.append(found)
        made = together(replies, round, _stacked)
        return Replies(made.uploads, made.clients, (*lost, *made.rejected))

    def _reply(self, client: int, answer: Message) -> Reply | Rejection:
        """A client's reply; what it shows must be as its state was at the start, or nothing."""
        try:
            upload, shown = answer.body
            state, round = str(answer.head["state"]), int(answer.head["round"])
            if len(bytes.fromhex(state)) != BYTES:
                raise ValueError("its state has no sha256")
        except (KeyError, TypeError, ValueError):
            return Rejection(client, "fields")
        before = self._shown[client]
        alike = layout(shown) == layout(before)
        self._offered[client] = state, shown if alike else before
        return Reply(client, round, upload)

    def commit(self, accepted: Tensor) -> None:
        """Continue with the new states of the accepted clients; the sites need no message."""
        for client in accepted.tolist():
            self._held[client], self._shown[client] = self._offered[client]
        self._offered = {}

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        """What every client's state shows of its collaboration, from its last accepted reply."""
        return tree.stack(self._shown)

    def evaluate(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = False,
    ) -> Predicted:
        """Ask every client of the round to evaluate its predictor; NaN for those that are lost."""
        head = {"metric": metric, "last": keep, "collect": self._collect}
        asked = len(Evaluation._fields) + self._losses
        answers = self._ask("predict", served, round, head)
        for _ in range(TRIES - 1):
            again = [c for c, answer in answers.items() if isinstance(answer, Rejection)]
            answers |= self._ask("predict", served, round, head, again) if again else {}
        found = {c: judged_answer(a, asked) for c, a in answers.items() if isinstance(a, Message)}
        lost = tuple(a for a in answers.values() if isinstance(a, Rejection))
        unread = tuple(Rejection(c, "fields") for c, one in found.items() if one is None)
        good = {client: one for client, one in found.items() if one is not None}
        lost = (*lost, *unread)
        return gathered_predictions(round.clients.tolist(), good, lost, asked, keep=keep)

    def snapshot(self) -> Tree:
        """The hashes of the clients' states, and what these show."""
        return held_states(self._held, tree.stack(self._shown))

    def restore(self, states: Tree) -> None:
        """Continue with other states, which the sites still hold."""
        self._held = [bytes(row.tolist()).hex() for row in states.hashes]
        self._shown = [tree.row(states.shown, k) for k in range(len(self._held))]

    def close(self) -> None:
        """Do nothing: the transport belongs to the caller, and may serve several engines."""

    def _ask(
        self,
        kind: str,
        rows: Tree,
        round: Round,
        head: Mapping[str, Any] = {},  # never changed
        only: Sequence[int] | None = None,
    ) -> dict[int, Message | Rejection]:
        """Send each client of the round a message; its answer, or a rejection with the reason."""
        common = {
            **{"kind": kind, "experiment": self._experiment},
            **{"round": round.index, "horizon": round.horizon},
        }
        places = {c: at for at, c in enumerate(round.clients.tolist()) if only is None or c in only}
        requests = {
            self._clients[client]: encode(
                Message(
                    {**common, **head, "client": client, "base": self._held[client]},
                    tree.row(rows, at),
                )
            )
            for client, at in places.items()
        }
        answers = self._transport.ask(requests, round.index)
        return {
            c: read_answer(c, answers.get(self._clients[c], "lost"), self._types) for c in places
        }


def first_states(algorithm: AnyAlgorithm, states: Tree, problem: Problem) -> Tree:
    """What the states before round 0 show of the collaboration, one row per client."""
    rows = (tree.row(tree.take(states, torch.tensor([k])), 0) for k in range(problem.population))
    return tree.stack([algorithm.shown(row) for row in rows])


def _stacked(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    return tree.stack([reply.upload for reply in replies]), ()
