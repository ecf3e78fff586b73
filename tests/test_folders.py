"""Attacks on folders of results: links, two processes at once, what verify has to notice."""

import csv
import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.errors import StoreError
from coterie.runs import checkpoint, run_folder, stored
from coterie.runs.environment import environment
from coterie.runs.run import SCORES, Log
from coterie.runs.run_folder import RunFolder
from coterie.storage import files, lock
from hostile import TINY, StopError, contents, rewritten, unfinished
from killing import command, finished, started, until
from synthetic import CLIENTS, grouped, predictors, record, roster, scores

CODE = Path(__file__).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An unfinished run and the same one finished; copies of them are attacked."""
    folder = tmp_path_factory.mktemp("made")
    unfinished(folder / "run")
    shutil.copytree(folder / "run", folder / "whole")
    coterie.resume(folder / "whole")
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def whole(made, tmp_path):
    return Path(shutil.copytree(made / "whole", tmp_path / "whole"))


@pytest.fixture(scope="module")
def compared_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "out"
    coterie.compare(TINY, methods=["fedavg", "fedamp"], rounds=1, out=str(out))
    return out


@pytest.fixture
def compared(compared_once, tmp_path):
    return Path(shutil.copytree(compared_once, tmp_path / "compared"))


# ---- links ---------------------------------------------------------------------------------------

LINKED = [
    "checkpoint",
    "checkpoint/round-00000001",
    "checkpoint/LATEST",
    "checkpoint/.round-00000007.1.tmp",
    "checkpoint/round-00000002/server.safetensors",
    "collaboration.parts",
    "collaboration.parts/00000000.npz",
    "config.json",
    "environment.json",
    "rounds.jsonl",
    "clients.csv",
    "models.safetensors",
    ".rounds.jsonl.77.tmp",
    ".lock",
]


def moved_and_linked(path, outside):
    """What was there lies outside now, and a link in its place; beside it what must not be lost."""
    outside.mkdir()
    if path.exists():
        path.rename(outside / path.name)
    target = outside / path.name
    if path.name == "checkpoint":
        (target / "photos").mkdir()
        (target / "photos" / "holiday.jpg").write_text("precious")
    if path.name == "collaboration.parts":
        shutil.copy(target / "00000000.npz", target / "00000099.npz")
    path.symlink_to(target)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_run_is_refused_and_nothing_outside_changes(run, tmp_path, name):
    outside = tmp_path / "outside"
    moved_and_linked(run / name, outside)
    before = contents(outside)
    with pytest.raises(StoreError, match=f"{re.escape(name)}: is a link"):
        coterie.resume(run)
    assert contents(outside) == before


def test_a_pipe_in_a_run_is_refused_at_once(run):
    (run / "rounds.jsonl").unlink()
    os.mkfifo(run / "rounds.jsonl")
    with pytest.raises(StoreError, match="is no plain file"):
        coterie.resume(run)


@pytest.mark.parametrize("name", ["summary.json", "models.safetensors", "MANIFEST.json"])
def test_a_link_in_a_finished_run_is_refused(whole, tmp_path, name):
    moved_and_linked(whole / name, tmp_path / "outside")
    for look in (coterie.verify, run_folder.read, coterie.resume):
        with pytest.raises(StoreError, match="is a link"):
            look(whole)


@pytest.mark.parametrize("name", ["fedamp", "fedamp/seed-0", "compare.json", "report.html"])
def test_a_link_in_a_comparison_is_refused(compared, tmp_path, name):
    moved_and_linked(compared / name, tmp_path / "outside")
    before = contents(tmp_path / "outside")
    for look in (coterie.verify, coterie.resume):
        with pytest.raises(StoreError, match="is a link"):
            look(compared)
    assert contents(tmp_path / "outside") == before


def test_a_link_where_a_new_run_would_write_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out" / "rounds.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="is a link"):
        coterie.run(TINY, method="fedavg", rounds=1, out=str(tmp_path / "out"))
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_with_the_name_of_a_temporary_file_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    files.write_text(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()


def test_only_names_of_our_own_are_removed(run, made):
    ours = {path.relative_to(made / "whole") for path in (made / "whole").rglob("*")}
    theirs = ["checkpoint/photos/a.jpg", "checkpoint/notes.txt", "collaboration.parts/mine.npz"]
    theirs += [".mine.tmp", "notes/rounds.jsonl", ".config.json.tmp"]
    for name in theirs:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    (run / ".rounds.jsonl.1234.tmp").write_text("cut short")
    coterie.resume(run)
    left = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    assert left == ours | {Path(name) for name in theirs}
    assert all((run / name).read_text() == "mine" for name in theirs)


def test_pruning_keeps_what_is_not_a_checkpoint(run):
    (run / "checkpoint" / "mine").mkdir()
    checkpoint.prune(run, set())
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["LATEST", "mine"]


# ---- two processes -------------------------------------------------------------------------------


def test_a_second_process_is_told_who_is_there_and_changes_nothing(tmp_path):
    out, said, config = tmp_path / "run", tmp_path / "said", tmp_path / "x.json"
    config.write_text(json.dumps({**TINY, "algorithm": {"name": "sleepy:Sleepy"}}))
    arguments = [config, "--code", CODE, "--out", out]
    first = started(["run", *arguments], tmp_path / "first")
    try:
        until(out / "checkpoint" / "LATEST")
        before = contents(out)
        assert command(["resume", out, "--code", CODE], said) == 2
        assert f"is in use by process {first.pid} on " in said.read_text()
        assert " UTC; " in said.read_text()
        assert command(["run", *arguments], said) == 2
        assert contents(out) == before
    finally:
        first.kill()
        finished(first)
    assert lock.NAME in {path.name for path in out.iterdir()}  # it is stale now
    with lock.held(out):
        pass


@pytest.mark.parametrize("place", ["", "fedamp/seed-0"])
def test_a_comparison_and_each_of_its_runs_is_locked(compared, place):
    shutil.rmtree(compared / "fedamp" / "seed-0")
    with lock.held(compared / place), pytest.raises(StoreError, match=f"process {os.getpid()}"):
        coterie.resume(compared)
    coterie.resume(compared)
    assert not any(coterie.verify(compared).values())
    assert not list(compared.rglob(".*"))


def test_a_disk_without_locks_is_refused(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with pytest.raises(StoreError, match=r"without file locks \(not supported\)"):
        lock.held(tmp_path).__enter__()


@pytest.mark.parametrize("text", ["", "{}", "[" * 10_000, "\0\xff", '{"pid": "x"}', "7"])
def test_a_lock_file_of_somebody_else_is_no_lock(tmp_path, text):
    (tmp_path / lock.NAME).write_text(text, encoding="latin-1")
    with lock.held(tmp_path), pytest.raises(StoreError, match="is in use"):
        lock.held(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError), lock.held(tmp_path / "new"):
        raise RuntimeError("refused")
    assert list(tmp_path.iterdir()) == []


# ---- verify --------------------------------------------------------------------------------------


def resealed(path):
    """The folder with a manifest that fits it, as a process writes it that was not alone."""
    files.seal(path, [name for name in run_folder.listed(path) if (path / name).is_file()])


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


HARMS = {
    "a round twice": ("rounds.jsonl", lambda ls: [*ls, ls[-1]]),
    "a round twice at once": ("rounds.jsonl", lambda ls: [ls[0], ls[0], *ls[1:]]),
    "a round missing": ("rounds.jsonl", lambda ls: ls[:1] + ls[2:]),
    "the last missing": ("rounds.jsonl", lambda ls: ls[:-1]),
    "out of order": ("rounds.jsonl", lambda ls: [ls[1], ls[0], *ls[2:]]),
    "scores of a client missing": ("clients.csv", lambda ls: ls[:-1]),
    "scores of a round twice": ("clients.csv", lambda ls: [*ls, *ls[-4:]]),
    "scores out of order": ("clients.csv", lambda ls: [ls[0], *ls[5:9], *ls[1:5], *ls[9:]]),
    "no scores": ("clients.csv", lambda ls: ls[:1]),
}


ODD = {
    f"{name}: {text[:20]}": (name, lambda _, text=text: [text])
    for name, text in (
        ("config.json", "[]"),
        ("config.json", '{"run": []}'),
        ("config.json", '{"run": {"rounds": "x"}}'),
        ("config.json", '{"run": {"rounds": 1000000000000000}}'),
        ("environment.json", "7"),
        ("rounds.jsonl", "7\n"),
        ("rounds.jsonl", "[" * 100_000 + "\n"),
        ("summary.json", "{}"),
        ("clients.csv", "\n"),
    )
}


@pytest.mark.parametrize(("name", "change"), [*HARMS.values(), *ODD.values()], ids=[*HARMS, *ODD])
def test_verify_sees_what_no_run_writes_although_the_manifest_fits(whole, name, change):
    assert coterie.verify(whole) == {str(whole): []}
    (whole / name).write_text("".join(change(lines_of(whole / name))))
    resealed(whole)
    try:
        (wrong,) = coterie.verify(whole).values()
    except StoreError as error:
        wrong = [str(error)]
    assert wrong
    assert len("".join(wrong)) < 2000


def test_verify_sees_that_matrices_are_whole(whole):
    stored_ = dict(np.load(whole / "collaboration.npz"))
    np.savez(
        whole / "collaboration.npz",
        **{**stored_, "A": stored_["A"][:-1], "rounds": stored_["rounds"][:-1]},
    )
    resealed(whole)
    assert "collaboration.npz: found rounds [0, 1]" in coterie.verify(whole)[str(whole)][0]


def test_verify_sees_what_the_manifest_does_not_list(whole):
    (whole / files.MANIFEST).write_text('{"files": {}}')
    (wrong,) = coterie.verify(whole).values()
    there = {path.name for path in whole.iterdir()} - {files.MANIFEST}
    assert {sentence.partition(" ")[0] for sentence in wrong} == there


@pytest.mark.parametrize("text", [None, "{"])
def test_a_config_that_cannot_be_read_is_one_runs_fault(compared, text):
    path = compared / "fedavg" / "seed-0" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    wrong = coterie.verify(compared)
    assert [name for name, found in wrong.items() if found] == [str(path.parent)]


PARTS = ["report.html", "comparison.json", "compare.json", "fedamp/seed-0", "fedavg/seed-0"]


@pytest.mark.parametrize("name", PARTS)
def test_verify_misses_what_is_deleted_from_a_comparison_or_edited(compared, name):
    assert not any(coterie.verify(compared).values())
    part = compared / name
    if part.is_file():
        text = part.read_text()
        part.write_text(text.replace("fedamp", "fedarm", 1))
        wrong = coterie.verify(compared)[str(compared)]
        assert f"{name} has changed since it was finished" in wrong
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    assert any(name in wrong for wrong in coterie.verify(compared)[str(compared)])
    if name != "compare.json":
        coterie.resume(compared)
        assert not any(coterie.verify(compared).values())


def test_verify_sees_a_run_of_another_comparison(compared):
    """A whole run, as it was written, but not the one that the report is about."""
    other = compared / "fedamp" / "seed-0"
    rewritten(other / "summary.json", seconds=0.0)
    resealed(other)
    report = coterie.verify(compared)
    assert report[str(other)] == []
    assert report[str(compared)] == [
        "fedamp/seed-0/MANIFEST.json has changed since it was finished"
    ]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "fedamp/../../x/MANIFEST.json", "a\n"])
def test_a_manifest_that_names_files_elsewhere_is_not_followed(compared, name):
    listing = json.loads((compared / files.MANIFEST).read_text())["files"]
    listing[name] = {"bytes": 0, "sha256": ""}
    (compared / files.MANIFEST).write_text(json.dumps({"files": listing}))
    (wrong,) = coterie.verify(compared)[str(compared)]
    assert wrong.endswith("is missing or does not belong here")


@pytest.mark.parametrize("path", ["../whole", "fedamp/../../whole", "/etc", "fedamp"])
def test_a_comparison_that_names_runs_elsewhere_is_not_read(compared, whole, path):
    listed = json.loads((compared / "comparison.json").read_text())
    rewritten(compared / "comparison.json", runs=[{**listed["runs"][0], "path": path}])
    with pytest.raises(StoreError, match="expected a list of runs"):
        coterie.read(compared)
    assert any(coterie.verify(compared).values())


def test_a_run_and_a_comparison_do_not_share_a_folder(compared, whole):
    before = contents(whole)
    with pytest.raises(StoreError, match="a finished run"):
        coterie.compare(TINY, methods=["fedavg"], rounds=1, out=str(whole))
    assert contents(whole) == before
    shutil.copy(compared / "compare.json", whole)  # as somebody else may have put it there
    with pytest.raises(StoreError, match="a finished run"):
        coterie.resume(whole)
    assert (whole / files.MANIFEST).exists()
    with pytest.raises(StoreError, match="holds a comparison"):
        coterie.run(TINY, method="fedavg", rounds=1, out=str(compared))
    assert not any(coterie.verify(compared).values())


def test_a_manifest_of_somebody_else_is_not_removed(tmp_path):
    (tmp_path / files.MANIFEST).write_text("mine")
    with pytest.raises(StoreError, match="expected a folder without one"):
        coterie.compare(TINY, methods=["fedavg"], rounds=1, out=str(tmp_path))
    assert (tmp_path / files.MANIFEST).read_text() == "mine"


def test_a_comparison_that_was_begun_again_is_not_finished(compared):
    def stop(step):
        if step.method == "scaffold":
            raise StopError

    with pytest.raises(StopError):
        coterie.compare(
            TINY, methods=["fedavg", "scaffold"], rounds=1, out=str(compared), progress=stop
        )
    (wrong,) = coterie.verify(compared)[str(compared)]
    assert "it is not finished" in wrong
    coterie.resume(compared)
    assert not any(coterie.verify(compared).values())


# ---- formulae ------------------------------------------------------------------------------------

FORMULA = tuple("=+-@\t\r\n＝＋－＠")
names = st.lists(
    st.text(alphabet=[*FORMULA, *"'\",; acmd|!0", "\x0b"], max_size=12),
    min_size=2,
    max_size=4,
    unique=True,
)


def written(path, clients):
    rows = stored.client_rows(
        0,
        {name: np.zeros(len(clients)) for name in SCORES},
        roster(clients=len(clients), names=tuple(clients)),
    )
    path.write_text(",".join(stored.COLUMNS) + "\n")
    stored.append_clients(path, rows)


@given(clients=names)
def test_no_name_is_a_formula_and_every_name_is_read_back(tmp_path_factory, clients):
    """Also to a spreadsheet that takes semicolons or tabs for the ends of cells."""
    path = tmp_path_factory.getbasetemp() / "clients.csv"
    written(path, clients)
    assert stored.read_clients(path)[1].clients == tuple(clients)
    with path.open(newline="") as file:
        cells = [row[1] for row in csv.reader(file)][1:]
    for cell in cells:
        for part in re.split("[,;\t\r\n]", cell):
            assert not part.startswith(FORMULA), (cell, clients)


def test_a_run_with_formulae_for_names_is_read_and_continued(tmp_path):
    clients = ("=cmd|' /C calc'!A0", "@SUM(1)", "+1", "-1", "\t=1", "'quoted", "''", "a;=b", "a")
    clients += ("\u2028", 'St. "Mary", ward 3', "a\r\nb")
    log = Log("fedfomo", 7, "accuracy", roster(seed=7, names=clients))
    folder = RunFolder.create(tmp_path / "run", log, {}, environment())
    for i, row in enumerate(scores("fedfomo", 7, 3)):
        folder.append(record(i, row, grouped(0.9)))
    again = Log("fedfomo", 7, "accuracy", roster(seed=7, names=clients))
    folder = RunFolder.reopen(folder.path, again, 2)
    folder.append(record(2, scores("fedfomo", 7, 3)[2], grouped(0.9)))
    folder.finish(predictors())
    assert run_folder.read(folder.path).roster.clients == clients
    assert len(clients) == CLIENTS
    assert run_folder.verify(folder.path) == []
