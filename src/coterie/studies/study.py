"""A study: the columns of a table, each of them a comparison of the same methods."""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ..core.imports import Code
from ..core.metrics import METRICS
from ..errors import ConfigError, CoterieError, did_you_mean
from ..runs.config.loading import canonical, load, merge
from ..runs.config.methods import VARIANT, Method
from ..runs.config.schema import Config, Table
from ..runs.config.sweeps import point_label, points, shared_sweeps
from ..runs.summary import FIELDS, LAST, score_field

RESULT = "result"  # the only column of a study without columns
NAMING = ("data", "partition", "model", "algorithm", "adapt")  # tables that name something
# Numbers of a study beside those of summary.json: statistics of the clients' gains over Local (P3).
RELATIVE = {
    "relative_best_tenth": "best_tenth",
    "relative_worst_tenth": "worst_tenth",
    "relative_variance": "variance",
    "relative_variance_best_tenth": "variance_best",
    "relative_variance_worst_tenth": "variance_worst",
}
# And: over the rounds, the mean of the best score so far (P4's curves); how much more accurate the
# Local of clients that are worse off is than that of the others (P3).
BEST_SO_FAR, LOCAL_LEAD = "mean_best_so_far", "underperformers_local_lead"
PLACES = ("out", "checkpoint_every", "federation")  # fields of [run] that change no result
IN = "|"  # in a claim, between a method and the column in which its number is taken


class StudyColumn(NamedTuple):
    """One column of a study's table: a config, and the number that is shown of its runs."""

    name: str
    number: str  # a field of summary.json, or another number of a study
    config: Config
    clients: tuple[int, ...] = ()  # the number is over these clients only; over all if empty


class Printed(NamedTuple):
    """A number as a paper prints it."""

    mean: float
    deviation: float | None = None


class Claim(NamedTuple):
    """What a table is printed to show, as a relation between the numbers of methods.

    ``relation`` is ``above`` or ``below`` (the first method against each of the others), ``rises``
    or ``falls`` (each method against the one before), ``best``, ``level`` (two methods, ``margin``
    apart at most), or ``at_least`` (one method against the value ``margin``). A method is a label,
    or ``label | column`` for its number in that column, whichever column is judged.
    """

    text: str
    relation: str
    methods: tuple[str, ...]
    margin: float = 0.0
    columns: tuple[str, ...] = ()  # all columns if empty
    number: str | None = None  # the column's own if None
    cause: str | dict[str, str] | None = None  # why it fails; by scale if found at some only
    # signed-rank tests of the first method against the others are below it
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    place: Literal["abstract", "conclusion"] | None = None  # of the paper's main claims
    ours: str | None = None  # our variant of the first method, for which it is judged, too
    lead_over: str | None = None  # numbers are differences to those of this method

    @property
    def between_columns(self) -> bool:
        """Whether every method has its own column, so that the claim is judged once."""
        return all(IN in method for method in self.methods)


def method_and_column(text: str) -> tuple[str, str]:
    """The label and the column of a claim's method; the column is empty if none is named.

    >>> method_and_column("fedfomo@5 | IID, val=0.4")
    ('fedfomo@5', 'IID, val=0.4')
    """
    label, _, column = text.partition(IN)
    return label.strip(), column.strip()


@dataclass(frozen=True)
class Study:
    """The columns of a table, and what is known of it beforehand."""

    name: str
    title: str
    columns: tuple[StudyColumn, ...]
    printed: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict)  # column, method
    claims: tuple[Claim, ...] = ()
    tolerance: float = 2.0
    notes: tuple[str, ...] = ()
    figure: str | None = None  # sweep, curves, matrices or scatter
    left_out: tuple[str, ...] = ()  # columns of the paper's table that are not here
    unasked: tuple[str, ...] = ()  # methods of the table that are not here

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of all columns, in the order in which they are listed."""
        found = {m.label: m for column in self.columns for m in column.config.methods()}
        return tuple(found.values())

    def cells(self) -> Iterator["StudyCell"]:
        """Every run that the table needs; columns of one config share their runs."""
        seen: set[str] = set()
        for column in self.columns:
            for seed in column.config.seeds:
                for method in column.config.methods():
                    cell = StudyCell(column, method, seed)
                    if cell.key not in seen:
                        seen.add(cell.key)
                        yield cell


class StudyCell(NamedTuple):
    """One run of a study."""

    column: StudyColumn
    method: Method
    seed: int

    def tables(self) -> Table:
        """The run's config as tables, without what does not make it another experiment.

        That is the engine with its device, the output folder, and the precision of matrix products
        on a GPU.
        """
        tables = canonical(self.column.config.single(self.method, self.seed))
        if tables["train"]["precision"] == "tf32":
            tables["train"]["precision"] = "float32"
        kept = {name: table for name, table in tables.items() if name != "engine"}
        return {**kept, "run": {f: v for f, v in kept["run"].items() if f not in PLACES}}

    @property
    def key(self) -> str:
        """The hash of those fields of the run's config that are not at their defaults.

        An option that is added later, with a default that changes nothing, keeps it as it is.
        """
        tables = self.tables()
        named = tuple((name, tables[name].get("name")) for name in NAMING)
        told = json.dumps(_without(tables, _defaults(named)), sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()


@functools.cache
def _defaults(named: tuple[tuple[str, str | None], ...]) -> Table:
    """The tables of a config that gives nothing but these names; empty if a field is required."""
    given = {table: {"name": name} for table, name in named if name is not None}
    try:
        return canonical(load(given))
    except CoterieError:
        return {}


def _without(tables: Table, defaults: Table) -> Table:
    """The tables without every field that is as in ``defaults``; names are always kept."""
    kept: Table = {}
    for name, value in tables.items():
        usual = defaults.get(name)
        if isinstance(value, dict):
            inside = _without(value, usual if isinstance(usual, dict) else {})
            kept |= {name: inside} if inside else {}
        elif name == "name" or value != usual or name not in defaults:
            kept[name] = value
    return kept


def same_experiment(one: Table, other: Table) -> bool:
    """Whether every field that both configs know has the same value."""
    return all(
        same_experiment(one[name], other[name])
        if isinstance(one[name], dict) and isinstance(other[name], dict)
        else one[name] == other[name]
        for name in one.keys() & other.keys()
    )


def study_of(tables: Table, code: Code, *, name: str, number: str | None = None) -> Study:
    """The study of a config's tables: one column per combination of its shared sweeps."""
    check_number(number, "--number")
    swept = shared_sweeps(tables)
    columns = []
    for point in points(swept):
        config = load(merge(tables, point), code=code)
        label = point_label(point) or RESULT
        columns.append(StudyColumn(label, number or default_number(config), config))
    found = [VARIANT in m.label for column in columns for m in column.config.methods()]
    title = f"a sweep over {', '.join(swept)}" if swept else "variants of methods"
    title = title if swept or any(found) else "one setting"
    return Study(name, title, tuple(columns), figure="sweep")


def default_number(config: Config) -> str:
    """The mean over clients in the last round."""
    metric = config.run.metric if config.run.metric in METRICS else "accuracy"
    return score_field(LAST, metric)


def check_number(number: object, where: str) -> None:
    """Refuse a number that is no field of ``summary.json`` and no other number of a study."""
    known = [score_field(name, metric) for name in FIELDS for metric in ("accuracy", "")]
    known += [*RELATIVE, BEST_SO_FAR, LOCAL_LEAD]
    if number is not None and number not in known:
        near = did_you_mean(str(number), dict.fromkeys(known))
        raise ConfigError(f"{where}: there is no number '{number}'; {near}")


def restricted(
    study: Study,
    columns: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    seeds: int | None = None,
) -> Study:
    """The study with some of its columns and methods, and the first of its seeds, alone."""
    for name in columns:
        names = [column.name for column in study.columns]
        if name not in names:
            raise ConfigError(
                f"--columns: there is no column '{name}'; {did_you_mean(name, names)}"
            )
    labels = [method.label for method in study.methods]
    for name in methods:
        if name not in labels:
            raise ConfigError(f"--methods: there is no '{name}'; {did_you_mean(name, labels)}")
    kept = [
        column._replace(config=_fewer(column.config, methods, seeds))
        for column in study.columns
        if not columns or column.name in columns
    ]
    asked = [column.name for column in kept]
    left_out = (*study.left_out, *(c.name for c in study.columns if c.name not in asked))
    unasked = tuple(label for label in labels if methods and label not in methods)
    return replace(study, columns=tuple(kept), left_out=left_out, unasked=unasked)


def _fewer(config: Config, methods: tuple[str, ...], seeds: int | None) -> Config:
    update: dict[str, Any] = {}
    if methods:
        named = [m.name for m in config.methods() if m.label in methods]
        update["methods"] = tuple(named) or ("local",)
    if seeds is not None:
        first = config.run.seed
        more = range(first + len(config.seeds), first + seeds) if len(config.seeds) < seeds else ()
        update["seeds"] = (*config.seeds[:seeds], *more)
    return config.model_copy(update={"run": config.run.model_copy(update=update)})
