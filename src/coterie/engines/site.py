"""A site: runs next to one client's data, answers the server's messages, keeps the client's state.

A site holds one shard and one state, in files of its own. It replaces the state only when the
server says which reply it accepted, so a repeated request gets the same answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, round_of
from ..core.problem import Problem
from ..core.shards import SPLITS, Ragged, Scaling, Shards
from ..core.tree import Tree
from ..errors import EngineError
from ..storage import files
from .codec import Message, decode, digest, encode, vocabulary
from .loop import LoopBackend

SHARD, STATE, PENDING = "shard.safetensors", "state.bin", "pending.bin"


@dataclass(frozen=True, eq=False)
class Site:
    """One client of a run: its folder holds its shard and its state."""

    folder: Path
    client: int
    problem: Problem
    algorithm: AnyAlgorithm

    def answer(self, data: bytes) -> bytes:
        """The reply to a message of the server."""
        message = decode(data, vocabulary(self.algorithm))
        if message.head["client"] != self.client:
            return self._refused("wrong_client")
        kind = message.head["kind"]
        if kind == "local":
            return self._local(message)
        if kind == "predict":
            return self._predict(message)
        if kind == "commit":
            return self._commit(str(message.head["state"]))
        raise EngineError(f"a site knows no message '{kind}'; expected local, predict or commit")

    def _local(self, message: Message) -> bytes:
        """Compute one round; the new state stays in a separate file until it is committed."""
        state = (self.folder / STATE).read_bytes()
        if digest(state) != message.head["base"]:
            return self._refused("stale_state")
        backend, round = self._at(message.head)
        received, kept = _one_row(message.body), _one_row(self._decoded(state))
        upload, new = backend.local(self.algorithm, received, kept, round)
        row = tree.row(new, 0)
        made = encode(Message({}, row))
        (self.folder / PENDING).write_bytes(made)
        head = {"round": round.index, "client": self.client, "state": digest(made)}
        return encode(Message(head, (tree.row(upload, 0), self.algorithm.shown(row))))

    def _predict(self, message: Message) -> bytes:
        backend, round = self._at(message.head)
        state = _one_row(self._decoded((self.folder / STATE).read_bytes()))
        found = backend.predict(
            self.algorithm,
            _one_row(message.body),
            state,
            round,
            str(message.head["metric"]),
            keep=bool(message.head["keep"]),
        )
        columns = [float(column[0]) for column in found.evaluation]
        scores = torch.tensor(columns, dtype=torch.float64)
        said: Tree = ()
        if found.outcomes is not None:
            said = tuple(torch.from_numpy(part) for part in found.outcomes)
        head = {"round": round.index, "client": self.client}
        return encode(Message(head, (scores, tree.row(found.mixture, 0), said)))

    def _commit(self, state: str) -> bytes:
        """Replace the state by the pending one; a repeated commit changes nothing."""
        pending = self.folder / PENDING
        if pending.is_file() and digest(pending.read_bytes()) == state:
            files.install(pending, self.folder / STATE)
        if digest((self.folder / STATE).read_bytes()) != state:
            return self._refused("stale_state")
        return encode(Message({"client": self.client, "state": state}))

    def _refused(self, reason: str) -> bytes:
        return encode(Message({"client": self.client, "refused": reason}))

    def _at(self, head: Mapping[str, Any]) -> tuple[LoopBackend, Any]:
        backend = LoopBackend(self.problem, read_shard(self.folder / SHARD, self.problem))
        clients = torch.tensor([self.client], device=self.problem.device)
        return backend, round_of(self.problem, int(head["round"]), int(head["horizon"]), clients)

    def _decoded(self, state: bytes) -> Tree:
        return decode(state, vocabulary(self.algorithm)).body


def _one_row(part: Tree) -> Tree:
    """A tree of one client with a leading dimension of one row."""
    return tree.map_leaves(lambda leaf: leaf.unsqueeze(0), part)


def write_shard(path: Path, shards: Shards, client: int) -> None:
    """Write one client's shard: its own samples and no other client's."""
    own = shards.of(client)
    arrays = {"x": own.x, "y": own.y, "relabel": own.relabel[client]}
    arrays |= {name: own.splits[name].of(client) for name in SPLITS}
    optional = {"units": own.units, "scale": own.scaling.scale, "shift": own.scaling.shift}
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
    )
