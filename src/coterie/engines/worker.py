"""The process of the wire engine, and the files of its clients.

The process reads requests from its input and writes the replies. Only the wire engine starts
``python -m coterie.engines.worker``. The setup is pickled, because it comes from the process that
started the worker; requests are not pickled. Each client has a folder with the file of its shard:
its own samples and no other client's.
"""

import functools
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.problem import Problem
from ..core.shards import SPLITS, Ragged, Scaling, Shards
from ..errors import CoterieError
from .codec import LENGTH
from .site import Site, judged

SHARD = "shard.safetensors"
ANSWERED, FAILED = b"\x00", b"\x01"
SETUP, JUDGE = b"setup", b"judge"  # sent instead of a client's number


# ---- the files of a client ----------------------------------------------------------------------


def place(home: Path, client: int) -> Path:
    """The folder of one client."""
    return home / f"client-{client:06d}"


def write_shard(path: Path, shards: Shards, client: int) -> None:
    """Write one client's shard: its own samples and no other client's."""
    own = shards.of(client)
    arrays = {"x": own.x, "y": own.y, "relabel": own.relabel[client]}
    arrays |= {name: own.splits[name].of(client) for name in SPLITS}
    optional = {"units": own.units, "scale": own.scaling.scale, "shift": own.scaling.shift}
    optional["shares"] = None if own.shares is None else own.shares[client]
    arrays |= {name: value for name, value in optional.items() if value is not None}
    facts = {
        "client": client,
        "literal": own.literal,
        "target_scale": own.scaling.target_scale,
        "target_shift": own.scaling.target_shift,
    }
    metadata = {"facts": json.dumps(facts)}
    save_file({n: v.cpu().clone().contiguous() for n, v in arrays.items()}, path, metadata)


def read_shard(path: Path, problem: Problem) -> Shards:
    """Read one client's shard from its file; the other clients of the problem have no samples."""
    with safe_open(path, framework="pt") as file:
        arrays: dict[str, Tensor] = {
            name: file.get_tensor(name).to(problem.device)
            for name in file.keys()  # noqa: SIM118
        }
        facts = json.loads((file.metadata() or {})["facts"])
    client, device = facts["client"], problem.device
    none = torch.zeros(0, dtype=torch.int64)
    lists = {name: [none] * problem.population for name in SPLITS}
    for name in SPLITS:
        lists[name][client] = arrays[name]
    relabel = torch.zeros(problem.population, len(arrays["relabel"]), dtype=torch.int64)
    relabel[client] = arrays["relabel"].cpu()
    shares = arrays.get("shares")
    return Shards(
        arrays["x"],
        arrays["y"],
        {name: Ragged(rows, device) for name, rows in lists.items()},
        relabel.to(device),
        Scaling(
            arrays.get("scale"), arrays.get("shift"), facts["target_scale"], facts["target_shift"]
        ),
        problem.dtype,
        arrays.get("units"),
        facts["literal"],
        None if shares is None else shares.expand(problem.population, -1),
    )


def simulated(home: Path, client: int, problem: Problem, algorithm: AnyAlgorithm) -> Site:
    """A client's site in a simulation: its folder is temporary, and it hands over its model."""
    folder = place(home, client)
    shards = functools.partial(read_shard, folder / SHARD, problem)
    return Site(folder, client, problem, algorithm, shards, durable=False)


# ---- the process --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup of a worker, sent before the first request of a run."""

    path: list[str]  # sys.path of the process that started the worker
    threads: int
    home: str  # a folder with one folder per client
    pickled: bytes  # (Problem, Algorithm)


def send(stream: IO[bytes], data: bytes) -> None:
    """Write one frame."""
    stream.write(len(data).to_bytes(LENGTH, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Read one frame; raise EOFError at the end of the stream."""
    length = int.from_bytes(_exactly(stream, LENGTH), "little")
    return _exactly(stream, length)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the other process ended")
    return data


def main() -> None:
    """Answer requests until the input ends."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of a method must not end up among the replies
    home = Path()
    told: tuple[Problem, AnyAlgorithm] | None = None
    while True:
        try:
            to, data = receive(requests), receive(requests)
        except EOFError:
            return
        if to == SETUP:
            setup = pickle.loads(data)
            sys.path[:] = setup.path
            torch.set_num_threads(setup.threads)
            home, told = Path(setup.home), pickle.loads(setup.pickled)
        elif to == JUDGE:
            send(replies, _tried(functools.partial(_judged, data)))
        elif told is not None:
            send(replies, _tried(functools.partial(_answer, home, int(to), told, data)))


def _answer(home: Path, client: int, told: tuple[Problem, AnyAlgorithm], data: bytes) -> bytes:
    return simulated(home, client, *told).answer(data)


def _judged(data: bytes) -> bytes:
    asked = json.loads(data)
    pairs = [(Path(ours), Path(local)) for ours, local in asked["pairs"]]
    return json.dumps(judged(asked["metric"], pairs).to_json()).encode()


def _tried(answer: Callable[[], bytes]) -> bytes:
    try:
        return ANSWERED + answer()
    except CoterieError as error:
        return FAILED + str(error).encode()
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return FAILED + f"{error}\n\n{trace}".encode()


if __name__ == "__main__":
    main()
