"""The attacks, one function a kind: each takes a generator of random choices and its own folder."""

import json
import shutil
import subprocess
import sys
import tempfile
import typing
import zipfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import coterie
from coterie import api
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.fedavg import FedAvg, Update
from coterie.core.algorithm import round_of
from coterie.core.messages import Reply, admit
from coterie.core.optim import Recipe
from coterie.data.datasets import load
from coterie.data.partition import PARTITIONS, federate
from coterie.data.simulation import Simulation, simulate
from coterie.networks.registry import MODELS
from coterie.runs.config import loading
from coterie.runs.config.schema import Config
from coterie.training.guard import Guard, screen
from fuzz.answers import HOSTILE
from fuzz.harness import Attack, Finding, damaged, strange

SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 3},
    "model": {"name": "linear"},
    "engine": {"name": "loop"},
    "run": {"rounds": 2, "methods": ["fedavg"]},
}


def _copy(tables: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) for key, value in tables.items()}


def _fields(table):
    """The fields of a table of a config, which may be optional; of an unknown one, the tables."""
    field = Config.model_fields.get(table)
    kinds = [Config] if field is None else typing.get_args(field.annotation) or [field.annotation]
    return list(next(kind for kind in kinds if hasattr(kind, "model_fields")).model_fields)


def _changed(random: Random, inside: Path) -> dict[str, Any]:
    """A good config with one to three of its fields replaced by something strange."""
    tables = _copy(SMALL)
    tables["run"]["out"] = str(inside / "out")
    for _ in range(random.choice([1, 1, 2, 3])):
        table = random.choice([*Config.model_fields, "nonsense"])
        if random.random() < 0.05:
            tables[table] = strange(random)
            continue
        fields = {
            "algorithm": [*ALGORITHMS, "name"],
            "model": ["name", "hidden", "dropout", "norm"],
            "partition": ["name", "clients", "groups", "alpha", "classes", "foreign_targets"],
        }.get(table, _fields(table))
        given = tables.setdefault(table, {})
        if not isinstance(given, dict):
            continue
        field = random.choice([*fields, "unknown"])
        given[field] = strange(random)
        if table == "partition" and random.random() < 0.5:
            given["name"] = random.choice(list(PARTITIONS))
        if table == "model" and random.random() < 0.5:
            given["name"] = random.choice(list(MODELS))
        if field in ALGORITHMS and random.random() < 0.9:
            names = list(ALGORITHMS[field].__dataclass_fields__) or ["none"]
            given[field] = {random.choice(names): strange(random)}
            if isinstance(tables["run"], dict):
                tables["run"]["methods"] = [field]
    return tables


def configs(random: Random, inside: Path) -> None:
    """A config with strange values; what is accepted is run, if it is small."""
    asked = loading.load(_changed(random, inside))
    small = asked.run.rounds <= 3 and len(asked.seeds) <= 2 and asked.train.epochs <= 3
    if small and asked.data.name == "digits":
        coterie.run(asked)


def tomls(random: Random, inside: Path) -> None:
    """A TOML file with damaged bytes."""
    text = 'methods = ["fedavg"]\n'
    for table, fields in SMALL.items():
        text += f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())
    path = inside / "x.toml"
    path.write_bytes(damaged(random, text.encode()))
    loading.load(path)


def tables(random: Random, inside: Path) -> None:
    """A CSV table with damaged bytes or strange cells."""
    path = inside / "sites.csv"
    rows = [["site", "age", "sex", "dose", "outcome"]]
    for i in range(40):
        rows.append([f"s{i % 3}", str(30 + i), "fm"[i % 2], f"{i / 7:.2f}", ["ill", "well"][i % 2]])
    for _ in range(random.choice([0, 1, 3])):
        cell = random.choice(
            [
                "1e30",
                "1e400",
                "-1e39",
                "nan",
                "",
                "=cmd|' /C calc'!A0",
                "\x1b[2J",
                "a" * 9000,
                "٣",
                "1,5",
                '"',
            ]
        )
        rows[random.randrange(41)][random.randrange(5)] = cell
    content = "\n".join(",".join(row) for row in rows).encode()
    path.write_bytes(damaged(random, content) if random.random() < 0.6 else content)
    tables = {
        **_copy(SMALL),
        "data": {"name": str(path), "client": "site", "target": "outcome"},
        "partition": {"name": "natural"},
    }
    if random.random() < 0.2:
        tables["data"][random.choice(["unit", "time", "split", "task", "drop"])] = strange(random)
    coterie.run(tables, out=str(inside / "out"))


def arrays(random: Random, inside: Path) -> None:
    """An npz file with strange arrays or damaged bytes."""
    n = 40
    x: Any = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    y: Any = np.arange(n) % 3
    client: Any = np.arange(n) % 4
    kind = random.randrange(9)
    if kind == 0:
        client = client - 1
    elif kind == 1:
        client = client[: random.randrange(n)]
    elif kind == 2:
        client = np.array([random.choice(["a", "b"]) for _ in range(n)])
    elif kind == 3:
        client = np.where(client == 0, np.nan, client)
    elif kind == 4:
        y = y.astype(np.int64) * random.choice([1, 10**3, 10**15, -1])
    elif kind == 5:
        x[random.randrange(n)] = random.choice([np.nan, np.inf, 1e38, -np.inf])
    elif kind == 6:
        x = x.astype(random.choice([np.int64, np.float64, np.uint8, np.complex64, np.bool_]))
    elif kind == 7:
        x = x.reshape(random.choice([(n, 4), (n, 2, 2), (n, 1, 2, 2), (n * 4,), (2, n // 2, 4)]))
    path = inside / "a.npz"
    np.savez(path, x=x, y=y, client=client)
    if random.random() < 0.4:
        path.write_bytes(damaged(random, path.read_bytes()))
    elif random.random() < 0.1:
        _lie(path, random)
    tables = {**_copy(SMALL), "data": {"name": str(path)}, "partition": {"name": "auto"}}
    coterie.run(tables, out=str(inside / "out"))


def _lie(path: Path, random: Random) -> None:
    """An array whose header says more than its bytes hold, or far more than memory does."""
    shape = random.choice([(10**12, 4), (2**62,), (-5, 4), (40, 10**9)])
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    body = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 64
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", body)
        archive.writestr("y.npy", body)


@cache
def _finished(kind: str) -> Path:
    """A finished run or comparison to tamper with."""
    place = Path(tempfile.mkdtemp(prefix="coterie-fuzz-")) / kind
    if kind == "comparison":
        api.compare(_copy(SMALL), out=str(place))
    else:
        api.run({**_copy(SMALL), "algorithm": {"name": "fedamp"}}, out=str(place))
    return place


def folders(random: Random, inside: Path) -> None:
    """A folder of results in which something was edited, cut, removed or linked."""
    place = inside / "results"
    shutil.rmtree(place, ignore_errors=True)
    kind = random.choice(["run", "comparison"])
    shutil.copytree(_finished(kind), place)
    if random.random() < 0.5:  # as if it had been killed
        for name in ("MANIFEST.json", "summary.json"):
            for path in place.rglob(name):
                path.unlink()
    changed = _tamper(random, place, inside.parent / "canary")
    how = random.choice(["verify", "resume", "read"])
    if how == "verify":
        report = api.verify(place)
        if changed and not any(report.values()):
            raise Finding(f"{changed}: verify says that all is as it was written")
    elif how == "resume":
        api.resume(place)
    elif kind == "comparison":
        repr(coterie.read(place))
    else:
        repr(coterie.read(place))


def _tamper(random: Random, place: Path, canary: Path) -> str:
    """Change one file of a folder; what was done."""
    files = sorted(path for path in place.rglob("*") if path.is_file())
    path = random.choice(files)
    how = random.randrange(5)
    if how == 0:
        path.unlink()
        return f"removed {path.relative_to(place)}"
    if how == 1:
        path.unlink()
        path.symlink_to(canary / "precious")
        return f"linked {path.relative_to(place)}"
    if how == 2:
        (place / "checkpoint").symlink_to(canary)
        return ""
    before = path.read_bytes()
    if path.suffix == ".json" and how == 3:
        path.write_text(json.dumps(_edited(random, json.loads(before))))
    else:
        path.write_bytes(damaged(random, before))
    return f"edited {path.relative_to(place)}" if path.read_bytes() != before else ""


def _edited(random: Random, value: Any) -> Any:
    """A JSON document with one part replaced."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        return {**value, key: _edited(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        return [*value[:at], _edited(random, value[at]), *value[at + 1 :]]
    found = strange(random)
    try:
        json.dumps(found)
    except (ValueError, RecursionError):
        return None
    return found


@cache
def _task() -> Simulation:
    made = federate(load("digits"), PARTITIONS["iid"](clients=5))
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return simulate(made, lambda: network, Recipe())


def uploads(random: Random, inside: Path) -> None:
    """Messages of clients with strange arrays, counts, rounds and senders."""
    on = _task()
    round = round_of(on.problem, 3, 9, torch.arange(5))
    good = Update(on.problem.start.clone(), on.problem.sizes[0])
    values = [0.0, 1e30, -1e30, 3e38, float("nan"), float("inf"), 1e-45]
    replies = []
    for client in range(5):
        upload: Any = good._replace(size=on.problem.sizes[client])
        if random.random() < 0.5:
            w = upload.w.clone()
            w[random.randrange(len(w))] = random.choice(values)
            w = random.choice([w, w[:-1], w[None], w.half(), w.double(), w.long(), w * 0])
            size = random.choice([upload.size, torch.tensor(random.choice([0, -9, 10**12, 5]))])
            upload = random.choice([Update(w, size), (w, size), w, (), None, [w]])
        sender, when = random.choice([(client, 3)] * 8 + [(99, 3), (client, 2), (-1, 3)])
        replies.append(Reply(sender, when, upload))
    kept, _ = admit(replies, round, like=(good, ()))
    if not kept:
        return
    rows = Update(
        torch.stack([r.upload.w for r in kept]), torch.stack([r.upload.size for r in kept])
    )
    part = round._replace(clients=torch.tensor([r.client for r in kept]))
    had = (on.problem.start.expand(len(kept), -1), ())
    at, _ = screen(rows, part, on.problem.sizes, Guard(), had)
    if len(at):
        new = FedAvg().aggregate(
            on.problem.start,
            Update(rows.w[at], rows.size[at]),
            part._replace(clients=part.clients[at]),
        )
        if not new.isfinite().all() or new.norm() > 200 * on.problem.start.norm():
            raise Finding("poison has entered the aggregate")


def commands(random: Random, inside: Path) -> None:
    """A command line with strange options, in a process of its own."""
    command = random.choice(["run", "compare", "doctor", "resume", "verify", "list", "show"])
    words = [command]
    options = ["--data", "--partition", "--clients", "--model", "--method", "--rounds", "--seed"]
    options += [
        "--seeds",
        "--epochs",
        "--batch",
        "--lr",
        "--engine",
        "--device",
        "--out",
        "--adapt",
    ]
    for _ in range(random.choice([0, 1, 2])):
        value = strange(random)
        text = (
            str(value).replace("\0", "")
            if random.random() < 0.8
            else random.choice(["", "--", "-1"])
        )
        words += random.choice([[random.choice(options), text], [f"--set=train.lr={text}"], [text]])
    if command in ("run", "compare"):
        words += ["--rounds", "1", "--clients", "2", "--model", "linear", "--engine", "loop"]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *words],
        cwd=inside,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "Traceback" in done.stderr or done.returncode not in (0, 1, 2):
        raise Finding(f"{words} ended with {done.returncode}: {done.stderr[-2000:]}")
    if "\x1b[31m" in done.stdout + done.stderr:
        raise Finding(f"{words}: an escape code came through: {done.stderr[-500:]!r}")


ATTACKS: dict[str, Attack] = {
    f.__name__: f for f in (configs, tomls, tables, arrays, folders, uploads, commands)
} | HOSTILE
