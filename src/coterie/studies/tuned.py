"""The result of a search: the best values of every method, as a table, as rows, and as TOML."""

import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from ..core.metrics import higher_is_better
from ..errors import ConfigError, did_you_mean, printable_lines
from ..runs.config.methods import OWN
from ..views import words

# ---- what is searched ----------------------------------------------------------------------------

# ``[tune.train]`` holds fields of ``[train]`` that are searched for every method, ``[tune.NAME]``
# fields of one method. A field lists its values, or has a range ``{low = 0.001, high = 0.3}``.

TRIALS, SEEDS = 8, 1
MOST_TRIALS = 10_000
TRAIN = "train"
FIELDS = ("trials", "seeds", TRAIN)
RANGE = {"low", "high", "log"}
SEED = 0  # of random trials: methods with the same fields try the same values
MOST_DRAWS = 50  # for each trial: values that were drawn before are drawn again

Values = dict[str, Any]  # one value per searched field, by its dotted name in the method's table


class Choices(NamedTuple):
    """A field that takes one of these values."""

    values: Sequence[Any]

    @property
    def ends(self) -> tuple[Any, ...]:
        """The smallest and the largest of several numbers; empty for anything else."""
        found = [value for value in self.values if _real(value)]
        several = len(found) == len(self.values) and len(found) > 1
        return (min(found), max(found)) if several else ()

    def drawn(self, luck: random.Random) -> Any:
        """One of the values at random."""
        return luck.choice(self.values)


class Range(NamedTuple):
    """A field that takes any number from ``low`` to ``high``; whole numbers if both are."""

    low: float
    high: float
    log: bool

    @property
    def values(self) -> Sequence[int] | None:
        """All whole numbers of the range; None for a range of real numbers."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return range(int(self.low), int(self.high) + 1) if whole else None

    @property
    def ends(self) -> tuple[Any, ...]:
        """Both ends."""
        return self.low, self.high

    def drawn(self, luck: random.Random) -> float:
        """A number at random, uniform or uniform in its logarithm."""
        if self.values is not None and not self.log:
            return luck.choice(self.values)
        if self.log:
            found = math.exp(luck.uniform(math.log(self.low), math.log(self.high)))
        else:
            found = luck.uniform(self.low, self.high)
        found = float(f"{found:.3g}") if self.values is None else round(found)
        return min(max(found, self.low), self.high)  # three digits are enough


Searched = Choices | Range
Space = dict[str, Searched]


@dataclass(frozen=True)
class TunePlan:
    """What is searched, and how many trials every method has."""

    trials: int
    seeds: int
    shared: Space
    own: dict[str, Space]  # by the method's name in the config

    def space(self, method: str) -> Space:
        """The fields that are searched for a method, by their dotted names in its table."""
        return {**self.shared, **self.own.get(method, {})}

    def trials_of(self, method: str) -> list[Values]:
        """The values to try: every combination if they fit into the trials, else random ones."""
        space, found = self.space(method), dict[str, Values]()
        count = size(space)
        if count is not None and count <= self.trials:
            listed = (searched.values or () for searched in space.values())
            return [dict(zip(space, each, strict=True)) for each in itertools.product(*listed)]
        luck = random.Random(SEED)
        for _ in range(self.trials * MOST_DRAWS):
            if len(found) < self.trials:
                drawn = {field: searched.drawn(luck) for field, searched in space.items()}
                found.setdefault(json.dumps(drawn), drawn)
        return list(found.values())


def size(space: Space) -> int | None:
    """The number of combinations; None if a field has a range of real numbers."""
    lists = [searched.values for searched in space.values()]
    return None if None in lists else math.prod(len(values or ()) for values in lists)


def read_plan(table: Any, methods: Iterable[str]) -> TunePlan:
    """The plan of a table ``[tune]``; ``methods`` are the names of the methods of the config."""
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f"tune: found {'nothing' if not table else repr(table)}; expected a table of what is "
            "searched, as in [tune.train] lr = [0.01, 0.1] or --set 'tune.train.lr=[0.01,0.1]'"
        )
    own, known = dict[str, Space](), [*FIELDS, *methods]
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
    return TunePlan(*counts, shared, own)


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


class TunedTrial(NamedTuple):
    """Values that were tried, and their score on validation data."""

    values: Values
    score: float  # mean over columns, seeds and clients; infinite if a model diverged


@final
@dataclass(frozen=True)
class TunedMethod:
    """What was found for one method."""

    name: str  # in the config
    label: str
    metric: str
    space: Space
    trials: tuple[TunedTrial, ...]
    table: dict[str, Any]  # what a config has to hold beside the best values

    @property
    def best(self) -> TunedTrial | None:
        """The trial with the best score, the first of equal ones; None if all diverged."""
        better = 1.0 if higher_is_better(self.metric) else -1.0
        known = [trial for trial in self.trials if math.isfinite(trial.score)]
        return max(known, key=lambda trial: better * trial.score, default=None)

    @property
    def exhausted(self) -> bool:
        """Whether every combination was tried."""
        return len(self.trials) == size(self.space)

    @property
    def at_edge(self) -> tuple[str, ...]:
        """The fields whose best value is the smallest or the largest that was searched."""
        if self.best is None:
            return ()
        found = self.best.values
        return tuple(f for f, searched in self.space.items() if found[f] in searched.ends)

    def chosen(self) -> dict[str, Any]:
        """The method's table of a config: the best values, nested."""
        made = {name: dict(v) if isinstance(v, dict) else v for name, v in self.table.items()}
        for dotted, value in (self.best.values if self.best else {}).items():
            inner, _, field = dotted.rpartition(".")
            (made.setdefault(inner, {}) if inner else made)[field] = value
        return made


@final
@dataclass(frozen=True, repr=False)
class Tuned:
    """What ``coterie tune`` found: one entry per method, and what a reader has to know."""

    title: str
    budget: int  # trials of every method
    methods: tuple[TunedMethod, ...]
    notes: tuple[str, ...]
    under: str | None  # the scale of a card to which the values belong; None for a config
    out: Path | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per method."""
        return [
            {
                "method": method.label,
                "values": None if method.best is None else method.best.values,
                "score": None if method.best is None else method.best.score,
                "metric": method.metric,
                "trials": len(method.trials),
                "exhausted": method.exhausted,
                "tried": [{"values": t.values, "score": t.score} for t in method.trials],
            }
            for method in self.methods
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "title": self.title,
            "budget": self.budget,
            "methods": self.rows(),
            "notes": list(self.notes),
            "folder": None if self.out is None else str(self.out),
        }

    def toml(self) -> str:
        """The best values as TOML: lines of a card's scale, or tables of a config."""
        lines = [f"# {line}" for line in (self.title, *self.notes)]
        if self.under is not None:
            lines += ["", f"[scales.{_key(self.under)}]"]
        for method in self.methods:
            place: tuple[str, ...] = ("algorithm", method.name)
            chosen = method.chosen()
            if self.under is None and chosen:
                lines += ["", f"[{'.'.join(map(_key, place))}]"]
                place = ()
            lines += _flat(place, chosen)
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        heads = ["method", "best values", "validation", "trials"]
        table = words.markdown(heads, map(_row, self.methods), "llr")
        notes = [f"- {note}" for note in self.notes]
        return printable_lines("\n".join([f"# {self.title}", "", *table, "", *notes]))


def _row(method: TunedMethod) -> tuple[str, str, str, str]:
    found = method.best
    values = words.NONE if found is None else ", ".join(map(_shown, found.values.items()))
    score = words.NONE if found is None else words.number(found.score, method.metric, places=2)
    trials = f"{len(method.trials)}{' (all)' if method.exhausted else ''}"
    return words.label(method.label), values or words.NONE, score, trials


def _shown(item: tuple[str, Any]) -> str:
    return f"{item[0]} = {toml_value(item[1])}"


def _flat(path: tuple[str, ...], table: dict[str, Any]) -> list[str]:
    """The lines of a table, with dotted keys for the tables inside it."""
    lines = []
    for name, value in table.items():
        at = (*path, name)
        if isinstance(value, dict):
            lines += _flat(at, value)
        else:
            lines.append(f"{'.'.join(map(_key, at))} = {toml_value(value)}")
    return lines


def _key(name: str) -> str:
    bare = name.replace("_", "").replace("-", "")
    return name if bare.isascii() and bare.isalnum() else json.dumps(name)


def toml_value(value: Any) -> str:
    """A value as TOML: numbers, texts, truth values and lists of them are written as in JSON.

    >>> toml_value({"low": 1, "log": True}), toml_value([0.1, "a"])
    ('{low = 1, log = true}', '[0.1, "a"]')
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {toml_value(v)}' for k, v in value.items())}}}"
    return json.dumps(value)
