"""The tables of a config with their fields, defaults and ranges.

The fields of what a table names (of a method, of a partition) are kept as ``options``; they are
checked in :mod:`coterie.runs.config.checks`.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ...core.imports import Code
from ...core.metrics import METRICS
from ...core.optim import Recipe
from ...core.privacy import Privacy
from ...core.ranges import Count, CountOrZero, OneOf, ShareAboveZero, ShareBelowOne
from ...data.partition import Fold
from ...engines import EngineSettings
from ...networks.changes import Changes, Lora
from ...training.guard import Guard
from .methods import Method, method_of

Table = dict[str, Any]
Fields = dict[str, Any]

# What `coterie run` and `coterie compare` take if no method is named.
METHOD = "fedfomo"
METHODS = ("local", "fedavg", "fedavg_ft", "fedfomo", "fedamp", "circle")

# The config of a command without a file: hidden groups whose labels conflict. Half of each client's
# data is for testing, so that training data is scarce and other clients' models can help.
DEMO: Table = {
    "data": {"name": "digits", "test": 0.5},
    "partition": {"name": "concept_shift", "clients": 12, "groups": 3},
    "model": {"name": "mlp"},
    "train": {"lr": 0.2, "epochs": 2, "batch": 10},
    "run": {"rounds": 20},
}


SITES = "sites"  # data.name of an experiment whose clients are the sites of a federation


class _Table(BaseModel, frozen=True):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Named(_Table, frozen=True):
    """A name and the fields of what it names."""

    name: str  # of what is used here, or auto
    options: Fields = {}


class PartitionTable(Named, frozen=True):
    """How samples are divided among clients.

    With ``foreign_targets`` each client is judged on another client's data (P1), with
    ``common_test`` on all test samples of the source (P3). ``above`` leaves out clients with no
    more samples than that, ``first`` all but so many of the others (P3).
    """

    name: str = "auto"  # a partition, or package.module:Class; auto: natural or iid
    foreign_targets: bool = False  # judge each client on another's data
    common_test: bool | None = None  # test all clients on all test samples of the source
    above: Count | None = None  # leave out clients with no more samples than that
    first: Count | None = None  # keep so many clients at most


class DataTable(_Table, frozen=True):
    """Where samples come from, and how the samples of a client are split.

    ``federated`` is the share of each client's samples that goes into the federated test set, which
    no client holds and on which a global model is scored. ``aux`` is the share of all test samples,
    or of the federated test set, that the server holds instead, for EWC. ``scale`` concerns images:
    pixels from 0 to 1, or standardised.
    """

    name: str = "digits"  # a dataset, a file or folder, or package.module:Class
    val: ShareBelowOne = 0.2  # share of a client's samples outside its test data
    test: ShareBelowOne = 0.2  # share of a client's samples
    aux: ShareBelowOne = 0.0  # share of all test samples that the server holds
    federated: ShareBelowOne | None = None  # share of each client's samples
    scale: Literal["auto", "unit", "standard"] = "auto"  # of pixels
    options: Fields = {}


class ModelTable(Named, frozen=True):
    """The network, and what it starts from.

    ``weights`` is a file of safetensors; layers that it does not hold start as they would.
    ``lora`` adds low-rank adapters, and trains only these and what ``lora.train`` names.
    """

    name: str = "auto"  # a network, or package.module:Class; auto: one that fits the data
    weights: str | None = None  # a file of safetensors to start from
    lora: Lora | None = None  # low-rank adapters of linear layers


class TrainTable(_Table, Recipe, frozen=True):
    """How a client trains in a round: all fields of Recipe, with its defaults and ranges.

    ``merge_val`` lets methods that do not use validation data otherwise train on it as well; no
    round is then chosen by validation (docs/protocol.md).
    """

    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"  # of the arithmetic
    merge_val: bool = False  # also train on validation data
    loss: str | None = None  # package.module:Class, in place of cross-entropy or squared error
    freeze: tuple[str, ...] | None = None  # patterns of parameters that are not trained

    def recipe(self) -> Recipe:
        return Recipe(**self.model_dump(include={field.name for field in fields(Recipe)}))


class PrivacyTable(_Table, Privacy, frozen=True):
    """Differential privacy of the clients' training samples: all fields of Privacy.

    One of ``noise`` and ``epsilon`` is needed; without the table nothing is private.
    """


class AlgorithmTable(_Table, frozen=True):
    """The method of a run, and the fields of every method, by the method's name.

    Beside its fields a method's table may hold ``train`` (fields of ``[train]`` for this method
    alone) and ``adapt`` (its own adaptation: a name and fields).
    """

    name: str | None = None  # the method of a run
    named: dict[str, Fields] = {}


class EngineTable(_Table, EngineSettings, frozen=True):
    """Which engine computes the clients: all fields of EngineSettings."""


class RunTable(_Table, frozen=True):
    """Rounds, participation, seeds, methods, evaluation, checkpoints and the output folder.

    With ``deal = "fixed"`` all seeds train the same clients: the first seed divides the data; with
    "anew" each seed divides it for itself; a number is the seed that does.
    With ``folds`` each method is trained once for each part of every client's samples, which then
    tests; ``data.test`` has no effect.
    The metric "auto" is accuracy; AUC where one of two classes has less than a third of the
    samples; and RMSE of numbers (at the sites of a federation MAE).
    With ``spread = "ray"`` the runs of a comparison are executed at the same time, in the tasks of
    a Ray cluster; otherwise one after the other in this process.
    """

    rounds: Count = 20  # communication rounds
    participation: ShareAboveZero = 1.0  # share of the clients in a round
    seed: CountOrZero = 0  # of one run, or the first seed
    seeds: tuple[CountOrZero, ...] = ()  # a list, or how many from run.seed on
    folds: Annotated[int, Field(ge=2, le=20)] | None = None  # parts of the data that test in turn
    fold: CountOrZero | None = None  # of one run: the part that tests
    deal: Literal["fixed", "anew"] | CountOrZero = "fixed"  # the seed that divides the data
    methods: tuple[str, ...] | None = None  # of a comparison; "all": every method
    evaluate_every: Count = 1  # rounds
    metric: Annotated[str, OneOf(("auto", *METRICS), own=True)] = "auto"  # or package.module:Class
    patience: Count | None = None  # evaluations without a better validation mean, then it stops
    checkpoint_every: Count | None = None  # rounds
    spread: Literal["ray"] | None = None  # execute the runs of a comparison at the same time
    out: str | None = None  # folder of the results
    federation: str | None = None  # folder of a real federation
    collect: bool | None = None  # fetch the sites' final models


class GuardTable(_Table, Guard, frozen=True):
    """Which uploads may be aggregated: all fields of Guard, with its defaults and ranges."""


class Config(_Table, frozen=True):
    """The checked config of an experiment."""

    data: DataTable = DataTable()
    partition: PartitionTable = PartitionTable()
    model: ModelTable = ModelTable()
    train: TrainTable = TrainTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    adapt: Named = Named(name="none")
    privacy: PrivacyTable | None = None
    engine: EngineTable = EngineTable()
    guard: GuardTable = GuardTable()
    run: RunTable = RunTable()
    _code: Code = PrivateAttr(default=Code())  # not a field: a config cannot give itself permission

    @property
    def code(self) -> Code:
        """The places from which code that the config names may be imported."""
        return self._code

    @classmethod
    def table(cls, name: str) -> type[BaseModel]:
        """The class of a table."""
        return PrivacyTable if name == "privacy" else type(getattr(cls(), name))

    def with_code(self, code: Code) -> "Config":
        """The config with permission to import code from these places."""
        allowed = self.model_copy()
        allowed._code = code  # type: ignore[misc]  # private: no field, and never frozen
        return allowed

    @property
    def changes(self) -> Changes:
        """What is changed in the network that ``model.name`` makes."""
        return Changes(self.model.weights, self.train.freeze or (), self.model.lora)

    @property
    def agreed_privacy(self) -> Privacy | None:
        """What ``[privacy]`` agrees on; None without it."""
        return None if self.privacy is None else Privacy(**self.privacy.model_dump())

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of a comparison; the one seed ``run.seed`` if no list is given.

        Each fold is trained with a seed of its own, from ``run.seed`` on.
        """
        run = self.run
        if run.folds is not None and run.fold is None:
            first = run.seeds[0] if run.seeds else run.seed
            return tuple(range(first, first + run.folds))
        return run.seeds or (run.seed,)

    def fold(self, seed: int) -> Fold | None:
        """The part of the data that tests in the run with this seed; None without folds."""
        if self.run.folds is None:
            return None
        index = self.seeds.index(seed) if self.run.fold is None else self.run.fold
        return Fold(index, self.run.folds)

    def dealt(self, seed: int) -> int:
        """The seed that divides the data among the clients of the run with this seed."""
        if self.run.deal == "anew":
            return seed
        return self.seeds[0] if self.run.deal == "fixed" else self.run.deal

    def method(self, name: str | None = None) -> Method:
        """A method with its fields from this config; without a name, the config's own method."""
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
        shared = method.adaptation is not None and method.own_adaptation is None
        deal = self.dealt(seed)
        one: dict[str, Any] = {"seed": seed, "seeds": (), "methods": None, "spread": None}
        one["deal"] = "fixed" if deal == seed else deal
        part = self.fold(seed)
        one["fold"] = None if part is None else part.part
        update = {
            "algorithm": AlgorithmTable(name=method.name, named={method.name: method.table()}),
            "adapt": self.adapt if shared else Named(name="none"),
            "train": self.train.model_copy(update=method.train),
            "run": self.run.model_copy(update=one),
        }
        return self.model_copy(update=update)
