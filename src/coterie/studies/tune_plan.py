"""Reads the table ``[tune]`` of a config or a card: what is searched, and how often it is tried.

``[tune.train]`` holds fields of ``[train]`` that are searched for every method, ``[tune.NAME]``
fields of one method. A field lists its values, or has a range ``{low = 0.001, high = 0.3}``.
"""

import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from ..experiment.config.methods import OWN

TRIALS, SEEDS = 8, 1
MOST_TRIALS = 10_000
LAST, BEST, BEST_OF_ROUNDS = "validation_last", "validation_best", "validation_best_of_rounds"
NUMBERS = (LAST, BEST, BEST_OF_ROUNDS)
TRAIN = "train"
FIELDS = ("trials", "seeds", "number", TRAIN)
RANGE = {"low", "high", "log"}

Values = dict[str, Any]  # one value per searched field, by its dotted name in the method's table


class Choices(NamedTuple):
    """A field that takes one of these values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """The smallest and the largest of several numbers; empty for anything else."""
        found = [value for value in self.values if _real(value)]
        several = len(found) == len(self.values) and len(found) > 1
        return (min(found), max(found)) if several else ()


class Range(NamedTuple):
    """A field that takes any number from ``low`` to ``high``; whole numbers if both are."""

    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Both ends."""
        return self.low, self.high


Searched = Choices | Range
Space = dict[str, Searched]


@dataclass(frozen=True)
class TunePlan:
    """What is searched, and how many trials every method has."""

    trials: int
    seeds: int
    number: str | None  # one of NUMBERS; None: the one that belongs to the table's own number
    shared: Space
    own: dict[str, Space]  # by the method's name in the config

    def space(self, method: str) -> Space:
        """The fields that are searched for a method, by their dotted names in its table."""
        return {**self.shared, **self.own.get(method, {})}


def size(space: Space) -> int | None:
    """The number of combinations; None if a field has a range of real numbers."""
    lists = _lists(space)
    return None if lists is None else math.prod(map(len, lists))


def combinations(space: Space) -> Generator[Values, float, None]:
    """Every combination of the listed values and whole numbers; the last field changes first."""
    for values in itertools.product(*(_lists(space) or ())):
        yield dict(zip(space, values, strict=True))


def _lists(space: Space) -> list[Sequence[Any]] | None:
    """The values of every field; None if a field has a range of real numbers."""
    found: list[Sequence[Any]] = []
    for searched in space.values():
        if isinstance(searched, Choices):
            found.append(searched.values)
        elif searched.whole:
            found.append(range(int(searched.low), int(searched.high) + 1))
        else:
            return None
    return found


def read_plan(table: Any, methods: Iterable[str]) -> TunePlan:
    """The plan of a table ``[tune]``; ``methods`` are the names of the methods of the config."""
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f"tune: found {'nothing' if not table else repr(table)}; expected a table of what is "
            "searched, as in [tune.train] lr = [0.01, 0.1] or --set 'tune.train.lr=[0.01,0.1]'"
        )
    number, own = table.get("number"), dict[str, Space]()
    if number is not None and number not in NUMBERS:
        raise ConfigError(
            f"tune.number: found {number!r}; expected {', '.join(NUMBERS)}: a choice reads "
            "validation data, and every other number is computed on test data"
        )
    known = [*FIELDS, *methods]
    for name, fields in table.items():
        if name not in known:
            raise ConfigError(f"tune.{name}: there is no such method; {did_you_mean(name, known)}")
        if name not in FIELDS:
            own[name] = _space(fields, f"tune.{name}")
    shared = _space({TRAIN: table[TRAIN]}, "tune") if TRAIN in table else {}
    if not shared and not any(own.values()):
        raise ConfigError(
            "tune: no field is searched; expected one, as in [tune.train] lr = [0.01, 0.1]"
        )
    counts = _count(table, "trials", TRIALS), _count(table, "seeds", SEEDS)
    return TunePlan(*counts, number, shared, own)


def _count(table: Mapping[str, Any], name: str, default: int) -> int:
    found = table.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MOST_TRIALS:
        raise ConfigError(f"tune.{name}: found {found!r}; expected from 1 to {MOST_TRIALS:,}")
    return found


def _space(fields: Any, where: str) -> Space:
    """The searched fields of a table; those of its tables ``train`` and ``adapt`` are dotted."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}: found {fields!r}; expected a table of fields to search")
    found: Space = {}
    for name, value in fields.items():
        inner = name in OWN and isinstance(value, Mapping) and not value.keys() & RANGE
        if inner:
            of = _space(value, f"{where}.{name}")
            found |= {f"{name}.{field}": searched for field, searched in of.items()}
        else:
            found[name] = _searched(value, f"{where}.{name}")
    return found


def _searched(value: Any, where: str) -> Searched:
    if isinstance(value, list | tuple) and value:
        if any(isinstance(one, Mapping) for one in value):
            raise ConfigError(f"{where}: found a table in the list; expected values")
        twice = [one for i, one in enumerate(value) if one in value[:i]]
        if twice:
            raise ConfigError(f"{where}: {twice[0]!r} stands there twice; name each value once")
        return Choices(tuple(value))
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= RANGE:
        return _range(value, where)
    raise ConfigError(
        f"{where}: found {value!r}; expected a list of values, as in [0.01, 0.1], or a range, as "
        "in {low = 0.001, high = 0.3, log = true}"
    )


def _range(value: Mapping[str, Any], where: str) -> Range:
    low, high, log = value["low"], value["high"], value.get("log", False)
    if not (_real(low) and _real(high) and low < high):
        raise ConfigError(f"{where}: found low {low!r}, high {high!r}; expected low < high")
    if not isinstance(log, bool):
        raise ConfigError(f"{where}.log: found {log!r}; expected true or false")
    if log and low <= 0:
        raise ConfigError(f"{where}.low: found {low!r}; expected above 0, because log = true")
    return Range(low, high, log)


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
