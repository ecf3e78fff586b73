"""A finished run, and the log that collects one: the only shape in which runs are handed on.

A :class:`Log` takes the records of a run round by round and becomes a :class:`Run`; reading a run's
folder gives the same run. Everything that shows runs (summaries, alarms, tables, pages) is a
function of them, so that a run in memory and a run on disk are judged by the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..core import metrics
from ..core.algorithm import Mixture
from ..core.answers import Outcomes
from ..core.batches import EVALUATION_BLOCK
from ..core.calls import Form
from ..core.metrics import Floats
from ..errors import StoreError, printable_lines
from . import collaboration

if TYPE_CHECKING:
    from ..data.federation import Federation
    from ..training.rounds import Record


class JudgedRows(NamedTuple):
    """What is known of the test samples beside the answers to them; rows are as in Outcomes."""

    classes: tuple[str, ...]  # their names; none in a regression
    target: str = ""  # the column that they come from; empty if there is none
    column: str = ""  # the column of the table that gives the subgroups; empty if there is none
    names: tuple[str, ...] = ()  # of the subgroups
    codes: NDArray[np.int64] | None = None  # [N] the subgroup of each test sample

    @classmethod
    def of(cls, federation: "Federation") -> "JudgedRows | None":
        """The test samples of a federation; None if its clients name the classes differently."""
        data = federation.dataset
        if federation.relabel is not None:
            return None
        classes = data.class_names or tuple(map(str, range(data.classes)))
        target = data.target.name if data.target is not None else ""
        if data.subgroups is None:
            return cls(classes, target)
        codes = np.concatenate([data.subgroups[test].numpy() for test in federation.test])
        groups = data.subgroup_column, data.subgroup_names
        return cls(classes, target, *groups, codes.astype(np.int64))


Line = dict[str, Any]  # one round, as a line of rounds.jsonl
Scores = dict[str, Floats]  # for each name of SCORES, one number per client [K]
Matrix = NDArray[np.float32]  # [K, K]
Packed = Any  # a Matrix, or a scipy.sparse.csr_array of one

MODELS, REPORT = "models.safetensors", "report.html"
RAN = "ran"  # key in the environment: how each form of a call was executed
LOCAL = "local"  # the method of training alone
SCORES = ("test", "val", "test_loss", "val_loss")
FEDERATED = "federated"  # the global model's accuracy on the federated test set, in a line
RAW = "raw"  # in a line: whose own models or samples each client was sent
SPARSE_FROM = 500  # clients; from this number on a matrix is kept as a sparse one


def pack(A: Any) -> Packed:
    """A matrix as it is kept in memory and stored: float32, sparse if there are many clients."""
    small = A.astype(np.float32)
    if A.shape[0] < SPARSE_FROM:
        return small
    from scipy.sparse import csr_array

    return csr_array(small)


def dense(matrix: Packed) -> Matrix:
    """All entries of a packed matrix."""
    entries: Matrix = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    return entries


@dataclass(frozen=True, eq=False)
class Roster:
    """The clients of a federation, without their data."""

    clients: tuple[str, ...]
    n_train: NDArray[np.int64]  # [K]
    n_val: NDArray[np.int64]
    n_test: NDArray[np.int64]
    groups: NDArray[np.int64] | None  # [K] the true groups, if they are known
    fingerprint: str
    weak: Mapping[str, str]  # client: what it lacks to be judged
    targets: NDArray[np.int64] | None = None  # [K] groups of the data that judges, if foreign
    rows: JudgedRows | None = None  # of all clients, if this process knows them

    @classmethod
    def of(cls, federation: "Federation") -> "Roster":
        """The clients of this federation."""
        splits = federation.train, federation.val, federation.test
        train, val, test = (np.array([len(part) for part in split]) for split in splits)
        groups, targets = (
            None if found is None else found.numpy().astype(np.int64)
            for found in (federation.groups, federation.target_groups)
        )
        weak = {
            name: found
            for i, name in enumerate(federation.clients)
            if (found := lack(federation, i))
        }
        sizes = train, val, test
        targets = None if federation.foreign is None else targets
        rows = JudgedRows.of(federation)
        return cls(federation.clients, *sizes, groups, federation.fingerprint, weak, targets, rows)

    def __len__(self) -> int:
        return len(self.clients)

    def truth(self, swaps: bool) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        """The groups of a matrix's columns and of its rows; None where they are not known.

        In ``A`` a client should rely on clients whose own data is of the group that judges it. In
        ``A Aᵀ`` two clients are compared by the models they use, so both count by the group of the
        data that judges them.
        """
        wanted = self.groups if self.targets is None else self.targets
        return (wanted if swaps else self.groups), wanted

    @property
    def without_validation(self) -> list[str]:
        """The clients without validation data of their own: they have no say in the best round."""
        return [self.clients[i] for i in np.flatnonzero(self.n_val == 0)]


def lack(federation: "Federation", i: int) -> str | None:
    """What a client lacks to train and to be judged; None if it has enough data."""
    own, data = federation.train[i], federation.dataset
    if len(own) < 2:
        return "one training sample" if len(own) else "no training samples"
    for name, split in (("test", federation.test[i]), ("validation", federation.val[i])):
        if len(split) == 0:
            return f"no {name} data"
    if not data.regression and bool((data.y[own] == data.y[own[0]]).all()):
        return "one class only"
    first, blocks = data.x[own[0]], own.split(EVALUATION_BLOCK)
    if all(bool((data.x[block] == first).all()) for block in blocks):
        return "constant features"
    return None


@final
@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One finished run, in memory or read from its folder.

    It has one line per round, one score per client and evaluated round, the collaboration matrices,
    the config, the environment, the numbers of its summary, and every client's model.
    """

    method: str
    seed: int
    metric: str
    roster: Roster
    lines: tuple[Line, ...]
    rounds: NDArray[np.int64]  # [R] the evaluated rounds
    test: Floats  # [R, K], NaN if a client has no such data
    val: Floats
    test_loss: Floats
    val_loss: Floats
    matrix_rounds: tuple[int, ...] = ()
    matrices: tuple[Packed, ...] = ()  # one for each of these rounds
    swaps: bool = False  # models change hands: A Aᵀ tells who works with whom
    merge_val: bool = False  # validation data was trained on: no round is chosen by it
    outcomes: Outcomes | None = None  # predictions of the last round, if they are not at sites
    config: Mapping[str, Any] = field(default_factory=dict)  # as in config.json
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None  # its folder; None if it was not written to disk
    held: Mixture | None = None  # the predictors in memory; None if they are in the folder

    @classmethod
    def read(cls, path: str | Path) -> "Run":
        """Read a finished run from its folder."""
        from .run_folder import read

        return read(Path(path))

    def mixture(self) -> Mixture:
        """The predictors of all clients: ``weights [K, r]``, ``models [K, r, P]``."""
        from .stored import read_models

        return read_models(self._models()) if self.held is None else self.held

    def predictor(self, client: int) -> Mixture:
        """The predictor of one client: ``weights [r]``, ``models [r, P]``."""
        from .stored import read_predictor

        algorithm = self.config.get("algorithm", {})  # its name, and a table for it
        tables = [self.config, *(t for t in algorithm.values() if isinstance(t, dict))]
        if any(table.get("adapt", {}).get("name") == "knn" for table in tables):
            raise StoreError(
                "this run's clients answer with their own samples beside the model (adapt = 'knn'),"
                " which no run keeps; expected another adaptation where models are taken home"
            )
        if self.held is not None:
            return Mixture(*(part[client] for part in self.held))
        return read_predictor(self._models(), client)

    def _models(self) -> Path:
        if self.path is None or not (self.path / MODELS).exists():
            raise StoreError(
                "this run kept no models: they are at the sites of its federation; get a site's "
                "own model there with 'coterie site export'"
            )
        return self.path / MODELS

    def __repr__(self) -> str:
        from ..views.table import run_text

        page = self.path and self.path / REPORT
        place = f"\n\npage: {page}" if page is not None and page.is_file() else ""
        return printable_lines(run_text(self) + place)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per evaluated round and client."""
        from ..views.frame import frame

        return frame([self])

    @property
    def last(self) -> Floats:
        """The test score of every client in the last evaluated round ``[K]``."""
        scores: Floats = self.test[-1]
        return scores

    @property
    def weights(self) -> Matrix | None:
        """The last collaboration matrix in which a client gives weight to another one ``[K, K]``.

        A method may stop giving weight to others when that gains nothing more (FedFomo does); its
        last weights on others are then shown. None for methods that have no such matrix.
        """
        for packed in reversed(self.matrices):
            if collaboration.any_others(packed):
                return dense(packed)
        return dense(self.matrices[-1]) if self.matrices else None


@dataclass
class Log:
    """Collects the records of a run, round by round."""

    method: str
    seed: int
    metric: str
    roster: Roster
    swaps: bool = False  # models change hands: A Aᵀ tells who works with whom
    merge_val: bool = False  # validation data was trained on: no round is chosen by it
    lines: list[Line] = field(default_factory=list)
    evaluated: list[tuple[int, Scores]] = field(default_factory=list)
    matrices: list[tuple[int, Packed]] = field(default_factory=list)
    outcomes: Outcomes | None = None

    def append(self, record: "Record") -> Line:
        """Add one round and return its line."""
        line = _line(record, self.roster, self.swaps)
        if record.evaluation is not None:
            scores = {name: getattr(record.evaluation, name) for name in SCORES}
            self.evaluated.append((record.index, scores))
            self.outcomes = record.outcomes
        if record.collaboration is not None:
            self.matrices.append((record.index, pack(record.collaboration)))
        self.lines.append(line)
        return line

    def run(self, **facts: Any) -> Run:
        """The run of all rounds that were added so far, with further fields of a run."""
        if not self.evaluated:
            raise StoreError(
                f"{self.method}: no round has been evaluated; expected the last one at least"
            )
        rounds = np.array([index for index, _ in self.evaluated], dtype=np.int64)
        scores: dict[str, Any] = {
            name: np.array([scores[name] for _, scores in self.evaluated], dtype=np.float64)
            for name in SCORES
        }
        return Run(
            self.method,
            self.seed,
            self.metric,
            self.roster,
            tuple(self.lines),
            rounds,
            **scores,
            matrix_rounds=tuple(index for index, _ in self.matrices),
            matrices=tuple(matrix for _, matrix in self.matrices),
            swaps=self.swaps,
            merge_val=self.merge_val,
            outcomes=self.outcomes,
            **facts,
        )


def _name(roster: Roster, client: int) -> str:
    """The name of a client; ``#number`` for a forged number, which belongs to no client."""
    return roster.clients[client] if 0 <= client < len(roster) else f"#{client}"


def _line(record: "Record", roster: Roster, swaps: bool) -> Line:
    line: Line = {
        "round": record.index,
        "clients": list(record.clients),
        "bytes_down": record.traffic.down,
        "bytes_up": record.traffic.up,
        "bytes_serve": record.traffic.serve,
        "seconds": record.seconds,
        "rejected": [
            {"client": _name(roster, r.client), "reason": r.reason} for r in record.rejected
        ],
    }
    if record.raw:
        line[RAW] = [[client, sorted(of)] for client, of in sorted(record.raw.items())]
    line.update(record.observed)
    if record.evaluation is not None:
        for name in SCORES:
            line[name] = float(metrics.mean_known(getattr(record.evaluation, name)))
    if record.federated is not None:
        line[FEDERATED] = record.federated
    if record.collaboration is not None:
        A = record.collaboration
        kin = collaboration.kinship(A, swaps)
        line["in_group_weight"] = collaboration.in_group_weight(kin, *roster.truth(swaps))
        line["off_diagonal"] = collaboration.off_diagonal(A, record.clients)
    return line


def ran(forms: Iterable[Form]) -> dict[str, dict[str, str]]:
    """How each form of a call was executed, by the form's id."""
    return {form.id: {"stage": form.stage, "way": form.way, "why": form.why} for form in forms}
