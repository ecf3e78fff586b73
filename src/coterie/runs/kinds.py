"""Checks of the JSON values in a run's files, by the names that error messages use for them.

A folder may come from a stranger: every value that is read from it is checked before it is used.
"""

import math
import reprlib
from collections.abc import Callable
from typing import Any

from ..core.metrics import METRICS

Check = Callable[[Any], bool]

LARGEST = 2**63  # larger integers are no counts, and may not convert to float


def _integer(value: Any) -> bool:
    """Whether the value is an integer of at most 64 bits; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def _count(value: Any) -> bool:
    return _integer(value) and value >= 0


def _finite(value: Any) -> bool:
    return _integer(value) or (isinstance(value, float) and math.isfinite(value))


def _number(value: Any) -> bool:
    """Whether the value is a number as runs write it: null is NaN, infinities are texts."""
    return value is None or _finite(value) or (_text(value) and value in ("inf", "-inf"))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(inside: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(inside, value))


def _table_of(inside: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(inside, value.values()))


def _named_texts(*names: str) -> Check:
    """A check that the value is a table of texts that has these names."""
    texts = _table_of(_text)
    return lambda value: texts(value) and value.keys() >= {*names}


def _call(value: Any) -> bool:
    """Whether the value says how calls of one stage were executed."""
    named = isinstance(value, dict) and all(_text(value.get(name)) for name in ("stage", "way"))
    return named and (value.get("why") is None or _text(value.get("why")))


def _calls(value: Any) -> bool:
    return isinstance(value, dict) and _list_of(_call)(value.get("calls", []))


KINDS: dict[str, Check] = {
    "a text": _text,
    "a metric": lambda value: _text(value) and value in METRICS,
    "an integer": _integer,
    "a count": _count,
    "a count or null": lambda value: value is None or _count(value),
    "a number or null": _number,
    "a finite number or null": lambda value: value is None or _finite(value),
    "finite seconds": lambda value: _finite(value) and value >= 0,
    "true or false": lambda value: isinstance(value, bool),
    "zero, uniform or varied": lambda value: (
        _text(value) and value in ("zero", "uniform", "varied")
    ),
    "two numbers": lambda value: _list_of(_number)(value) and len(value) == 2,
    "a list of counts": _list_of(_count),
    "a list of texts": _list_of(_text),
    "a list of alarms": _list_of(_named_texts("code", "text")),
    "a list of clients and reasons": _list_of(_named_texts("client", "reason")),
    "a table of texts": _table_of(_text),
    "a table of counts": _table_of(_count),
    "a table with calls": _calls,
}


def check(name: str, value: Any, kind: str) -> None:
    """Raise ValueError if the value of a field is not of the expected kind."""
    if not KINDS[kind](value):
        raise ValueError(f"'{name}' is {shown(value)}; expected {kind}")


def shown(value: Any) -> str:
    """The start of a value, for an error message."""
    return reprlib.repr(value)


def number(value: Any) -> float:
    """The number that a run wrote as a JSON value.

    >>> number(0.5), number("-inf"), number(None)
    (0.5, -inf, nan)
    """
    return math.nan if value is None else float(value)
