"""Makes what a config names: data, federations, network, recipe, engine.

A config that cannot be run is refused here, before a folder is made.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..core.algorithm import Sharing, check_run
from ..core.fields import AUTO
from ..core.flat import build
from ..core.locations import located
from ..core.metrics import metrics_for
from ..core.problem import Problem
from ..core.recipe import Recipe
from ..data.arrays import AUTO_SCALE
from ..data.datasets import load as load_data
from ..data.federation import Dataset, Federation
from ..data.partition import federate, partition_class
from ..errors import ConfigError
from ..networks import registry
from .config.checks import model_options, partition_options
from .config.methods import Method
from .config.schema import Config, Named
from .setting import Setting
from .simulated import Assembly
from .simulated_sites import Homes


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
    federations = {
        seed: federate(
            dataset,
            partition,
            val=config.data.val,
            test=config.data.test,
            aux=config.data.aux,
            federated=config.data.federated or 0.0,
            seed=seed,
            foreign_targets=config.partition.foreign_targets,
            common_test=bool(config.partition.common_test),
            first=config.partition.first,
            above=config.partition.above,
        )
        for seed in config.seeds
    }
    for federation in federations.values():
        _check_sizes(federation)
        dataset = federation.dataset  # the columns of a table are final only after partitioning
    return Assembly(config, federations, factory_of(config, dataset), Homes())


def factory_of(config: Config, dataset: Dataset) -> Callable[[], nn.Module]:
    """A function that makes the config's networks, which are checked to fit the data."""
    build = registry.builder(config.model.name, config.code)
    factory = registry.factory(build, dataset, **config.model.options)
    if config.train.precision == "bf16":
        factory = registry.in_bfloat16(factory, torch.device(config.engine.device).type)
    _check_model(factory, dataset, config.model.name)
    return factory


def check_methods(setting: Setting, methods: Iterable[Method]) -> None:
    """Refuse, before anything is trained, a method that could not finish its run."""
    config, made = setting.config, dict[tuple[bool, Sharing | None, Recipe], Problem]()
    for method in methods:
        algorithm, asked = method.build(), config.single(method, config.seeds[0])
        traits = algorithm.traits
        # the problems of methods differ in these only
        needs = traits.uses_validation, traits.sharing, asked.train.recipe()
        if needs not in made:
            made[needs] = setting.prepare(algorithm, asked).problem
        with located(algorithm):
            check_run(algorithm, made[needs], config.run.rounds)


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
        model = Named(name=registry.default(dataset))
        model = model.model_copy(update={"options": model_options(model, config.code)})
    run = config.run.model_copy(update={"metric": _metric(config.run.metric, dataset)})
    data = config.data
    if data.scale == AUTO and dataset.x.dtype == torch.uint8:  # images
        data = data.model_copy(update={"scale": AUTO_SCALE})
    update = {"data": data, "partition": partition, "model": model, "run": run}
    return config.model_copy(update=update)


def _metric(metric: str, dataset: Dataset) -> str:
    fit = metrics_for("numbers" if dataset.regression else "classes")
    if metric == AUTO:
        return fit[0]
    if metric not in fit:
        kind = "numbers" if dataset.regression else f"{dataset.classes} classes"
        raise ConfigError(
            f"run.metric: '{metric}' does not fit {dataset.name}, whose targets are {kind}; "
            f"expected one of {', '.join(fit)}"
        )
    return metric


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
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"model.name: '{name}' fails on a sample of shape {list(dataset.x.shape[1:])} of "
            f"{dataset.name}: {error}; expected a network for such samples"
        ) from error
    wanted = (*dataset.y[:1].shape, dataset.classes or 1)
    if shape != wanted:
        raise ConfigError(
            f"model.name: '{name}' gives an output of shape {list(shape)} for one sample; expected "
            f"{list(wanted)}, a score for each class of each target, or one value"
        )
