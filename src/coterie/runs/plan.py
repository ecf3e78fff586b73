"""What is to be run: a plan is a list of cells, each one method with one seed on one config."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .comparison_folder import place
from .config.methods import Method
from .config.schema import Config
from .run import LOCAL

FIRST = (LOCAL, "fedavg")  # run before the others, whose alarms and gains refer to them


class Cell(NamedTuple):
    """One run of a plan."""

    config: Config  # of the comparison that the run belongs to
    method: Method
    seed: int
    out: Path | None  # the run's folder; None keeps the run in memory
    kept: bool = True  # whether the folder stays when the run is finished, with a page

    @property
    def name(self) -> tuple[str, int]:
        """The method's label and the seed, by which a comparison knows its runs."""
        return self.method.label, self.seed


@dataclass(frozen=True)
class Plan:
    """Runs in the order in which they are wanted."""

    cells: tuple[Cell, ...]
    out: Path | None = None  # the folder of all runs
    shared: bool = False  # whether other processes may execute the same cells in the same folders
    wait: bool = True  # whether to wait in the end for cells that other processes have taken

    @classmethod
    def single(cls, config: Config, out: Path | None) -> "Plan":
        method, seed = config.method(), config.run.seed
        return cls((Cell(config.single(method, seed), method, seed, out),), out)

    @classmethod
    def comparison(cls, config: Config, out: Path | None) -> "Plan":
        return cls(
            tuple(
                Cell(config, method, seed, None if out is None else place(out, method.label, seed))
                for method in config.methods()
                for seed in config.seeds
            ),
            out,
        )


def columns(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """The cells of each config, in the order in which they are run: FIRST first for each seed."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        found.setdefault(id(cell.config), []).append(cell)
    for column in found.values():
        seeds = list(dict.fromkeys(cell.seed for cell in column))
        yield sorted(column, key=lambda c: (seeds.index(c.seed), turn(c.method.label)))


def turn(label: str) -> int:
    """The turn of a method within its seed."""
    return FIRST.index(label) if label in FIRST else len(FIRST)
