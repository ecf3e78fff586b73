"""Checks of the JSON values in a run's files, by the names that error messages use for them.

A folder may come from a stranger: every value that is read from it is checked before it is used.
"""

import math
import reprlib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from ..core.imports import names_class
from ..core.metrics import METRICS

LARGEST = 2**63  # larger integers are no counts, and may not convert to float

Integer = Annotated[StrictInt, Field(gt=-LARGEST, lt=LARGEST)]
Count = Annotated[StrictInt, Field(ge=0, lt=LARGEST)]
Finite = Annotated[StrictInt | StrictFloat, AllowInfNan(False), Field(gt=-1e308, lt=1e308)]
Number = Finite | Literal["inf", "-inf"] | None  # as runs write it: null is NaN
Texts = dict[str, StrictStr]


def _with(*names: str) -> AfterValidator:
    """A check that a table has these names."""

    def checked(table: Texts) -> Texts:
        if not table.keys() >= {*names}:
            raise ValueError(f"expected {', '.join(names)}")
        return table

    return AfterValidator(checked)


def _metric(name: str) -> str:
    if name not in METRICS and not names_class(name):
        raise ValueError(f"expected {', '.join(METRICS)}")
    return name


class Call(BaseModel):
    """How the calls of one stage were executed."""

    stage: StrictStr
    way: StrictStr
    why: StrictStr | None


class Calls(BaseModel):
    """A table with calls."""

    calls: list[Call] = []


class Started(BaseModel):
    """What has to be in the ``config.json`` of a run that is continued."""

    asked: dict[str, Any]
    resolved: dict[str, Any]
    hash: StrictStr


class Environment(BaseModel):
    """What has to be in an ``environment.json``, where it is there."""

    argv: list[StrictStr] = []
    resumed: list[Any] = []
    ran: dict[str, Call] = {}


class PrivacySpent(BaseModel):
    """What a run spent of its clients' privacy."""

    noise: Finite
    clip: Finite
    delta: Finite
    epsilon: dict[str, Number]
    accountant: StrictStr
    simulated: StrictBool
    leaves: StrictStr


KINDS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind)
    for name, kind in dict[str, Any](
        {
            "a text": StrictStr,
            "a metric": Annotated[StrictStr, AfterValidator(_metric)],
            "an integer": Integer,
            "a count": Count,
            "a count or null": Count | None,
            "a number or null": Number,
            "a finite number or null": Finite | None,
            "finite seconds": Annotated[Finite, Field(ge=0)],
            "true or false": StrictBool,
            "zero, uniform or varied": Literal["zero", "uniform", "varied"],
            "two numbers": Annotated[list[Number], Field(min_length=2, max_length=2)],
            "a list of counts": list[Count],
            "a list of texts": list[StrictStr],
            "a list of alarms": list[Annotated[Texts, _with("code", "text")]],
            "a list of clients and owners": list[tuple[Count, list[Count]]],
            "a list of clients and reasons": list[Annotated[Texts, _with("client", "reason")]],
            "a table of texts": Texts,
            "a table of counts": dict[str, Count],
            "a table with calls": Calls,
            "a table or null": PrivacySpent | None,
        }
    ).items()
}


def fits(value: Any, kind: str) -> bool:
    """Whether a value is of this kind."""
    try:
        KINDS[kind].validate_python(value)
    except ValidationError:
        return False
    return True


def check(name: str, value: Any, kind: str) -> None:
    """Raise ValueError if the value of a field is not of the expected kind."""
    if not fits(value, kind):
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
