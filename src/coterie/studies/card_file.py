"""Reads a card: one table or figure of a paper, as a TOML file in ``experiments/``.

A card is a config with further tables: ``[card]`` (what it is), ``[columns]`` (those of the printed
table), ``[paper]`` (its numbers), ``[[claims]]``, and ``[scales]`` (the same at other sizes).
docs/cards.md describes the format. Everything in it is checked before a run begins.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..core.imports import Code
from ..errors import ConfigError, did_you_mean
from ..runs.config.loading import load, merge
from ..runs.config.schema import DataTable, Table
from ..runs.config.sweeps import point_label, points, shared_sweeps
from .outcome import FEWEST, RELATIONS
from .study import (
    IN,
    RESULT,
    Claim,
    Printed,
    Study,
    StudyColumn,
    check_number,
    default_number,
    method_and_column,
)

# ---- claims --------------------------------------------------------------------------------------


def claim_of(found: Any) -> Any:
    """The fields of a claim from an entry of ``[[claims]]``, which has exactly one relation."""
    if not isinstance(found, dict):
        return found
    given = {name: value for name, value in found.items() if name in RELATIONS}
    if len(given) != 1:
        raise ConfigError(
            f"claims: '{found.get('text')}' has {len(given)} relations; expected one of "
            f"{', '.join(RELATIONS)}"
        )
    ((relation, value),) = given.items()
    rest = {name: value for name, value in found.items() if name not in RELATIONS}
    by, within = rest.pop("by", 0.0), rest.pop("within", 2.0)
    margin = within if relation == "level" else by
    if relation == "at_least" and isinstance(value, list) and len(value) == 2:
        value, margin = value
    methods = [value] if isinstance(value, str) else value
    return {**rest, "relation": relation, "methods": methods, "margin": margin}


def checked_claim(claim: Claim) -> Claim:
    """The claim; refuses one that could not fail, or whose columns contradict each other."""
    check_number(claim.number, "claims.number")
    where, placed = f"claims: '{claim.text}': {claim.relation}", [IN in m for m in claim.methods]
    if claim.relation == "best" and (any(placed) or len(claim.methods) > 1):
        raise ConfigError(f"{where}: found a column; expected a method, and columns = [...]")
    if claim.relation != "best" and len(claim.methods) < FEWEST.get(claim.relation, 2):
        raise ConfigError(f"{where}: found {len(claim.methods)} methods; expected two or more")
    if not all(method_and_column(m)[1] or IN not in m for m in claim.methods):
        raise ConfigError(f"{where}: found no column behind {IN}; expected 'method {IN} column'")
    if claim.p is not None and (claim.relation != "above" or any(placed)):
        raise ConfigError(f"{where}: found p; expected it beside methods of one column in 'above'")
    if all(placed) and claim.columns:
        raise ConfigError(f"{where}: every method names its column; remove columns = [...]")
    return claim


PAPER = "paper"  # the scale of the file itself
NAMING = ("data", "partition", "model", "adapt")  # tables whose fields belong to what they name


class CardTable(BaseModel):
    """The table ``[card]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"P[1-5]-[A-Za-z0-9-]{1,30}|arena|pfllib")]
    paper: Literal["FedFomo", "FedeRiCo", "PaFL", "WAFFLE", "FedAMP", "coterie"]
    title: str
    figure: Literal["sweep", "curves", "matrices", "scatter"] | None = None
    number: str | None = None
    tolerance: Annotated[float, Field(ge=0)] = 2.0
    clients: tuple[Annotated[int, Field(ge=0)], ...] = ()
    stand_in: str | None = None
    notes: tuple[str, ...] = ()
    waits: str | None = None


def _number(value: Any) -> Printed:
    """A printed number: alone, or with its deviation in a list."""
    parts = value if isinstance(value, list) else [value]
    real = [part for part in parts if isinstance(part, int | float) and not isinstance(part, bool)]
    if not 1 <= len(parts) <= 2 or len(real) != len(parts):
        raise ValueError("expected a number or [mean, deviation]")
    return Printed(*map(float, parts))


class ScaleTable(BaseModel):
    """One of ``[scales]``: fields of the config, and these."""

    model_config = ConfigDict(extra="allow", frozen=True)

    note: str | None = None
    tried: str | None = None  # what was tried at this scale and left
    columns: dict[str, Table] | None = None  # the columns of the scale, with fields of their own

    @property
    def tables(self) -> Table:
        """The fields of the config."""
        return dict(self.model_extra or {})


class Card(BaseModel):
    """A table or figure of a paper, at any of its scales; other tables of the file are a config."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    path: Path
    about: CardTable = Field(alias="card")
    columns: dict[str, Table] = {}
    printed: dict[str, dict[str, Annotated[Any, BeforeValidator(_number)]]] = Field(
        {}, alias="paper"
    )
    claims: tuple[
        Annotated[Claim, BeforeValidator(claim_of), AfterValidator(checked_claim)], ...
    ] = ()
    scales: dict[str, ScaleTable] = {}

    @property
    def tables(self) -> Table:
        """The config at the paper's scale."""
        return dict(self.model_extra or {})

    def at(self, scale: str) -> Table:
        """The config at a scale."""
        return merged(self.tables, self.scales[scale].tables if scale in self.scales else {})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all scales."""
        return (PAPER, *self.scales)

    def study(
        self,
        scale: str = PAPER,
        changes: Mapping[str, Any] | None = None,
        code: Code | None = None,
    ) -> Study:
        """The study of this card at one scale; ``changes`` are fields of the config."""
        if scale not in self.names:
            known = did_you_mean(scale, self.names)
            raise ConfigError(f"{self.path}: there is no scale '{scale}'; {known}")
        here, about = self.scales.get(scale, ScaleTable()), self.about
        narrowed = here.columns
        columns = self._columns(self.at(scale), narrowed, dict(changes or {}), code or Code())
        notes = [here.note, about.stand_in, about.waits, *about.notes]
        return Study(
            name=about.id,
            title=f"{about.paper}: {about.title}",
            columns=columns,
            printed=self.printed,
            claims=tuple(
                c._replace(cause=c.cause.get(scale)) if isinstance(c.cause, dict) else c
                for c in self.claims
            ),
            tolerance=about.tolerance,
            notes=tuple(text for text in notes if text),
            figure=about.figure,
            left_out=tuple(n for n in self.columns if narrowed is not None and n not in narrowed),
        )

    def _columns(
        self, base: Table, narrowed: Mapping[str, Table] | None, changes: dict[str, Any], code: Code
    ) -> tuple[StudyColumn, ...]:
        found: list[StudyColumn] = []
        for name, overrides in (self.columns or {RESULT: {}}).items():
            further = {} if narrowed is None else narrowed.get(name)
            if further is None:
                continue
            tables = merged(merged(base, overrides), further)
            number = tables.pop("number", None) or self.about.number
            tables = merge(tables, changes)
            for point in points(shared_sweeps(tables)):
                config = _loaded(self.path, merge(tables, point), code)
                shown = ", ".join(filter(None, [name if self.columns else "", point_label(point)]))
                of = number or default_number(config), config, self.about.clients
                found.append(StudyColumn(shown or RESULT, *of))
        return tuple(found)


def read_card(path: Path) -> Card:
    """Read and check a card; its scales are checked when they are used."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a card in TOML") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no card: {error}; expected TOML (docs/cards.md)") from None
    try:
        return _card(path, tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _card(path: Path, tables: Table) -> Card:
    try:
        card = Card.model_validate({**tables, "path": path})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, wanted = (
            ".".join(map(str, first["loc"])),
            first["msg"].replace("dictionary", "table"),
        )
        for start in ("Value error, expected ", "Input should be "):
            wanted = wanted.removeprefix(start)
        raise ConfigError(f"{place}: found {first['input']!r}; expected {wanted}") from None
    for number in [card.about.number, *(table.get("number") for table in card.columns.values())]:
        check_number(number, "number")
    for scale, table in card.scales.items():
        for name in table.columns or ():
            if name not in card.columns:
                known = did_you_mean(name, card.columns)
                raise ConfigError(f"scales.{scale}.columns: {known}")
    for claim in card.claims:
        for scale in claim.cause if isinstance(claim.cause, dict) else ():
            if scale not in card.names:
                known = did_you_mean(scale, card.names)
                told = f"claims: '{claim.text}': cause: there is no scale '{scale}'"
                raise ConfigError(f"{told}; {known}")
    return card


def _loaded(path: Path, tables: Table, code: Code) -> Any:
    """The config of a column; as in the papers, each seed divides the data anew."""
    run = tables.get("run", {})
    if isinstance(run, Mapping):
        tables = {**tables, "run": {"deal": "anew", **run}}
    try:
        return load(tables, code=code)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def merged(tables: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """The tables with those of ``over`` merged into them, table by table.

    A partition, network or adaptation of another name replaces the fields of the one before, and
    another dataset those that only the one before may have (``part``).
    """
    made: Table = dict(tables)
    for name, value in over.items():
        before = made.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            other = name in NAMING and value.get("name", before.get("name")) != before.get("name")
            made[name] = merged(_of_any(name, before) if other else before, value)
        else:
            made[name] = value
    return made


def _of_any(table: str, before: Mapping[str, Any]) -> Table:
    """The fields that stay if a table names something else: shares and scale of ``[data]``."""
    kept = DataTable.model_fields.keys() if table == "data" else ()
    return {name: value for name, value in before.items() if name in kept}
