"""Runs each client in another process, with its own shard file and state files.

Only messages are exchanged: a client receives its row as bytes, keeps its states in files and
answers with bytes. The engine proves that no method depends on shared memory or on another client's
data. It is the engine of a real federation (:mod:`coterie.engines.remote`) over pipes; because the
clients' files are its own, it can also read and write their states.
"""

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from ..core import tree
from ..core.algorithm import AnyAlgorithm
from ..core.calls import Form
from ..core.paired_tests import SiteGain
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import EngineError
from . import worker
from .base import Enrolment
from .codec import Message, Types, decode, encode, vocabulary
from .remote import RemoteEngine, SiteState, held_states
from .site import STATES, StateFiles
from .worker import FAILED, JUDGE, SETUP, SHARD, Setup, place, receive, send, simulated, write_shard

# ---- who answers for the clients ----------------------------------------------------------------

Homes = tuple[Path, Path]  # of the clients of two runs: a method's, and Local's of the same seed


class Host(Protocol):
    """Answers for clients, in another process or in this one."""

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Begin a run; the clients' folders are in ``home``."""

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client; None if it gave none."""

    def close(self) -> None:
        """Stop answering."""


class Inline:
    """Answers in this process; messages are still bytes, and states are still files."""

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Begin a run."""
        self._home, self._told = home, (problem, algorithm)

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client."""
        return simulated(self._home, client, *self._told).answer(data)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class Worker:
    """A process that answers for clients; it is started again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._setup: bytes | None = None

    def set_up(self, home: Path, problem: Problem, algorithm: AnyAlgorithm, threads: int) -> None:
        """Send the process the setup of a run, before the run's first request."""
        pickled = _pickled(problem, algorithm)
        self._setup = pickle.dumps(Setup(sys.path, threads, str(home), pickled))
        if self._process is not None:
            self._tell(_open(self._process.stdin))

    def judge(self, metric: str, pairs: Sequence[Homes]) -> SiteGain:
        """A client's gain over Local, from the answers in its folders of each seed's two runs."""
        asked = {"metric": metric, "pairs": [list(map(str, pair)) for pair in pairs]}
        requests, replies = self._pipes()
        send(requests, JUDGE)
        send(requests, json.dumps(asked).encode())
        return SiteGain.from_json(json.loads(_answered(receive(replies), "a client")))

    def _tell(self, requests: IO[bytes]) -> None:
        if self._setup is not None:
            send(requests, SETUP)
            send(requests, self._setup)

    def ask(self, client: int, data: bytes) -> bytes | None:
        """The reply of a client; None if the process ended before it answered."""
        if self._setup is None:
            raise EngineError("a worker was asked before it was set up")
        try:
            requests, replies = self._pipes()
            send(requests, str(client).encode())
            send(requests, data)
            reply = receive(replies)
        except (OSError, EOFError):
            self.close()
            return None
        return _answered(reply, f"client {client}")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """The pipes for requests and replies of the process, which is started if necessary."""
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
                with contextlib.suppress(OSError):  # unflushed data cannot be sent any more
                    _open(stream).close()
            self._process.wait()
            self._process = None


def _answered(reply: bytes, who: str) -> bytes:
    if reply[:1] == FAILED:
        raise EngineError(f"{who} failed in its process: {reply[1:].decode()}")
    return reply[1:]


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise EngineError("a worker process has no pipe")
    return stream


def _pickled(problem: Problem, algorithm: AnyAlgorithm) -> bytes:
    try:
        return pickle.dumps((problem, algorithm))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineError(
            f"engine.name: 'wire' runs clients in another process, which cannot be told of this "
            f"method or network ({error}); define their classes in a module that can be imported, "
            "or use engine.name = 'loop'"
        ) from error


def gains_of(
    metric: str, homes: Mapping[str, Sequence[Homes]], clients: int
) -> dict[str, list[SiteGain]]:
    """Each client's gain over Local by method, computed next to its answers in another process.

    ``homes`` has one entry per seed. A run's home is where its clients' final answers are.
    """
    judge = Worker()
    try:
        return {
            method: [
                judge.judge(metric, [(place(ours, k), place(local, k)) for ours, local in pairs])
                for k in range(clients)
            ]
            for method, pairs in homes.items()
        }
    finally:
        judge.close()


# ---- the engine ---------------------------------------------------------------------------------


class WireEngine:
    """Runs every client behind a process boundary.

    The clients' files are in the folder ``home``; :meth:`close` leaves nothing of them but a
    client's final model and its answers. Without ``home`` it is a temporary folder, which is
    removed. A ``worker`` that is passed in may serve several engines in turn; the caller has to
    close it.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        threads: int | None = None,
        worker: Host | None = None,
        home: Path | None = None,
    ) -> None:
        self._shards, self._lent = shards, worker is not None
        self._worker: Host = worker or Worker()
        self._threads = threads or torch.get_num_threads()
        self._kept = home is not None
        self._home = home or Path(tempfile.mkdtemp(prefix="coterie-sites-"))
        label = {"engine": "wire", "state": "disk", "threads": self._threads}
        self._pipes = _Pipes(self._worker)
        self._remote = RemoteEngine(self._pipes, label=label, experiment="", collect=True)
        # between the first states and the last, this is the engine of a federation
        self.exchange, self.commit = self._remote.exchange, self._remote.commit
        self.shown, self.evaluate = self._remote.shown, self._remote.evaluate
        self._types: Types = {}

    @property
    def choice(self) -> dict[str, Any]:
        """The resolved settings."""
        return self._remote.choice

    @property
    def forms(self) -> tuple[Form, ...]:
        """Empty: every call is executed as it is written."""
        return ()

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Write every client's shard and state, and send the worker its setup."""
        self._types = vocabulary(algorithm)
        for client in range(problem.population):
            folder = place(self._home, client)
            folder.mkdir(parents=True, exist_ok=True)
            write_shard(folder / SHARD, self._shards, client)
        self._worker.set_up(self._home, problem, algorithm, self._threads)
        self._pipes.clients = {name: client for client, name in enumerate(problem.clients)}
        first = algorithm.init(problem)[1] if states is None else states
        each = (tree.take(first, torch.tensor([k])) for k in range(problem.population))
        rows = [tree.row(one, 0) for one in each]
        hashes = [self._files(k).write(encode(Message({}, row)), 0) for k, row in enumerate(rows)]
        shown = tree.stack([algorithm.shown(row) for row in rows])
        return self._remote.begin(problem, algorithm, held_states(hashes, shown))

    def snapshot(self) -> Tree:
        """The clients' states, read from their files."""
        rows = []
        for client, sha in enumerate(self._remote.hashes):
            data = self._files(client).read(sha)
            if data is None:
                raise EngineError(f"client {client} lost its state: {STATES} holds no {sha}")
            rows.append(decode(data, self._types).body)
        return tree.stack(rows)

    def close(self) -> None:
        """End the process and remove the clients' files."""
        if not self._lent:
            self._worker.close()
        if not self._kept:
            shutil.rmtree(self._home, ignore_errors=True)
            return
        for folder in self._home.glob("client-*"):
            (folder / SHARD).unlink(missing_ok=True)
            shutil.rmtree(folder / STATES, ignore_errors=True)

    def _files(self, client: int) -> StateFiles:
        return StateFiles(place(self._home, client) / STATES, durable=False)


class _Pipes:
    """The transport to a worker process, which answers for one client after the other."""

    def __init__(self, worker: Host) -> None:
        self._worker = worker
        self.clients: Mapping[str, int] = {}

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        """Each client's answer; a client whose process ended is lost."""
        return {
            name: self._worker.ask(self.clients[name], data) or "lost"
            for name, data in requests.items()
        }

    def sites(self) -> dict[str, SiteState]:
        """The clients, all of them online: the worker is started again when it has ended."""
        return {name: SiteState(True, 0.0) for name in self.clients}

    def close(self) -> None:
        """Do nothing: the engine closes the worker."""
