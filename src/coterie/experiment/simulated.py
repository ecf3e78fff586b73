"""The clients of a simulation: all of their data is in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from ..core.algorithm import AnyAlgorithm
from ..core.metrics import METRICS
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..data.federation import Federation
from ..data.manifest import Identity, manifest
from ..data.preprocessing import Preprocessing, preprocessing_of
from ..data.simulation import Simulation, simulate
from ..engines import Engine, make_engine
from ..engines.wire import WireEngine
from ..results.history import Roster
from .config.schema import Config
from .resume import UnfinishedRun
from .setting import Cell, Gains, Prepared, Setting
from .simulated_sites import Homes


@final
@dataclass(frozen=True, eq=False)
class Assembly(Setting):
    """A config whose names are all resolved, with its federations and its network's factory."""

    config: Config
    federations: dict[int, Federation]  # by seed
    factory: Callable[[], nn.Module]
    homes: Homes

    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        """The problem and the shards of one run."""
        on = simulation_of(self, algorithm, asked)
        return Prepared(on.problem, Roster.of(on.federation), on.shards)

    def identity(self, seed: int) -> Identity:
        """Hashes of the clients' data and of how it is divided."""
        return self.federations[seed]

    def manifest(self, seed: int) -> dict[str, Any]:
        """The full description of the partition."""
        return manifest(self.federations[seed])

    def preprocessing(self, seed: int) -> Preprocessing | None:
        """How samples become inputs."""
        return preprocessing_of(self.federations[seed].dataset)

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """The engine that the config asks for, or that an interrupted run was executed with."""
        asked = self.config.single(cell.method, cell.seed)
        ways = None if left is None else left.ways
        asked = asked if left is None else left.with_engine(asked)
        if on.shards is None:
            raise AssertionError("a simulation holds the data of all clients")
        if asked.engine.name == "wire":
            return WireEngine(on.shards, threads=asked.engine.threads, home=self.homes.of(cell))
        alone = self.config == asked
        runs = 1 if alone else len(self.config.methods()) * len(self.config.seeds)
        return engine_of(asked, on.problem, on.shards, ways, scratch=cell.out, runs=runs)

    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        """The server and every client's state."""
        server, states = algorithm.init(problem)
        return server, states

    def gains(self, cells: Sequence[Cell]) -> Gains | None:
        """None, unless clients in other processes kept their answers to themselves."""
        if self.config.engine.name != "wire":
            return None
        clients = len(self.federations[self.config.seeds[0]])
        return self.homes.gains(cells, clients, self.config.run.metric)

    def close(self) -> None:
        """Remove the temporary files of clients in other processes."""
        self.homes.close()


def simulation_of(assembly: Assembly, algorithm: AnyAlgorithm, asked: Config) -> Simulation:
    """The problem and the shards of one run, whose config is ``asked``.

    ``merge_val`` has an effect only on methods that never read validation data.
    """
    train, seed = asked.train, asked.run.seed
    return simulate(
        assembly.federations[seed],
        assembly.factory,
        train.recipe(),
        seed=seed,
        device=assembly.config.engine.device,
        dtype=torch.float64 if train.precision == "float64" else torch.float32,
        merge_val=train.merge_val and not algorithm.traits.uses_validation,
        sharing=algorithm.traits.sharing,
        shares=METRICS[assembly.config.run.metric].by_share,
    )


def engine_of(
    config: Config,
    problem: Problem,
    shards: Shards,
    before: Mapping[str, str] | None = None,
    *,
    scratch: Path | None = None,
    runs: int = 1,
) -> Engine:
    """Make the engine that a config asks for; ``engines.process`` applies its process settings.

    ``before`` says how an interrupted run executed each form of a call (``core.calls.Form``),
    ``runs`` how many runs of a comparison share what ``auto`` measures. States on disk are files in
    the folder ``scratch``.
    """
    asked = config.engine
    return make_engine(
        asked.name,
        problem,
        shards,
        chunk=asked.chunk,
        memory_mib=asked.memory_mib,
        state=asked.state,
        threads=asked.threads,
        trace=asked.trace,
        compiled=asked.compiled,
        rounds=config.run.rounds,
        participation=config.run.participation,
        runs=runs,
        before=before,
        scratch=scratch,
    )
