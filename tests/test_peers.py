"""The comparison with other frameworks, without any of them: its protocol, its turns, its rows."""

import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import networks
import pytest
import torch

import compare
import workers
from compare import Entrant, rows, table, take_turns
from coterie.networks import registry
from workers import PeerError, Worker
from workloads import WORKLOADS

PEERS = compare.HERE / "peers"

GOOD = """
    from wire import Wire
    wire = Wire()
    print("a framework's chatter")
    wire.ready("fake 1.0", "one way", 3)
    while wire.wanted():
        wire.answer(0.25, 10)
"""
Start = Callable[[str], Worker]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a worker from its source; ends it after the test."""
    monkeypatch.setattr(workers, "SETTLE", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(PEERS))
    started: list[Worker] = []

    def begin(source: str) -> Worker:
        script = tmp_path / f"worker{len(started)}.py"
        script.write_text(textwrap.dedent(source))
        command = [sys.executable, str(script), '{"parameters": 3, "steps": 10}']
        started.append(Worker(command, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield begin
    for worker in started:
        worker.close(limit=0.1)


def stopped(worker: Worker) -> int:
    """How many of a worker's processes are stopped."""
    files = [Path(f"/proc/{pid}/stat") for pid in workers.members(worker._process.pid)]
    return sum(file.read_text().rpartition(")")[2].split()[0] == "T" for file in files)


def becomes(found: Callable[[], object], expected: object) -> bool:
    """Whether something becomes true soon: signals take a moment."""
    deadline = time.monotonic() + 3
    while found() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found() == expected


def test_a_worker_says_what_it_is_and_answers_each_round(start: Start) -> None:
    worker = start(GOOD)
    assert worker.ready(5) == {"version": "fake 1.0", "setting": "one way"}
    assert [worker.round(5), worker.round(5)] == [0.25, 0.25]


def test_a_worker_stands_still_between_its_turns_with_all_its_processes(start: Start) -> None:
    child = "import subprocess; subprocess.Popen(['sleep', '60'], process_group=0)\n"
    worker = start(child + textwrap.dedent(GOOD))
    worker.ready(5)
    assert becomes(lambda: stopped(worker), 2)
    worker.round(5)
    assert becomes(lambda: stopped(worker), 2)
    worker.wake()
    assert becomes(lambda: stopped(worker), 0)


def test_closing_leaves_no_process_behind(start: Start) -> None:
    child = "import subprocess; subprocess.Popen(['sleep', '60'], process_group=0)\n"
    worker = start(child + textwrap.dedent(GOOD))
    worker.ready(5)
    session = worker._process.pid
    assert len(workers.members(session)) == 2
    worker.close()
    assert becomes(lambda: workers.members(session), [])
    assert worker._process.returncode == 0  # asked to quit, it did


def test_a_worker_that_dies_says_how(start: Start) -> None:
    worker = start("raise SystemExit('no such backend')")
    with pytest.raises(PeerError, match="ended with code 1; its last line: no such backend"):
        worker.ready(5)
    worker = start(GOOD.replace("wire.answer(0.25, 10)", "raise SystemExit(3)"))
    worker.ready(5)
    for _ in range(2):  # the second finds a broken pipe
        with pytest.raises(PeerError, match="ended with code 3"):
            worker.round(5)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("print('hello', flush=True)", "answered 'hello'; expected a JSON object"),
        ("print('[1]', flush=True)", r"answered '\[1\]'; expected a JSON object"),
        ("print('{}', flush=True)", "expected its version and setting"),
    ],
)
def test_a_worker_that_answers_garbage_is_refused(start: Start, said: str, complaint: str) -> None:
    with pytest.raises(PeerError, match=complaint):
        start(f"{said}\nimport time; time.sleep(60)").ready(5)


@pytest.mark.parametrize("seconds", ["-1.0", "float('nan')", "'fast'", "None"])
def test_a_round_without_seconds_is_refused(start: Start, seconds: str) -> None:
    worker = start(GOOD.replace("0.25", seconds))
    worker.ready(5)
    with pytest.raises(PeerError, match="expected the seconds of a round"):
        worker.round(5)


def test_a_silent_worker_is_not_waited_for(start: Start) -> None:
    with pytest.raises(PeerError, match="said nothing for 0 s"):
        start("import time; time.sleep(60)").ready(0.1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("0.25, 10", "0.25, 9"), "steps: found 9, expected 10"),
        (('one way", 3', 'one way", 4'), "parameters: found 4, expected 3"),
    ],
)
def test_a_worker_checks_its_own_work(
    start: Start, change: tuple[str, str], complaint: str
) -> None:
    assert change[0] in GOOD
    worker = start(GOOD.replace(*change))
    with pytest.raises(PeerError, match=complaint):
        [worker.ready(5), worker.round(5)]


def entrant(name: str, seconds: list[float], order: list[str], fails_at: int = 99) -> Entrant:
    """Somebody with prepared times, who notes when it is asked."""
    left = list(seconds)

    def once() -> float:
        order.append(name)
        if len(seconds) - len(left) == fails_at:
            raise PeerError("out of breath")
        return left.pop(0)

    return Entrant(name, once, "1.0", "as is")


def test_everybody_takes_turns_and_who_fails_drops_out() -> None:
    order: list[str] = []
    field = [
        entrant("plain", [4.0, 6.0, 50.0], order),
        entrant("auto", [2.0, 2.0, 1.0], order),
        entrant("slow", [8.0, 8.0, 8.0], order, fails_at=1),
        entrant("peer", [3.0, 9.0, 3.0], order),
    ]
    times = take_turns(field, 3)
    whole = ["plain", "auto", "slow", "peer"]
    assert order == [*whole, *whole, "plain", "auto", "peer"]
    assert times == [[4.0, 6.0, 50.0], [2.0, 2.0, 1.0], "out of breath", [3.0, 9.0, 3.0]]
    found = rows("W1", field, times)
    assert [row.seconds_per_round for row in found] == [6.0, 2.0, None, 3.0]
    assert [row.speedup_over_loop for row in found] == [1.0, 3.0, None, 2.0]
    assert [row.ratio_of_auto for row in found] == [3.0, 1.0, None, 1.5]
    assert [row.failed for row in found] == ["", "", "out of breath", ""]
    assert "failed" in table(found).splitlines()[3]
    assert "out of breath" in table(found)


def test_a_missing_peer_is_a_row_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = [Entrant(name, lambda: 1.0, "1.0", "as is") for name in ("plain", "auto")]
    monkeypatch.setattr(compare, "ours", lambda workload, cores: home)
    monkeypatch.setattr(compare, "ENVIRONMENTS", tmp_path)
    found = compare.compare("W1", ["flower"], 1, 1)
    assert [row.engine for row in found] == ["plain", "auto", "flower"]
    assert "run `make bench-peers`" in found[-1].failed


@pytest.mark.parametrize(("workload", "steps"), [("W1", 1000), ("W2", 1000), ("W3", 200)])
def test_peers_train_the_same_networks_on_the_same_data(workload: str, steps: int) -> None:
    spec = compare.job(workload, 2)
    options = {"hidden": (200,)} if spec["model"] == "mlp" else {}
    theirs = networks.network(spec["model"])
    mine = registry.MODELS[spec["model"]]((1, 28, 28), 10, **options)
    mine.load_state_dict(dict(zip(mine.state_dict(), theirs.state_dict().values(), strict=True)))
    x, y = networks.data(spec)[1]
    assert torch.equal(mine(x[:4]), theirs(x[:4]))
    task = WORKLOADS[workload].simulation(torch.device("cpu"))
    at = task.federation.train[1]
    assert torch.equal(task.shards.x[at], x)
    assert torch.equal(task.shards.y[at], y)
    assert (spec["steps"], spec["lr"]) == (steps, 0.01)
    assert spec["parameters"] == networks.size(theirs)
