"""Each client in another process, with its own shard file and state file.

Nothing is shared but messages: a client receives its row as bytes, keeps its state in a file and
answers with bytes. The engine proves that no method leans on shared memory or on another client's
data, and does over pipes what an engine on a network does over connections.
"""

import contextlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

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
from . import worker
from .base import Enrolment, Evaluation, Predicted, Replies
from .codec import Message, Types, decode, digest, encode, vocabulary
from .loop import together
from .simulator import joined
from .site import SHARD, STATE, Site, write_shard
from .worker import FAILED, SETUP, Setup, place, receive, send


class Host(Protocol):
    """Answers for clients, in another process or in this one."""

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Begin a run whose clients' folders lie in ``home``."""

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client; None where there is none."""

    def close(self) -> None:
        """End what answers."""


class Inline:
    """Answers in this process, still through bytes and files."""

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Begin a run."""
        self._home, self._told = home, (problem, algorithm)

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client."""
        return Site(place(self._home, client), client, *self._told).answer(data)

    def close(self) -> None:
        """Nothing is left to end."""


class Worker:
    """A process that answers for clients; one that ended is started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._setup: bytes | None = None

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Tell the process of a run before its first request."""
        pickled = _pickled(problem, algorithm)
        self._setup = pickle.dumps(Setup(sys.path, threads, str(home), pickled))
        if self._process is not None:
            self._tell(_open(self._process.stdin))

    def _tell(self, requests: IO[bytes]) -> None:
        if self._setup is None:
            raise EngineError("a worker was asked before it was set up")
        send(requests, SETUP)
        send(requests, self._setup)

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client; None where its process ended before it answered."""
        try:
            requests, replies = self._pipes()
            send(requests, str(client).encode())
            send(requests, data)
            reply = receive(replies)
        except (OSError, EOFError):
            self.close()
            return None
        if reply[:1] == FAILED:
            raise EngineError(f"client {client} failed in its process: {reply[1:].decode()}")
        return reply[1:]

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Where a running process reads requests and writes replies."""
        if self._process is None:
            command = [sys.executable, "-P", "-m", worker.__name__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            self._tell(_open(self._process.stdin))
        return _open(self._process.stdin), _open(self._process.stdout)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what was not flushed has nowhere to go
                    _open(stream).close()
            self._process.wait()
            self._process = None


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise EngineError("a worker process has no pipe")
    return stream


class WireEngine:
    """Every client behind a process boundary.

    The clients' files lie where temporary files go, and are removed by :meth:`close`. A ``worker``
    that is given serves several engines in turn, and its owner ends it.
    """

    def __init__(
        self, shards: Shards, *, threads: int | None = None, worker: Host | None = None
    ) -> None:
        self._shards, self._lent = shards, worker is not None
        self._worker: Host = worker or Worker()
        self._threads = threads or torch.get_num_threads()
        self._home = Path(tempfile.mkdtemp(prefix="coterie-sites-"))
        self._held: list[str] = []  # the sha256 of every client's state
        self._offered: dict[int, tuple[str, Tree]] = {}  # client: its new state's, what it shows
        self._shown: list[Tree] = []
        self._types: Types = {}
        self._problem: Problem | None = None

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved."""
        return {"engine": "wire", "state": "disk", "threads": self._threads}

    @property
    def forms(self) -> tuple[Form, ...]:
        """None: every call is done as it is written."""
        return ()

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Write everybody's shard and state, and tell the worker what it runs."""
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
        """Send each client of the round its row; whoever does not answer is lost for the round."""
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
        """Tell the accepted clients to take their new states."""
        for client in accepted.tolist():
            state, shown = self._offered[client]
            answer = self._ask(client, {"kind": "commit", "state": state})
            if isinstance(answer, Rejection):  # the process ended: it is asked once more
                answer = self._ask(client, {"kind": "commit", "state": state})
            if isinstance(answer, Rejection):
                raise EngineError(f"client {client} lost its state: {answer.reason}")
            self._held[client], self._shown[client] = state, shown
        self._offered = {}

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        """What every client's state shows, as its last accepted reply said."""
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
        """Ask every client of the round how good its predictor is."""
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
        """A client's answer, or why there is none."""
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


def _pickled(problem: Problem, algorithm: AnyAlgorithm) -> bytes:
    try:
        return pickle.dumps((problem, algorithm))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineError(
            f"engine.name: 'wire' runs clients in another process, which cannot be told of this "
            f"method or network ({error}); define their classes in a module that can be imported, "
            "or use engine.name = 'loop'"
        ) from error


def _stacked(replies: Sequence[Reply]) -> tuple[Tree, Tree]:
    return tree.stack([reply.upload for reply in replies]), ()


def _predicted(body: Tree) -> Predicted:
    """One client's scores, predictor and answers as rows of one client."""
    scores, mixture, said = body
    columns = [np.array([value]) for value in scores.tolist()]
    rows = Mixture(mixture.weights[None], mixture.models[None])
    outcomes = Outcomes(*(part.numpy() for part in said)) if said else None
    return Predicted(Evaluation(*columns), rows, outcomes)
