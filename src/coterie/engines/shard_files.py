"""The file of one client's shard: its own samples and no other client's."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.problem import Problem
from ..core.shards import SPLITS, Ragged, Scaling, Shards

SHARD = "shard.safetensors"


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
