"""A round of coterie, of a plain PyTorch loop and of other frameworks, taking turns in one run.

    .venv/bin/python bench/compare.py [W1 W2 W3] [--peer NAME] [--repeats 5] [--json]

Each peer runs in its own environment, ``.venv-peers/NAME``, which ``make bench-peers`` makes.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import coterie
from coterie.engines.process import settings
from plain import fastest
from run import contestant, words
from timing import WARM, Contestant, busy, timed
from workers import PeerError, Worker
from workloads import WORKLOADS, steady

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".venv-peers"
PEERS = {"fedjax": ("jit", "one_core", "pmap"), "pfl": ("threads", "processes"), "flower": ("ray",)}
NAMES = ("W1", "W2", "W3")
CPU = torch.device("cpu")
PATIENCE = 900.0  # seconds for a worker to build and warm up, or for one round


class Entrant(NamedTuple):
    """Somebody whose rounds are timed."""

    engine: str
    once: Callable[[], float]  # a round, and its seconds
    version: str
    setting: str


class Row(NamedTuple):
    """One contestant on one workload; what was not measured is None, and ``failed`` says why."""

    workload: str
    engine: str
    setting: str
    version: str
    seconds_per_round: float | None
    speedup_over_loop: float | None  # the plain loop's seconds over its own
    ratio_of_auto: float | None  # its seconds over those of coterie's auto
    failed: str


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where a peer failed, 2 where the machine is busy."""
    told = options().parse_args(arguments)
    if unknown := sorted(set(told.workloads) - set(NAMES)):
        options().error(f"found {', '.join(unknown)}; expected {', '.join(NAMES)}")
    if not told.force and (why := busy()):
        options().error(why)
    rows: list[Row] = []
    for workload in told.workloads or NAMES:
        found = compare(workload, told.peer or list(PEERS), told.repeats, torch.get_num_threads())
        rows += found
        if not told.json:
            print(table(found), flush=True)
    if told.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    return int(any(row.failed for row in rows))


def options() -> argparse.ArgumentParser:
    """What may be typed."""
    parser = argparse.ArgumentParser(description="coterie against other frameworks, on the CPU")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="W1, W2, W3; all")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only these")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each")
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.add_argument("--force", action="store_true", help="even on a busy machine")
    return parser


def compare(workload: str, peers: list[str], repeats: int, cores: int) -> list[Row]:
    """All contestants on one workload."""
    entrants, absent = [], []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for peer, setting in [(name, one) for name in peers for one in PEERS[name]]:
            tell(f"{workload}: {peer}, {setting}: building and warming up")
            try:
                spec = {**job(workload, cores), "setting": setting}
                entrants.append(enter(peer, spec, logs / f"{peer}-{setting}", stack))
            except PeerError as error:
                absent.append(Row(workload, peer, setting, "", None, None, None, str(error)))
        tell(f"{workload}: coterie: building and warming up")
        entrants = [*ours(workload, cores), *entrants]
        tell(f"{workload}: timing")
        times = take_turns(entrants, repeats)
    return [*rows(workload, entrants, times), *absent]


def ours(workload: str, cores: int) -> list[Entrant]:
    """The plain loop and ``auto``, warm."""
    work = WORKLOADS[workload]
    start = steady(work.method, work.simulation(CPU))
    plain, chosen = fastest(start, cores)
    torch.set_num_threads(cores)
    loop = Contestant(plain, chosen["threads"], words(chosen))
    entrants = [
        in_this_process("plain", f"torch {torch.__version__}", loop),
        in_this_process("auto", f"coterie {coterie.__version__}", contestant("auto", start)),
    ]
    for one in entrants:
        for _ in range(WARM):
            one.once()
    return entrants


def in_this_process(engine: str, version: str, one: Contestant) -> Entrant:
    """A contestant of this process."""

    def once() -> float:
        with settings(threads=one.threads):
            return timed(one.once, CPU)

    return Entrant(engine, once, version, one.resolved)


def job(workload: str, cores: int) -> dict[str, Any]:
    """The workload in the words that a worker understands."""
    work = WORKLOADS[workload]
    problem = work.simulation(CPU).problem
    return {
        "workload": workload,
        "model": work.model,
        "shape": work.shape,
        "clients": work.clients,
        "samples": work.samples,
        "batch": work.batch,
        "lr": problem.recipe.lr,
        "steps": work.clients * work.steps,
        "parameters": problem.model.parameters,
        "cores": cores,
    }


def enter(peer: str, spec: dict[str, Any], log: Path, stack: ExitStack) -> Entrant:
    """A peer's worker, warm and paused; the stack ends it."""
    python = ENVIRONMENTS / peer / "bin" / "python"
    if not python.exists():
        raise PeerError(f"{python} does not exist; run `make bench-peers`")
    worker = Worker([str(python), str(HERE / "peers" / f"{peer}_worker.py"), json.dumps(spec)], log)
    stack.callback(worker.close)
    said = worker.ready(PATIENCE)
    return Entrant(peer, lambda: worker.round(PATIENCE), said["version"], said["setting"])


def take_turns(entrants: list[Entrant], repeats: int) -> list[list[float] | str]:
    """Everybody's seconds, a round each in turn; or why somebody dropped out."""
    times: list[list[float] | str] = [[] for _ in entrants]
    for _ in range(repeats):
        for place, entrant in enumerate(entrants):
            so_far = times[place]
            if isinstance(so_far, str):
                continue
            try:
                so_far.append(entrant.once())
            except PeerError as error:
                times[place] = str(error)
    return times


def rows(workload: str, entrants: list[Entrant], times: list[list[float] | str]) -> list[Row]:
    """Medians, and their ratios to the plain loop and to auto."""
    medians = [None if isinstance(spent, str) else statistics.median(spent) for spent in times]
    by_name = dict(zip((entrant.engine for entrant in entrants), medians, strict=True))
    made = []
    for entrant, spent, median in zip(entrants, times, medians, strict=True):
        made.append(
            Row(
                workload,
                entrant.engine,
                entrant.setting,
                entrant.version,
                median,
                by_name["plain"] / median if median else None,
                median / by_name["auto"] if median else None,
                spent if isinstance(spent, str) else "",
            )
        )
    return made


def table(rows: list[Row]) -> str:
    """One workload for a reader."""
    lines = [f"{'':4} {'':8} {'s a round':>10} {'over plain':>11} {'of auto':>9}   setting"]
    for row in rows:
        if row.failed:
            figures = f"{'failed':>10} {'':>11} {'':>9}"
        else:
            seconds, speedup, ratio = row[4:7]
            figures = f"{seconds:10.4f} {speedup:9.2f} x {ratio:7.2f} x"
        about = "; ".join(part for part in (row.setting, row.version, row.failed) if part)
        lines.append(f"{row.workload:4} {row.engine:8} {figures}   {about}")
    return "\n".join(lines)


def tell(line: str) -> None:
    """Progress: what is under way."""
    print(f"peers: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
