"""The folder of one run: everything needed to read, draw, repeat and verify the run.

    config.json           the resolved config and the folder's format; written before round 0
    partition.json        which client holds which samples, with hashes; written before round 0
    preprocessing.json    how samples become inputs: columns, means, classes; written before round 0
    environment.json      the environment: versions, device, threads, command
    rounds.jsonl          one line per round
    clients.csv           one line per client and evaluated round
    collaboration.npz     the matrices A [R, K, K], for methods that have them
    models.safetensors    every client's predictor; identical models are stored once
    predictions.npz       the predictions for every test sample: the verdict is computed from them
    summary.json          the numbers of the table
    report.html           the run on one page
    MANIFEST.json         sha256 and size of each file; written last: an unfinished run has none

During a run, its matrices are in ``collaboration.parts/``, one file per round, and ``checkpoint/``
holds the state from which a killed run can be continued (:meth:`RunFolder.reopen`).
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.calls import Form
from ..core.metrics import METRICS, read_facts
from ..data.manifest import Identity, changes
from ..data.standard import Preprocessing
from ..errors import StoreError
from ..storage import faults, files, lock
from . import checkpoint, kinds, stored
from .run import MODELS, RAN, REPORT, Line, Log, Run, ran
from .statistics import promised_rounds
from .summary import Predictors, checked, finished

if TYPE_CHECKING:
    from ..training.rounds import Record

# ---- names, and checks before a folder is used ---------------------------------------------------

CONFIG, ENVIRONMENT, SUMMARY = "config.json", "environment.json", "summary.json"
ROUNDS, CLIENTS = "rounds.jsonl", "clients.csv"
MATRICES, PARTS = "collaboration.npz", "collaboration.parts"
PARTITION = "partition.json"
PREPROCESSING = "preprocessing.json"  # how samples become inputs; older folders have none
PREDICTIONS = "predictions.npz"
NAMES = (
    *(CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, MATRICES, PARTS, MODELS, SUMMARY, files.MANIFEST),
    *(PARTITION, PREPROCESSING, PREDICTIONS, REPORT, checkpoint.FOLDER),
)
FIRST = (PARTITION, PREPROCESSING)  # alone they are not a run, and may be overwritten
LISTED = (CONFIG, ENVIRONMENT, ROUNDS, CLIENTS, SUMMARY)  # every manifest lists them
AT_SITES = "sites"  # resolved.models of a config whose run left the final models at the sites
PART = re.compile(r"\d{8}\.npz")
CUT_SHORT = re.compile(  # writes that a kill has cut short
    rf"\.({'|'.join(map(re.escape, NAMES))})\.\d+\.tmp"
)

FORMAT = 1  # of the folders that this version writes and reads
FORMAT_KEY = "format"  # in config.json of a run and in compare.json of a comparison


def refuse_other_format(first: Path) -> None:
    """Refuse a folder of another format; ``first`` is the file of the folder that has the format.

    A file that is missing or cannot be read is accepted here; its reader refuses it.
    """
    try:
        found = files.read_json(first)
    except StoreError:
        return
    number = found.get(FORMAT_KEY) if isinstance(found, dict) else None
    if type(number) is not int or number != FORMAT:
        raise StoreError(
            f"{first}: '{FORMAT_KEY}' is {kinds.shown(number)}; expected {FORMAT}, the format that "
            "this version of coterie reads; run the experiment again in another folder, or install "
            "the version that wrote this one"
        )


def is_finished(path: Path) -> bool:
    return (path / files.MANIFEST).is_file() and (path / SUMMARY).is_file()


def refuse_links(path: Path) -> None:
    """Refuse a folder in which a name that coterie uses is a link or a special file."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    ours = [n for n in names if n in NAMES or n == lock.NAME or CUT_SHORT.fullmatch(n)]
    files.refuse_links(path, ours)


def refuse_used(path: Path) -> None:
    """Refuse a folder that already holds a run; the message says what to do."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: is a file; expected a folder, new or empty; choose one by --out")
    refuse_links(path)
    used = [name for name in NAMES if name not in FIRST and (path / name).exists()]
    if not used:
        return
    found, advice = f"an unfinished run ({', '.join(used)})", f"run 'coterie resume {path}', "
    if is_finished(path):
        found, advice = "a finished run", ""
    raise StoreError(
        f"{path}: holds {found}; expected a folder without one; nothing was overwritten; {advice}"
        "choose another folder with --out or delete this one first"
    )


def untidy(path: Path) -> bool:
    """Whether the folder of a finished run still has files that only an unfinished run needs."""
    refuse_links(path)
    return any((path / name).exists() for name in (PARTS, checkpoint.FOLDER, lock.NAME))


def tidy(path: Path) -> None:
    """Remove the files that only an unfinished run needs."""
    files.remove(path / PARTS, PART)
    checkpoint.clear(path)


# ---- reading -------------------------------------------------------------------------------------

_FAULTS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError)


def read(path: Path) -> Run:
    if not is_finished(path):
        raise StoreError(
            f"{path}: holds no finished run (no {files.MANIFEST}); expected a folder written by "
            "'coterie run'; finish it with 'coterie resume' or run it again"
        )
    refuse_links(path)
    refuse_other_format(path / CONFIG)
    try:
        return _read(path)
    except _FAULTS as error:
        raise StoreError(
            f"{path}: is not as a run writes it ({type(error).__name__}: {error}); expected a "
            "folder of 'coterie run'; check it with 'coterie verify'"
        ) from error


def read_preprocessing(path: Path) -> Preprocessing:
    """How the samples of a run became inputs, from the run's folder."""
    stored = path / PREPROCESSING
    if not stored.is_file():
        raise StoreError(
            f"{path}: has no {PREPROCESSING}: it was written by an earlier version, or its data "
            f"has no schema; run it again with 'coterie run {path / CONFIG} --out FOLDER'"
        )
    return Preprocessing.from_json(files.read_start(stored, None).decode("utf-8", "replace"))


def _read(path: Path) -> Run:
    try:
        summary = checked(files.read_json(path / SUMMARY))
    except ValueError as error:
        raise StoreError(
            f"{path / SUMMARY}: {error}; check the folder with 'coterie verify'"
        ) from error
    config, where = files.read_json(path / CONFIG), files.read_json(path / ENVIRONMENT)
    if not all(isinstance(part, dict) for part in (config, where, config.get("run", {}))):
        raise TypeError(f"expected tables in {CONFIG} and {ENVIRONMENT}")
    read_facts(summary["metric"], config.get("metric", {}))
    log = _log(path, summary)
    _check_clients(log)
    kinds.Environment.model_validate(where)
    return log.run(config=config, environment=where, summary=summary, path=path)


def _log(path: Path, summary: dict[str, Any]) -> Log:
    """Read the log of all rounds of a run."""
    scores, roster = stored.read_clients(path / CLIENTS)
    facts = {"fingerprint": summary["partition_fingerprint"], "weak": summary["weak_clients"]}
    matrices: list[tuple[int, Any]] = []
    truth: dict[str, Any] = {}
    outcomes = rows = None
    if (path / MATRICES).exists():
        matrices, truth = stored.read_matrices(path / MATRICES)
    if (path / PREDICTIONS).exists():
        outcomes, rows = stored.read_outcomes(path / PREDICTIONS)
    return Log(
        summary["method"],
        summary["seed"],
        summary["metric"],
        replace(roster, **facts, **truth, rows=rows),
        swaps=summary["in_group_weight_of"] != "A",
        merge_val=summary["merge_val"],
        lines=stored.read_rounds(path / ROUNDS),
        evaluated=scores,
        matrices=matrices,
        outcomes=outcomes,
    )


def _check_clients(log: Log) -> None:
    """Refuse files that are not about the same number of clients."""
    roster, K = log.roster, len(log.roster)
    for name, groups in (("groups", roster.groups), ("targets", roster.targets)):
        if groups is not None and groups.shape != (K,):
            raise ValueError(f"{MATRICES}: {name} have shape {list(groups.shape)}; expected [{K}]")
    for _, matrix in log.matrices:
        if matrix.shape != (K, K):
            found = list(matrix.shape)
            raise ValueError(f"{MATRICES}: a matrix has shape {found}; expected [{K}, {K}]")
    if log.outcomes is not None and len(log.outcomes.sizes) != K:
        answered = len(log.outcomes.sizes)
        raise ValueError(f"{PREDICTIONS}: holds answers of {answered} clients; expected {K}")
    mixed = METRICS[log.metric].probabilities
    if log.outcomes is not None and mixed != (log.outcomes.values.ndim == 2):
        raise ValueError(f"{PREDICTIONS}: its answers are not of a kind that {log.metric} scores")


# ---- checking ------------------------------------------------------------------------------------


def verify(path: Path) -> list[str]:
    """The faults of a finished run's folder, as sentences; empty if all is as written."""
    refuse_links(path)
    refuse_other_format(path / CONFIG)
    return files.faults(path, listed(path)) or _contents(path)


def listed(path: Path) -> list[str]:
    """The files of a finished run that its manifest has to list: those of a run that are there."""
    try:
        at_sites = models_at_sites(files.read_json(path / CONFIG))
    except StoreError:  # the manifest tells that it is not as it was
        at_sites = True
    needed = {*LISTED, *(() if at_sites else (MODELS,))}
    there = {name for name in NAMES if (path / name).is_file()}
    return sorted(needed.union(there) - {files.MANIFEST})


def models_at_sites(config: Any) -> bool:
    """Whether the config says that the final models were left at the sites of a federation."""
    resolved = config.get("resolved") if isinstance(config, dict) else None
    return isinstance(resolved, dict) and resolved.get("models") == AT_SITES


def _contents(path: Path) -> list[str]:
    """Contradictions between files that match the manifest."""
    run = read(path)
    kept = {
        CLIENTS: [(int(index), None) for index in run.rounds],
        MATRICES: [(index, None) for index in run.matrix_rounds],
    }
    wrong = _gaps(run.lines, kept, promised_rounds(run))
    models = path / MODELS
    if models.exists() and stored.stored_digest(models) != run.summary.get("digest"):
        wrong.append(f"{MODELS} does not give the digest in {SUMMARY}")
    return wrong


def refuse_gaps(path: Path, log: Log) -> None:
    """Refuse to continue from logs in which rounds, scores or matrices are missing."""
    wrong = _gaps(log.lines, {CLIENTS: log.evaluated, PARTS: log.matrices}, len(log.lines))
    if wrong:
        raise StoreError(f"{path}{os.sep}{wrong[0]}; resume from an earlier checkpoint")


def _gaps(
    lines: Sequence[Line], kept: Mapping[str, Sequence[tuple[int, Any]]], rounds: object
) -> list[str]:
    """Rounds that are missing, doubled or out of order, one sentence per file."""
    there = [line.get("round") for line in lines]
    wrong = []
    if len(there) != rounds or there != list(range(len(there))):
        wrong.append(
            f"{ROUNDS}: found rounds {_some(there)}; expected {rounds} from 0 on, in order"
        )
    for name, mark in zip(kept, ("test", "off_diagonal"), strict=True):
        promised = [line.get("round") for line in lines if mark in line]
        found = [index for index, _ in kept[name]]
        if found != promised:
            expected = f"{_some(promised)}, as {ROUNDS} says"
            wrong.append(f"{name}: found rounds {_some(found)}; expected {expected}")
    return wrong


def _some(rounds: Sequence[Any], most: int = 20) -> str:
    """The first few of these rounds, as text."""
    return f"{list(rounds[:most])}{' …' * (len(rounds) > most)}"


def refuse_other_data(path: Path, now: Identity) -> None:
    """Refuse to continue, or to compare with, a run whose clients had other data."""
    if not (path / PARTITION).is_file():
        raise StoreError(
            f"{path}: has no {PARTITION}, so that its data cannot be compared with what is here; "
            "it was begun by an earlier version; choose another folder with --out or delete it"
        )
    changed = changes(files.read_json(path / PARTITION), now)
    if changed:
        raise StoreError(
            f"{path}: the data is not what this run began with ({'; '.join(changed)}); expected "
            f"partition {now.fingerprint} to be that of {PARTITION}; nothing was changed; "
            "restore the data, or choose another folder with --out"
        )


# ---- writing -------------------------------------------------------------------------------------


class RunFolder:
    """The folder of one run while it is being written."""

    def __init__(
        self, path: Path, log: Log, config: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> None:
        self.path, self.log = path, log
        self.config, self.environment = config, environment
        self._unsafe: list[Path] = []  # parts that are not flushed to disk yet
        self._safe: checkpoint.Listing = {}  # parts that are flushed

    @classmethod
    def create(
        cls,
        path: Path,
        log: Log,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        partition: Mapping[str, Any] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> "RunFolder":
        """Create the folder of a new run; a folder that holds a run, finished or not, is refused.

        ``partition`` is the manifest of the federation; synthetic logs have none. It is written
        before the config, so that the data of every run that can be continued can be compared.
        ``preprocessing`` is written beside it, so that models can be used without the data.
        """
        refuse_used(path)
        with files.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        if partition is not None:
            files.write_text(path / PARTITION, files.to_json(dict(partition)) + "\n")
        if preprocessing is not None:
            files.write_text(path / PREPROCESSING, preprocessing.to_json() + "\n")
        config = {FORMAT_KEY: FORMAT, **config}
        files.write_json(path / CONFIG, config)
        files.write_json(path / ENVIRONMENT, dict(environment))
        files.write_text(path / ROUNDS, "")
        files.write_text(path / CLIENTS, ",".join(stored.COLUMNS) + "\n")
        return cls(path, log, config, environment)

    @classmethod
    def reopen(cls, path: Path, log: Log, rounds: int) -> "RunFolder":
        """Reopen the folder of an unfinished run after ``rounds`` rounds; later rounds are dropped.

        If ``rounds`` is 0, only the config has to exist.
        """
        lines = stored.read_rounds(path / ROUNDS)[:rounds] if rounds else []
        if len(lines) < rounds:
            raise StoreError(
                f"{path / ROUNDS}: found {len(lines)} whole rounds; expected {rounds}; resume from "
                "an earlier checkpoint"
            )
        scores = stored.read_clients(path / CLIENTS)[0] if rounds else []
        scores = [(index, found) for index, found in scores if index < rounds]
        matrices, safe = _kept_parts(path, rounds)
        log = replace(log, lines=lines, evaluated=scores, matrices=matrices)
        refuse_gaps(path, log)
        files.write_text(path / ROUNDS, "".join(files.to_json(line) + "\n" for line in lines))
        with files.whole(path / CLIENTS) as temporary:
            temporary.write_text(",".join(stored.COLUMNS) + "\n", encoding="utf-8")
            for index, found in log.evaluated:
                stored.append_clients(temporary, stored.client_rows(index, found, log.roster))
        files.remove(path, CUT_SHORT)
        known = (path / ENVIRONMENT).is_file()
        where = files.read_json(path / ENVIRONMENT) if known else {}
        folder = cls(path, log, files.read_json(path / CONFIG), where)
        folder._safe = safe
        return folder

    def note_resumed(
        self, rounds: int, where: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> None:
        """Write into ``environment.json`` that the run was continued, and what has changed."""
        note = {"after_rounds": rounds, "changed": dict(changed)}
        before = self.environment or where
        self.environment = {**before, "resumed": [*before.get("resumed", []), note]}
        files.write_json(self.path / ENVIRONMENT, dict(self.environment))

    def note_ran(self, forms: Iterable[Form]) -> None:
        """Write into ``environment.json`` how new forms of calls were executed.

        This is done before the round is logged, because a logged round is not executed again.
        """
        before = self.environment.get(RAN, {})
        known = {**ran(forms), **before}  # a resumed run knows only part of the reasons
        if known.keys() != before.keys():
            self.environment = {**self.environment, RAN: known}
            files.write_json(self.path / ENVIRONMENT, dict(self.environment))

    def append(self, record: "Record") -> Line:
        """Write one round to the logs."""
        line = self.log.append(record)
        with files.writing(self.path):
            with (self.path / ROUNDS).open("a", encoding="utf-8", newline="\n") as file:
                file.write(files.to_json(line) + "\n")
            faults.at("log.line")
            if record.evaluation is not None:
                rows = stored.client_rows(*self.log.evaluated[-1], self.log.roster)
                stored.append_clients(self.path / CLIENTS, rows)
            if record.collaboration is not None:
                (self.path / PARTS).mkdir(exist_ok=True)
                part = self.path / PARTS / f"{record.index:08d}.npz"
                stored.write_matrices(part, self.log.matrices[-1:], self.log.roster)
                self._unsafe.append(part)
        return line

    def sync(self) -> checkpoint.Listing:
        """Flush the logs to disk; returns their sizes and hashes, for a checkpoint."""
        grown = (self.path / ROUNDS, self.path / CLIENTS)
        with files.writing(self.path):
            for path in (*grown, *self._unsafe):
                files.flush_to_disk(path)
            if self._unsafe:
                files.flush_to_disk(self.path / PARTS)
        self._safe |= {f"{PARTS}/{path.name}": files.describe(path) for path in self._unsafe}
        self._unsafe = []
        return {**{path.name: files.describe(path) for path in grown}, **self._safe}

    def finish(
        self,
        predictors: Predictors,
        references: Mapping[str, Run] | None = None,
        *,
        page: bool = True,
    ) -> Run:
        """Finish the run: write matrices, models, summary, page and, last, the manifest."""
        log, path = self.log, self.path
        run = finished(log, predictors, self.config, self.environment, references)
        self.sync()
        if log.matrices:
            with files.whole(path / MATRICES) as temporary:
                stored.write_matrices(temporary, log.matrices, log.roster)
        if predictors.mixture is not None:
            with files.whole(path / MODELS) as temporary:
                stored.write_models(temporary, predictors.mixture)
        if log.outcomes is not None:
            with files.whole(path / PREDICTIONS) as temporary:
                stored.write_outcomes(temporary, log.outcomes, log.roster.rows)
        faults.at("finish.models")
        files.write_json(path / SUMMARY, run.summary)
        faults.at("finish.summary")
        run = replace(run, path=path, held=None)
        if page:
            from ..views.page import run_page

            files.write_text(path / REPORT, run_page(run))
            faults.at("finish.page")
        files.seal(path, [name for name in listed(path) if (path / name).is_file()])
        faults.at("finish.manifest")
        tidy(path)
        return run


def _kept_parts(path: Path, rounds: int) -> tuple[list[tuple[int, Any]], checkpoint.Listing]:
    """The matrices of the first rounds and their files; files of later rounds are removed."""
    matrices: list[tuple[int, Any]] = []
    safe: checkpoint.Listing = {}
    for part in sorted((path / PARTS).glob("*.npz")):
        if not PART.fullmatch(part.name):
            continue
        if int(part.stem) < rounds:
            matrices += stored.read_matrices(part)[0]
            safe[f"{PARTS}/{part.name}"] = files.describe(part)
        else:
            part.unlink()
    return matrices, safe
