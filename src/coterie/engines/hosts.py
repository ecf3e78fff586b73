"""Hosts that answer for the clients of the wire engine: another process, or this one."""

import contextlib
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from ..core.algorithm import AnyAlgorithm
from ..core.problem import Problem
from ..core.site_gain import SiteGain
from ..errors import EngineError
from . import worker
from .worker import FAILED, JUDGE, SETUP, Setup, receive, send, simulated


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

    def judge(self, metric: str, pairs: Sequence[tuple[Path, Path]]) -> SiteGain:
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
