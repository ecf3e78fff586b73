"""The clients of an experiment, wherever they are: in this process, or at sites of a federation.

A :class:`Setting` answers what the runner asks of the clients: what a server knows about them, the
engine that reaches them, and their own gains over training alone where their answers stay with
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.algorithm import AnyAlgorithm, check_run
from ..core.locations import located
from ..core.paired_tests import SiteGain
from ..core.policies import governed
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..data.manifest import Identity
from ..data.standard import Preprocessing
from ..engines import Engine
from .config.methods import Method
from .config.schema import Config
from .plan import Cell
from .resume import UnfinishedRun
from .run import Roster

Gains = Mapping[str, Sequence[SiteGain]]  # by method: one entry per client


class Prepared(NamedTuple):
    """What a run knows of its clients before it begins."""

    problem: Problem
    roster: Roster
    shards: Shards | None  # None where the data is elsewhere


class Setting(ABC):
    """The clients of an experiment. ``config`` has every "auto" that depends on data resolved."""

    config: Config

    def asked(self, cell: Cell) -> Config:
        return self.config.single(cell.method, cell.seed)

    @abstractmethod
    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        """What a server knows of the clients of one run; ``asked`` is the config of that run."""

    @abstractmethod
    def identity(self, seed: int) -> Identity:
        """Hashes of the clients' data and of how it is divided."""

    @abstractmethod
    def manifest(self, seed: int) -> dict[str, Any]:
        """The contents of a run's ``partition.json``."""

    @abstractmethod
    def preprocessing(self, seed: int) -> Preprocessing | None:
        """How samples become inputs; None if no schema can describe them."""

    @abstractmethod
    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """The engine that reaches the clients; an unfinished run keeps its own."""

    @abstractmethod
    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        """The server and the states before round 0, as a checkpoint stores them."""

    def gains(self, cells: Sequence[Cell]) -> Gains | None:
        """The clients' own gains; None if the runs' histories hold the answers on test samples."""
        return None

    def check(self, methods: Iterable[Method]) -> None:
        """Refuse, before anything is trained, a method that could not finish its run."""
        for method in methods:
            algorithm = method.build()
            problem = self.prepare(
                algorithm, self.config.single(method, self.config.seeds[0])
            ).problem
            with located(algorithm):
                check_run(governed(algorithm, problem), problem, self.config.run.rounds)

    @abstractmethod
    def close(self) -> None:
        """Release connections, and remove temporary files."""
