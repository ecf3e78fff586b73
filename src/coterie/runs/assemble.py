"""Makes what a config names: data, federations, network, recipe, and the clients of a simulation.

A config that cannot be run is refused here, before a folder is made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn

from ..core.algorithm import AnyAlgorithm
from ..core.fields import AUTO
from ..core.flat import build
from ..core.metrics import METRICS, automatic, metrics_for
from ..core.problem import Problem
from ..core.tree import Tree
from ..data.arrays import AUTO_SCALE
from ..data.datasets import load as load_data
from ..data.federation import Dataset, Federation
from ..data.manifest import Identity, manifest
from ..data.partition import federate, partition_class
from ..data.simulation import Simulation, simulate
from ..data.standard import Preprocessing, preprocessing_of
from ..data.streamed import is_streamed, refuse_streamed
from ..engines import Engine, Length, make_engine
from ..errors import ConfigError
from ..networks import registry
from ..networks.changes import unused_adapter
from .accounting import solved
from .config.checks import model_options, own_loss, partition_options
from .config.schema import Config
from .plan import Cell
from .resume import UnfinishedRun
from .run import Roster
from .setting import Prepared, Setting

# ---- the clients ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Assembly(Setting):
    """A config whose names are all resolved, with its federations and its network's factory."""

    config: Config
    federations: dict[int, Federation]  # by seed
    factory: Callable[[], nn.Module]
    _made: dict[tuple[Any, ...], Simulation] = field(default_factory=dict)

    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        on = self.simulated(algorithm, asked)
        return Prepared(on.problem, Roster.of(on.federation), on.shards)

    def simulated(self, algorithm: AnyAlgorithm, asked: Config) -> Simulation:
        """The same with the federation; runs of one seed that need the same share it.

        ``merge_val`` has an effect only on methods that never read validation data.
        """
        train, seed, sharing = asked.train, asked.run.seed, algorithm.traits.sharing
        recipe, merge = train.recipe(), train.merge_val and not algorithm.traits.uses_validation
        key = seed, merge, sharing, train.precision, train.loss
        if key not in self._made:
            for other in [made for made in self._made if made[0] != seed]:
                del self._made[other]
            self._made[key] = simulate(
                self.federations[seed],
                self.factory,
                recipe,
                seed=seed,
                device=self.config.engine.device,
                dtype=torch.float64 if train.precision == "float64" else torch.float32,
                merge_val=merge,
                sharing=sharing,
                shares=METRICS[self.config.run.metric].by_share,
                privacy=asked.agreed_privacy,
                loss=own_loss(train, self.config.code),
            )
        on = self._made[key]
        problem = on.problem
        if problem.recipe != recipe:
            problem = replace(problem, recipe=recipe)
        return on._replace(problem=solved(problem, algorithm, asked.run.rounds))

    def identity(self, seed: int) -> Identity:
        return self.federations[seed]

    def manifest(self, seed: int) -> dict[str, Any]:
        return manifest(self.federations[seed])

    def preprocessing(self, seed: int) -> Preprocessing | None:
        return preprocessing_of(self.federations[seed].dataset)

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """The engine that the config asks for, or that an interrupted run was executed with."""
        if on.shards is None:
            raise AssertionError("a simulation holds the data of all clients")
        asked = self.asked(cell)
        alone = self.config == asked
        runs = 1 if alone else len(self.config.methods()) * len(self.config.seeds)
        engine = asked.engine if left is None else left.engine(asked.engine)
        return make_engine(
            engine,
            on.problem,
            on.shards,
            Length(asked.run.rounds, asked.run.participation, runs),
            before=None if left is None else left.ways,
        )

    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        server, states = algorithm.init(problem)
        return server, states

    def close(self) -> None:
        """Do nothing: engines close what they open."""


# ---- from a config -------------------------------------------------------------------------------


def assemble(config: Config) -> Assembly:
    """Read the data, partition it for every seed, and build the network to check that it fits."""
    _check_device(config.engine.device)
    data = config.data
    dataset = load_data(data.name, scale=data.scale, code=config.code, **data.options)
    config = settled(config, dataset)
    _check_weights(config.train.class_weights, dataset)
    _check_clients(config.partition.options.get("clients") or 1, dataset)
    kind = partition_class(config.partition.name, config.code)
    partition = kind(**config.partition.options)
    deals = {
        (deal, fold): federate(
            dataset,
            partition,
            val=config.data.val,
            test=config.data.test,
            aux=config.data.aux,
            federated=config.data.federated or 0.0,
            seed=deal,
            foreign_targets=config.partition.foreign_targets,
            common_test=bool(config.partition.common_test),
            first=config.partition.first,
            above=config.partition.above,
            fold=fold,
        )
        for deal, fold in {(config.dealt(s), config.fold(s)): None for s in config.seeds}
    }
    for federation in deals.values():
        _check_sizes(federation)
        dataset = federation.dataset  # the columns of a table are final only after partitioning
    federations = {s: deals[config.dealt(s), config.fold(s)] for s in config.seeds}
    return Assembly(config, federations, factory_of(config, dataset))


def factory_of(config: Config, dataset: Dataset) -> Callable[[], nn.Module]:
    """A function that makes the config's networks, which are checked to fit the data."""
    build = registry.builder(config.model.name, config.code)
    factory = config.changes.made(registry.factory(build, dataset, **config.model.options))
    if config.train.precision == "bf16":
        factory = registry.in_bfloat16(factory, torch.device(config.engine.device).type)
    _check_model(factory, dataset, config.model.name)
    return factory


def settled(config: Config, dataset: Dataset) -> Config:
    """The config with every "auto" that depends on the data replaced by its value."""
    partition, model = config.partition, config.model
    if partition.name == AUTO:
        owned = dataset.owners is not None
        if owned and partition.options:
            raise ConfigError(
                f"partition.clients: {dataset.name} comes with its own clients, so their number "
                "cannot be chosen; leave it out or name a partition"
            )
        partition = partition.model_copy(update={"name": "natural" if owned else "iid"})
        partition = partition.model_copy(
            update={"options": partition_options(partition, config.code)}
        )
    if model.name == AUTO:
        model = model.model_copy(update={"name": registry.default(dataset)})
        model = model.model_copy(update={"options": model_options(model, config.code)})
    run = config.run.model_copy(update={"metric": _metric(config.run.metric, dataset)})
    data = config.data
    if data.scale == AUTO and dataset.x.dtype == torch.uint8:  # images
        data = data.model_copy(update={"scale": AUTO_SCALE})
    engine = config.engine
    if engine.name == AUTO and is_streamed(dataset):
        engine = engine.model_copy(update={"name": "loop"})
    if engine.name != "loop":
        refuse_streamed(dataset, f"engine.name = '{engine.name}'")
    update = {"data": data, "partition": partition, "model": model, "run": run, "engine": engine}
    return config.model_copy(update=update)


def _metric(metric: str, dataset: Dataset) -> str:
    fit = metrics_for("numbers" if dataset.regression else "classes")
    if metric == AUTO:
        return fit[0] if dataset.regression else automatic(prevalence(dataset))
    if metric not in fit:
        kind = "numbers" if dataset.regression else f"{dataset.classes} classes"
        raise ConfigError(
            f"run.metric: '{metric}' does not fit {dataset.name}, whose targets are {kind}; "
            f"expected one of {', '.join(fit)}"
        )
    return metric


def prevalence(dataset: Dataset) -> float | None:
    """The share of the second of two classes; None of other targets, or of a mere schema."""
    if dataset.classes != 2 or dataset.y.ndim > 1 or len(dataset.y) < 2:
        return None
    return float((dataset.y == 1).double().mean())


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.device(device).index or 0
    if index >= count:
        raise ConfigError(
            f"engine.device: found '{device}', but torch sees {count} CUDA devices here; "
            "use cpu, or install a torch build for this machine's GPU"
        )


def _check_weights(class_weights: str, dataset: Dataset) -> None:
    """Refuse class weights where a sample has several targets."""
    if class_weights != "none" and dataset.y.ndim > 1:
        raise ConfigError(
            f"train.class_weights: found '{class_weights}', but samples of {dataset.name} have a "
            "target at every position; use 'none'"
        )


def _check_clients(clients: int, dataset: Dataset) -> None:
    """Refuse more clients than samples before partitioning, which would run out of memory."""
    if clients > len(dataset.x):
        raise ConfigError(
            f"partition.clients: found {clients}, but {dataset.name} has only {len(dataset.x):,} "
            "samples; expected at most one client per sample"
        )


def _check_sizes(federation: Federation) -> None:
    """Refuse a federation in which no client has training data, or none has test data."""
    for name, split in (("training", federation.train), ("test", federation.test)):
        if not any(len(part) for part in split):
            raise ConfigError(
                f"partition: no client has any {name} data ({federation.partition} of "
                f"{federation.dataset.name}); use fewer clients, or change data.test and data.val"
            )


def _check_model(factory: Callable[[], nn.Module], dataset: Dataset, name: str) -> None:
    """Pass one sample through a new network; refuse a network whose shapes do not fit the data."""
    sample = dataset.x[:1]
    try:
        module = build(factory, 0, "check").eval()
        if sample.dtype != torch.int64:
            sample = sample.to(next(module.parameters()).dtype)
        with torch.no_grad():
            shape = tuple(module(sample).shape)
        unused = unused_adapter(module, sample)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"model.name: '{name}' fails on a sample of shape {list(dataset.x.shape[1:])} of "
            f"{dataset.name}: {error}; expected a network for such samples"
        ) from error
    if unused is not None:
        raise ConfigError(
            f"model.lora.layers: the network '{name}' passes the adapter of its layer '{unused}' "
            "by; expected linear layers that it calls; name others"
        )
    wanted = (*dataset.y[:1].shape, dataset.classes or 1)
    if shape != wanted:
        raise ConfigError(
            f"model.name: '{name}' gives an output of shape {list(shape)} for one sample; expected "
            f"{list(wanted)}, a score for each class of each target, or one value"
        )
