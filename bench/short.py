"""Times whole short runs: engine ``auto`` against the loop, in new processes with empty caches.

    python bench/short.py MODEL METHOD ROUNDS ENGINE     # one of these runs; prints a JSON object

A long run pays back the time that ``auto`` spends on measuring, tracing and compiling; a short run
must not be slower than the loop because of it. The setting is that of
``experiments/methods/fashion_mnist.toml``; its data is read from ``COTERIE_DATA``.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from coterie.runs.assemble import assemble
from coterie.runs.config.loading import load
from coterie.runs.config.schema import Config
from coterie.runs.execute import run_cell
from coterie.runs.plan import Plan
from coterie.runs.run import Run
from coterie.runs.setting import Setting

MODELS = ("lenet5", "fedavg_cnn")
METHODS = ("fedavg", "fedfomo")
ROUNDS = (1, 3, 10)
ENGINES = ("auto", "loop")


class Short(NamedTuple):
    """Median times of whole runs with both engines, without the time to read data."""

    model: str
    method: str
    rounds: int
    auto_seconds: float
    loop_seconds: float
    ratio: float  # of the medians
    cpu_ratio: float  # of the medians of processor seconds, compilers included
    resolved: str  # what auto chose in the last turn
    turns: int


def config_of(model: str, method: str, rounds: int, engine: str) -> Config:
    """The config of one run."""
    return load(
        {
            "data": {"name": "fashion_mnist"},
            "partition": {"name": "practical_groups", "clients": 30},
            "model": {"name": model},
            "train": {"lr": 0.05, "epochs": 2, "batch": 32},
            "algorithm": {"name": method},
            "engine": {"name": engine},
            "run": {"rounds": rounds, "evaluate_every": 4},
        }
    )


def runs(models: Sequence[str], repeats: int) -> Iterator[Short]:
    """Yield a result for every model, method and number of rounds; engines take turns."""
    return (
        _short(model, method, rounds, repeats)
        for model in models
        for method in METHODS
        for rounds in ROUNDS
    )


def _short(model: str, method: str, rounds: int, repeats: int) -> Short:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for _ in range(repeats):
        for engine in ENGINES:
            found[engine].append(_in_new_process(model, method, str(rounds), engine))
    wall, cpu = (
        {name: statistics.median(run[key] for run in done) for name, done in found.items()}
        for key in ("seconds", "cpu")
    )
    return Short(
        model,
        method,
        rounds,
        auto_seconds=wall["auto"],
        loop_seconds=wall["loop"],
        ratio=wall["auto"] / wall["loop"],
        cpu_ratio=cpu["auto"] / cpu["loop"],
        resolved=found["auto"][-1]["resolved"],
        turns=repeats,
    )


def _in_new_process(*arguments: str) -> dict[str, Any]:
    """One run in a process of its own, with an empty cache; its errors are shown as they are."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "COTERIE_CACHE": cache},
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout)


def timed(config: Config) -> dict[str, Any]:
    """Execute one run in this process: its seconds, processor seconds, and engine."""
    setting = assemble(config)
    began, used = time.perf_counter(), _cpu()
    result = executed(setting)
    seconds, cpu = time.perf_counter() - began, _cpu() - used
    found = result.config["resolved"]
    words = ", ".join(f"{name} {found[name]}" for name in ("engine", "chunk") if name in found)
    return {"seconds": seconds, "cpu": cpu, "resolved": words}


def executed(setting: Setting) -> Run:
    """Execute the one run of a config, in memory."""
    return run_cell(setting, Plan.single(setting.config, None).cells[0])


def _cpu() -> float:
    """Processor seconds of this process and of the children it waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


if __name__ == "__main__":
    model, method, rounds, engine = sys.argv[1:]
    print(json.dumps(timed(config_of(model, method, int(rounds), engine))))
