"""Clients with too little, harmed files, hostile names, long runs: it goes on or never starts."""

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.core import tree
from coterie.data.federation import Federation
from coterie.training.rounds import train
from support import METHODS, engine_of, images, predictors, task

# client: samples for training, validation and test; "" or what is special about them
WEAK = {
    "fine": (20, 6, 6),
    "other": (17, 5, 6),
    "third": (23, 6, 7),
    "empty": (0, 4, 5),
    "single": (1, 4, 5),
    "one class": (12, 4, 5),
    "no validation": (14, 0, 5),
    "no test": (14, 5, 0),
    "constant": (9, 3, 4),
    "nothing": (0, 0, 0),
}
ABLE = [i for i, sizes in enumerate(WEAK.values()) if sizes[0]]


def weak_federation():
    data = images(sum(map(sum, WEAK.values())) + 40)
    start, parts = 0, []
    for name, sizes in WEAK.items():
        cuts = torch.arange(start, start + sum(sizes))
        start += sum(sizes)
        if name == "one class":
            cuts = (data.y == 1).nonzero().flatten()[: sum(sizes)]
        if name == "constant":
            data.x[cuts] = 0.5
        parts.append(cuts.split(list(sizes)))
    splits = (tuple(part[k] for part in parts) for k in range(3))
    return Federation(data, "by hand", tuple(WEAK), *splits)


def each_on(engine):
    """Every method; one client at a time takes long, and is for the slow tests but in four."""
    quick = METHODS if engine == "vmap" else ("fedavg", "scaffold", "fedfomo", "fedamp", "fedem")
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in METHODS}
    return [pytest.param(name, engine, marks=marks[name]) for name in METHODS]


@pytest.mark.parametrize(("name", "engine"), [*each_on("vmap"), *each_on("loop")])
def test_a_run_with_weak_clients_finishes(name, engine):
    algorithm = METHODS[name]()
    on = task(algorithm, federated=weak_federation(), merge=False)
    _, fresh = algorithm.init(on.problem)
    fresh = tree.map_leaves(torch.clone, fresh)
    for record in train(algorithm, on.problem, engine_of(engine, on), 2):
        assert list(record.clients) == ABLE  # who has nothing to train on is not asked
        assert record.rejected == ()
    assert predictors(record).models.isfinite().all()
    judged = np.array([sizes[2] > 0 for sizes in WEAK.values()])
    assert (np.isfinite(record.evaluation.test) == judged).all()
    idle = torch.tensor([i for i in range(len(WEAK)) if i not in ABLE])
    for now, then in zip(tree.leaves(record.states), tree.leaves(fresh), strict=True):
        assert torch.equal(now[idle], then[idle])


def test_without_validation_data_training_data_takes_its_place():
    on = task(METHODS["fedfomo"](), federated=weak_federation(), merge=False)
    assert not on.problem.counts.validated[list(WEAK).index("no validation")]
    assert on.shards.splits["val"].sizes[6] == 14


@pytest.fixture
def table(tmp_path):
    """A table with weak sites, its parts given."""
    luck = random.Random(0)
    lines = ["site,part,a,b,y"]
    for name, sizes in WEAK.items():
        for part, size in zip(("train", "val", "test"), sizes, strict=True):
            for i in range(size):
                y = 1 if name == "one class" else i % 2
                a, b = (1.0, 2.0) if name == "constant" else (y + luck.gauss(0, 1), luck.random())
                lines.append(f"{name},{part},{a:.4f},{b:.4f},{'no' if y else 'yes'}")
    path = tmp_path / "sites.csv"
    path.write_text("\n".join(lines) + "\n")
    return {"name": str(path), "client": "site", "target": "y", "split": "part"}


def test_the_verdict_names_weak_clients(table, tmp_path):
    found = coterie.compare(
        {"data": table, "model": {"name": "linear"}, "engine": {"name": "loop"}},
        methods=["fedfomo"],
        rounds=2,
        out=str(tmp_path / "out"),
    )
    lacking = {
        "empty": "no training samples",
        "single": "one training sample",
        "one class": "one class only",
        "no validation": "no validation data",
        "no test": "no test data",
        "constant": "constant features",
    }
    assert found.runs[0].summary["weak_clients"] == lacking
    for client in list(lacking)[:3]:
        assert f"{client} ({lacking[client]})" in found.verdict
    assert "and 3 others" in found.verdict
    assert "too little data at" in (tmp_path / "out" / "report.html").read_text()


# ---- harmed data at one site -------------------------------------------------------------

HARMED = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9] + b'"'),
    "other delimiter": lambda path: path.write_text(path.read_text().replace(",", ";")),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "empty": lambda path: path.write_bytes(b""),
    "not a file": lambda path: (path.unlink(), path.mkdir()),
    "column missing": lambda path: path.write_text(path.read_text().replace("y\n", "z\n", 1)),
}


@pytest.mark.parametrize("harm", HARMED)
def test_a_harmed_file_of_one_site_is_named_before_anything_is_trained(harm, tmp_path):
    sites = tmp_path / "sites"
    sites.mkdir()
    luck = random.Random(1)
    for name in ("north", "south", "west"):
        rows = [f"{luck.random()},{luck.random()},{i % 2}" for i in range(20)]
        (sites / f"{name}.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    config = {"data": {"name": str(sites), "target": "y"}, "model": {"name": "linear"}}
    out = tmp_path / "out"
    coterie.run(config, method="fedavg", rounds=1, engine="loop")  # as it is, it can be read
    HARMED[harm](sites / "south.csv")
    with pytest.raises(coterie.CoterieError, match="south"):
        coterie.run(config, method="fedavg", rounds=1, engine="loop", out=str(out))
    assert not out.exists()


# ---- nothing is written elsewhere -------------------------------------------------------------


def test_hostile_names_write_nothing_outside_the_folder(tmp_path):
    names = ("../../up", "/abs", "a/b", "..", "nul\\con", "<b>bold</b>")
    lines = ["site,a,b,y"]
    for i, name in enumerate(names * 12):
        lines.append(f"{name},{i % 7},{i % 5},{i % 2}")
    inside = tmp_path / "inside"
    inside.mkdir()
    path = tmp_path / "..strange..csv"
    path.write_text("\n".join(lines) + "\n")
    before = set(tmp_path.rglob("*")) | {inside / "out"}
    coterie.compare(
        {"data": {"name": str(path), "client": "site", "target": "y"}, "model": {"name": "linear"}},
        methods=["fedfomo"],
        rounds=2,
        engine="loop",
        out=str(inside / "out"),
    )
    new = {p for p in set(tmp_path.rglob("*")) - before if "cache" not in p.parts}
    assert new
    assert all(p.is_relative_to(inside / "out") for p in new)
    assert "<b>bold</b>" not in (inside / "out" / "report.html").read_text()


@pytest.mark.parametrize("name", ["../fedavg", "os:../x", "/etc/x:Y"])
def test_a_method_cannot_name_a_path(name, tmp_path):
    with pytest.raises(coterie.ConfigError):
        coterie.compare(methods=[name], rounds=1, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ---- long runs ---------------------------------------------------------------------------


def resident():
    """Memory of this process in MiB, and its open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("clients", "rounds"), [(20, 60), pytest.param(100, 200, marks=pytest.mark.slow)]
)
def test_memory_and_open_files_stay_flat(clients, rounds, tmp_path):
    seen = []

    def watch(step):
        if step.done % (rounds // 10) == 0:
            seen.append(resident())

    coterie.run(
        {
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": clients},
            "model": {"name": "mlp"},
            "engine": {"name": "vmap", "chunk": clients},
            "run": {"rounds": rounds, "evaluate_every": rounds // 10, "checkpoint_every": 2},
        },
        method="fedamp",
        out=str(tmp_path / "out"),
        progress=watch,
    )
    memory, handles = (np.array(column) for column in zip(*seen, strict=True))
    assert handles[-1] <= handles[2]
    assert memory[-1] - memory[3] < 0.05 * memory[3]
