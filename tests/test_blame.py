"""Errors in a user's own method or network name the user's file and line, in one sentence."""

import re
import sys

import pytest

import coterie

METHOD = '''
from dataclasses import dataclass
from typing import NamedTuple

import torch

from coterie import Algorithm, Mixture
from coterie.core.algorithm import rows, single


def add(a, b):
    return a + b  # add


class Pool(NamedTuple):
    w: torch.Tensor


class Own(NamedTuple):
    w: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True)
class Mine(Algorithm):
    """A method of one's own."""

    def check(self, problem, rounds):
        pass  # check

    def init(self, problem):
        K = problem.population
        states = Own(rows(problem.start, K), torch.zeros(K, 2))
        return Pool(problem.start), states  # init

    def download(self, server, round):
        return rows(server.w, len(round.clients))  # download

    def local(self, client, received, state):
        w = client.train(received)
        return w, Own(w, state.seen + 1)  # local

    def aggregate(self, server, uploads, round):
        return Pool(uploads.mean(0))  # aggregate

    def serve(self, server, round):
        return rows(server.w, len(round.clients))  # serve

    def predictor(self, client, served, state):
        return single(served)  # predictor

    def collaboration(self, server, shown, round):
        return None  # collaboration
'''
OPTIONS = {"method": "mine:Mine", "rounds": 2, "clients": 3}
OF_FEDAVG = {**OPTIONS, "method": "fedavg"}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write the method with one line replaced, and run it in an engine."""
    monkeypatch.chdir(tmp_path)

    def run(mark, line, engine="loop", **options):
        old = [text for text in METHOD.splitlines() if text.endswith(f"# {mark}")]
        text = METHOD
        if mark:
            (found,) = old
            indent = found[: len(found) - len(found.lstrip())]
            text = METHOD.replace(found, f"{indent}{line}  # {mark}")
        (tmp_path / "mine.py").write_text(text)
        sys.modules.pop("mine", None)
        return coterie.run(code=str(tmp_path), engine=engine, **OPTIONS, **options)

    yield run
    sys.modules.pop("mine", None)


def line_of(mark: str) -> int:
    (number,) = (i for i, text in enumerate(METHOD.splitlines(), 1) if text.endswith(f"# {mark}"))
    return number


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_method_as_it_stands_runs(mine, engine):
    assert mine("", "", engine).summary["rounds"] == 2


FUNCTIONS = [
    "check",
    "init",
    "download",
    "local",
    "aggregate",
    "serve",
    "predictor",
    "collaboration",
]


PLACES = [("loop", mark) for mark in FUNCTIONS]
PLACES += [(engine, mark) for engine in ("vmap", "wire") for mark in ("local", "predictor")]


@pytest.mark.parametrize(("engine", "mark"), PLACES)
def test_an_exception_names_the_users_file_and_line(mine, engine, mark):
    """Also where it is raised deeper, by torch, or in another process."""
    with pytest.raises(coterie.EngineError) as found:
        mine(mark, "return torch.zeros(2) + torch.zeros(3)", engine)
    told = str(found.value)
    assert f"mine.py, line {line_of(mark)}, in {mark}: return torch.zeros(2)" in told
    assert "must match the size" in told
    assert "Traceback" not in told


def test_the_last_line_of_the_users_file_counts(mine):
    """Not the one that called it."""
    with pytest.raises(coterie.EngineError, match=f"mine.py, line {line_of('add')}, in add:"):
        mine("aggregate", "return add(torch.zeros(2), torch.zeros(3))")


WRONG = [
    ("init", "return states", "returned a Own of 2 parts; expected a pair: the server"),
    ("init", "return [1], states", "returned a list in its server; expected tensors"),
    ("init", "return Pool(problem.start), problem.start[:1]", "expected one row per client: [3,"),
    ("download", "return server.w", "expected one row per client: [3, ...]"),
    ("local", "return w", "expected a pair: the upload, and the new state"),
    ("local", "return w, w", "expected a state with the parts of the old one (w, seen)"),
    ("local", "return w, Own(w, state.seen[:1])", "state.seen; expected the old shape [2]"),
    ("local", "return float(1), state", "a float in its upload; expected tensors"),
    ("aggregate", "return uploads.mean(0)", "expected the new server, a Pool of 1 parts as before"),
    ("aggregate", "server.w", "returned None; expected the new server"),
    ("serve", "return server.w", "expected one row per client: [3, ...]"),
    ("predictor", "return served", "expected a Mixture(weights [r], models [r, P])"),
    ("predictor", "return Mixture(served.new_ones(2), served[None])", "weights [2] and models [1,"),
    (
        "collaboration",
        "return torch.ones(2, 2)",
        "weights [2, 2]; expected weights [3, 3], or None",
    ),
    ("collaboration", "return [1.0]", "returned a list; expected None, or weights [K, K]"),
]


CASES = [("loop", *w) for w in WRONG]
CASES += [("vmap", *w) for w in WRONG if w[0] in ("local", "predictor")]  # the client half


@pytest.mark.parametrize(("engine", "mark", "line", "message"), CASES, ids=lambda part: part[:30])
def test_what_a_function_returns_is_checked_where_it_returns(mine, engine, mark, line, message):
    """In one sentence that names the function and its file; never an IndexError elsewhere."""
    with pytest.raises(coterie.EngineError) as found:
        mine(mark, line, engine)
    told = str(found.value)
    assert re.match(rf"Mine\.{mark}\(\) \(mine\.py, line \d+\) returned ", told), told
    assert message in told
    assert "\n" not in told


def test_a_network_of_ones_own_is_named(tmp_path):
    code = '''
import torch
from torch import nn

calls = []


class Net(nn.Module):
    """A network that fails when it is trained."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        if torch.is_grad_enabled():
            raise ValueError("not today")
        return self.layer(x.flatten(1))
'''
    (tmp_path / "mynet.py").write_text(code)
    with pytest.raises(coterie.EngineError, match=r"(?s)not today.*mynet\.py, line 17, in forward"):
        coterie.run(model="mynet:Net", engine="loop", code=str(tmp_path), **OF_FEDAVG)


def test_the_command_prints_it_without_a_traceback(mine, command):
    with pytest.raises(coterie.EngineError):
        mine("aggregate", "return 1 / 0")
    sys.modules.pop("mine", None)
    asked = ["--code", ".", "--method", "mine:Mine", "--rounds", "1", "--engine", "loop"]
    code, _, err = command("run", *asked)
    assert code == 2
    assert "Traceback" not in err
    assert re.search(
        r"ZeroDivisionError: division by zero\n +\S+mine\.py, line \d+, in aggregate", err
    )


def test_errors_of_a_callback_stay_as_they_are(mine):
    def watch(step):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        mine("", "", progress=watch)
