"""Sweeps: a field that lists several values, ``epsilon = {sweep = [0, 0.1, 0.3]}``.

A sweep of a method's field makes one variant of the method per value, ``fedfomo@epsilon=0.1``: the
variants are methods of one comparison. A sweep of a field that all methods share (``data.val``)
makes one column per value: each column is a comparison of its own (:mod:`coterie.studies`).
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError
from .methods import VARIANT
from .schema import METHODS, Table

SWEEP = "sweep"
MOST = 1_000  # variants, or columns, of one config


def merge(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """The tables with the changes, whose names are dotted, applied; neither argument is changed."""
    merged: Table = dict(tables)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        at = merged
        for part in path:
            if not isinstance(at.get(part, {}), Mapping):
                raise ConfigError(f"{dotted}: '{part}' is a value; expected a table to set it in")
            at[part] = dict(at.get(part, {}))
            at = at[part]
        at[last] = value
    return merged


def is_sweep(value: Any) -> bool:
    """Whether a value of a config lists values to be tried."""
    return isinstance(value, Mapping) and value.keys() == {SWEEP}


def with_variants(tables: Table) -> Table:
    """The tables with every sweep of a method's field replaced by variants of that method.

    >>> made = with_variants({"algorithm": {"fedfomo": {"epsilon": {"sweep": [0, 0.3]}}}})
    >>> made["algorithm"]
    {'fedfomo@epsilon=0': {'epsilon': 0}, 'fedfomo@epsilon=0.3': {'epsilon': 0.3}}
    """
    algorithm = tables.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return tables
    algorithm = _with_table(algorithm)
    made: Table = {}
    variants: dict[str, list[str]] = {}
    for name, table in algorithm.items():
        found = dict(_sweeps(table, "")) if isinstance(table, Mapping) else {}
        if not found:
            made[name] = table
            continue
        chosen = {_variant(name, point): merge(table, point) for point in points(found)}
        variants[name] = list(chosen)
        made |= chosen
    if not variants:
        return tables
    if made.get("name") in variants:
        made.pop("name")
    return {**tables, "algorithm": made, "run": _listed(tables, algorithm, variants)}


def shared_sweeps(tables: Table) -> dict[str, list[Any]]:
    """The values of every sweep outside ``[algorithm]``, by dotted field."""
    rest = {name: table for name, table in tables.items() if name != "algorithm"}
    return dict(_sweeps(rest, ""))


def point_label(point: Mapping[str, Any]) -> str:
    """The name of a combination: ``epsilon=0.1,downloads=3``.

    >>> point_label({"algorithm.fedfomo.epsilon": 0.1, "data.val": 0.5})
    'epsilon=0.1,val=0.5'
    """
    return ",".join(f"{field.rpartition('.')[2]}={_short(value)}" for field, value in point.items())


def refuse_shared(tables: Table) -> None:
    """Refuse a sweep of a field that all methods share, for commands that run one comparison."""
    for field in shared_sweeps(tables):
        raise ConfigError(
            f"{field}: found a sweep of a field that all methods share; expected one value; "
            "'coterie sweep' runs a comparison per value"
        )


def _with_table(algorithm: Mapping[str, Any]) -> Table:
    """``[algorithm]`` with sweeps of the named method's own fields moved into its table."""
    own = {field: value for field, value in algorithm.items() if is_sweep(value)}
    if not own:
        return dict(algorithm)
    name = algorithm.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            f"algorithm.{next(iter(own))}: no method is named here; write the sweep into a table "
            "of the method, as in [algorithm.fedfomo]"
        )
    loose = {f: v for f, v in algorithm.items() if f != "name" and not isinstance(v, Mapping)}
    kept = {f: v for f, v in algorithm.items() if f not in own and f not in loose}
    table = kept.get(name, {})
    return {**kept, name: {**table, **loose, **own} if isinstance(table, Mapping) else table}


def _sweeps(value: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    if is_sweep(value):
        listed = value[SWEEP]
        if not isinstance(listed, list | tuple) or not listed:
            raise ConfigError(f"{path}.{SWEEP}: found {listed!r}; expected a list of values")
        yield path, list(listed)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _sweeps(part, f"{path}.{name}".removeprefix("."))


def points(found: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of several sweeps, by dotted field."""
    made = [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())]
    if len(made) > MOST:
        raise ConfigError(
            f"{next(iter(found))}: the sweeps make {len(made):,} combinations; expected at most "
            f"{MOST:,}; list fewer values"
        )
    return made


def _variant(name: str, point: Mapping[str, Any]) -> str:
    """The variant's name: a variant that is swept keeps its own tag in front."""
    return f"{name}{',' if VARIANT in name else VARIANT}{point_label(point)}"


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in text)


def _listed(tables: Table, algorithm: Table, variants: Mapping[str, list[str]]) -> Any:
    """``[run]`` with every swept method of its list replaced by its variants."""
    run = tables.get("run", {})
    if not isinstance(run, Mapping):
        return run
    named = [algorithm["name"]] if isinstance(algorithm.get("name"), str) else list(METHODS)
    names = run.get("methods", named)
    if not isinstance(names, list | tuple):
        return run
    listed = [*names, *(name for name in variants if name not in names)]
    return {**run, "methods": [v for name in listed for v in variants.get(name, [name])]}
