"""Checks of a config: first its form, then every name in it and the fields of what is named."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields as recipe_fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ...core.fields import AUTO, REQUIRED, Field, checked, fields
from ...core.imports import Code, imported, names_class
from ...core.metrics import OwnMetric, register
from ...core.optim import Recipe
from ...errors import ConfigError, did_you_mean
from .methods import NONE, OWN, VARIANT, algorithm_class, without_adaptation
from .schema import (
    METHODS,
    AlgorithmTable,
    Config,
    DataTable,
    Fields,
    ModelTable,
    Named,
    PartitionTable,
    Table,
    TrainTable,
)

T = TypeVar("T", bound=BaseModel)
MOST_SHOWN = 500  # characters of a value that a message repeats


def validated(formed: Table) -> Config:
    """The config of these tables; pydantic's first error is raised as a ConfigError."""
    return _fitted(Config, formed, "")


def _fitted(kind: type[T], formed: Table, where: str) -> T:
    """The table of this kind; ``where`` begins the names of its fields."""
    try:
        return kind.model_validate_json(json.dumps(formed, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = [*where.split("."), *map(str, first["loc"])] if where else [*map(str, first["loc"])]
    if first["type"] == "extra_forbidden":
        raise _unknown(path)
    wanted = first["msg"].removeprefix("Input should be ").replace("an object", "a table")
    if first["type"] == "string_pattern_mismatch":  # only the device has one
        wanted = "cpu, cuda or cuda:N"
    elif first["type"].startswith(("greater_than", "less_than")):
        wanted = f"a number {wanted}"
    found = repr(first["input"])
    found = found if len(found) <= MOST_SHOWN else f"{found[:MOST_SHOWN]}…"
    raise ConfigError(f"{'.'.join(path) or 'config'}: found {found}; expected {wanted}")


def _unknown(path: list[str]) -> ConfigError:
    """The error for a table or a field that does not exist."""
    if len(path) == 1:
        known = did_you_mean(path[0], Config.model_fields)
        return ConfigError(f"{path[0]}: there is no such table; {known}")
    known = did_you_mean(path[-1], Config.table(path[0]).model_fields)
    return ConfigError(f"{'.'.join(path)}: [{path[0]}] has no such field; {known}")


def with_names(config: Config) -> Config:
    """The config with data, partition and model looked up, their fields checked and filled in."""
    _check_own(config)
    _check_patience(config)
    found = {
        "data": _data_options(config),
        "partition": partition_options(config.partition, config.code),
        "model": model_options(config.model, config.code),
    }
    tables = {
        table: getattr(config, table).model_copy(update={"options": options})
        for table, options in found.items()
    }
    return config.model_copy(update=tables)


def own_loss(train: TrainTable, code: Code) -> Callable[..., Any] | None:
    """The loss that ``train.loss`` names, or that a program passed."""
    from ...core.losses import OwnLoss

    if train.loss is None:
        return None
    given = code.objects.get(train.loss)
    found = imported(train.loss, OwnLoss, "train.loss", code) if given is None else given
    made: Callable[..., Any] = found() if isinstance(found, type) else found
    return made


def _check_patience(config: Config) -> None:
    """Refuse to stop by validation where the server knows no validation scores."""
    if config.run.patience and (config.train.merge_val or config.run.federation):
        raise ConfigError(
            "run.patience: stops by scores on validation data, which a federation leaves at the "
            "sites and train.merge_val trains on; expected neither, or no patience"
        )


def _check_own(config: Config) -> None:
    """Look up a loss and a metric of one's own; they work in this process alone."""
    metric, code = config.run.metric, config.code
    if ":" in metric:
        given = code.objects.get(metric)
        register(metric, given or imported(metric, OwnMetric, "run.metric", code))
    own_loss(config.train, code)
    for field, own in (("run.metric", ":" in metric), ("train.loss", config.train.loss)):
        if own and (config.run.federation or config.engine.name == "wire"):
            raise ConfigError(
                f"{field}: code of one's own is not sent to sites or to other processes; expected "
                "a simulation with engine.name 'auto', 'vmap' or 'loop'"
            )


def _data_options(config: Config) -> Fields:
    """The options of a dataset, checked; readers of files check their own options."""
    from ...data.datasets import DATASETS, SOURCES, read_options, reader_class
    from ...data.given import Frame
    from ...data.sources.tables import TableOptions

    name, options = config.data.name, config.data.options
    if name in SOURCES or config.run.federation is not None:
        return options
    if name in DATASETS:
        return checked(options, fields(DATASETS[name].loader), "data", name)
    if name in config.code.objects:
        frame = isinstance(config.code.objects[name], Frame)
        return (
            read_options(name, options, TableOptions)
            if frame
            else checked(options, (), "data", name)
        )
    if names_class(name):
        reader = reader_class(name, config.code)
        return checked(options, _own_fields(reader, DataTable, "data", name), "data", name)
    if not Path(name).exists():
        known = did_you_mean(name, DATASETS)
        raise ConfigError(f"data.name: no dataset and no file is called '{name}'; {known}")
    return options


def partition_options(partition: Named, code: Code) -> Fields:
    """The checked fields of a partition; "auto" takes only a number of clients."""
    from ...data.partition import PARTITIONS, partition_class

    name, options = partition.name, partition.options
    if name == AUTO:
        found = checked(options, fields(PARTITIONS["iid"]), "partition", name)
        return {key: found[key] for key in options}
    kind = partition_class(name, code)
    known = _own_fields(kind, PartitionTable, "partition", name)
    found = checked(options, known, "partition", name)
    kind(**found)
    return found


def _own_fields(
    kind: Callable[..., Any], table: type[BaseModel], where: str, name: str
) -> tuple[Field, ...]:
    """The fields of a class; refuses one that the config's table has for itself."""
    found = fields(kind)
    for field in found:
        if field.name in table.model_fields:
            raise ConfigError(
                f"{where}.name: '{name}' has a field '{field.name}', which is a field of [{where}] "
                "itself; rename the field of the class"
            )
    return found


def model_options(model: Named, code: Code) -> Fields:
    """The checked options of a network; "auto" has none."""
    from ...networks.registry import MODELS, builder

    name, options = model.name, model.options
    if name == AUTO:
        return checked(options, (), "model", name)
    if ":" not in name:
        return checked(options, fields(_known(name, MODELS, "model")), "model", name)
    own = builder(name, code)
    known = [  # a vocabulary without default comes from the data, as shape and classes do
        field
        for field in _own_fields(own, ModelTable, "model", name)
        if field.name != "vocabulary" or field.default is not REQUIRED
    ]
    rest: Fields = {}
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(own).parameters.values()):
        rest = {key: options[key] for key in options.keys() - {field.name for field in known}}
    told = {key: value for key, value in options.items() if key not in rest}
    return {**checked(told, known, "model", name), **dict(sorted(rest.items()))}


def with_methods(config: Config, loose: Fields) -> Config:
    """The config with the fields of every method that it mentions checked and filled in.

    ``loose`` are the fields in ``[algorithm]`` itself: they belong to the method it names.
    """
    own, told = config.algorithm.name, dict(config.algorithm.named)
    places = {name: f"algorithm.{name}" for name in told}
    if own is not None:
        places.setdefault(own, "algorithm")
        told[own] = {**told.get(own, {}), **loose}
    elif config.run.methods is None:
        places = dict.fromkeys(METHODS, "run.methods") | places
    places = dict.fromkeys(config.run.methods or (), "run.methods") | places
    named = {name: _method_fields(name, told, places[name], config) for name in places}
    adapt = _adaptation(config.adapt, list(named))
    update = {"algorithm": AlgorithmTable(name=own, named=named), "adapt": adapt}
    config = config.model_copy(update=update)
    for method in (config.method(), *config.methods()):
        method.build()  # a method may refuse a combination of its fields
    _check_lists(config)
    _check_privacy(config)
    return config


def _check_privacy(config: Config) -> None:
    """Refuse a [privacy] that says nothing or too much, and what it could not cover."""
    privacy, run = config.privacy, config.run
    if privacy is None:
        return
    if (privacy.noise is None) == (privacy.epsilon is None):
        found = "neither" if privacy.noise is None else "both"
        raise ConfigError(f"privacy: found {found} of noise and epsilon; expected one of them")
    if run.federation is not None and privacy.noise is None:
        raise ConfigError(
            "privacy.epsilon: the sites of a federation agree on a noise, not on an ε; simulate "
            "the experiment with epsilon, and set the noise that its summary tells"
        )
    if run.collect:
        raise ConfigError(
            "run.collect: final models may be adapted without noise, and with [privacy] they stay "
            "at the sites; leave collect out"
        )


def _check_lists(config: Config) -> None:
    """Refuse seeds that are listed twice, an empty list of methods, and two methods of one name."""
    seeds, names = config.run.seeds, config.run.methods
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    _check_folds(config)
    if twice:
        raise ConfigError(f"run.seeds: {twice[0]} stands there twice; name each seed once")
    if names is not None and not names:
        raise ConfigError("run.methods: found an empty list; name at least one method")
    labels: dict[str, Any] = {}
    for method in map(config.method, names or ()):
        if labels.setdefault(method.label, method.algorithm) is not method.algorithm:
            raise ConfigError(
                f"run.methods: two classes would both be called '{method.label}'; rename one"
            )


def _check_folds(config: Config) -> None:
    """Refuse folds beside what they exclude."""
    run, data, partition = config.run, config.data, config.partition
    if run.folds is None:
        if run.fold is not None:
            raise ConfigError(f"run.fold: found {run.fold} without run.folds; set both, or none")
        return
    if run.fold is not None and run.fold >= run.folds:
        raise ConfigError(f"run.fold: found {run.fold}; expected less than run.folds ({run.folds})")
    excluded = {
        "run.seeds": len(run.seeds) > 1,
        "run.deal": run.deal == "anew",
        "data.federated": bool(data.federated),
        "partition.common_test": bool(partition.common_test),
        "partition.foreign_targets": partition.foreign_targets,
    }
    for name in (name for name, given in excluded.items() if given):
        raise ConfigError(f"run.folds: found it beside {name}; expected one of the two")


def _method_fields(name: str, told: Mapping[str, Fields], where: str, config: Config) -> Fields:
    """The checked table of a method.

    An alias without a table of its own has its base's fields. A variant has those of the method
    that it is a variant of, and its own in their place.
    """
    kind = algorithm_class(name, config.code, "algorithm.name" if where == "algorithm" else where)
    plain = name.partition(VARIANT)[0]
    given = told.get(plain, told.get(without_adaptation(name)[0], {}))
    given = {**given, **told[name]} if name in told else given
    table = "algorithm" if where == "algorithm" else f"algorithm.{name}"
    own = {key: given[key] for key in OWN if key in given}
    for key, value in own.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{table}.{key}: found {value!r}; expected a table of fields")
    rest = {key: value for key, value in given.items() if key not in own}
    found = checked(rest, fields(kind), table, kind.__name__)
    if "train" in own:
        found["train"] = _own_recipe(own["train"], config, f"{table}.train")
    if "adapt" in own:
        found["adapt"] = _own_adaptation(own["adapt"], f"{table}.adapt")
    return found


def _own_recipe(given: Fields, config: Config, where: str) -> Fields:
    """The fields of ``[train]`` that one method has for itself, checked."""
    known = [field.name for field in recipe_fields(Recipe)]
    for name in given:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{where}.{name}: a method has no such field for itself; {near}")
    made = _fitted(TrainTable, {**config.train.model_dump(), **given}, where)
    return {name: getattr(made, name) for name in given}


def _own_adaptation(given: Fields, where: str) -> Fields:
    """The adaptation that one method has for itself, with every field checked and filled in."""
    from ...adapt import ADAPTATIONS

    name = given.get("name")
    if name not in ADAPTATIONS:
        known = did_you_mean(str(name), ADAPTATIONS)
        raise ConfigError(f"{where}.name: found {name!r}; expected the name of one; {known}")
    rest = {key: value for key, value in given.items() if key != "name"}
    return {"name": name, **checked(rest, fields(ADAPTATIONS[name]), where, str(name))}


def _adaptation(adapt: Named, methods: list[str]) -> Named:
    """The adaptation with its fields checked.

    If ``[adapt]`` names none, its fields belong to the adaptation in a method's name, as in
    ``fedavg_ft``.
    """
    from ...adapt import ADAPTATIONS

    used = {without_adaptation(name)[1] for name in methods} - {NONE}
    if adapt.name != NONE:
        kind = _known(adapt.name, {NONE: None, **ADAPTATIONS}, "adapt")
    elif not adapt.options:
        return adapt
    elif len(used) == 1:
        kind = ADAPTATIONS[used.pop()]
    else:
        field = next(iter(adapt.options))
        raise ConfigError(f"adapt.{field}: nothing is adapted here; set adapt.name as well")
    return Named(name=adapt.name, options=checked(adapt.options, fields(kind), "adapt", adapt.name))


def _known(name: str, table: Mapping[str, Any], where: str) -> Any:
    if name not in table:
        known = did_you_mean(name, [AUTO, *table] if where != "adapt" else table)
        raise ConfigError(f"{where}.name: there is no {where} '{name}'; {known}")
    return table[name]
