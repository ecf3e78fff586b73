"""Times a round of every engine against a plain PyTorch loop, as ratios in one run.

    make bench ARGS="W1 W4 --json"

A workload with long rounds is timed with fewer rounds, at least three.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

import growth
import short
from coterie.algorithms import ALGORITHMS
from coterie.core.algorithm import AnyAlgorithm
from coterie.data.simulation import Simulation
from coterie.engines import EngineSettings, Length, make_backend
from coterie.engines.base import Backend, Work
from coterie.engines.process import settings
from plain import fastest
from timing import (
    FAILURES,
    WARM,
    Bill,
    Contestant,
    Lap,
    Machine,
    bill,
    busy,
    machine,
    race,
    reason,
    tell,
)
from workloads import HORIZON, WORKLOADS, Steady, Workload, steady

ENGINES = ("auto", "vmap", "loop")


class Result(NamedTuple):
    """The timing of one engine on one workload; a value that could not be measured is None."""

    workload: str
    engine: str  # "plain" is the plain PyTorch loop
    seconds_per_round: float | None
    speedup_over_loop: float | None  # over the plain loop
    peak_mib: float | None  # memory of a round beyond what was held before it
    share_of_ceiling: float | None  # the shortest possible time divided by the time it took
    precision: str
    device: str
    resolved: str  # what the engine chose
    failed: str  # why the engine failed; empty if it did not
    repeats: int  # rounds that the median is over
    ms_per_step: float | None  # one step of all clients
    gflop: float  # of a round
    gbytes: float  # moved in a round at least
    gemm_gflops: float  # of the machine, per second
    copy_gbs: float  # of the machine, per second

    @property
    def told(self) -> str:
        """What the engine chose, or why it failed."""
        return f"failed: {self.failed}" if self.failed else self.resolved


def results(
    works: Iterable[Workload], device: torch.device, precision: str, repeats: int
) -> Iterator[Result]:
    """Yield the result of every engine on some workloads, each workload when it is done."""
    with settings(tf32=precision == "tf32"):
        tell("the machine's rates")
        here = machine(device, precision)
        for work in works:
            cost, laps = measured(work, device, repeats)
            for name, lap in laps.items():
                yield _result(work, name, lap, laps["plain"].seconds, cost, here)


def _result(
    work: Workload, name: str, lap: Lap, loop: float | None, cost: Bill, here: Machine
) -> Result:
    spent = lap.seconds
    return Result(
        workload=work.name,
        engine=name,
        seconds_per_round=spent,
        speedup_over_loop=loop / spent if loop and spent else None,
        peak_mib=lap.peak_mib,
        share_of_ceiling=cost.seconds(here) / spent if spent else None,
        precision=here.precision,
        device=here.device,
        resolved=lap.resolved,
        failed=lap.failed,
        repeats=lap.repeats,
        ms_per_step=1e3 * spent / work.steps if spent else None,
        gflop=cost.flops / 1e9,
        gbytes=cost.bytes / 1e9,
        gemm_gflops=here.gemm / 1e9,
        copy_gbs=here.copy / 1e9,
    )


def measured(work: Workload, device: torch.device, repeats: int) -> tuple[Bill, dict[str, Lap]]:
    """The cost of a round of a workload, and the timings of the plain loop and every engine."""
    tell(f"{work.name}, {work.about}, {work.clients} x {work.samples}: setting up")
    start, cores = steady(work.method, work.simulation(device)), torch.get_num_threads()
    plain, chosen = fastest(start, cores)
    cost = bill(work, plain.clients)
    field = {"plain": Contestant(plain, chosen["threads"], words(chosen))}
    failed = {}
    for name in ENGINES:
        tell(f"{work.name}: making engine '{name}'")
        try:
            field[name] = contestant(name, start)
        except FAILURES as error:
            failed[name] = Lap(failed=reason(error))
    laps = race(field, device, repeats, lambda line: tell(f"{work.name}: {line}"))
    return cost, {**laps, **failed}


class Cost(NamedTuple):
    """The processor seconds of a method's round beside FedAvg's, on one thread, in turns."""

    workload: str
    method: str
    cpu_seconds: float | None
    over_fedavg: float | None
    told: str  # what the engine chose, or why it failed


def costs(works: Iterable[Workload], names: Sequence[str], repeats: int) -> Iterator[Cost]:
    """Yield the cost of these methods, with their defaults, on some workloads."""
    for work in works:
        on = work.simulation(torch.device("cpu"))
        fedavg = _prepared(ALGORITHMS["fedavg"](), on)
        for name in names:
            tell(f"{work.name}: {name}")
            try:
                mine = fedavg if name == "fedavg" else _prepared(ALGORITHMS[name](), on)
                with settings(threads=1):
                    turns = [(_cpu(fedavg), _cpu(mine)) for _ in range(WARM + repeats)][WARM:]
            except FAILURES as error:
                yield Cost(work.name, name, None, None, f"failed: {reason(error)}")
                continue
            base, own = (statistics.median(times) for times in zip(*turns, strict=True))
            yield Cost(work.name, name, own, own / base, mine.resolved)


def _prepared(method: AnyAlgorithm, on: Simulation) -> Contestant:
    method.check(on.problem, HORIZON)
    return contestant("vmap", steady(method, on))


def _cpu(one: Contestant) -> float:
    began = time.process_time()
    one.once()
    return time.process_time() - began


def contestant(engine: str, start: Steady) -> Contestant:
    """Rounds of a method on the backend that a long run would use."""
    work = Work(start.on.problem, start.on.shards)
    made = make_backend(EngineSettings(engine), work, Length(growth.LONG))
    return Contestant(_round_of(made, start), made.choice["threads"], words(made.choice))


def _round_of(backend: Backend, start: Steady) -> Callable[[], None]:
    """A function that executes one round of the method, without evaluation."""
    _, method, server, states, round = start

    def once() -> None:
        uploads, _ = backend.local(method, method.download(server, round), states, round)
        method.aggregate(server, uploads, round)

    return once


def words(choice: dict[str, object]) -> str:
    """What an engine or the plain loop chose."""
    told = (f"{key} {value}" for key, value in choice.items() if key != "compiler")
    return ", ".join(told)


# ---- printing ------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of a table: its title, the field it shows and its format."""

    title: str
    field: str
    form: str

    def cell(self, value: object) -> str:
        """A value in the column's format, a dash where there is none."""
        return self.fitted("-") if value is None else format(value, self.form)

    def fitted(self, text: str) -> str:
        """A text padded to the column's width and aligned like its values."""
        return format(text, self.form.split(".")[0])


RESULTS = (
    Column("", "workload", "<4"),
    Column("engine", "engine", "<7"),
    Column("s/round", "seconds_per_round", ">10.4f"),
    Column("ms/step", "ms_per_step", ">10.2f"),
    Column("over plain", "speedup_over_loop", ">10.2f"),
    Column("of ceiling", "share_of_ceiling", ">10.1%"),
    Column("peak MiB", "peak_mib", ">9.0f"),
    Column("rounds", "repeats", ">6"),
    Column("resolved to", "told", ""),
)
BY_METHOD = (
    Column("", "workload", "<4"),
    Column("method", "method", "<15"),
    Column("CPU s/round", "cpu_seconds", ">11.4f"),
    Column("over FedAvg", "over_fedavg", ">11.2f"),
    Column("resolved to", "told", ""),
)
COSTS = (
    Column("method", "method", "<7"),
    Column("registered", "registered", ">10"),
    Column("clients", "clients", ">7"),
    Column("engine", "engine", "<7"),
    Column("s/round", "seconds_per_round", ">10.4f"),
    Column("s/client", "seconds_per_client", ">10.6f"),
    Column("peak MiB", "peak_mib", ">9.0f"),
)
SHORT = (
    Column("model", "model", "<10"),
    Column("method", "method", "<7"),
    Column("rounds", "rounds", ">6"),
    Column("auto, s", "auto_seconds", ">8.1f"),
    Column("loop, s", "loop_seconds", ">8.1f"),
    Column("ratio", "ratio", ">6.3f"),
    Column("CPU ratio", "cpu_ratio", ">9.3f"),
    Column("turns", "turns", ">5"),
    Column("resolved to", "resolved", ""),
)


def show(rows: Iterable[NamedTuple], columns: Sequence[Column], *, as_json: bool) -> None:
    """Print a table, each row when it is done; or a list of JSON objects at the end."""
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    for number, row in enumerate(rows):
        if not number:
            if isinstance(row, Result):
                rates = f"GEMM {row.gemm_gflops:.0f} GFLOP/s, copy {row.copy_gbs:.1f} GB/s"
                print(f"{row.device}, {row.precision}: {rates}")
            print("  ".join(column.fitted(column.title) for column in columns))
        told = (column.cell(getattr(row, column.field)) for column in columns)
        print("  ".join(told).rstrip(), flush=True)


# ---- the command line ----------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    """The options of ``make bench``."""
    about = [f"  {work.name}  {work.about}" for work in WORKLOADS.values()]
    parser = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        epilog="\n".join(["workloads:", *about]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="or MODEL of --short; all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds per engine")
    parser.add_argument("--precision", choices=("float32", "tf32"), default="float32")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--scale", action="store_true", help="rounds of 10 to 1,000 clients")
    instead.add_argument("--population", action="store_true", help="100 of 100 to 10,000 clients")
    instead.add_argument(
        "--methods", metavar="A,B", help="methods against FedAvg, on a CPU; or all"
    )
    instead.add_argument("--short", action="store_true", help="whole short runs against the loop")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--force", action="store_true", help="measure even on a busy machine")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; 2 where this cannot be measured or the machine is busy."""
    parser = options()
    asked = parser.parse_args(arguments)
    known = short.MODELS if asked.short else WORKLOADS
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"found {', '.join(unknown)}; expected {', '.join(known)}")
    if lost := {*(asked.methods or "all").split(",")} - {"all", *ALGORITHMS}:
        parser.error(f"--methods: found {', '.join(lost)}; see coterie list methods")
    if asked.repeats < 1:
        parser.error(f"--repeats: found {asked.repeats}; expected 1 or more")
    if asked.precision == "tf32" and asked.device == "cpu":
        parser.error("precision 'tf32' is a GPU's; found device 'cpu'; use float32")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("device 'cuda': torch sees no CUDA device here; use cpu")
    if not asked.force and (why := busy()):
        parser.error(why)
    device = torch.device(asked.device)
    if asked.scale:
        show(growth.scale(device, asked.repeats), COSTS, as_json=asked.json)
    elif asked.population:
        show(growth.population(device, asked.repeats), COSTS, as_json=asked.json)
    elif asked.short:
        show(short.runs(asked.names or known, asked.repeats), SHORT, as_json=asked.json)
    elif asked.methods:
        works = [WORKLOADS[name] for name in asked.names or ["W4"]]  # on W1 WAFFLE needs 23 GB
        names = list(ALGORITHMS) if asked.methods == "all" else asked.methods.split(",")
        show(costs(works, names, asked.repeats), BY_METHOD, as_json=asked.json)
    else:
        works = [WORKLOADS[name] for name in asked.names or known]
        found = results(works, device, asked.precision, asked.repeats)
        show(found, RESULTS, as_json=asked.json)


if __name__ == "__main__":
    main()
