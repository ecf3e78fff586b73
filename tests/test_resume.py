"""A run that was killed anywhere, stopped, or robbed of a file ends as if nothing had happened."""

import contextlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import coterie
from coterie.core import tree
from coterie.engines import auto
from coterie.errors import CoterieWarning, StoreError
from coterie.runs import checkpoint, run_folder
from coterie.runs.assemble import assemble
from coterie.runs.checkpoint import SHARE, Keeper
from coterie.runs.config.loading import config_hash
from coterie.runs.environment import environment
from coterie.storage import faults, files
from killing import command, finished, started, until
from support import METHODS, last, task
from synthetic import record

FOUR = ("fedavg", "scaffold", "fedfomo", "fedamp")  # of different state
ROUNDS = 3
TINY = {
    "data": {"name": "digits"},
    "partition": {"name": "concept_shift", "clients": 5, "groups": 2},
    "model": {"name": "linear"},
    "train": {"batch": 50},
    "engine": {"name": "vmap", "chunk": 3},
    "run": {"rounds": ROUNDS, "participation": 0.7, "checkpoint_every": 1},
}
IN_A_RUN = [point for point in faults.POINTS if not point.startswith("compare")]
WHOLE: dict[str, Path] = {}  # method: the folder of its uninterrupted run


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def whole(shelf, method):
    """The folder of an uninterrupted run."""
    if method not in WHOLE:
        coterie.run(TINY, method=method, out=str(shelf / method))
        WHOLE[method] = shelf / method
    return WHOLE[method]


def result(folder):
    """All that has to be the same: everything but times and the environment."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("seconds")
    matrices = folder / "collaboration.npz"
    parts = (
        (folder / "clients.csv").read_text(),
        run_folder.read(folder).matrices if matrices.exists() else (),
    )
    said = [part.tolist() for part in run_folder.read(folder).outcomes[:4]]
    return lines, summary, parts[0], [matrix.tolist() for matrix in parts[1]], said


def assert_same(folder, expected):
    assert result(folder) == result(expected)
    assert coterie.verify(folder) == {str(folder): []}
    assert not (folder / "checkpoint").exists()
    assert not (folder / "collaboration.parts").exists()
    assert not list(folder.glob(".*"))


# ---- kills ---------------------------------------------------------------------------


def killed_and_resumed(method, point, config, tmp_path, shelf):
    out = tmp_path / "run"
    arguments = ["run", config, "--method", method, "--out", out]
    assert command(arguments, tmp_path / "said", fault=point) == -signal.SIGKILL
    coterie.resume(out)
    assert_same(out, whole(shelf, method))


@pytest.mark.parametrize(("point", "method"), [*zip(IN_A_RUN, itertools.cycle(FOUR), strict=False)])
def test_killed_at_every_point(method, point, config, tmp_path, shelf):
    second = point.startswith(("round", "log", "checkpoint"))
    killed_and_resumed(method, f"{point}:2" if second else point, config, tmp_path, shelf)


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_A_RUN)
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_every_point_with_every_method(method, point, config, tmp_path, shelf):
    test_killed_at_every_point(method, point, config, tmp_path, shelf)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_instants(seed, config, tmp_path, shelf):
    luck = random.Random(seed)
    method, out = luck.choice(FOUR), tmp_path / "run"
    process = started(["run", config, "--method", method, "--out", out], tmp_path / "said")
    until(out / "config.json")
    for _ in range(20):
        time.sleep(luck.uniform(0, 0.15))
        process.kill()
        if finished(process) != -signal.SIGKILL:
            break
        process = started(["resume", out], tmp_path / "said")
    finished(process)
    coterie.resume(out)
    assert_same(out, whole(shelf, method))


def test_killed_in_its_first_round_and_again_after_it_was_resumed(config, tmp_path, shelf):
    out = tmp_path / "run"
    arguments = ["run", config, "--method", "fedfomo", "--out", out]
    assert command(arguments, tmp_path / "said", fault="log.line") == -signal.SIGKILL
    for point in ("run.created", "round.done:2", "checkpoint.renamed", "finish.summary"):
        assert command(["resume", out], tmp_path / "said", fault=point) == -signal.SIGKILL
    assert command(["resume", out], tmp_path / "said") == 0
    assert_same(out, whole(shelf, "fedfomo"))


def test_an_adaptation_is_resumed(tmp_path, config, shelf):
    killed_and_resumed("fedavg_ft", "round.local:2", config, tmp_path, shelf)


@pytest.mark.compiled
def test_played_rounds_are_resumed_and_played(tmp_path):
    method = "fedfomo"
    played = {**TINY, "engine": {**TINY["engine"], "trace": True, "threads": 2}}
    config, out = tmp_path / "config.json", tmp_path / "run"
    config.write_text(json.dumps(played))
    coterie.run(played, method=method, out=str(tmp_path / "whole"))
    arguments = ["run", config, "--method", method, "--out", out]
    assert command(arguments, tmp_path / "said", fault="round.done:2") == -signal.SIGKILL
    coterie.resume(out)
    resolved = json.loads((out / "config.json").read_text())["resolved"]
    assert (resolved["engine"], resolved["trace"], resolved["threads"]) == ("vmap", True, 2)
    assert_same(out, tmp_path / "whole")


def test_an_unknown_point_is_refused(monkeypatch):
    monkeypatch.setenv("COTERIE_FAULT", "checkpoint.stats")
    with pytest.raises(coterie.ConfigError, match=r"did you mean 'checkpoint\.stat"):
        faults.at("round.local")


# ---- inside compare --------------------------------------------------------------------------

METHODS_COMPARED = ["local", "fedavg", "fedamp"]


@pytest.mark.parametrize(
    ("point", "continued"),
    [
        ("checkpoint.renamed:4", 2),  # of FedAvg, the second method
        ("finish.summary:2", 2),
        ("compare.cell:2", None),
        ("compare.report", None),
        ("compare.manifest", None),
    ],
)
def test_a_comparison_goes_on_where_it_was_killed(point, continued, config, tmp_path, shelf):
    expected, out = shelf / "comparison", tmp_path / "compared"
    flags = {"methods": METHODS_COMPARED}
    if not expected.exists():
        coterie.compare(TINY, **flags, out=str(expected))
    named = ["compare", config, "--methods", ",".join(METHODS_COMPARED), "--out", out]
    assert command(named, tmp_path / "said", fault=point) == -signal.SIGKILL
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/seed-0/MANIFEST.json")}
    again = ["resume", out] if point.startswith("compare") else named
    assert command(again, tmp_path / "said") == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}  # finished ones are not touched
    for method in METHODS_COMPARED:
        assert_same(out / method / "seed-0", expected / method / "seed-0")
    where = json.loads((out / "fedavg" / "seed-0" / "environment.json").read_text())
    rounds = None if continued is None else [{"after_rounds": continued, "changed": {}}]
    assert where.get("resumed") == rounds  # in the middle, not from its start
    assert (out / "report.html").exists()
    assert all(wrong == [] for wrong in coterie.verify(out).values())


def test_one_run_of_a_comparison_is_judged_beside_the_others(config, tmp_path, shelf):
    out = tmp_path / "compared"
    named = ["compare", config, "--methods", "local,fedamp", "--out", out]
    assert command(named, tmp_path / "said", fault="round.local:5") == -signal.SIGKILL
    found = coterie.resume(out / "fedamp" / "seed-0")
    assert found.summary["relative_to_local"] is not None


# ---- signals -----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_once_it_ends_after_the_round(number, code, tmp_path, shelf):
    out, said, config = tmp_path / "run", tmp_path / "said", tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "run": {**TINY["run"], "rounds": 4000}}))
    process = started(["run", config, "--method", "fedamp", "--out", out], said)
    until(out / "checkpoint" / "LATEST")
    os.kill(process.pid, number)
    assert finished(process) == code
    assert f"continue with 'coterie resume {out}'" in said.read_text()
    latest = (out / "checkpoint" / "LATEST").read_text().strip()
    rounds = len((out / "rounds.jsonl").read_text().splitlines())
    assert latest == f"round-{rounds:08d}"  # nothing is lost


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_twice_it_ends_at_once_and_can_be_resumed(number, tmp_path, shelf):
    out, said, config = tmp_path / "run", tmp_path / "said", tmp_path / "config.json"
    slow = {**TINY, "algorithm": {"name": "sleepy:Sleepy"}}
    config.write_text(json.dumps(slow))
    code = Path(__file__).parent
    process = started(["run", config, "--code", code, "--out", out], said)
    until(out / "checkpoint" / "LATEST")
    time.sleep(0.5)  # it is in its second round now
    began = time.monotonic()
    os.kill(process.pid, number)
    time.sleep(0.3)
    os.kill(process.pid, number)
    code = finished(process)
    assert time.monotonic() - began < 15  # the round takes a minute
    assert code in (128 + number, -number)
    assert f"continue with 'coterie resume {out}'" in said.read_text()
    assert [entry.name for entry in (out / "checkpoint").glob("round-*")] == ["round-00000001"]


def test_a_stopped_run_ends_the_same(config, tmp_path, shelf):
    out = tmp_path / "run"
    process = started(["run", config, "--method", "scaffold", "--out", out], tmp_path / "said")
    until(out / "rounds.jsonl")
    os.kill(process.pid, signal.SIGINT)
    assert finished(process) in (0, 130)
    coterie.resume(out)
    assert_same(out, whole(shelf, "scaffold"))


# ---- what is not as it was written ---------------------------------------------------


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """An unfinished run with two checkpoints, after rounds 1 and 2."""
    place = tmp_path_factory.mktemp("stopped")
    (place / "config.json").write_text(json.dumps(TINY))
    arguments = ["run", place / "config.json", "--method", "fedfomo", "--out", place / "run"]
    assert command(arguments, place / "said", fault="log.done:3") == -signal.SIGKILL
    kept = sorted(entry.name for entry in (place / "run" / "checkpoint").iterdir())
    assert kept == ["LATEST", "round-00000001", "round-00000002"]
    return place / "run"


@pytest.fixture
def stopped(stopped_once, tmp_path):
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


def truncated(share):
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


HARMS = [
    ("MANIFEST.json", truncated(0)),
    ("MANIFEST.json", flipped),
    ("MANIFEST.json", Path.unlink),
    ("server.safetensors", truncated(0.01)),
    ("server.safetensors", truncated(0.99)),
    ("server.safetensors", Path.unlink),
    ("states.safetensors", truncated(0.5)),
    ("states.safetensors", flipped),
]


@pytest.mark.parametrize(("name", "harm"), HARMS, ids=range(len(HARMS)))
def test_a_harmed_checkpoint_is_named_and_the_one_before_is_used(stopped, name, harm, shelf):
    harm(stopped / "checkpoint" / "round-00000002" / name)
    with pytest.warns(CoterieWarning, match=f"round-00000002/{name}.*falling back"):
        coterie.resume(stopped)
    notes = json.loads((stopped / "environment.json").read_text())["resumed"]
    assert [note["after_rounds"] for note in notes] == [1]
    assert_same(stopped, whole(shelf, "fedfomo"))


@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "clients.csv", "collaboration.parts/00000001.npz"]
)
def test_a_harmed_log_is_named_and_an_earlier_round_is_used(stopped, name, shelf):
    path = stopped / name
    data = bytearray(path.read_bytes())
    second = json.loads((stopped / "checkpoint/round-00000002/MANIFEST.json").read_text())
    data[second["logs"][name]["bytes"] - 9] ^= 1  # in the second round
    path.write_bytes(data)
    with pytest.warns(CoterieWarning, match=f"{name}: has changed.*falling back"):
        coterie.resume(stopped)
    assert_same(stopped, whole(shelf, "fedfomo"))


def test_a_harmed_manifest_is_not_taken_for_a_harmed_log(stopped, shelf):
    path = stopped / "checkpoint" / "round-00000002" / "MANIFEST.json"
    digest = json.loads(path.read_text())["logs"]["rounds.jsonl"]["sha256"]
    other = ("1" if digest[0] == "0" else "0") + digest[1:]
    path.write_text(path.read_text().replace(digest, other))
    with pytest.warns(CoterieWarning, match="round-00000002/MANIFEST.json: .*has changed"):
        coterie.resume(stopped)
    assert_same(stopped, whole(shelf, "fedfomo"))


def garbage_after_it(stopped):
    for name in ("rounds.jsonl", "clients.csv"):
        with (stopped / name).open("ab") as file:
            file.write(b"\xff{not a line\n,,\n")


def newest_vanished(stopped):
    shutil.rmtree(stopped / "checkpoint" / "round-00000002")


def all_emptied(stopped):
    for path in (stopped / "checkpoint").glob("*/MANIFEST.json"):
        path.write_text("")


@pytest.mark.parametrize(
    ("harm", "says"),
    [(garbage_after_it, None), (newest_vanished, "round-00000002"), (all_emptied, "falling back")],
)
def test_what_is_lost_is_said_and_the_run_ends_the_same(stopped, harm, says, shelf):
    harm(stopped)
    with contextlib.nullcontext() if says is None else pytest.warns(CoterieWarning, match=says):
        coterie.resume(stopped)
    assert_same(stopped, whole(shelf, "fedfomo"))


class Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (open, (str(self.canary), "w"))


def every_name(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_pickle_under_any_name_is_never_run(stopped, tmp_path):
    bomb, canary = pickle.dumps(Bomb(tmp_path / "canary")), tmp_path / "canary"
    for number, path in enumerate(every_name(stopped)):
        copy = tmp_path / str(number)
        shutil.copytree(stopped, copy)
        (copy / path.relative_to(stopped)).write_bytes(bomb)
        with contextlib.suppress(coterie.CoterieError, CoterieWarning):  # warnings are errors here
            coterie.resume(copy)
        assert not canary.exists(), path
    pickle.loads(bomb).close()
    assert canary.exists()  # it would have gone off


# ---- a full disk -------------------------------------------------------------------------


def test_a_full_disk_is_named_and_what_was_written_is_intact(tmp_path, shelf):
    """Files may grow to so many bytes: enough for the server of FedFomo, not for the states."""
    out, said, config = tmp_path / "run", tmp_path / "said", tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    arguments = ["run", config, "--method", "fedfomo", "--out", out]
    assert command(arguments, said, limit=20_000) == 2
    text = said.read_text()
    assert "cannot be written (File too large)" in text
    assert "Traceback" not in text
    assert not list((out / "checkpoint").glob("*"))
    assert command(["resume", out], said) == 0
    assert_same(out, whole(shelf, "fedfomo"))


def test_a_disk_that_fills_up_later_leaves_the_round_before(stopped, tmp_path, shelf):
    said = tmp_path / "said"
    assert command(["resume", stopped], said, limit=5000) == 2  # too little for the models
    assert "models.safetensors: cannot be written" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert checkpoint.newest(stopped)[0].rounds == 2
    assert command(["resume", stopped], said) == 0
    assert_same(stopped, whole(shelf, "fedfomo"))


# ---- what may be resumed ---------------------------------------------------------------------


def test_another_config_is_refused(stopped):
    written = json.loads((stopped / "config.json").read_text())
    written["train"]["lr"] = 0.2
    files.write_json(stopped / "config.json", written)
    (stopped / ".lock").unlink()  # of the process that was killed
    before = {path: path.read_bytes() for path in every_name(stopped)}
    with pytest.raises(StoreError, match="another config"):
        coterie.resume(stopped)
    assert before == {path: path.read_bytes() for path in every_name(stopped)}


def test_the_engine_that_was_chosen_is_chosen_again(stopped):
    """Had auto been asked again, it would have measured, and written down what it found."""
    written = json.loads((stopped / "config.json").read_text())
    asked = coterie.load({**TINY, "engine": {"name": "auto"}}, {"algorithm.name": "fedfomo"})
    settled = assemble(asked).config
    hashed = config_hash(settled.single(settled.method(), 0))
    assert hashed != written["hash"]
    files.write_json(
        stopped / "config.json",
        {
            **written,
            "asked": {"engine": asked.engine.model_dump(exclude_none=True)},
            "hash": hashed,
            "run": {**written["run"], "metric": "accuracy"},
        },
    )
    assert coterie.resume(stopped).config["resolved"]["chunk"] == 3
    assert not auto.cache_file().exists()


def test_other_versions_are_named(stopped):
    where = json.loads((stopped / "environment.json").read_text())
    where["versions"]["torch"], where["source"] = "1.0", "edited"
    files.write_json(stopped / "environment.json", where)
    with (
        pytest.warns(CoterieWarning, match=r"torch was 1\.0"),
        pytest.warns(CoterieWarning, match="source was edited"),
    ):
        coterie.resume(stopped)
    (note,) = json.loads((stopped / "environment.json").read_text())["resumed"]
    assert note["after_rounds"] == 2
    assert note["changed"] == {"torch": torch.__version__, "source": environment()["source"]}


def test_a_used_folder_is_refused_and_a_finished_run_read(stopped, tmp_path):
    with pytest.raises(StoreError, match="holds no run to continue"):
        coterie.resume(tmp_path)
    for says in ("coterie resume", "a finished run"):
        with pytest.raises(StoreError, match=says):
            coterie.run(TINY, method="fedfomo", out=stopped)
        first = coterie.resume(stopped)
    assert coterie.resume(stopped).summary == first.summary


# ---- what a checkpoint costs -----------------------------------------------------------------


def test_checkpoints_take_a_small_share_of_the_time(tmp_path):
    """However slow the disk and however short the rounds."""
    keeper, spent, work = Keeper(tmp_path, cost=3.0), 0, 0.0
    for index in range(1000):
        one = record(index, torch.ones(3).numpy())._replace(seconds=0.7)
        work += one.seconds
        if keeper.due(one):
            keeper.since = 0.0
            spent += 1
    assert 2 <= spent <= 1 + work * SHARE / 3


@pytest.mark.parametrize("name", FOUR)
def test_a_checkpoint_gives_back_every_bit(name, tmp_path):
    algorithm = METHODS[name]()
    on = task(algorithm)
    found = last(algorithm, on, rounds=2)
    checkpoint.write(tmp_path, 2, found.server, found.states, {})
    stored, wrong = checkpoint.newest(tmp_path)
    assert wrong == []
    trees = checkpoint.restore(stored, *algorithm.init(on.problem))
    for made, back in zip((found.server, found.states), trees, strict=True):
        assert type(made) is type(back)
        for a, b in zip(tree.leaves(made), tree.leaves(back), strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
