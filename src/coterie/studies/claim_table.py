"""Reads one entry of a card's ``[[claims]]``: a relation between the numbers of methods."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..errors import ConfigError, did_you_mean
from .judging import FEWEST, RELATIONS
from .study import IN, Claim, check_number, method_and_column


class StrictTable(BaseModel):
    """A table of a card that has no fields but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClaimTable(StrictTable):
    """One entry of ``[[claims]]``; exactly one of its relations is given."""

    text: str
    columns: tuple[str, ...] = ()
    number: str | None = None
    above: tuple[str, ...] | None = None
    below: tuple[str, ...] | None = None
    rises: tuple[str, ...] | None = None
    falls: tuple[str, ...] | None = None
    best: str | None = None
    level: tuple[str, str] | None = None
    at_least: tuple[str, float] | None = None
    at_most: tuple[str, float] | None = None
    cause: str | dict[str, str] | None = None  # why it fails; by scale if found at some only
    by: float = 0.0
    within: float = 2.0
    p: Annotated[float, Field(gt=0, le=1)] | None = None


def check_claim(table: ClaimTable, scales: Sequence[str]) -> None:
    """Refuse a claim that cannot be judged, or that has the cause of a scale that is not there."""
    claim_of(table, scales[0])
    for scale in table.cause if isinstance(table.cause, dict) else ():
        if scale not in scales:
            raise ConfigError(
                f"claims: '{table.text}': cause: there is no scale '{scale}'; "
                f"{did_you_mean(scale, scales)}"
            )


def claim_of(table: ClaimTable, scale: str) -> Claim:
    """The claim that a table states, with the cause of its failure at this scale.

    A table without a relation, or with several, is refused.
    """
    given = {name: getattr(table, name) for name in RELATIONS}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            f"claims: '{table.text}' has {len(given)} relations; expected one of "
            f"{', '.join(RELATIONS)}"
        )
    check_number(table.number, "claims.number")
    ((relation, value),) = given.items()
    if relation in ("at_least", "at_most"):
        methods, margin = (value[0],), value[1]
    else:
        methods = (value,) if isinstance(value, str) else tuple(value)
        margin = table.within if relation == "level" else table.by
    cause = table.cause.get(scale) if isinstance(table.cause, dict) else table.cause
    rest = margin, table.columns, table.number, cause, table.p
    claim = Claim(table.text, relation, methods, *rest)
    _check_methods(claim)
    return claim


def _check_methods(claim: Claim) -> None:
    """Refuse a claim that could not fail, or whose columns contradict each other."""
    where, placed = f"claims: '{claim.text}': {claim.relation}", [IN in m for m in claim.methods]
    if claim.relation == "best" and any(placed):
        raise ConfigError(f"{where}: found a column; expected a method, and columns = [...]")
    if claim.relation != "best" and len(claim.methods) < FEWEST.get(claim.relation, 2):
        raise ConfigError(f"{where}: found {len(claim.methods)} methods; expected two or more")
    if not all(method_and_column(m)[1] or IN not in m for m in claim.methods):
        raise ConfigError(f"{where}: found no column behind {IN}; expected 'method {IN} column'")
    if claim.p is not None and (claim.relation != "above" or any(placed)):
        raise ConfigError(f"{where}: found p; expected it beside methods of one column in 'above'")
    if all(placed) and claim.columns:
        raise ConfigError(f"{where}: every method names its column; remove columns = [...]")
