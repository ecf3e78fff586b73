"""What a run sets for the process is restored, and nothing else sets it."""

import re
from pathlib import Path

import pytest
import torch

import coterie
from coterie.algorithms.local import Local
from coterie.engines import process
from support import engine_of, task

SOURCE = Path(coterie.__file__).parent


def now():
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return torch.get_num_threads(), products.allow_tf32, convolutions.allow_tf32


@pytest.mark.parametrize("asked", [{"threads": 2}, {"tf32": True}, {}])
@pytest.mark.parametrize("fails", [False, True])
def test_settings_are_restored(asked, fails):
    before = now()
    try:
        with process.settings(**asked):
            threads, *tf32 = now()
            assert threads == asked.get("threads", before[0])
            assert tf32 == [asked["tf32"]] * 2 if "tf32" in asked else tuple(tf32) == before[1:]
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert now() == before


@pytest.mark.parametrize("engine", ["loop", "wire", "vmap", "auto"])
def test_making_an_engine_sets_nothing(engine):
    before, on = now(), task(Local())
    made = engine_of(engine, on, threads=2, rounds=1, trace=False)
    assert now() == before
    assert made.choice["engine"] == "vmap" or made.choice["threads"] == 2


def test_a_run_leaves_the_process_as_it_was():
    before = now()
    config = {"partition": {"clients": 2}, "model": {"name": "linear"}, "run": {"rounds": 1}}
    for engine in ({"name": "loop", "threads": 2}, {"name": "vmap", "trace": False}):
        coterie.run({**config, "engine": engine}, method="fedavg")
        assert now() == before


def test_threads_and_precision_are_set_in_one_place():
    allowed = {"engines/process.py", "compiled/trust.py"}  # scoped
    sets = re.compile(r"\bset_num_threads\(|\ballow_tf32 = ")
    texts = {path: path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    found = {at.relative_to(SOURCE).as_posix() for at, text in texts.items() if sets.search(text)}
    assert "engines/process.py" in found <= allowed
