"""Progress: a line now and then, never long silence, which sites answered; callbacks of others."""

import re
import sys
import threading
import types
from itertools import pairwise
from pathlib import Path

import pytest

import coterie
from coterie.commands.live import (
    EVERY,
    SILENCE,
    TRACKERS,
    Lines,
    Tally,
    also_logged,
    events,
    progress_on_stderr,
)
from coterie.runs.listeners import Progress

DOCS = Path(__file__).parents[1] / "docs"


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines(rounds=10, **options):
    clock, written = Clock(), []
    return clock, Lines(Tally(rounds, clock=clock, **options), written.append), written


def step(done, rounds=10, score=50.0, **more):
    return Progress("fedavg", 0, done, rounds, score, **more)


def test_fast_rounds_share_a_line_and_every_end_has_one():
    clock, out, written = lines(rounds=100)
    for done in range(1, 101):
        clock.now += EVERY / 8  # exact in floats
        out.tell(step(done, 100))
    assert len(written) == 100 // 8 + 1
    assert written[0].startswith("fedavg, seed 0: round 8 of 100, mean 50")
    assert written[-1] == "fedavg, seed 0: 100 rounds, mean 50"


def test_there_is_never_long_silence():
    """A beat each second, whatever happens: no two lines are further apart than the bound."""
    clock, out, written = lines()
    times = [0.0]
    for second in range(1, 200):
        clock.now, before = float(second), len(written)
        if second in (60, 61, 150):
            out.tell(step(1 + len(times) % 3))
        out.beat()
        times += [clock.now] * (len(written) > before)
    assert max(b - a for a, b in pairwise(times)) <= SILENCE
    assert written[0] == f"preparing for {SILENCE:.0f} s"
    assert any(re.search(r"in round \d of 10 for \d+ s, mean 50", line) for line in written)


def test_the_line_has_score_bytes_and_time_left():
    clock, out, written = lines(rounds=4)
    for done in (1, 2):
        clock.now += 10
        out.tell(step(done, 4, None if done == 2 else 61.0, sent=2000))
    assert written[-1] == (
        "fedavg, seed 0: round 2 of 4, mean 61, 4.0 kB sent, about 20 s left"
    )  # the last score stays until the next evaluation


def test_rounds_from_disk_do_not_count_for_the_time_left():
    clock = Clock()
    tally = Tally(20, clock=clock)
    tally.add(step(10, more=10, reused=True))
    assert tally.left is None
    clock.now = 99.0  # the first round of a run may compile
    tally.add(Progress("other", 0, 1, 10, None))
    assert tally.left is None
    clock.now += 3.0
    tally.add(Progress("other", 0, 2, 10, None))
    assert tally.left == pytest.approx(8 * 3.0)


def test_a_federation_says_who_answered():
    clock, out, written = lines(sites=True)
    clock.now += EVERY
    out.tell(step(1, answered=("a", "b"), silent=("c",)))
    assert written[-1].endswith("answered: a, b, no answer: c")
    clock.now += EVERY
    out.tell(step(2))
    assert written[-1].endswith("answered: none")


def test_names_cannot_write_control_codes():
    clock, out, written = lines(sites=True)
    clock.now += EVERY
    out.tell(step(1, answered=("a\x1b[2J",)))
    assert "\x1b" not in written[-1]


def test_every_event_is_told_at_once():
    said = events(step(3, rejected=(("a", "lost"),), slow=("local took 90 %",)))
    assert said == [
        "fedavg, seed 0: round 3 left out client 'a' (lost)",
        "fedavg, seed 0: local took 90 %",
    ]


def test_the_thread_ends_with_the_block(capsys):
    before = threading.active_count()
    with progress_on_stderr(1, 2) as watch:
        watch(step(2, 2))
    assert threading.active_count() == before
    assert capsys.readouterr().err == "fedavg, seed 0: 2 rounds, mean 50\n"


# ---- callbacks -----------------------------------------------------------------------------------


def test_progress_tells_bytes_and_answers():
    seen = []
    result = coterie.run(method="fedavg", rounds=2, clients=3, engine="loop", progress=seen.append)
    clients = result.roster.clients
    assert [(one.done, one.answered, one.silent) for one in seen] == [
        (done, clients, ()) for done in (1, 2)
    ]
    assert [one.sent for one in seen] == [
        line["bytes_down"] + line["bytes_up"] for line in result.lines
    ]


def test_the_callback_of_the_docs_works(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "progress.md").read_text("utf-8"), re.S)
    exec(compile(block, "progress.md", "exec"), {})
    told = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert told == [[method, "0", done] for method in ("local", "fedavg") for done in "12"]


def test_the_documented_fields_are_all_fields():
    table = (DOCS / "progress.md").read_text("utf-8").partition("| field |")[2].partition("\n\n")[0]
    first = re.findall(r"^\| (`.*?`) \|", table, re.M)
    assert [name for cell in first for name in re.findall(r"`(\w+)`", cell)] == [*Progress._fields]


class Kept:
    """Stands for the packages of all trackers, called as their own documentation has it."""

    def __init__(self):
        self.logged, self.closed = {}, []
        self.MlflowClient = lambda: self
        self.SummaryWriter = self.writer

    def writer(self, log_dir):  # of TensorBoard
        def add_scalar(tag, value, at):
            self.log_metric(log_dir, tag, value, at)

        return types.SimpleNamespace(
            add_scalar=add_scalar, close=lambda: self.set_terminated(log_dir, "FINISHED")
        )

    def init(self, project, name, group, reinit):  # of Weights & Biases
        run = f"{project}/{name}"

        def log(values, step):
            for key, value in values.items():
                self.log_metric(run, key, value, step)

        def finish(code):
            self.set_terminated(run, "KILLED" if code else "FINISHED")

        return types.SimpleNamespace(log=log, finish=finish)

    def get_experiment_by_name(self, name):  # from here on of MLflow
        return None

    def create_experiment(self, name):
        return name

    def create_run(self, home, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{home}/{run_name}"))

    def log_metric(self, run, name, value, step):
        self.logged.setdefault(run, []).append((name, step))

    def set_terminated(self, run, status):
        self.closed.append((run, status))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_every_round_in_a_run_per_method_and_seed(
    tracker, monkeypatch, tmp_path, command
):
    """Every run is closed when its rounds are done; without the package nothing is started."""
    module, kept = TRACKERS[tracker][0], Kept()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = command("run", "--rounds", "1", f"--{tracker}", "mine")
    assert code == 2
    assert f"pip install coterie[{tracker}]" in err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, module, kept)
    options = f"compare --methods fedavg --rounds 2 --clients 3 --engine loop --{tracker} mine"
    between = "/seed-" if tracker == "tensorboard" else "-"
    for _ in range(2):  # the second call finds finished runs and logs nothing
        code, _, err = command(*options.split(), "--out", "out")
        assert not code, err
        runs = [f"mine/{method}{between}0" for method in ("local", "fedavg")]
        assert kept.closed == [(run, "FINISHED") for run in runs]
    expected = [(name, at) for at in (1, 2) for name in ("bytes", "score")]
    assert [*kept.logged.values()] == [expected] * 2


def test_a_run_that_ends_early_is_not_called_finished_by_its_tracker(monkeypatch):
    """One that is done is closed at once, however the others end."""
    kept = Kept()
    monkeypatch.setitem(sys.modules, "mlflow", kept)
    with also_logged("mlflow", "mine", lambda step: None) as watch:
        watch(Progress("local", 0, 1, 1, 50.0))
        assert kept.closed == [("mine/local-0", "FINISHED")]
        watch(step(1))
    assert kept.closed[1:] == [("mine/fedavg-0", "KILLED")]


def test_what_a_tracker_refuses_is_told_in_a_sentence(monkeypatch, tmp_path, command):
    """W&B, for one, refuses a project with a slash."""

    def init(**asked):
        raise ValueError(f"Invalid project name {asked['project']!r}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    code, _, err = command("run", "--rounds", "1", "--clients", "3", "--wandb", "a/b")
    assert code == 2
    assert "--wandb a/b: wandb could not begin a run: Invalid project name 'a/b'; " in err
