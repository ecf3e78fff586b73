"""The tables of a config and their own fields, defaults and limits.

What belongs to a name (a method's fields, a partition's) is kept as ``options`` and checked in
:mod:`coterie.experiment.config.loading` against what the name stands for.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ...core.imports import Code
from ...core.metrics import METRICS
from ...core.ranges import Count, CountOrZero, OneOf, ShareAboveZero, ShareBelowOne
from ...core.recipe import Recipe
from ...engines import ENGINES
from ...engines.base import DEVICE, MOST_THREADS
from ...training.guard import Guard
from .methods import Method, method_of

Table = dict[str, Any]
Fields = dict[str, Any]

METHOD = "fedfomo"  # of `coterie run`, and METHODS of `coterie compare`, where none is named
METHODS = ("local", "fedavg", "fedavg_ft", "fedfomo", "fedamp", "heurfedamp")

# What `coterie compare` runs where it is told nothing: hidden groups whose labels conflict. Half of
# each client's data is for testing, which leaves the others' models something to add.
DEMO: Table = {
    "data": {"name": "digits", "test": 0.5},
    "partition": {"name": "concept_shift", "clients": 12, "groups": 3},
    "model": {"name": "mlp"},
    "train": {"lr": 0.2, "epochs": 2, "batch": 10},
    "run": {"rounds": 20},
}


class _Table(BaseModel, frozen=True):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Named(_Table, frozen=True):
    """A name and the fields of what it stands for."""

    name: str
    options: Fields = {}


class PartitionTable(Named, frozen=True):
    """How samples are divided; each client may be judged on another's data (P1)."""

    name: str = "auto"
    foreign_targets: bool = False


class DataTable(_Table, frozen=True):
    """Where samples come from, and how a client's are divided.

    ``aux`` is the share of all test samples that the server holds instead, for EWC. ``scale`` is of
    images: pixels from 0 to 1, or standardised.
    """

    name: str = "digits"
    val: ShareBelowOne = 0.2
    test: ShareBelowOne = 0.2
    aux: ShareBelowOne = 0.0
    scale: Literal["auto", "unit", "standard"] = "auto"
    options: Fields = {}


class TrainTable(_Table, Recipe, frozen=True):
    """How a client trains in a round: all fields of Recipe, with its defaults and ranges.

    ``merge_val`` lets methods that weigh nothing on validation data train on it as well; no round
    is then chosen by validation (docs/protocol.md).
    """

    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    merge_val: bool = False

    def recipe(self) -> Recipe:
        """The recipe alone."""
        return Recipe(**self.model_dump(include={field.name for field in fields(Recipe)}))


class AlgorithmTable(_Table, frozen=True):
    """The method of a run, and the fields of every method by its name."""

    name: str | None = None
    named: dict[str, Fields] = {}


class EngineTable(_Table, frozen=True):
    """Who computes, and where."""

    name: Annotated[str, OneOf(tuple(ENGINES))] = "auto"
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    chunk: Count | None = None
    memory_mib: Count | None = None
    state: Literal["device", "host", "disk"] = "device"
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None
    play: bool | None = None
    compiled: bool | None = None


class RunTable(_Table, frozen=True):
    """How long, how often, how many, and where to."""

    rounds: Count = 20
    participation: ShareAboveZero = 1.0
    seed: CountOrZero = 0
    seeds: tuple[CountOrZero, ...] = ()
    methods: tuple[str, ...] | None = None
    evaluate_every: Count = 1
    metric: Annotated[str, OneOf(("auto", *METRICS))] = "auto"
    checkpoint_every: Count | None = None
    out: str | None = None


class GuardTable(_Table, Guard, frozen=True):
    """What may enter an aggregation: all fields of Guard, with its defaults and ranges."""


class Config(_Table, frozen=True):
    """A whole experiment, checked."""

    data: DataTable = DataTable()
    partition: PartitionTable = PartitionTable()
    model: Named = Named(name="auto")
    train: TrainTable = TrainTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    adapt: Named = Named(name="none")
    engine: EngineTable = EngineTable()
    guard: GuardTable = GuardTable()
    run: RunTable = RunTable()
    _code: Code = PrivateAttr(default=Code())  # no field: a config cannot allow itself anything

    @property
    def code(self) -> Code:
        """Where code that the config names may come from."""
        return self._code

    def with_code(self, code: Code) -> "Config":
        """The config, with code allowed from these places."""
        allowed = self.model_copy()
        allowed._code = code  # type: ignore[misc]  # private: no field, and never frozen
        return allowed

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of a comparison; the one seed where no list is given."""
        return self.run.seeds or (self.run.seed,)

    def method(self, name: str | None = None) -> Method:
        """A method with its fields as they are here; the config's own where none is named."""
        name = name or self.algorithm.name or METHOD
        adapt = self.adapt
        return method_of(name, self.algorithm.named, adapt.name, adapt.options, self.code)

    def methods(self) -> tuple[Method, ...]:
        """The methods of a comparison; Local is always one of them."""
        names = self.run.methods or ((self.algorithm.name,) if self.algorithm.name else METHODS)
        if "local" not in names:
            names = ("local", *names)
        return tuple({m.label: m for m in map(self.method, names)}.values())

    def single(self, method: Method, seed: int) -> "Config":
        """The config of one run of a comparison."""
        adapt = self.adapt if method.adaptation else Named(name="none")
        algorithm = AlgorithmTable(name=method.name, named={method.name: method.fields})
        run = self.run.model_copy(update={"seed": seed, "seeds": (), "methods": None})
        return self.model_copy(update={"algorithm": algorithm, "adapt": adapt, "run": run})
