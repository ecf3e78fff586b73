"""Reads JSON that another machine sent into dataclasses: strict types, no unknown fields."""

import functools
from typing import Any, Final, TypeVar, cast

from ..errors import DataError

MOST_BYTES = 64 * 2**20  # of a text; a schema of 10,000 columns takes less than one mebibyte
MOST_SHOWN = 60  # characters of a value that a message repeats
# A dataclass with ``__pydantic_config__ = STRICT`` can be parsed.
STRICT: Final = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

Kind = TypeVar("Kind")


def parsed(text: str, kind: type[Kind], where: str) -> Kind:
    """The object of this dataclass that a JSON text describes; anything else is a DataError."""
    from pydantic import ValidationError  # slow to import

    if len(text) > MOST_BYTES:
        raise DataError(f"{where}: found {len(text):,} characters; expected at most {MOST_BYTES:,}")
    try:
        found: Kind = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        return found
    path = ".".join([where, *(str(part) for part in first["loc"])])
    shown = repr(first["input"])
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
    raise DataError(f"{path}: found {shown}; {first['msg'][:200]}")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
