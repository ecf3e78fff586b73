"""The output of ``coterie bench``: a table, or a list of JSON objects."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import Result
from .growth import Cost
from .short import Short


class Column(NamedTuple):
    """A column of the table: its title, the field it shows and its format."""

    title: str
    field: str
    form: str


RESULTS = (
    Column("", "workload", "<4"),
    Column("engine", "engine", "<7"),
    Column("s/round", "seconds_per_round", ">10.4f"),
    Column("ms/step", "ms_per_step", ">10.2f"),
    Column("over plain", "speedup_over_loop", ">10.2f"),
    Column("of ceiling", "share_of_ceiling", ">10.1%"),
    Column("peak MiB", "peak_mib", ">9.0f"),
    Column("rounds", "repeats", ">6"),
    Column("resolved to", "resolved", ""),
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


def show_results(results: Iterable[Result], *, as_json: bool) -> None:
    """Print the result of every engine on every workload, each when it is done."""
    if as_json:
        _objects(results)
        return
    for number, result in enumerate(results):
        if not number:
            rates = f"GEMM {result.gemm_gflops:.0f} GFLOP/s, copy {result.copy_gbs:.1f} GB/s"
            print(f"{result.device}, {result.precision}: {rates}\n{_titles(RESULTS)}")
        shown = result._replace(resolved=f"failed: {result.failed}") if result.failed else result
        print(_line(RESULTS, shown._asdict()), flush=True)


def show_costs(costs: Iterable[Cost], *, as_json: bool) -> None:
    """Print the costs of rounds of growing numbers of clients."""
    if as_json:
        _objects(costs)
        return
    print(_titles(COSTS))
    for cost in costs:
        print(_line(COSTS, cost._asdict()), flush=True)


def show_short(runs: Iterable[Short], *, as_json: bool) -> None:
    """Print the times of whole short runs with ``auto`` and with the loop."""
    if as_json:
        _objects(runs)
        return
    print(_titles(SHORT))
    for run in runs:
        print(_line(SHORT, run._asdict()), flush=True)


def _objects(rows: Iterable[Result] | Iterable[Cost] | Iterable[Short]) -> None:
    print(json.dumps([row._asdict() for row in rows], indent=1))


def _titles(columns: Sequence[Column]) -> str:
    return "  ".join(_fitted(c.title, c) for c in columns).rstrip()


def _line(columns: Sequence[Column], values: dict[str, object]) -> str:
    cells = ((values[c.field], c) for c in columns)
    shown = (_fitted("-", c) if value is None else format(value, c.form) for value, c in cells)
    return "  ".join(shown).rstrip()


def _fitted(text: str, column: Column) -> str:
    """A text padded to the column's width and aligned like its values."""
    return format(text, column.form.split(".")[0])
