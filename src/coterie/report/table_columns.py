"""The columns of a comparison's table: one row of COLUMNS for each."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..core.metrics import METRICS
from ..errors import ConfigError, did_you_mean
from ..results.judgement import LOCAL
from . import words

if TYPE_CHECKING:
    from ..results.comparison import MethodRow
    from .outcomes import Comparison


class Heading(NamedTuple):
    """The heading of a column and what the column means."""

    head: str
    meaning: str


@dataclass(frozen=True)
class TableColumn:
    """One column of the table: its heading, its meaning, its cells and when it is shown.

    A column with a ``name`` can also be asked for by it.
    ``{unit}`` and ``{metric}`` in the texts are replaced by the comparison's unit and metric.
    """

    head: str
    meaning: str
    cell: Callable[["MethodRow", "Comparison"], str]
    shown: Callable[["Comparison"], bool] = lambda _: True
    name: str = ""

    def heading(self, comparison: "Comparison") -> Heading:
        """The heading for this comparison, with unit and metric filled in."""
        metric = METRICS[comparison.metric]
        title = f"{metric.title}, {metric.unit}," if metric.unit else metric.title
        unit = words.unit(comparison.metric).strip()
        texts = (text.format(unit=unit, metric=title) for text in (self.head, self.meaning))
        return Heading(*(text.strip() for text in texts))


def _some_serve_few(comparison: "Comparison") -> bool:
    """Whether the methods serve different numbers of clients; the table then shows the numbers."""
    return len({row.served for row in comparison.rows}) > 1


def _some_federated(comparison: "Comparison") -> bool:
    """Whether a global model was scored on a federated test set."""
    return any(not math.isnan(row.federated_accuracy.mean) for row in comparison.rows)


def _score(name: str) -> Callable[["MethodRow", "Comparison"], str]:
    """A function that gives the cell for a field of the row that is a score over seeds."""
    return lambda row, on: words.spread(getattr(row, name), on.metric)


def _beside(row: "MethodRow") -> list[str]:
    """The texts that alarms put beside the number, each text once."""
    return list(dict.fromkeys(f"({alarm.beside})" for alarm in row.alarms if alarm.beside))


def _mean(row: "MethodRow", on: "Comparison") -> str:
    return " ".join([words.spread(row.mean, on.metric), *_beside(row)])


def _alone(row: "MethodRow", on: "Comparison") -> str:
    return words.NONE if row.method == LOCAL else words.spread(row.alone, on.metric)


def _worse_off(row: "MethodRow", on: "Comparison") -> str:
    if row.method == LOCAL:
        return words.NONE
    clients = row.compared // max(1, len(on.of_method(row.method)))
    return f"{words.count(row.worse_than_local)} of {clients}"


COLUMNS = (
    TableColumn("method", "", lambda row, _: words.label(row.method)),
    TableColumn("mean {unit}", "mean {metric} over clients, last round", _mean),
    TableColumn(
        "federated %",
        "accuracy of the global model on the federated test set, last round",
        lambda row, _: words.spread(row.federated_accuracy, "accuracy"),
        shown=_some_federated,
    ),
    TableColumn(
        "serves",
        "clients that have a model of this method; the star compares methods that serve the same",
        lambda row, _: str(row.served),
        shown=_some_serve_few,
    ),
    TableColumn(
        "alone",
        "the mean of Local over the clients that the method serves",
        _alone,
        shown=_some_serve_few,
    ),
    TableColumn(
        "worst tenth",
        "mean of the tenth of the clients with the worst scores, last round",
        _score("worst_tenth"),
    ),
    TableColumn(
        "worse off", "clients worse off than with their own local model, per run", _worse_off
    ),
    TableColumn(
        "bytes per client",
        "bytes that one client sends and receives for training, whole run",
        lambda row, _: words.size(row.bytes_per_client.mean),
    ),
    TableColumn(
        "in group",
        "share of the weight on other clients, over all rounds, inside the true group",
        lambda row, _: words.share(row.in_group_weight),
    ),
    TableColumn(
        "best by val.",
        "mean in the round with the best validation score",
        _score("best_by_validation"),
    ),
    TableColumn(
        "best on test",
        "mean in the best round on test data (BMTA): optimistic",
        _score("best_on_test"),
    ),
    *(
        TableColumn(head, meaning, _score(name), shown=lambda _: False, name=name)
        for name, head, meaning in (
            ("weighted_mean", "pooled", "mean weighted by test samples, last round"),
            ("best_tenth", "best tenth", "mean of the tenth of the clients with the best scores"),
            ("variance", "variance", "variance over clients, last round"),
            ("variance_best_tenth", "VarB", "variance over the best tenth of the clients"),
            ("variance_worst_tenth", "VarW", "variance over the worst tenth of the clients"),
        )
    ),
)


def checked_columns(names: Iterable[str]) -> tuple[str, ...]:
    """The names of columns that are asked for; refuses one that there is not."""
    known = [column.name for column in COLUMNS if column.name]
    for name in (found := tuple(names)):
        if name not in known:
            raise ConfigError(f"columns: no column is called '{name}'; {did_you_mean(name, known)}")
    return found
