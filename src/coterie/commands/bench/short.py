"""Times whole short runs: engine ``auto`` against the loop, in new processes with empty caches.

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

from ...errors import ConfigError, EngineError, did_you_mean
from ...runs import interrupt
from ...runs.assemble import assemble
from ...runs.config.loading import load
from ...runs.config.schema import Config
from ...runs.runner import execute
from ...runs.setting import Cell

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


def short(models: Sequence[str], repeats: int) -> Iterator[Short]:
    """Yield a result for every model, method and number of rounds; engines take turns."""
    for name in models:
        if name not in MODELS:
            raise ConfigError(f"model '{name}' is unknown here; {did_you_mean(name, MODELS)}")
    assemble(config_of(MODELS[0], METHODS[0], 1, "loop"))  # raises here if data is missing
    for model in models or MODELS:
        for method in METHODS:
            for rounds in ROUNDS:
                yield _short(model, method, rounds, repeats)


def _short(model: str, method: str, rounds: int, repeats: int) -> Short:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for _ in range(repeats):
        for engine in ENGINES:
            found[engine].append(_in_new_process(model, method, str(rounds), engine))
    wall, cpu = (
        {name: statistics.median(run[key] for run in runs) for name, runs in found.items()}
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
    """One run in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            env={**os.environ, "COTERIE_CACHE": cache},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise EngineError(f"a run of {' '.join(arguments)} failed: {said}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def timed(model: str, method: str, rounds: int, engine: str) -> dict[str, Any]:
    """Execute one run in this process: its seconds, processor seconds, and engine."""
    config = config_of(model, method, rounds, engine)
    chosen = config.method()
    assembly = assemble(config.single(chosen, config.run.seed))
    began, used = time.perf_counter(), _cpu()
    with interrupt.held(None) as stop:
        result = execute(assembly, Cell(chosen, config.run.seed, None), stop=stop)
    seconds, cpu = time.perf_counter() - began, _cpu() - used
    found = result.config["resolved"]
    words = ", ".join(f"{name} {found[name]}" for name in ("engine", "chunk") if name in found)
    return {"seconds": seconds, "cpu": cpu, "resolved": words}


def _cpu() -> float:
    """Processor seconds of this process and of the children it waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


if __name__ == "__main__":
    model, method, rounds, engine = sys.argv[1:]
    print(json.dumps(timed(model, method, int(rounds), engine)))
