"""What stays of a run of a study: its numbers, one small JSON file per run."""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ..core import metrics
from ..core.metrics import Floats
from ..errors import StoreError
from ..runs import kinds, statistics, summary
from ..runs.config.methods import TAG
from ..runs.config.schema import Table
from ..runs.run import Run, dense
from ..storage import files
from ..storage.files import strict
from .study import BEST_SO_FAR, LOCAL_LEAD, RELATIVE, StudyCell, same_experiment

FORMAT = 1
MATRICES = 4  # at most, of different rounds
MATRIX_CLIENTS = 64  # beyond it no matrix is kept; above FEW only the last one
FEW = 20
DIGITS = 7  # significant ones of a score
# long parts of a summary that no card shows
LEFT_OUT: dict[str, Any] = {"weak_clients": {}, "clients_without_validation": [], "ran": {}}


@strict
class CellRecord:
    """The numbers of one run: its summary, its curve, and each client's scores."""

    key: str  # StudyCell.key
    config: dict[str, Any]  # StudyCell.tables()
    method: str
    seed: int
    summary: dict[str, Any]
    rounds: list[int]  # the evaluated rounds
    curve: list[float | None]  # mean over clients on test data, for each of them
    last: list[float | None]  # each client's test score in the last round
    best: list[float | None]  # in the round with the best mean
    best_of_rounds: list[float | None]  # in its own best round
    n_test: list[int]
    groups: list[int] | None
    matrices: dict[str, list[list[float]]]  # who gave weight to whom, by round
    environment: dict[str, Any]
    # each client's validation score: the same three; empty if it was trained on, and in old records
    validation: dict[str, list[float | Literal["inf", "-inf"] | None]] = field(default_factory=dict)
    # test scores over the evaluated rounds of the clients that the column's number is over, by
    # client; empty if it is over all clients, and in old records
    curves: dict[str, list[float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: StudyCell, data: Run, precision: str) -> "CellRecord":
        """The record of a finished run."""
        history, roster = data, data.roster
        here = [client for client in cell.column.clients if client < len(roster)]
        best = statistics.best_round(history.test, history.metric)
        where = data.environment
        return cls(
            key=cell.key,
            config=cell.tables(),
            method=history.method,
            seed=history.seed,
            summary=files.plain(data.summary) | LEFT_OUT,
            rounds=history.rounds.tolist(),
            curve=_numbers(metrics.mean_known(history.test)),
            last=_numbers(history.last),
            best=_numbers(history.test[-1 if best is None else best]),
            best_of_rounds=_numbers(statistics.best_of_rounds(history.test, history.metric)),
            n_test=roster.n_test.tolist(),
            groups=None if roster.groups is None else roster.groups.tolist(),
            matrices=_matrices(history),
            environment={
                **{name: where.get(name) for name in ("coterie", "git_commit", "source", "device")},
                **{name: where.get(name) for name in ("device_name", "cores", "python")},
                "torch": dict(where.get("versions") or {}).get("torch"),
                "precision": precision,
                "engine": data.config.get("resolved", {}).get("engine"),
            },
            validation=_validation(history),
            curves={str(client): _numbers(history.test[:, client]) for client in here},
        )

    def validation_score(self, name: str, clients: Sequence[int] = ()) -> float:
        """The mean validation score over all clients or over these; NaN if there is none.

        ``name`` is ``last``, ``best`` (in the round with the best mean) or ``best_of_rounds``.
        """
        found = self.validation.get(name, [])
        chosen = [found[i] for i in clients if i < len(found)] if clients else found
        values = [math.nan if value is None else float(value) for value in chosen]
        return float(metrics.mean_known(np.array(values, dtype=np.float64)))

    def number(self, name: str, clients: Sequence[int] = ()) -> float:
        """A number of the run, over all clients or over these; NaN if it does not exist."""
        if name == BEST_SO_FAR:
            return float(metrics.mean_known(self.best_so_far(clients)))
        per_client = {
            summary.score_field(summary.LAST, self.metric): self.last,
            "bmta": self.best,
            "best_of_rounds": self.best_of_rounds,
        }
        if clients and name in per_client:
            chosen = [per_client[name][i] for i in clients if i < len(self.last)]
            return float(metrics.mean_known(_array(chosen)))
        value = self.summary.get(name)
        return math.nan if value is None or isinstance(value, str | list | dict) else float(value)

    def over_rounds(self, clients: Sequence[int] = ()) -> Floats:
        """The mean test score ``[rounds]`` over all clients or over these; NaN if not recorded."""
        if not clients:
            return _array(self.curve)
        unknown = [None] * len(self.rounds)
        found = [_array(self.curves.get(str(client), unknown)) for client in clients]
        return metrics.mean_known(np.stack(found, axis=-1))

    def best_so_far(self, clients: Sequence[int] = ()) -> Floats:
        """The best of :meth:`over_rounds` up to each evaluated round."""
        return statistics.best_so_far(self.over_rounds(clients), self.metric)

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return str(self.summary["metric"])

    def scores(self, name: str) -> Floats:
        """Each client's score ``last`` or in the round with the ``best`` mean."""
        return _array(self.best if name == "best" else self.last)

    def relative(self, local: "CellRecord") -> "CellRecord":
        """The record with the numbers that are relative to the clients' own Local filled in."""
        alone = _array(local.last)
        gained = metrics.gains(_array(self.last), alone, self.metric)
        spread = statistics.over_clients(gained, np.array(self.n_test))._asdict()
        found = {
            "relative_to_local": float(metrics.mean_known(gained)),
            "worse_than_local": statistics.count_worse(gained),
            **{name: spread[field] for name, field in RELATIVE.items()},
            LOCAL_LEAD: _lead(alone, gained, self.metric),
        }
        return replace(self, summary=self.summary | files.plain(found))

    def write(self, folder: Path) -> Path:
        """Write the record into a folder of records."""
        folder.mkdir(parents=True, exist_ok=True)
        path = record_path(folder, self.key)
        files.write_json(path, {"format": FORMAT, **asdict(self)})
        return path


def record_path(folder: Path, key: str) -> Path:
    """The file of a record in a folder of records."""
    return folder / f"{key[:16]}.json"


def record_for(cell: StudyCell, known: Mapping[str, CellRecord]) -> CellRecord | None:
    """The record of a cell among those known by key; None if there is none.

    A default that has changed since makes the run another experiment, with the same key.
    """
    record = known.get(cell.key)
    if record is None or not same_experiment(record.config, cell.tables()):
        return None
    return record


def _numbers(values: Floats) -> list[float | None]:
    return [_rounded(v) if np.isfinite(v) else None for v in values]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _array(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _lead(alone: Floats, gained: Floats, metric: str) -> float:
    """How much better the Local of clients that are worse off is than that of the others.

    NaN if there are no such clients, or no others.
    """
    of_worse, of_others = alone[gained < 0], alone[gained >= 0]
    if not len(of_worse) or not len(of_others):
        return math.nan
    return float(metrics.gains(of_worse.mean(), of_others.mean(), metric))


def _validation(history: Run) -> dict[str, Any]:
    """Each client's validation scores; infinite ones, of models that diverged, stay infinite."""
    if history.merge_val:
        return {}
    best = statistics.best_round(history.val, history.metric)
    found = {
        "last": history.val[-1],
        "best": history.val[-1 if best is None else best],
        "best_of_rounds": statistics.best_of_rounds(history.val, history.metric),
    }
    return {name: files.plain([_rounded(v) for v in values]) for name, values in found.items()}


def _matrices(history: Run) -> dict[str, list[list[float]]]:
    """Matrices of a few rounds, spread over the run."""
    count, clients = len(history.matrices), len(history.roster)
    if not count or clients > MATRIX_CLIENTS:
        return {}
    kept = min(MATRICES if clients <= FEW else 1, count)
    places = sorted({round(i) for i in np.linspace(count - 1, 0, kept)})
    return {
        str(history.matrix_rounds[i]): np.round(dense(history.matrices[i]), 4).tolist()
        for i in places
    }


# ---- as JSON -------------------------------------------------------------------------------------

# what records share: parts of their configs, and these
WHOLE = ("environment", "rounds", "n_test", "groups")


def publish(records: Sequence[CellRecord], path: Path, *, matrices: bool) -> None:
    """Add records to a file of published ones, with their matrices or without."""
    before = _records_in(path, path.stat().st_mtime_ns) if path.exists() else {}
    kept = {**before, **{record.key: record for record in records}}
    if kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, _records_text(list(kept.values()), matrices=matrices))


def read_published(folder: Path) -> dict[str, CellRecord]:
    """The published records of all cards, by key: cards may share runs."""
    found: dict[str, CellRecord] = {}
    for path in sorted(folder.glob("*.json")):
        for key, record in _records_in(path, path.stat().st_mtime_ns).items():
            if key not in found or record.matrices:  # only cards that show matrices publish them
                found[key] = record
    return found


@functools.lru_cache(maxsize=500)
def _records_in(path: Path, _changed: int) -> dict[str, CellRecord]:
    """The records of one published file; read again when the file has changed."""
    found = files.read_json(path)
    return {record.key: record for record in published_records(found, path)}


def _records_text(records: Sequence[CellRecord], *, matrices: bool) -> str:
    """Several records as one JSON text, one line per record, with their matrices or without.

    What records share is written once and named by its number. Validation scores stay at home.
    """
    shared: dict[str, int] = {}

    def number(part: Any) -> int:
        return shared.setdefault(_compact(part), len(shared))

    lines = []
    for record in records:
        left: Table = {"validation": {}} if matrices else {"validation": {}, "matrices": {}}
        table = {**asdict(record), **left}
        config = {name: number(part) for name, part in record.config.items()}
        whole = {name: number(table[name]) for name in WHOLE}
        lines.append(_compact({"format": FORMAT, **table, "config": config, **whole}))
    head = ",\n".join(shared)
    return f'{{"shared":[\n{head}\n],"records":[\n' + ",\n".join(lines) + "\n]}\n"


def published_records(found: Any, where: object) -> Iterator[CellRecord]:
    """The records of what ``publish`` wrote; anything else is refused."""
    try:
        shared = found["shared"]
        for told in found["records"]:
            config = {name: shared[at] for name, at in told["config"].items()}
            whole = {name: shared[told[name]] for name in WHOLE}
            yield record_of({**told, "config": config, **whole}, where)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise StoreError(
            f"{where}: holds no list of records ({error!r}); expected what 'reproduce' wrote"
        ) from error


def _compact(value: Any) -> str:
    """JSON without spaces; its floats have six digits."""
    return json.dumps(_short(value), separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_records(folder: Path) -> dict[str, CellRecord]:
    """All records of a folder, by key."""
    found = (record_of(files.read_json(path), path) for path in sorted(folder.glob("*.json")))
    return {record.key: record for record in found}


def record_of(found: Any, where: object) -> CellRecord:
    """The record of a JSON value that came from outside; anything else is refused."""
    try:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"found {kinds.shown(found)}; expected format {FORMAT}")
        given = {name: value for name, value in found.items() if name != "format"}
        record: CellRecord = _kind().validate_json(json.dumps(given))
        _check(record)
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        told = str(error)
    raise StoreError(
        f"{where}: is no record of a run ({told}); expected a file that 'coterie reproduce', "
        "'coterie sweep' or 'coterie tune' wrote; remove it to run this again"
    )


@functools.cache
def _kind() -> TypeAdapter[CellRecord]:
    return TypeAdapter(CellRecord)


def _check(record: CellRecord) -> None:
    """Refuse what the kinds of the fields allow and no run writes."""
    summary.checked(record.summary)
    method, _, tag = record.method.partition("@")
    if not method.isidentifier() or (tag and not TAG.fullmatch(tag)):
        raise ValueError(f"method: found {kinds.shown(record.method)}; expected a label")
    if any(len(curve) != len(record.rounds) for curve in record.curves.values()):
        raise ValueError("curves: expected a score for each round")
    for matrix in record.matrices.values():
        if np.array(matrix, dtype=np.float64).shape != (len(record.last),) * 2:
            raise ValueError("a matrix is not square over the clients")
