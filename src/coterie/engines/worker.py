"""A process that runs sites: it reads requests from its input and writes the replies.

``python -m coterie.engines.worker`` is started by the wire engine and by nobody else. What it is
told first is pickled, because it comes from the process that started it; requests are not.
"""

import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from ..core.algorithm import AnyAlgorithm
from ..core.problem import Problem
from .codec import LENGTH
from .site import Site

ANSWERED, FAILED = b"\x00", b"\x01"


@dataclass(frozen=True, eq=False)
class Setup:
    """What a worker is told before its first request."""

    path: list[str]  # where Python finds modules
    threads: int
    home: str  # a folder with one folder per client
    pickled: bytes  # (Problem, Algorithm)


def send(stream: IO[bytes], data: bytes) -> None:
    """Write one frame."""
    stream.write(len(data).to_bytes(LENGTH, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Read one frame; an end of the stream is an EOFError."""
    length = int.from_bytes(_exactly(stream, LENGTH), "little")
    return _exactly(stream, length)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the other process ended")
    return data


def place(home: Path, client: int) -> Path:
    """The folder of one client."""
    return home / f"client-{client:06d}"


def main() -> None:
    """Answer requests until the input ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a method prints must not end up among the replies
    setup = pickle.loads(receive(requests))
    sys.path[:] = setup.path
    torch.set_num_threads(setup.threads)
    problem, algorithm = pickle.loads(setup.pickled)
    while True:
        try:
            client = int.from_bytes(receive(requests), "little")
            data = receive(requests)
        except EOFError:
            return
        send(replies, _answer(Path(setup.home), client, problem, algorithm, data))


def _answer(
    home: Path, client: int, problem: Problem, algorithm: AnyAlgorithm, data: bytes
) -> bytes:
    try:
        return ANSWERED + Site(place(home, client), client, problem, algorithm).answer(data)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return FAILED + f"{error}\n\n{trace}".encode()


if __name__ == "__main__":
    main()
