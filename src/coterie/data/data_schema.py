"""The schema of a dataset: what sites have to agree on before their samples mean the same.

A table's schema says which columns are inputs, which of them are numbers or categories, and what
the classes are. Images, tokens and features have the shape of one sample instead of columns. A
schema comes from other machines: :meth:`Schema.from_json` checks types, counts and lengths.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import CoterieWarning, DataError, few
from ..storage.files import parsed, strict
from .arrays import MOST_TOKENS, PIXELS, TRAIN
from .federation import Dataset
from .sources.sheets import MOST_CLASSES, MOST_LEVELS, NO_CELL, InputColumn, TargetColumn

SchemaKind = Literal["table", "images", "tokens", "features"]

MOST_COLUMNS = 10_000
MOST_NAMES = 100_000  # classes of a target
MOST_INPUTS = 100_000_000  # numbers of one sample
MOST_FEATURES = 100_000  # features that a table's columns become
LONGEST = 1_000  # characters of a name


@strict
class Schema:
    """How samples are encoded. ``parts`` is None where the source does not divide its samples."""

    kind: SchemaKind
    target: TargetColumn
    columns: tuple[InputColumn, ...] = ()  # the inputs of a table
    shape: tuple[int, ...] = ()  # of one sample that is no row of a table
    pixels: str = ""  # images: whose mean and deviation pixels are scaled by; "" for neither
    tokens: int = 0  # tokens: one more than the largest
    parts: tuple[int, ...] | None = None  # 0 train, 1 validation, 2 test, as the source says

    def __post_init__(self) -> None:
        """Refuse counts, lengths and combinations that no data has."""
        for fault in _faults(self):
            raise DataError(fault)

    @classmethod
    def of(cls, dataset: Dataset) -> "Schema":
        """The schema of samples that are no rows of a table."""
        if dataset.y.ndim > 1:
            raise DataError(
                f"{dataset.name}: has a target at every position of a sample, which sites and "
                "exported models cannot have yet; use data.targets = 'last'"
            )
        names = dataset.class_names or tuple(str(c) for c in range(dataset.classes))
        if names and int(dataset.y.max()) >= len(names):
            raise DataError(
                f"{dataset.name}: found class {int(dataset.y.max())} and {len(names)} names of "
                "classes; expected a name for every class"
            )
        numbered = names == tuple(map(str, range(len(names))))
        kinds: dict[torch.dtype, SchemaKind] = {torch.uint8: "images", torch.int64: "tokens"}
        kind = kinds.get(dataset.x.dtype, "features")
        return cls(
            kind,
            TargetColumn("", ("integers" if numbered else "texts") if names else "quantity", names),
            shape=tuple(dataset.x.shape[1:]),
            pixels=dataset.name if kind == "images" and dataset.name in PIXELS else "",
            tokens=int(dataset.x.max()) + 1 if kind == "tokens" else 0,
            parts=None if dataset.fixed is None else tuple(dataset.fixed.unique().tolist()),
        )

    def to_json(self) -> str:
        """The schema as JSON: the same text for the same schema."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read a schema that another machine sent; refuses whatever is no schema."""
        return parsed(text, cls, "schema")

    @property
    def hash(self) -> str:
        """The sha256 of the schema."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def regression(self) -> bool:
        """Whether targets are real numbers."""
        return self.target.kind == "quantity"

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features that a table's columns become."""
        return tuple(title for column in self.columns for title in column.titles)

    @property
    def numeric(self) -> Tensor | None:
        """Which inputs are filled in and standardised; None if inputs are no rows of features."""
        if self.kind == "table":
            return torch.tensor([flag for column in self.columns for flag in column.numeric])
        is_row = self.kind == "features" and len(self.shape) == 1
        return torch.ones(self.shape, dtype=torch.bool) if is_row else None

    def example(self) -> Dataset:
        """A dataset of one sample, of zeros or of the largest token, to build networks for."""
        shape = (len(self.feature_names),) if self.kind == "table" else self.shape
        x = torch.full((1, *shape), max(self.tokens - 1, 0), dtype=DTYPES[self.kind])
        y = torch.zeros(1, dtype=torch.float32 if self.regression else torch.int64)
        names = self.target.classes
        return Dataset("sites", x, y, len(names), class_names=names, numeric=self.numeric)


DTYPES: dict[SchemaKind, torch.dtype] = {
    "table": torch.float32,
    "images": torch.uint8,
    "tokens": torch.int64,
    "features": torch.float32,
}


def client_order(sites: Iterable[str]) -> tuple[str, ...]:
    """Sites in the order in which a folder of one file per client lists them (``a-b.csv, a.csv``).

    The first site decides the order of columns, and sums are added up in this order.
    """
    return tuple(sorted(sites, key=lambda site: f"{site}."))


def refuse_unfinished(schema: Schema) -> Schema:
    """The schema; refuses one by which nothing can be trained, as a single site's may be."""
    for column in schema.columns:
        if column.kind == "empty":
            raise DataError(
                f"column '{column.name}' is empty in every row of every site; leave it out with "
                f"data.drop = ['{column.name}']"
            )
    name, classes = schema.target.name, schema.target.classes
    if not schema.regression and len(classes) < 2:
        where = f" in column '{name}' (data.target)" if name else ""
        raise DataError(
            f"every sample of every site has the class '{classes[0]}'{where}; one class leaves "
            "nothing to learn"
        )
    if schema.parts is not None and TRAIN not in schema.parts:
        raise DataError(f"no site has a sample marked as train; found the parts {schema.parts}")
    return schema


def _faults(schema: Schema) -> Iterator[str]:
    """What is wrong with a schema."""
    target, table = schema.target, schema.kind == "table"
    yield from _faults_of_names("schema.target.classes", target.classes, MOST_NAMES, table)
    yield from _faults_of_names("schema.target.name", (target.name,), 1)
    if (target.kind != "quantity") != bool(target.classes):
        yield (
            f"schema.target: found the kind '{target.kind}' with {len(target.classes)} classes; "
            "expected classes, or a quantity without classes"
        )
    yield from _faults_of_columns(schema) if table else _faults_of_shape(schema)
    if schema.parts is not None and list(schema.parts) != sorted({*schema.parts} & {0, 1, 2}):
        yield f"schema.parts: found {schema.parts}; expected some of 0, 1, 2, sorted"


def _faults_of_columns(schema: Schema) -> Iterator[str]:
    if (schema.shape, schema.pixels, schema.tokens) != ((), "", 0):
        yield "schema: found a table with a shape, pixels or tokens; expected columns"
    if not schema.columns:
        yield "schema.columns: found none; no columns are left to predict from"
    names = tuple(column.name for column in schema.columns)
    yield from _faults_of_names("schema.columns", names, MOST_COLUMNS)
    for column in schema.columns:
        where = f"schema.columns: column '{column.name}'"
        yield from _faults_of_names(where, column.levels, MOST_LEVELS, in_order=True)
        if (column.kind == "levels") != bool(column.levels):
            yield (
                f"{where}: found the kind '{column.kind}' with {len(column.levels)} levels; "
                "expected levels, or numbers without levels"
            )
    width = len(schema.feature_names)
    if width > MOST_FEATURES:
        yield (
            f"schema.columns: found {width:,} features; expected at most {MOST_FEATURES:,}; leave "
            "columns of many categories out with data.drop"
        )


def _faults_of_shape(schema: Schema) -> Iterator[str]:
    shape, rank = schema.shape, {"images": 3, "tokens": 1}.get(schema.kind, len(schema.shape))
    size = math.prod(side if side > 0 else MOST_INPUTS + 1 for side in shape[:5])
    if len(shape) not in range(1, 5) or len(shape) != rank or size > MOST_INPUTS or schema.columns:
        yield (
            f"schema.shape: found {shape[:5]} for {schema.kind} with {len(schema.columns)} columns;"
            f" expected at most {MOST_INPUTS:,} numbers a sample, and no columns"
        )
    if schema.pixels not in ("", *PIXELS) or (schema.pixels and schema.kind != "images"):
        yield f"schema.pixels: found '{schema.pixels[:60]}'; expected {', '.join(PIXELS)}"
    if (schema.kind == "tokens") != (0 < schema.tokens <= MOST_TOKENS):
        yield (
            f"schema.tokens: found {schema.tokens} for {schema.kind}; expected a number of tokens "
            f"up to {MOST_TOKENS:,}, or 0 if samples are no tokens"
        )


def _faults_of_names(
    where: str, names: tuple[str, ...], most: int, in_order: bool = False
) -> Iterator[str]:
    """Too many names, two equal names, or texts that are no names."""
    if len(names) > most:
        yield f"{where}: found {len(names):,} names; expected at most {most:,}"
    if len({*names}) < len(names):
        yield f"{where}: found a name twice; expected different names"
    if in_order and list(names) != sorted(names):
        yield f"{where}: found names out of order; expected them sorted"
    for text in names:
        if len(text) > LONGEST or "\x00" in text:
            yield (
                f"{where}: found a text of {len(text):,} characters ({text[:60]!r}…); expected at "
                f"most {LONGEST:,}, and none of them NUL; leave a column of long texts out with "
                "data.drop"
            )


# ---- the common schema of several sites, or which sites disagree on what ------------------------

# The result is what reading all sites' files together would have found, without any site's rows.


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


def _same(what: str, by_site: Mapping[str, str]) -> None:
    """Refuse values that differ between sites."""
    if len({*by_site.values()}) > 1:
        sites: dict[str, list[str]] = {}
        for site, value in by_site.items():
            sites.setdefault(value, []).append(site)
        told = "; ".join(f"'{value}' at {few(where)}" for value, where in sites.items())
        raise DataError(
            f"the sites' {what} differs: found {told}; all sites need the same; correct the file "
            "or the [data] options of one side"
        )


def _columns(schemas: Mapping[str, Schema]) -> tuple[InputColumn, ...]:
    """The columns that all sites have; the message of a refusal names columns and sites."""
    by_site = {s: {c.name: c for c in schema.columns} for s, schema in schemas.items()}
    told = []
    for name in {name: None for columns in by_site.values() for name in columns}:
        without = [site for site, columns in by_site.items() if name not in columns]
        if without:
            having = [site for site in by_site if site not in without]
            told.append(f"'{name}' is at {few(having)} and not at {few(without)}")
    if told:
        raise DataError(
            f"the sites' columns differ: {few(told)}; all sites need the same columns: leave "
            "a column out where it is with data.drop, or add it where it is missing (data.split, "
            "data.unit and data.time name columns that are no inputs)"
        )
    return tuple(
        _column(name, {site: columns[name] for site, columns in by_site.items()})
        for name in next(iter(by_site.values()))
    )


def _column(name: str, by_site: Mapping[str, InputColumn]) -> InputColumn:
    """One column that all sites have."""
    found = {
        kind: [site for site, column in by_site.items() if column.kind == kind]
        for kind in ("numbers", "levels", "empty")
    }
    if found["numbers"] and found["levels"]:
        texts = found["levels"]
        example = next((text for text in by_site[texts[0]].levels if text != NO_CELL), NO_CELL)
        raise DataError(
            f"column '{name}' is numbers at {few(found['numbers'])} and text at {few(texts)} (such "
            f"as '{example}' at {texts[0]}); write numbers at all sites, or make it a category at "
            f"all sites with data.categories = ['{name}'], or leave it out with data.drop = "
            f"['{name}']"
        )
    missing = any(column.missing for column in by_site.values())
    if not found["levels"]:
        return InputColumn(name, "numbers" if found["numbers"] else "empty", missing)
    levels = _sorted([level for column in by_site.values() for level in column.levels])
    if found["empty"]:
        levels = _sorted([*levels, NO_CELL])
    if len(levels) > MOST_LEVELS:
        most = max(found["levels"], key=lambda site: len(by_site[site].levels))
        raise DataError(
            f"column '{name}' holds {len(levels)} different texts at {few(found['levels'])} "
            f"together ({len(by_site[most].levels)} at {most}: '{levels[0]}', '{levels[1]}', …); "
            f"more than {MOST_LEVELS} is no category: spell categories one way, or leave the "
            f"column out at all sites with data.drop = ['{name}']"
        )
    return InputColumn(name, "levels", levels=levels)


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
        if quantity or len(classes) > MOST_CLASSES:
            return replace(first, kind="quantity", classes=())
        return replace(first, kind="integers", classes=classes)
    if numbers:
        raise DataError(
            f"column '{first.name}' (data.target) is numbers at {few(numbers)} and classes by "
            f"text at {few(texts)} (such as '{targets[texts[0]].classes[0]}' at {texts[0]}); "
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
            f"the classes at {few(odd)} are not those of the other sites, and "
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
