"""The schema of a dataset: what sites have to agree on before their samples mean the same.

A table's schema says which columns are inputs, which of them are numbers or categories, and what
the classes are. Images, tokens and features have the shape of one sample instead of columns. A
schema comes from other machines: :meth:`Schema.from_json` checks types, counts and lengths.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import DataError
from .arrays import MOST_TOKENS, PIXELS, TRAIN
from .federation import Dataset
from .sources.columns import MOST_LEVELS, InputColumn, TargetColumn
from .untrusted import STRICT, parsed

SchemaKind = Literal["table", "images", "tokens", "features"]

MOST_COLUMNS = 10_000
MOST_CLASSES = 100_000
MOST_INPUTS = 100_000_000  # numbers of one sample
MOST_FEATURES = 100_000  # features that a table's columns become
LONGEST = 1_000  # characters of a name


@dataclass(frozen=True)
class Schema:
    """How samples are encoded. ``parts`` is None where the source does not divide its samples."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: SchemaKind
    target: TargetColumn
    columns: tuple[InputColumn, ...] = ()  # the inputs of a table
    shape: tuple[int, ...] = ()  # of one sample that is no row of a table
    pixels: str = ""  # images: whose mean and deviation pixels are scaled by; "" for neither
    tokens: int = 0  # tokens: one more than the largest
    parts: tuple[int, ...] | None = None  # 0 train, 1 validation, 2 test, as the source says

    def __post_init__(self) -> None:
        """Refuse counts, lengths and combinations that no data has."""
        _check_target(self)
        if self.kind == "table":
            _check_columns(self)
        else:
            _check_shape(self)
        if self.parts is not None and list(self.parts) != sorted({*self.parts} & {0, 1, 2}):
            raise DataError(f"schema.parts: found {self.parts}; expected some of 0, 1, 2, sorted")

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
    if not schema.regression and len(schema.target.classes) < 2:
        raise DataError(
            f"every sample of every site has the class '{schema.target.classes[0]}'"
            f"{_in_column(schema)}; one class leaves nothing to learn"
        )
    if schema.parts is not None and TRAIN not in schema.parts:
        raise DataError(f"no site has a sample marked as train; found the parts {schema.parts}")
    return schema


def _in_column(schema: Schema) -> str:
    return f" in column '{schema.target.name}' (data.target)" if schema.target.name else ""


def _check_target(schema: Schema) -> None:
    target = schema.target
    _check_names("schema.target.classes", target.classes, MOST_CLASSES)
    _check_text("schema.target.name", target.name)
    if (target.kind == "quantity") != (not target.classes):
        raise DataError(
            f"schema.target: found the kind '{target.kind}' with {len(target.classes)} classes; "
            "expected classes, or a quantity without classes"
        )
    if schema.kind == "table" and list(target.classes) != sorted(target.classes):
        raise DataError("schema.target.classes: found classes out of order; expected them sorted")


def _check_columns(schema: Schema) -> None:
    if (schema.shape, schema.pixels, schema.tokens) != ((), "", 0):
        raise DataError("schema: found a table with a shape, pixels or tokens; expected columns")
    if not schema.columns:
        raise DataError("schema.columns: found none; no columns are left to predict from")
    _check_names("schema.columns", tuple(c.name for c in schema.columns), MOST_COLUMNS)
    for column in schema.columns:
        where = f"schema.columns: column '{column.name[:LONGEST]}'"
        _check_names(where, column.levels, MOST_LEVELS)
        if list(column.levels) != sorted(column.levels):
            raise DataError(f"{where}: found levels out of order; expected them sorted")
        if (column.kind == "levels") != bool(column.levels):
            raise DataError(
                f"{where}: found the kind '{column.kind}' with {len(column.levels)} levels; "
                "expected levels, or numbers without levels"
            )
    width = len(schema.feature_names)
    if width > MOST_FEATURES:
        raise DataError(
            f"schema.columns: found {width:,} features; expected at most {MOST_FEATURES:,}; leave "
            "columns of many categories out with data.drop"
        )


def _check_shape(schema: Schema) -> None:
    shape, rank = schema.shape, {"images": 3, "tokens": 1}.get(schema.kind, len(schema.shape))
    size = math.prod(side if side > 0 else MOST_INPUTS + 1 for side in shape[:5])
    if len(shape) not in range(1, 5) or len(shape) != rank or size > MOST_INPUTS or schema.columns:
        raise DataError(
            f"schema.shape: found {shape[:5]} for {schema.kind} with {len(schema.columns)} columns;"
            f" expected at most {MOST_INPUTS:,} numbers a sample, and no columns"
        )
    if schema.pixels not in ("", *PIXELS) or (schema.pixels and schema.kind != "images"):
        raise DataError(
            f"schema.pixels: found '{schema.pixels[:60]}'; expected {', '.join(PIXELS)}"
        )
    if (schema.kind == "tokens") != (0 < schema.tokens <= MOST_TOKENS):
        raise DataError(
            f"schema.tokens: found {schema.tokens} for {schema.kind}; expected a number of tokens "
            f"up to {MOST_TOKENS:,}, or 0 if samples are no tokens"
        )


def _check_names(where: str, names: tuple[str, ...], most: int) -> None:
    """Refuse too many names, two equal names, and texts that are no names."""
    if len(names) > most:
        raise DataError(f"{where}: found {len(names):,} names; expected at most {most:,}")
    if len({*names}) < len(names):
        raise DataError(f"{where}: found a name twice; expected different names")
    for name in names:
        _check_text(where, name)


def _check_text(where: str, text: str) -> None:
    if len(text) > LONGEST or "\x00" in text:
        raise DataError(
            f"{where}: found a text of {len(text):,} characters ({text[:60]!r}…); expected at most "
            f"{LONGEST:,}, and none of them NUL; leave a column of long texts out with data.drop"
        )
