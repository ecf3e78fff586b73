"""Merges the schemas of several sites into the common one, or says which sites disagree on what.

The result is what reading all sites' files together would have found, without any site's rows.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ..errors import CoterieWarning, DataError
from .data_schema import Schema, client_order, refuse_unfinished
from .sources.columns import MOST_CLASSES, MOST_LEVELS, NO_CELL, InputColumn, TargetColumn

MOST_NAMED = 5  # sites or columns that a message names


def merged(schemas: Mapping[str, Schema]) -> Schema:
    """The common schema of all sites, by site name; the order of the sites does not matter."""
    if not schemas:
        raise DataError("found no site's schema; expected at least one")
    found = refuse_unfinished(union({site: schemas[site] for site in client_order(schemas)}))
    for column in found.columns:
        _warn_alike(f"column '{column.name}'", column.levels)
    _warn_alike("the target", found.target.classes)
    return found


def union(schemas: Mapping[str, Schema]) -> Schema:
    """The least schema that all of these fit into; the first one decides the order of columns."""
    first = next(iter(schemas.values()))
    _same("kind of data", {site: schema.kind for site, schema in schemas.items()})
    parts = {part for schema in schemas.values() for part in schema.parts or ()}
    divided = any(schema.parts is not None for schema in schemas.values())
    common = replace(first, parts=tuple(sorted(parts)) if divided else None)
    if first.kind == "table":
        return replace(common, columns=_columns(schemas), target=_table_target(schemas))
    _same("pixel scale", {site: schema.pixels for site, schema in schemas.items()})
    return replace(
        common,
        shape=_shape(schemas),
        tokens=max(schema.tokens for schema in schemas.values()),
        target=_array_target(schemas),
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _same(what: str, by_site: Mapping[str, str]) -> None:
    """Refuse values that differ between sites."""
    if len({*by_site.values()}) > 1:
        sites: dict[str, list[str]] = {}
        for site, value in by_site.items():
            sites.setdefault(value, []).append(site)
        told = "; ".join(f"'{value}' at {_listed(where)}" for value, where in sites.items())
        raise DataError(
            f"the sites' {what} differs: found {told}; all sites need the same; correct the file "
            "or the [data] options of one side"
        )


# The inputs of tables


def _columns(schemas: Mapping[str, Schema]) -> tuple[InputColumn, ...]:
    by_site = {s: {c.name: c for c in schema.columns} for s, schema in schemas.items()}
    _refuse_odd_columns(by_site)
    order = next(iter(by_site.values()))
    return tuple(
        _column(name, {site: columns[name] for site, columns in by_site.items()}) for name in order
    )


def _refuse_odd_columns(by_site: Mapping[str, Mapping[str, InputColumn]]) -> None:
    """Refuse columns that are not at all sites; the message names columns and sites."""
    names = {name: None for columns in by_site.values() for name in columns}
    told = []
    for name in names:
        without = [site for site, columns in by_site.items() if name not in columns]
        if without:
            having = [site for site in by_site if site not in without]
            told.append(f"'{name}' is at {_listed(having)} and not at {_listed(without)}")
    if told:
        raise DataError(
            f"the sites' columns differ: {_listed(told)}; all sites need the same columns: leave "
            "a column out where it is with data.drop, or add it where it is missing (data.split, "
            "data.unit and data.time name columns that are no inputs)"
        )


def _column(name: str, by_site: Mapping[str, InputColumn]) -> InputColumn:
    """One column that all sites have."""
    found = {
        kind: [site for site, column in by_site.items() if column.kind == kind]
        for kind in ("numbers", "levels", "empty")
    }
    if found["numbers"] and found["levels"]:
        _refuse_mixed(name, found["numbers"], found["levels"], by_site[found["levels"][0]].levels)
    missing = any(column.missing for column in by_site.values())
    if not found["levels"]:
        return InputColumn(name, "numbers" if found["numbers"] else "empty", missing)
    levels = _sorted([level for column in by_site.values() for level in column.levels])
    if found["empty"]:
        levels = _sorted([*levels, NO_CELL])
    if len(levels) > MOST_LEVELS:
        most = max(found["levels"], key=lambda site: len(by_site[site].levels))
        raise DataError(
            f"column '{name}' holds {len(levels)} different texts at {_listed(found['levels'])} "
            f"together ({len(by_site[most].levels)} at {most}: '{levels[0]}', '{levels[1]}', …); "
            f"more than {MOST_LEVELS} is no category: spell categories one way, or leave the "
            f"column out at all sites with data.drop = ['{name}']"
        )
    return InputColumn(name, "levels", levels=levels)


def _refuse_mixed(
    name: str, numbers: list[str], texts: list[str], examples: tuple[str, ...]
) -> NoReturn:
    example = next((text for text in examples if text != NO_CELL), NO_CELL)
    raise DataError(
        f"column '{name}' is numbers at {_listed(numbers)} and text at {_listed(texts)} (such as "
        f"'{example}' at {texts[0]}); write numbers at all sites, or make it a category at all "
        f"sites with data.categories = ['{name}'], or leave it out with data.drop = ['{name}']"
    )


def _sorted(names: list[str]) -> tuple[str, ...]:
    """Different names, sorted as numpy sorts them when it reads a whole table."""
    return tuple(np.unique(np.array(names)).tolist())


def _warn_alike(what: str, names: tuple[str, ...]) -> None:
    """Warn of names that differ only in case or blanks: most likely one name, spelt two ways."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault("".join(name.casefold().split()), name)
        if other != name:
            warnings.warn(
                CoterieWarning(
                    f"{what} holds '{other}' and '{name}', which differ only in case or blanks; "
                    "they count as two: if they are one, spell them the same at all sites"
                ),
                stacklevel=3,
            )


# Targets


def _table_target(schemas: Mapping[str, Schema]) -> TargetColumn:
    """The common target of tables, as the reader of one table would decide."""
    targets = {site: schema.target for site, schema in schemas.items()}
    _same("target column (data.target)", {site: target.name for site, target in targets.items()})
    first = next(iter(targets.values()))
    texts = [site for site, target in targets.items() if target.kind == "texts"]
    numbers = [site for site in targets if site not in texts]
    classes = _sorted([name for target in targets.values() for name in target.classes])
    if not texts:
        quantity = any(target.kind == "quantity" for target in targets.values())
        quantity = quantity or len(classes) > MOST_CLASSES
        return (
            replace(first, kind="quantity", classes=())
            if quantity
            else replace(first, kind="integers", classes=classes)
        )
    if numbers:
        raise DataError(
            f"column '{first.name}' (data.target) is numbers at {_listed(numbers)} and classes by "
            f"text at {_listed(texts)} (such as '{targets[texts[0]].classes[0]}' at {texts[0]}); "
            "write classes one way, and set data.task to the same at all sites"
        )
    return replace(first, kind="texts", classes=classes)


def _array_target(schemas: Mapping[str, Schema]) -> TargetColumn:
    """The common target of arrays: equal lists of classes, longer numberings, or more names."""
    targets = {site: schema.target for site, schema in schemas.items()}
    tasks = {s: "numbers" if t.kind == "quantity" else "classes" for s, t in targets.items()}
    _same("task (targets that are real numbers, or classes)", tasks)
    longest = max(targets.values(), key=lambda target: len(target.classes))
    lists = {target.classes for target in targets.values()}
    if len(lists) == 1 or all(target.kind == "integers" for target in targets.values()):
        return longest
    tokens = any(schema.kind == "tokens" for schema in schemas.values())
    if tokens or any(classes != _sorted([*classes]) for classes in lists):
        odd = [site for site, target in targets.items() if target.classes != longest.classes]
        raise DataError(
            f"the classes at {_listed(odd)} are not those of the other sites, and "
            + ("tokens have no names to match" if tokens else "their order is the file's own")
            + "; give the same class_names, in the same order, at all sites"
        )
    return TargetColumn("", "texts", _sorted([name for names in lists for name in names]))


def _shape(schemas: Mapping[str, Schema]) -> tuple[int, ...]:
    """The common shape of samples; grey images become RGB if any site's images have colour."""
    shapes = {site: schema.shape for site, schema in schemas.items()}
    first = next(iter(schemas.values()))
    if first.kind == "images" and {shape[0] for shape in shapes.values()} == {1, 3}:
        shapes = {site: (3, *shape[1:]) for site, shape in shapes.items()}
    hint = " (data.size resizes images)" if first.kind == "images" else ""
    _same(f"shape of a sample{hint}", {s: "x".join(map(str, t)) for s, t in shapes.items()})
    return next(iter(shapes.values()))
