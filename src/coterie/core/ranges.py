"""Type aliases that declare the range of a field, and the check of values against them.

A field of a method, an adaptation or a partition, and an option of a network or of a synthetic
dataset, declares its range in its annotation and nowhere else: ``mu: NotNegative = 0.1``. Configs
and constructors refuse values outside the range, and ``coterie show`` prints it. NaN and infinity
are always refused.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Interval as Interval  # re-exported, as MinLen is
from annotated_types import MinLen as MinLen

LARGEST = 10**9  # larger numbers overflow float32 in products, and make loops endless
MODELS = 1000  # models of one server, or layers of one network: more exhaust the memory

Number = Annotated[float, Interval(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Interval(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Interval(ge=0, le=LARGEST)]
AtLeastOne = Annotated[float, Interval(ge=1, le=LARGEST)]
Share = Annotated[float, Interval(ge=0, le=1)]
ShareAboveZero = Annotated[float, Interval(gt=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Cosine = Annotated[float, Interval(ge=-1, le=1)]
Count = Annotated[int, Interval(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Interval(ge=0, le=LARGEST)]
Few = Annotated[int, Interval(ge=1, le=MODELS)]  # where each takes memory
Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What fields of this type mean, where their class does not say."""

    text: str


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The range of a string that must be one of these names: ``Annotated[str, OneOf(NAMES)]``.

    Use it for names from a table, and a ``Literal`` for a few fixed names. With ``own`` a name
    with a colon, of what a user or a program brings, is accepted as well.
    """

    names: tuple[str, ...]
    own: bool = False

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        """Pydantic's schema for this range: the same as for a ``Literal``."""
        from pydantic_core import core_schema  # slow to import

        named = core_schema.literal_schema(list(self.names))
        if not self.own:
            return named
        brought = core_schema.str_schema(pattern=":", strict=True)
        message = f"Input should be {self.words(', ')}"
        return core_schema.union_schema(
            [named, brought], custom_error_type="name", custom_error_message=message
        )

    def words(self, between: str = " or ") -> str:
        return between.join([*map(repr, self.names), *(["package.module:Class"] * self.own)])


def fitted(value: Any, kind: Any) -> Any:
    """Convert a value to the type ``kind``; ValueError for another type or a value out of range.

    A list is read as a list of a TOML or JSON file.

    >>> fitted(2, Positive)
    2.0
    """
    if isinstance(value, list):
        return fitted_json(value, kind)
    return _adapter(kind).validate_python(value)


def fitted_json(value: Any, kind: Any) -> Any:
    """As :func:`fitted`, for a value of a TOML or JSON file: a list may stand for any sequence."""
    return _adapter(kind).validate_json(json.dumps(value, default=str))


@functools.cache
def _adapter(kind: Any) -> Any:
    """Pydantic's strict validator of a type, which refuses NaN and infinity."""
    import pydantic  # slow to import

    rules = pydantic.ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return pydantic.TypeAdapter(kind, config=rules)


_PLAIN = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "nothing",
    Any: "a value",
}
_MANY = {"a whole number": "whole numbers", "a number": "numbers", "a table": "tables"}


def in_words(kind: Any) -> str:
    """A type and its range in plain words.

    >>> in_words(Positive | Auto)
    "a number above 0 and at most 1e9, or 'auto'"
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        parts = [in_words(part) for part in arguments if part is not type(None)]
        long = any(" and " in part or "," in part for part in parts)
        return (", or " if long else " or ").join(parts)
    if origin is Callable:
        return "a Python function"
    if origin in (tuple, list, Sequence):
        return f"a list of {_plural(in_words(arguments[0]))}"
    if origin is Annotated:
        base, *limits = arguments
        for limit in limits:
            if isinstance(limit, OneOf):
                return limit.words()
        return in_words(base) + "".join(_limit(limit) for limit in limits)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        cells = (f"{f.name} ({in_words(hints[f.name])})" for f in dataclasses.fields(kind))
        return f"a table of {', '.join(cells)}"
    return _PLAIN.get(kind, getattr(kind, "__name__", str(kind)))


def _plural(words: str) -> str:
    for one, many in _MANY.items():
        if words.startswith(one):
            return many + words.removeprefix(one)
    return words.removeprefix("a ") + "s"


def _limit(limit: Any) -> str:
    """The words that describe an annotation's limit."""
    if isinstance(limit, MinLen):
        return f", at least {'one' if limit.min_length == 1 else limit.min_length}"
    if not isinstance(limit, Interval):
        return ""
    low = limit.gt if limit.ge is None else limit.ge
    high = limit.lt if limit.le is None else limit.le
    if limit.ge is not None and limit.le is not None:
        return f" from {_number(low)} to {_number(high)}"
    below = f"{'of at least' if limit.gt is None else 'above'} {_number(low)}"
    above = f"{'at most' if limit.lt is None else 'below'} {_number(high)}"
    return f" {below} and {above}"


def _number(value: Any) -> str:
    return f"{value:g}".replace("e+0", "e")
