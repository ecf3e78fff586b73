"""Runs each client in another process, with its own shard file and state file.

Only messages are exchanged: a client receives its row as bytes, keeps its state in a file and
answers with bytes. The engine proves that no method depends on shared memory or on another client's
data, and does over pipes what an engine on a network does over connections.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import Rejection, Reply
from ..core.paired import Outcomes
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from .base import Enrolment, Evaluation, Predicted, Replies
from .codec import Message, Types, decode, digest, encode, vocabulary
from .hosts import Host, Worker
from .loop import together
from .simulator import joined
from .site import SHARD, STATE, write_shard
from .worker import place


class WireEngine:
    """Runs every client behind a process boundary.

    The clients' files are in a temporary folder, which :meth:`close` removes. A ``worker`` that is
    passed in may serve several engines in turn; the caller has to close it.
    """

    def __init__(
        self, shards: Shards, *, threads: int | None = None, worker: Host | None = None
    ) -> None:
        self._shards, self._lent = shards, worker is not None
        self._worker: Host = worker or Worker()
        self._threads = threads or torch.get_num_threads()
        self._home = Path(tempfile.mkdtemp(prefix="coterie-sites-"))
        self._held: list[str] = []  # the sha256 of every client's state
        self._offered: dict[int, tuple[str, Tree]] = {}  # new state's sha256 and shown, by client
        self._shown: list[Tree] = []
        self._types: Types = {}
        self._problem: Problem | None = None

    @property
    def choice(self) -> dict[str, Any]:
        """The resolved settings."""
        return {"engine": "wire", "state": "disk", "threads": self._threads}

    @property
    def forms(self) -> tuple[Form, ...]:
        """Empty: every call is executed as it is written."""
        return ()

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Write every client's shard and state, and send the worker its setup."""
        self._problem, self._types = problem, vocabulary(algorithm)
        for client in range(problem.population):
            folder = place(self._home, client)
            folder.mkdir(exist_ok=True)
            write_shard(folder / SHARD, self._shards, client)
        rows = algorithm.init(problem)[1] if states is None else states
        self.restore(rows)
        self._shown = [algorithm.shown(self._state(k)) for k in range(problem.population)]
        self._worker.set_up(self._home, problem, algorithm, self._threads)
        return Enrolment(problem.clients, problem.counts)

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """Send each client of the round its row; a client without an answer misses the round."""
        replies, lost = [], []
        self._offered = {}
        for position, client in enumerate(round.clients.tolist()):
            head = {"kind": "local", "base": self._held[client]}
            answer = self._ask(client, head, tree.row(received, position), round)
            if isinstance(answer, Rejection):
                lost.append(answer)
                continue
            upload, shown = answer.body
            self._offered[client] = str(answer.head["state"]), shown
            replies.append(Reply(client, int(answer.head["round"]), upload))
        found = together(replies, round, _stacked)
        return Replies(found.uploads, found.clients, (*lost, *found.rejected))

    def commit(self, accepted: Tensor) -> None:
        """Tell the accepted clients to commit their new states."""
        for client in accepted.tolist():
            state, shown = self._offered[client]
            answer = self._ask(client, {"kind": "commit", "state": state})
            if isinstance(answer, Rejection):  # the process ended: ask once more
                answer = self._ask(client, {"kind": "commit", "state": state})
            if isinstance(answer, Rejection):
                raise EngineError(f"client {client} lost its state: {answer.reason}")
            self._held[client], self._shown[client] = state, shown
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
        """Ask every client of the round to evaluate its predictor."""
        parts = []
        for position, client in enumerate(round.clients.tolist()):
            head = {"kind": "predict", "metric": metric, "keep": keep}
            answer = self._ask(client, head, tree.row(served, position), round)
            if isinstance(answer, Rejection):
                answer = self._ask(client, head, tree.row(served, position), round)
            if isinstance(answer, Rejection):
                raise EngineError(f"client {client} could not be judged: {answer.reason}")
            parts.append(_predicted(answer.body))
        return joined(parts, tree.concat([part.mixture for part in parts]))

    def snapshot(self) -> Tree:
        """The clients' states, read from their files."""
        return tree.stack([self._state(client) for client in range(len(self._held))])

    def restore(self, states: Tree) -> None:
        """Write the clients' state files."""
        problem = self._problem
        if problem is None:
            raise EngineError("the engine has no clients yet; call begin() first")
        self._held = []
        for client in range(problem.population):
            data = encode(Message({}, tree.row(tree.take(states, torch.tensor([client])), 0)))
            (place(self._home, client) / STATE).write_bytes(data)
            self._held.append(digest(data))

    def close(self) -> None:
        """End the process and remove the clients' files."""
        if not self._lent:
            self._worker.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _state(self, client: int) -> Tree:
        return decode((place(self._home, client) / STATE).read_bytes(), self._types).body

    def _ask(
        self, client: int, head: dict[str, Any], row: Tree = (), round: Round | None = None
    ) -> Message | Rejection:
        """Send a client a message; return its answer, or a rejection with the reason."""
        if round is not None:
            head = {**head, "round": round.index, "horizon": round.horizon}
        data = self._worker.ask(client, encode(Message({**head, "client": client}, row)))
        if data is None:
            return Rejection(client, "lost")
        try:
            answer = decode(data, self._types)
        except EngineError:
            return Rejection(client, "unreadable")
        if "refused" in answer.head:
            return Rejection(client, str(answer.head["refused"]))
        return answer


def _stacked(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    return tree.stack([reply.upload for reply in replies]), ()


def _predicted(body: Tree) -> Predicted:
    """One client's scores, predictor and answers, with a leading dimension of one row."""
    scores, mixture, said = body
    columns = [np.array([value]) for value in scores.tolist()]
    rows = Mixture(mixture.weights[None], mixture.models[None])
    outcomes = Outcomes(*(part.numpy() for part in said)) if said else None
    return Predicted(Evaluation(*columns), rows, outcomes)
