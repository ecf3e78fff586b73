"""Runs clients that are at other places: the engine of a real federation, without a transport.

A :class:`Transport` carries messages to the sites and their answers back. The engine knows a site's
state by its sha256 alone: states, data, private parts of models and answers on test samples stay at
the sites (see :mod:`coterie.engines.site`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Round
from ..core.calls import Form
from ..core.messages import Rejection, Reply, layout
from ..core.problem import Problem
from ..core.tree import Tree
from .base import Enrolment, Evaluation, Predicted, Replies
from .codec import Message, Types, encode, vocabulary
from .loop import together
from .site_answers import gathered_predictions, judged_answer, read_answer

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
