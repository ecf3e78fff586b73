"""Searches hyper-parameters on validation data, with the same number of trials for every method.

import coterie
found = coterie.tune("experiment.toml", out="runs/tuned")   # what its table [tune] says
print(found)          # the best values of every method
print(found.toml())   # the same as TOML
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..api import listeners_of
from ..core.imports import Code, Given
from ..errors import ConfigError
from ..runs import interrupt
from ..runs.config.loading import TUNE, canonical, load, merge, read, tables_of
from ..runs.config.methods import VARIANT, Method, without_adaptation
from ..runs.config.schema import Config, Table
from ..runs.config.sweeps import with_variants
from ..runs.listeners import Watch
from ..storage import files
from .card_file import PAPER, Card
from .records import CellRecord, read_records, record_for
from .reproducing import card_of
from .study import Study, StudyCell, StudyColumn, restricted, study_of
from .study_runs import RECORDS, run_each
from .tuned import (
    Choices,
    Space,
    Tuned,
    TunedMethod,
    TunedTrial,
    TunePlan,
    Values,
    read_plan,
    toml_value,
)

TEXT, TOML, TRIALS = "tune.md", "tuned.toml", "trials.json"
# The validation score that belongs to a table's number; LAST for every other one.
LAST, BEST, BEST_OF_ROUNDS = "validation_last", "validation_best", "validation_best_of_rounds"
BELONGING = {
    "bmta": BEST,
    "accuracy_best_by_validation": BEST,
    "score_best_by_validation": BEST,
    "best_of_rounds": BEST_OF_ROUNDS,
}
UNEQUAL = (
    "validation scores choose among values of one method; they do not compare methods, because "
    "some methods weigh models on validation data"
)


@dataclass(frozen=True)
class Tuning:
    """A search that can be run: the study whose methods are tuned, and what is searched."""

    study: Study
    plan: TunePlan
    methods: tuple[Method, ...]
    out: Path | None
    command: str
    notes: tuple[str, ...] = ()
    under: str | None = None  # Tuned.under

    @property
    def rounds(self) -> int:
        """The rounds of the longest run."""
        return max(column.config.run.rounds for column in self.study.columns)

    def expected(self) -> int:
        """The number of runs that are missing, at most."""
        cells = sum(len(column.config.seeds) for column in self.study.columns)
        trials = sum(len(self.plan.trials_of(method.name)) for method in self.methods)
        return max(0, cells * trials - len(self._known()))

    def run(self, listeners: Sequence[Watch] = ()) -> Tuned:
        """Run the trials that have no records yet, and write the result."""
        known, metric = self._known(), ""
        wanted = {method.label: self.plan.trials_of(method.name) for method in self.methods}
        tried: dict[str, list[TunedTrial]] = {label: [] for label in wanted}
        with interrupt.held(self.out, self.command):
            for trial in range(max(map(len, wanted.values()))):
                asked = {m: values[trial] for m, values in wanted.items() if trial < len(values)}
                cells = self._cells(asked)
                todo = [cell for cell in cells if record_for(cell, known) is None]
                known |= {r.key: r for r in run_each(todo, self.out, listeners)}
                metric = _metric(cells, known)
                for label, values in asked.items():
                    of = [cell for cell in cells if cell.method.label == label]
                    tried[label].append(TunedTrial(values, self._score(of, known)))
        return self._written(self._tuned(tried, metric))

    def check(self) -> None:
        """Refuse a value that its method does not take, before anything is run."""
        for method in self.methods:
            space, others = self.plan.space(method.name), dict[str, Any]()
            for field, searched in space.items():
                own = field in self.plan.own.get(method.name, {})
                where = f"{TUNE}.{method.name}.{field}" if own else f"{TUNE}.{field}"
                listed = searched.values if isinstance(searched, Choices) else searched.ends
                for value in listed:
                    try:
                        self._columns({method.label: {**others, field: value}})
                    except ConfigError as error:
                        raise ConfigError(f"{where}: {value!r} cannot be tried: {error}") from None
                others[field] = listed[0]

    def _known(self) -> dict[str, CellRecord]:
        found = {} if self.out is None else read_records(self.out / RECORDS)
        return {key: record for key, record in found.items() if record.validation}

    def _columns(self, asked: Mapping[str, Values]) -> list[StudyColumn]:
        """The columns, with these values in the tables of the methods that are tried."""
        names = {method.label: method.name for method in self.methods}
        by_name = {names[label]: values for label, values in asked.items()}
        return [c._replace(config=_with(c.config, by_name)) for c in self.study.columns]

    def _cells(self, asked: Mapping[str, Values]) -> list[StudyCell]:
        """The runs of one trial of these methods; columns of one config share theirs."""
        found: dict[str, StudyCell] = {}
        for column in self._columns(asked):
            for seed in column.config.seeds:
                for method in column.config.methods():
                    if method.label in asked:
                        cell = StudyCell(column, method, seed)
                        found.setdefault(cell.key, cell)
        return list(found.values())

    def _score(self, cells: Sequence[StudyCell], known: Mapping[str, CellRecord]) -> float:
        """The mean validation score of a trial over its runs."""
        scores = []
        for cell in cells:
            number = BELONGING.get(cell.column.number, LAST)
            name = number.removeprefix("validation_")
            scores.append(known[cell.key].validation_score(name, cell.column.clients))
            if math.isnan(scores[-1]):
                raise ConfigError(
                    f"{cell.method.label}: no client has a validation score; expected validation "
                    "data to choose by: set data.val above 0"
                )
        return sum(scores) / len(scores)

    def _tuned(self, tried: Mapping[str, list[TunedTrial]], metric: str) -> Tuned:
        found = [
            TunedMethod(
                name=method.name,
                label=method.label,
                metric=metric,
                space=self.plan.space(method.name),
                trials=tuple(tried[method.label]),
                table=_needed(method, self.plan.space(method.name)),
            )
            for method in self.methods
        ]
        plan, seeds = self.plan, self.study.columns[0].config.seeds
        numbers = [BELONGING.get(c.number, LAST) for c in self.study.columns]
        title = (
            f"{self.command}: {', '.join(dict.fromkeys(numbers))}, {plan.trials} trials per "
            f"method, seeds {', '.join(map(str, seeds))}"
        )
        notes = [UNEQUAL, *self.notes]
        notes += [
            f"{one.label}: the best {', '.join(one.at_edge)} is at the edge of what was searched"
            for one in found
            if one.at_edge
        ]
        fewer = [m.label for m in found if m.exhausted and len(m.trials) < plan.trials]
        if fewer:
            notes.append(f"fewer trials, because all values were tried: {', '.join(fewer)}")
        return Tuned(title, plan.trials, tuple(found), tuple(notes), self.under, self.out)

    def _written(self, found: Tuned) -> Tuned:
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            files.write_text(self.out / TEXT, f"{found}\n")
            files.write_text(self.out / TOML, found.toml())
            files.write_json(self.out / TRIALS, found.rows())
        return found


def _with(config: Config, asked: Mapping[str, Values]) -> Config:
    """The config with these values, by method and dotted field, in the methods' own tables."""
    tables = canonical(config)
    for name, values in asked.items():
        if name in tables["algorithm"]:
            tables["algorithm"][name] = merge(tables["algorithm"][name], values)
    return load(tables, code=config.code)


def _metric(cells: Sequence[StudyCell], known: Mapping[str, CellRecord]) -> str:
    found = list(dict.fromkeys(known[cell.key].metric for cell in cells))
    if len(found) > 1:
        raise ConfigError(
            f"the columns are scored by {' and '.join(found)}; expected one metric; tune them one "
            "by one with --columns"
        )
    return found[0]


def _needed(method: Method, space: Space) -> dict[str, Any]:
    """What a table with the best values has to repeat, so that it replaces nothing.

    A table of a variant replaces the recipe and the adaptation of its method's table. A table of a
    name such as ``fedavg_ft`` replaces the whole table of ``fedavg``.
    """
    kept: dict[str, Any] = {}
    if VARIANT not in method.name and without_adaptation(method.name)[0] != method.name:
        usual = {f.name: f.default for f in fields(method.algorithm) if f.default is not MISSING}
        kept = {name: v for name, v in method.fields.items() if usual.get(name, MISSING) != v}
    kept |= {"train": dict(method.train)} if method.train else {}
    if any(field.startswith("adapt.") for field in space):
        kept["adapt"] = {"name": method.own_adaptation, **method.adapt_fields}
    return kept


Tunable = Mapping[str, Any] | str | Path
SCALE = "tuned"  # of a card, for values that were searched at the paper's scale
MERGED = (
    "train.merge_val = true was set to false for the search: a choice needs validation data that "
    "was not trained on"
)


def tune(
    source: Tunable,
    *,
    scale: str = PAPER,
    trials: int | None = None,
    seeds: int | None = None,
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,  # noqa: A002 - as in coterie.run
    out: str | Path | None = None,
    code: Given = None,
    progress: Watch | None = None,
) -> Tuned:
    """Search the fields that the table ``[tune]`` of a config or a card names (docs/tune.md).

    ``source`` is a config (a file or tables), or a card (its file or its id). With ``out`` a search
    that was killed is continued, and no finished trial is run again.
    """
    given = {"trials": trials, "seeds": seeds}
    changes = dict(set or {})
    changes |= {f"{TUNE}.{name}": value for name, value in given.items() if value is not None}
    found = tuning_of(
        source, scale, changes, methods=tuple(methods), columns=tuple(columns), code=code
    )
    return replace(found, out=None if out is None else Path(out)).run(listeners_of(progress))


def tuning_of(
    source: Tunable,
    scale: str = PAPER,
    changes: Mapping[str, Any] | None = None,
    *,
    methods: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    code: Given = None,
) -> Tuning:
    """What searches the fields of a config or a card; nothing is run yet.

    The folder is one that is named after the source.
    """
    given, allowed, card = dict(changes or {}), Code.of(code, installed=True), _card(source)
    told = str(source) if isinstance(source, str | Path) else ""
    if card is None:
        study, tables = _of_config(source, given, allowed)
    elif card.about.waits:
        raise ConfigError(f"{card.about.id} cannot be run yet: {card.about.waits}")
    else:
        study = card.study(scale, given, allowed)
        tables = merge(card.at(scale), given)
    try:
        plan = read_plan(tables.get(TUNE), [method.name for method in study.methods])
        asked = restricted(study, columns, methods, plan.seeds)
        apart = tuple(c._replace(config=_unmerged(c.config)) for c in asked.columns)
        merging = any(column.config.train.merge_val for column in asked.columns)
        chosen = tuple(m for m in asked.methods if not methods or m.label in methods)
        if not chosen:
            raise ConfigError(f"--methods: the columns have none of {', '.join(methods)}")
        at = f" --scale {scale}" if card is not None and scale != PAPER else ""
        at += "".join(f" --set '{field}={toml_value(v)}'" for field, v in given.items())
        made = Tuning(
            study=replace(asked, columns=apart),
            plan=plan,
            methods=chosen,
            out=Path("runs") / f"{study.name}{'' if card is None else f'-{scale}'}-tune",
            command=f"coterie tune {told}{at}" if told else "coterie.tune(...)",
            notes=(MERGED,) if merging else (),
            under=None if card is None else SCALE if scale == PAPER else scale,
        )
        made.check()
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}" if told else str(error)) from None
    return made


def _of_config(source: Tunable, given: dict[str, Any], code: Code) -> tuple[Study, Table]:
    """The study of a config, and its tables."""
    tables = with_variants(merge(tables_of(source, given), given))
    run = tables.get("run", {})
    apart = {f: v for f, v in run.items() if f != "out"} if isinstance(run, Mapping) else run
    name = Path(str(source)).stem if isinstance(source, str | Path) else TUNE
    return study_of({**tables, "run": apart}, code, name=name), tables


def _card(source: Tunable) -> Card | None:
    """The card of this source; None if it is a config."""
    if isinstance(source, Mapping):
        return None
    path = Path(source)
    if path.suffix in (".toml", ".json"):
        return card_of(str(source)) if path.suffix == ".toml" and "card" in read(path) else None
    return card_of(str(source))


def _unmerged(config: Config) -> Config:
    train = config.train.model_copy(update={"merge_val": False})
    return config.model_copy(update={"train": train})
