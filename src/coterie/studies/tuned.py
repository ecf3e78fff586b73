"""The result of a search: the best values of every method, as a table, as rows, and as TOML."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from ..core.metrics import higher_is_better
from ..errors import printable_lines
from ..report import words
from .tune_plan import Space, Values, size


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
                lines += _flat(("algorithm", method.name), method.chosen())
        else:
            for method in self.methods:
                lines += _tables(("algorithm", method.name), method.chosen())
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        heads = ["method", "best values", "validation", "trials"]
        rows = [[*_row(method)] for method in self.methods]
        table = [f"| {' | '.join(row)} |" for row in (heads, ["---", "---", "---:", "---:"], *rows)]
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
    """Dotted keys, as they stand below the header of a card's scale."""
    lines = []
    for name, value in table.items():
        at = (*path, name)
        if isinstance(value, dict):
            lines += _flat(at, value)
        else:
            lines.append(f"{'.'.join(map(_key, at))} = {toml_value(value)}")
    return lines


def _tables(path: tuple[str, ...], table: dict[str, Any]) -> list[str]:
    """The table with a header, and its inner tables with theirs."""
    plain = {name: value for name, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_key(name)} = {toml_value(value)}" for name, value in plain.items()]
    lines = ["", f"[{'.'.join(map(_key, path))}]", *lines] if lines else []
    for name, value in table.items():
        if isinstance(value, dict):
            lines += _tables((*path, name), value)
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
