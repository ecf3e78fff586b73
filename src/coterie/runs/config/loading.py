"""Loads a config from TOML or tables, validates it, and gives its canonical form and its hash.

A config has the tables ``[data] [partition] [model] [train] [algorithm] [adapt] [privacy] [engine]
[guard] [run]``, all of them optional. In a table with a ``name``, the other fields are those of
what is named: ``[algorithm] name = "fedfomo"`` takes FedFomo's fields. In a comparison the fields
of a method are in a table of its own, ``[algorithm.fedfomo]``. Relative paths are relative to the
file.
A table ``[tune]`` says what ``coterie tune`` searches; it is no part of the config.

Everything is checked here, before any data is read; the first fault is raised as a ConfigError.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.imports import Code, Given
from ...errors import ConfigError, CoterieError
from ...storage.files import expanded
from .checks import validated, with_methods, with_names
from .schema import DEMO, SITES, Config, Fields, Table
from .sweeps import merge, refuse_shared, with_variants

__all__ = [
    "Config",
    "canonical",
    "config_hash",
    "default_out",
    "load",
    "merge",
    "read",
    "tables_of",
]

HEART = "heart"  # in place of a file: the config of the dataset of this name
ALL = "all"  # run.methods = "all" means every method
MOST_SEEDS = 10_000  # each seed is a run of every method
# What a run adds to its config.json.
WRITTEN = ("format", "resolved", "asked", "hash", "metric", "accounted")
TUNE = "tune"  # a table that only 'coterie tune' reads
# The tables with a name, whose other fields belong to what is named.
NAMED = tuple(name for name, table in Config() if "options" in dict(table or ()))


def load(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    code: Given | Code = None,
) -> Config:
    """Load a config from a file, from tables, or the built-in one; overrides have dotted names.

    ``code`` are folders from which code that the config names may be imported. Code of installed
    packages is allowed as well, except for a ``.json`` file: a run writes such files, and they may
    come from somebody else.

    >>> load({"train": {"lr": 0.5}}, {"run.rounds": 3}).run.rounds
    3
    """
    changes = dict(overrides or {})
    tables = tables_of(source, changes)
    prefix = "" if source is None or isinstance(source, Mapping) else f"{source}: "
    if not isinstance(code, Code):
        code = Code.of(code, installed=not str(source).endswith(".json"))
    try:
        return _resolved(tables, changes, code)
    except RecursionError:
        raise ConfigError(
            f"{prefix}the tables are nested too deeply; expected two levels"
        ) from None
    except CoterieError as error:
        told = str(error).partition(":")[0] in changes  # then the fault is not in the file
        raise type(error)(f"{'' if told else prefix}{error}") from None


def tables_of(source: str | Path | Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Table:
    """The tables of a file, of a mapping, or of the built-in example, before any change."""
    if isinstance(source, Mapping):
        return dict(source)
    if source == HEART and not Path(HEART).exists():
        return _heart()
    if source is not None:
        return _anchored(read(Path(source)), Path(source).resolve().parent)
    if changes.keys() & {"data.name", "run.federation"}:
        return {}  # the built-in partition does not fit other data
    # nor do its options fit another partition
    other = changes.get("partition.name", DEMO["partition"]["name"]) != DEMO["partition"]["name"]
    return {name: table for name, table in DEMO.items() if not (other and name == "partition")}


def _heart() -> Table:
    """The tables that ``coterie new heart`` writes, with the dataset in place of its file."""
    from ...data.sources.heart import heart_config

    tables = tomllib.loads(heart_config())
    shares = {split: tables["data"][split] for split in ("val", "test")}
    return {**tables, "data": {"name": HEART, **shares}}


def read(path: Path) -> Table:
    """Read the tables of a TOML file, or of the ``config.json`` of a run."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a config in TOML") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected UTF-8 text") from None
    try:
        if path.suffix != ".json":
            return tomllib.loads(text)
        tables: Table = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; expected two levels") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: holds a {type(tables).__name__}; expected tables")
    return {key: table for key, table in tables.items() if key not in WRITTEN}


def canonical(config: Config) -> Table:
    """The config as tables, with every default filled in, that :func:`load` takes again."""
    tables = config.model_dump(mode="json", exclude_none=True)
    for table in NAMED:
        tables[table] |= tables[table].pop("options")
    tables["algorithm"] |= tables["algorithm"].pop("named")
    return tables


def config_hash(config: Config) -> str:
    """The sha256 of the canonical config without its output folder and checkpoint interval."""
    tables = canonical(config)
    for field in ("out", "checkpoint_every", "federation"):
        tables["run"].pop(field, None)
    text = json.dumps(tables, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def default_out(config: Config) -> Config:
    """The config with an output folder; if it names none, one that is derived from its hash."""
    if config.run.out is not None:
        return config
    data = Path(config.data.name.rpartition(":")[2]).stem  # of pkg.module:Class, the class
    out = str(Path("runs") / f"{data}-{config_hash(config)[:8]}")
    return config.model_copy(update={"run": config.run.model_copy(update={"out": out})})


def _anchored(tables: Mapping[str, Any], folder: Path) -> Table:
    """The tables of a file with relative paths (of output, of data that exists) resolved."""
    made = {key: dict(v) if isinstance(v, Mapping) else v for key, v in tables.items()}
    for table, field in (
        *(("run", "out"), ("run", "federation")),
        *(("data", "path"), ("data", "name"), ("model", "weights")),
    ):
        value = made[table].get(field) if isinstance(made.get(table), dict) else None
        if isinstance(value, str) and (field != "name" or (folder / value).exists()):
            made[table][field] = str(folder / expanded(value))
    return made


def _resolved(tables: Table, changes: Mapping[str, Any], code: Code) -> Config:
    """The config of these tables, checked: first their form, then every name and its fields."""
    own = {name: table for name, table in merge(tables, changes).items() if name != TUNE}
    merged = _of_sites(with_variants(own))
    refuse_shared(merged)
    loose = _loose(merged.get("algorithm"))
    return with_methods(with_names(validated(_formed(merged)).with_code(code)), loose)


def _of_sites(tables: Table) -> Table:
    """The tables; where sites are the clients, ``data.name`` says so."""
    run, data = tables.get("run"), tables.get("data", {})
    if not isinstance(run, Mapping) or run.get("federation") is None:
        return tables
    return {**tables, "data": {"name": SITES, **data}} if isinstance(data, Mapping) else tables


def _formed(tables: Table) -> Table:
    """The tables in the form of the schema: named fields as ``options``, seeds as a list."""
    formed = dict(tables)
    for table in NAMED:
        given, default = tables.get(table, {}), getattr(Config(), table)
        if isinstance(given, Mapping):
            own = type(default).model_fields.keys() - {"options"}
            fixed = {key: value for key, value in given.items() if key in own}
            rest = {key: value for key, value in given.items() if key not in own}
            formed[table] = {"name": default.name, **fixed, "options": rest}
    given = tables.get("algorithm", {})
    if isinstance(given, Mapping):
        named = {key: value for key, value in given.items() if isinstance(value, Mapping)}
        name = {"name": given["name"]} if "name" in given else {}
        formed["algorithm"] = {**name, "named": named}
    run = tables.get("run", {})
    if isinstance(run, Mapping) and run.get("methods") in (ALL, [ALL]):
        from ...algorithms import ALGORITHMS, ALIASES

        run = formed["run"] = {**run, "methods": [*ALGORITHMS, *ALIASES]}
    if isinstance(run, Mapping) and type(run.get("seeds")) is int:
        first = run.get("seed", 0)
        if not 1 <= run["seeds"] <= MOST_SEEDS:
            raise ConfigError(
                f"run.seeds: found {run['seeds']}; expected from 1 to {MOST_SEEDS:,}, or a list"
            )
        seeds = [first + i for i in range(run["seeds"])] if type(first) is int else []
        formed["run"] = {**run, "seeds": seeds}
    return formed


def _loose(algorithm: Any) -> Fields:
    """The fields in ``[algorithm]`` itself: they belong to the method it names."""
    if not isinstance(algorithm, Mapping):
        return {}
    loose = {k: v for k, v in algorithm.items() if k != "name" and not isinstance(v, Mapping)}
    if loose and "name" not in algorithm:
        field = next(iter(loose))
        raise ConfigError(
            f"algorithm.{field}: no method is named here; name it by algorithm.name or --method, "
            f"or write the field into a table of the method, as in [algorithm.fedfomo] {field}"
        )
    return loose
