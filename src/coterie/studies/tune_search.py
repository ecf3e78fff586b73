"""Runs a search: trial after trial of every method, each trial as cells of a study with records."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..core.metrics import higher_is_better
from ..errors import ConfigError
from ..experiment import interrupt
from ..experiment.config.loading import TUNE, canonical, load, merge
from ..experiment.config.methods import VARIANT, Method, without_adaptation
from ..experiment.config.schema import Config
from ..experiment.interrupt import Stop
from ..experiment.runner import Watch
from ..storage import files
from .cell_record import CellRecord, record_for
from .record_files import read_records
from .study import Study, StudyCell, StudyColumn
from .study_runs import RECORDS, run_each
from .suggestions import require_optuna, suggestions
from .tune_plan import BEST, BEST_OF_ROUNDS, LAST, Choices, Space, TunePlan, Values, size
from .tuned import Tuned, TunedMethod, TunedTrial

TEXT, TOML, TRIALS = "tune.md", "tuned.toml", "trials.json"
# The validation number that belongs to a table's number; LAST for every other one.
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
        return max(0, cells * sum(map(self._budget, self.methods)) - len(self._known()))

    def run(self, progress: Watch | None = None) -> Tuned:
        """Run the trials that have no records yet, and write the result."""
        known = self._known()
        searches = {
            m.label: suggestions(self.plan.space(m.name), self.plan.trials) for m in self.methods
        }
        asked = {label: next(search) for label, search in searches.items()}
        tried: dict[str, list[TunedTrial]] = {label: [] for label in searches}
        metric = ""
        with interrupt.held(self.out, self.command) as stop:
            while asked:
                cells = self._cells(asked)
                known |= self._run(cells, known, stop, progress)
                metric = _metric(cells, known)
                for label, values in asked.items():
                    of = [cell for cell in cells if cell.method.label == label]
                    tried[label].append(TunedTrial(values, self._score(of, known)))
                asked = _next(searches, {label: tried[label][-1] for label in asked}, metric)
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
            require_optuna(space, self.plan.trials, f"{TUNE}, {method.label}")

    def _budget(self, method: Method) -> int:
        count = size(self.plan.space(method.name))
        return self.plan.trials if count is None else min(count, self.plan.trials)

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

    def _run(
        self,
        cells: Sequence[StudyCell],
        known: Mapping[str, CellRecord],
        stop: Stop,
        progress: Watch | None,
    ) -> dict[str, CellRecord]:
        todo = [cell for cell in cells if record_for(cell, known) is None]
        made: dict[str, CellRecord] = {}
        for record in run_each(todo, self.out, stop=stop, progress=progress):
            made[record.key] = record
            if self.out is not None:
                record.write(self.out / RECORDS)
        return made

    def _score(self, cells: Sequence[StudyCell], known: Mapping[str, CellRecord]) -> float:
        """The mean validation score of a trial over its runs."""
        scores = []
        for cell in cells:
            number = self.plan.number or BELONGING.get(cell.column.number, LAST)
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
        numbers = [plan.number or BELONGING.get(c.number, LAST) for c in self.study.columns]
        title = (
            f"{self.command}: {', '.join(dict.fromkeys(numbers))}, {plan.trials} trials per "
            f"method, seeds {', '.join(map(str, seeds))}"
        )
        notes = [UNEQUAL, *self.notes, *filter(None, map(_edges, found))]
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


def _next(
    searches: Mapping[str, Generator[Values, float, None]],
    told: Mapping[str, TunedTrial],
    metric: str,
) -> dict[str, Values]:
    """The next values of every method that has trials left."""
    better, asked = 1.0 if higher_is_better(metric) else -1.0, {}
    for label, trial in told.items():
        try:
            asked[label] = searches[label].send(better * trial.score)
        except StopIteration:
            continue
    return asked


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


def _edges(found: TunedMethod) -> str:
    if not found.at_edge:
        return ""
    return f"{found.label}: the best {', '.join(found.at_edge)} is at the edge of what was searched"
