"""Kill runs of every method at random instants, resume them, and write down what came of it.

    python docs/results/reliability.py --kills 50 --seed 0 > docs/results/reliability.md

Every run is a process of its own, started by the command line and ended by SIGKILL. Its folder is
then resumed, perhaps to be killed again, and at the end compared with an uninterrupted run.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import coterie
from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.runs import checkpoint, run_folder
from coterie.runs.environment import environment

CONFIG: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "concept_shift", "clients": 8, "groups": 2},
    "model": {"name": "mlp"},
    "engine": {"name": "vmap", "chunk": 8, "threads": 1},
    "run": {"rounds": 25, "participation": 0.6, "seed": 3, "checkpoint_every": 2},
}
COSTS = (  # model, clients, method, rounds
    ("mlp", 12, "fedavg", 200),
    ("mlp", 12, "fedfomo", 200),
    ("mlp", 100, "fedfomo", 100),
    ("lenet5", 20, "fedamp", 60),
    ("fedavg_cnn", 10, "fedfomo", 20),
)

HEAD = """# Kills at random instants

{total} kills (SIGKILL) over {methods} methods, {rounds} rounds each; **{runs} runs ended with the
digest of their uninterrupted run** and with every file as its manifest says{others}.
{midway} of the kills came while a checkpoint was being written, {early} where no finished one was
there. The instants are drawn: a round, uniform over those to come and the writing of the results
after the last, and a moment within one and a half times the length of a round.

```
python docs/results/reliability.py --kills {kills} --seed {seed} > docs/results/reliability.md
```

Commit `{commit}`, {versions}, {machine}; seeds: kills {seed}, runs {own}. A checkpoint is written
after every second round."""

TAIL = """
## What a checkpoint costs

Measured in the same session, on a machine that others were using. "Each round" is
`run.checkpoint_every = 1`; "by rule" is the default: a checkpoint is written when the rounds since
the last one took at least twenty times what that one cost.

| model | clients | method | a round | each round | written | share | by rule | written | share |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""

WRITE = checkpoint.Keeper.write


class Kill(NamedTuple):
    """One kill: how far the run had come."""

    logged: int  # rounds in rounds.jsonl
    saved: str  # the newest checkpoint
    midway: bool  # a checkpoint was being written


def kill_somewhere(command: list[str], out: Path, rounds: int, after: float) -> bool:
    """Start a command and kill it so many seconds after so many rounds; False if it had ended."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready = out / run_folder.ENVIRONMENT  # written anew when a run is resumed
    seen = ready.stat().st_mtime_ns if ready.exists() else None
    while process.poll() is None:
        if ready.exists() and ready.stat().st_mtime_ns != seen and logged(out) >= rounds:
            break
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    return process.wait() == -signal.SIGKILL


def logged(out: Path) -> int:
    """Rounds in the log."""
    path = out / run_folder.ROUNDS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def state_of(out: Path) -> Kill:
    """What a killed run has left."""
    home = out / checkpoint.FOLDER
    names = sorted(p.name for p in home.iterdir()) if home.exists() else []
    saved = [name for name in names if name.startswith("round-")]
    last = str(int(saved[-1].removeprefix("round-"))) if saved else "none"
    return Kill(logged(out), last, any(name.startswith(".") for name in names))


def ended_as(whole: coterie.Run, out: Path) -> bool:
    """Whether a run has the digest of an uninterrupted one and files as they were written."""
    same: bool = coterie.resume(out).summary["digest"] == whole.summary["digest"]
    return same and coterie.verify(out) == {str(out): []}


def tortured(method: str, kills: int, luck: random.Random, home: Path) -> tuple[list[Kill], bool]:
    """Kill one run several times and resume it; whether it ends as the uninterrupted one."""
    began = time.perf_counter()
    whole = coterie.run(CONFIG, method=method, out=str(home / f"{method}-whole"))
    rounds = CONFIG["run"]["rounds"]
    a_round = whole.summary["seconds"] / rounds
    out, config = home / method, home / "config.json"
    config.write_text(json.dumps(CONFIG))
    start = [sys.executable, "-m", "coterie"]
    command = [*start, "run", str(config), "--method", method, "--out", str(out)]
    done: list[Kill] = []
    late, same = 0, True
    while len(done) < kills and late < 20:
        first = min(logged(out), rounds - 1)
        at, after = luck.randrange(first, rounds + 1), luck.uniform(0, 1.5 * a_round)
        if kill_somewhere(command, out, at, after):
            done.append(state_of(out))
        else:
            late += 1
        if (out / "MANIFEST.json").exists():  # it was finished: begin anew
            same &= ended_as(whole, out)
            out = home / f"{method}-{len(done)}-{late}"
            command = [*start, "run", str(config), "--method", method, "--out", str(out)]
        elif (out / "config.json").exists():
            command = [*start, "resume", str(out)]
    if not (out / "config.json").exists():
        subprocess.run(command, check=True, capture_output=True)
    elif not (out / "MANIFEST.json").exists():
        subprocess.run([*start, "resume", str(out)], check=True, capture_output=True)
    same &= ended_as(whole, out)
    print(
        f"{method}: {done} {same} {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True
    )
    return done, same


def timed(into: list[float]) -> Any:
    """The writing of a checkpoint, with what it cost noted."""

    def write(self: checkpoint.Keeper, *given: Any) -> None:
        WRITE(self, *given)
        into.append(self.cost or 0.0)

    return write


def cost(model: str, clients: int, method: str, rounds: int) -> str:
    """A row of the table of costs: checkpoints after each round, and as the rule allows."""
    cells = []
    for every in ({"checkpoint_every": 1}, {}):
        spent: list[float] = []
        checkpoint.Keeper.write = timed(spent)  # type: ignore[method-assign]
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "data": {"name": "digits"},
                "partition": {"name": "iid", "clients": clients},
                "model": {"name": model},
                "engine": {"name": "vmap", "chunk": 20, "threads": 1},
                "run": {"rounds": rounds, **every},
            }
            work = coterie.run(config, method=method, out=f"{folder}/run").summary["seconds"]
        checkpoint.Keeper.write = WRITE  # type: ignore[method-assign]
        cells += [
            f"{1000 * sum(spent) / len(spent):.0f} ms" if spent else "",
            str(len(spent)),
            f"{100 * sum(spent) / work:.1f} %",
        ]
    return (
        f"| {model} | {clients} | {method} | {1000 * work / rounds:.0f} ms | "
        + " | ".join(cells)
        + " |"
    )


def main() -> None:
    """Everything, as Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    luck = random.Random(asked.seed)
    methods = [*ALGORITHMS, *ALIASES]
    where = environment()
    kills: list[Kill] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, method in enumerate(methods):
            share = asked.kills * (i + 1) // len(methods) - asked.kills * i // len(methods)
            done, same = tortured(method, share, luck, Path(folder))
            kills += done
            wrong += [] if same else [method]
    runs = f"{len(methods) - len(wrong)} of {len(methods)}"
    machine = f"{where['cores']} cores, one thread, {platform.platform()}"
    text = HEAD.format(
        total=len(kills),
        others=f" (not {', '.join(wrong)})" if wrong else "",
        midway=sum(kill.midway for kill in kills),
        early=sum(kill.saved == "none" for kill in kills),
        methods=len(methods),
        rounds=CONFIG["run"]["rounds"],
        runs=runs,
        kills=asked.kills,
        seed=asked.seed,
        own=CONFIG["run"]["seed"],
        commit=where["git_commit"],
        versions=f"Python {where['python']}, torch {where['versions']['torch']}",
        machine=machine,
    )
    print(text)
    print(TAIL)
    for line in COSTS:
        print(cost(*line), flush=True)


if __name__ == "__main__":
    main()
