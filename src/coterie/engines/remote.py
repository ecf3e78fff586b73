"""Runs clients that are at other places: the engine of a real federation, without a transport.

A :class:`Transport` carries messages to the sites and their answers back. The engine knows a site's
state by its sha256 alone: states, data, private parts of models and answers on test samples stay at
the sites (see :mod:`coterie.engines.site`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import REASONS, Layout, Rejection, Reply, layout
from ..core.metrics import LARGEST_SCORE, Metric, metric_named
from ..core.problem import Problem
from ..core.tree import Tree
from ..errors import EngineError
from .base import Enrolment, Evaluation, Predicted, Replies
from .codec import Message, Types, decode, encode, is_digest, refused_by, vocabulary
from .loop import together

SETUP = -1  # the number of a round for messages outside of rounds
TRIES = 2  # an evaluation that is lost is asked for again: it changes nothing at the site
PASSING = ("lost", "unreadable")  # reasons that may be others in the next round
WIDEST = 1024  # models of one site's predictor
SCORES = 2  # of the metric, before the losses: see Evaluation
Read = TypeVar("Read")


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

    def largest(self) -> int:
        """Bytes of the largest message that may arrive now."""


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
        self._held: list[str] = []  # the sha256 of every client's state
        self._shown: list[Tree] = []
        self._offered: dict[int, tuple[str, Tree]] = {}  # new state's sha256 and shown, by client
        self._rejected: dict[int, str] = {}  # why a client's last answer was none, by client
        self._accepted: int | None = None  # answers that were aggregated; None before any round
        self._width, self._dtype = 0, torch.float32  # of a model

    @property
    def choice(self) -> dict[str, Any]:
        return dict(self._label)

    @property
    def forms(self) -> tuple[Form, ...]:
        return ()

    @property
    def hashes(self) -> tuple[str, ...]:
        return tuple(self._held)

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Start with the sites' first states, or continue with the states of a snapshot."""
        self._clients, self._types = problem.clients, vocabulary(algorithm)
        self._width, self._dtype = problem.model.whole, problem.dtype
        if not isinstance(states, HeldStates):
            first = algorithm.init(problem)[1] if states is None else states
            states = held_states(self._starts, first_states(algorithm, first, problem))
        if not states.hashes.any():  # resumed before its first checkpoint
            states = held_states(self._starts, states.shown)
        self.restore(states)
        return Enrolment(problem.clients, problem.counts)

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """Send each client of the round its row; a client without an answer misses the round."""
        self._offered = {}
        replies, lost = [], []

        def read(client: int, answer: Message) -> TrainedAnswer:
            return trained_answer(answer, client, layout(self._shown[client]))

        for client, found in self._ask("local", received, round, read).items():
            if isinstance(found, Rejection):
                lost.append(found)
                self._rejected[client] = found.reason
                continue
            self._rejected.pop(client, None)
            replies.append(found.reply)
            shown = self._shown[client] if found.shown is None else found.shown
            self._offered[client] = found.state, shown
        self._refuse_refused(round)
        made = together(replies, round, _stacked)
        return Replies(made.uploads, made.clients, (*lost, *made.rejected))

    def _refuse_refused(self, round: Round) -> None:
        """End a run that no site of the federation goes on with: waiting would change nothing."""
        reasons = {*self._rejected.values()}
        if len(self._rejected) == len(self._clients) and not reasons & {*PASSING}:
            raise EngineError(
                f"round {round.index}: every site refuses ({', '.join(sorted(reasons))}), so the "
                "run has no result; expected at least one that takes part; look at the sites' "
                "logs, then resume the run or start a new one"
            )

    def commit(self, accepted: Tensor) -> None:
        """Continue with the new states of the accepted clients; the sites need no message."""
        self._accepted = (self._accepted or 0) + len(accepted)
        for client in accepted.tolist():
            self._held[client], self._shown[client] = self._offered[client]
        self._offered = {}

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        """What every client's state shows of its collaboration, from its last accepted reply."""
        return tree.stack(self._shown)

    def evaluate(
        self, algorithm: AnyAlgorithm, served: Tree, round: Round, metric: str, keep: bool = False
    ) -> Predicted:
        """Ask every client of the round to evaluate its predictor; NaN for those that are lost."""
        head = {"metric": metric, "last": keep, "collect": self._collect}
        asked = Assessment(round.index, metric_named(metric), self._width, self._dtype)

        def read(client: int, answer: Message) -> JudgedAnswer:
            return judged_answer(answer, client, asked)

        answers = self._ask("predict", served, round, read, head)
        for _ in range(TRIES - 1):
            again = [c for c, answer in answers.items() if isinstance(answer, Rejection)]
            answers |= self._ask("predict", served, round, read, head, again) if again else {}
        lost = tuple(a for a in answers.values() if isinstance(a, Rejection))
        good = {c: a for c, a in answers.items() if not isinstance(a, Rejection)}
        if keep and self._experiment and (not good or self._accepted == 0):
            reasons = {one.reason for one in lost} | {*self._rejected.values()}
            raise EngineError(
                f"no site took part until the end ({', '.join(sorted(reasons))}), so the run has "
                "no result; look at the sites' logs, then resume the run"
            )
        return gathered_predictions(round.clients.tolist(), good, lost, keep=keep)

    def snapshot(self) -> Tree:
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
        read: Callable[[int, Message], Read],
        head: Mapping[str, Any] = {},  # never changed
        only: Sequence[int] | None = None,
    ) -> dict[int, Read | Rejection]:
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
            c: read_answer(c, answers.get(self._clients[c], "lost"), self._types, partial(read, c))
            for c in places
        }


def first_states(algorithm: AnyAlgorithm, states: Tree, problem: Problem) -> Tree:
    """What the states before round 0 show of the collaboration, one row per client."""
    rows = (tree.row(tree.take(states, torch.tensor([k])), 0) for k in range(problem.population))
    return tree.stack([algorithm.shown(row) for row in rows])


def _stacked(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    return tree.stack([reply.upload for reply in replies]), ()


# ---- the answers of sites: nothing in them is trusted --------------------------------------------


class _WrongError(Exception):
    """An answer that is rejected for this reason."""


def read_answer(
    client: int, data: bytes | str, types: Types, read: Callable[[Message], Read]
) -> Read | Rejection:
    """What ``read`` finds in the answer of a site; a rejection whatever is wrong with it.

    ``data`` is a text if there is no answer: the reason.
    """
    if isinstance(data, str):
        return Rejection(client, data if data in REASONS else "lost")
    try:
        answer, refused = decode(data, types), refused_by(data)
        return read(answer) if refused is None else Rejection(client, refused[0])
    except EngineError:
        return Rejection(client, "unreadable")
    except _WrongError as error:
        return Rejection(client, str(error))
    except Exception:  # whatever a stranger's answer brings about
        return Rejection(client, "fields")


class TrainedAnswer(NamedTuple):
    """One client's answer to a round of training."""

    reply: Reply
    state: str  # sha256 of its new state
    shown: Tree | None  # None where it is not of the layout that was agreed


def trained_answer(answer: Message, client: int, shown: Layout) -> TrainedAnswer:
    """One client's answer; ``shown`` is the layout of what its state showed before."""
    upload, told = answer.body
    layout(upload)  # refuses whatever is no tree of arrays
    round = _round(answer.head, client)
    state = _sha256(answer.head["state"])
    fits = layout(told) == shown and all(_finite(leaf) for leaf in _arrays(told))
    return TrainedAnswer(Reply(client, round, upload), state, told if fits else None)


class JudgedAnswer(NamedTuple):
    """One client's answer to an evaluation."""

    scores: list[float]
    predictor: Mixture
    digest: str


class Assessment(NamedTuple):
    """What a site was asked to evaluate."""

    round: int
    metric: Metric
    width: int  # numbers of a model
    dtype: torch.dtype  # of a model's numbers


def judged_answer(answer: Message, client: int, asked: Assessment) -> JudgedAnswer:
    if _round(answer.head, client) != asked.round:
        raise _WrongError("wrong_round")
    scores, predictor = answer.body
    weights, models = predictor
    fits = isinstance(predictor, Mixture) and scores.shape == (len(Evaluation._fields),)
    fits &= weights.dim() == 1 and 1 <= len(weights) <= WIDEST
    fits &= models.shape in ((len(weights), 0), (len(weights), asked.width))
    if not fits or not scores.is_floating_point():
        raise _WrongError("shape")
    if not weights.is_floating_point() or models.dtype != asked.dtype:
        raise _WrongError("dtype")
    if not _finite(weights):
        raise _WrongError("not_finite")
    told = scores.double().tolist()
    wrong = [loss < 0 or LARGEST_SCORE < loss < math.inf for loss in told[SCORES:]]
    if not all(map(asked.metric.possible, told[:SCORES])) or any(wrong):
        raise _WrongError("range")
    digest = answer.head.get("digest")
    return JudgedAnswer(told, predictor, "" if digest is None else _sha256(digest))


def _round(head: Mapping[str, Any], client: int) -> int:
    """The round that an answer is of; it must be a number, and the client's own."""
    round = head["round"]
    if type(round) is not int:
        raise _WrongError("fields")
    if type(head["client"]) is not int or head["client"] != client:
        raise _WrongError("wrong_client")
    return round


def _sha256(text: Any) -> str:
    if not is_digest(text):
        raise _WrongError("fields")
    return str(text)


def _finite(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() or bool(leaf.isfinite().all())


def _arrays(part: Tree) -> list[Tensor]:
    return [part] if isinstance(part, Tensor) else [leaf for each in part for leaf in _arrays(each)]


def gathered_predictions(
    clients: Sequence[int],
    found: Mapping[int, JudgedAnswer],
    lost: tuple[Rejection, ...],
    *,
    keep: bool,
) -> Predicted:
    """The scores of all clients; NaN and no predictor for a client that did not answer."""
    table = np.full((len(clients), len(Evaluation._fields)), np.nan)
    predictors: list[Mixture | None] = []
    for at, client in enumerate(clients):
        one = found.get(client)
        predictors.append(None if one is None else one.predictor)
        if one is not None and bool((one.predictor.weights != 0).any()):
            table[at] = one.scores
    digests = tuple(found[c].digest if c in found else "" for c in clients)
    mixture = _padded(predictors)
    return Predicted(Evaluation(*table.T), mixture, None, digests if keep else None, lost)


def _padded(predictors: Sequence[Mixture | None]) -> Mixture:
    """Predictors of different widths in one mixture; models only if every client sent its own."""
    known = [one for one in predictors if one is not None]
    width = max((len(one.weights) for one in known), default=1)
    sizes = {one.models.shape[1] for one in known}
    size = sizes.pop() if len(sizes) == 1 and len(known) == len(predictors) else 0
    first = known[0] if known else Mixture(torch.zeros(1), torch.zeros(1, 0))
    types = Counter(one.weights.dtype for one in known)  # one site does not decide for all
    dtype = max(types, key=lambda kind: (types[kind], kind.itemsize), default=torch.float32)
    weights = torch.zeros(len(predictors), width, dtype=dtype)
    models = first.models.new_zeros(len(predictors), width, size)
    for at, one in enumerate(predictors):
        if one is not None:
            weights[at, : len(one.weights)] = one.weights
            models[at, : len(one.models)] = one.models[:, :size]
    return Mixture(weights, models)
