"""Writes the folder of a run: round by round during the run, and the results at its end."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.calls import Form
from ...data.preprocessing import Preprocessing
from ...errors import StoreError
from ...results.history import History, Line, Log
from ...storage import faults, files
from .. import checkpoint
from . import stored_arrays, stored_logs, stored_models
from .finished_run import RAN, Predictors, RunData, collect, ran
from .names import (
    CLIENTS,
    CONFIG,
    CUT_SHORT,
    ENVIRONMENT,
    FORMAT,
    FORMAT_KEY,
    MATRICES,
    MODELS,
    PART,
    PARTITION,
    PARTS,
    PREDICTIONS,
    PREPROCESSING,
    REPORT,
    ROUNDS,
    SUMMARY,
    refuse_used,
    tidy,
)
from .verifying import refuse_gaps

if TYPE_CHECKING:
    from ...training.rounds import Record

Render = Callable[[RunData], str]  # the page of a finished run as one HTML text


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
        files.write_text(path / CLIENTS, ",".join(stored_logs.COLUMNS) + "\n")
        return cls(path, log, config, environment)

    @classmethod
    def reopen(cls, path: Path, log: Log, rounds: int) -> "RunFolder":
        """Reopen the folder of an unfinished run after ``rounds`` rounds; later rounds are dropped.

        If ``rounds`` is 0, only the config has to exist.
        """
        lines = stored_logs.read_rounds(path / ROUNDS)[:rounds] if rounds else []
        if len(lines) < rounds:
            raise StoreError(
                f"{path / ROUNDS}: found {len(lines)} whole rounds; expected {rounds}; resume from "
                "an earlier checkpoint"
            )
        scores = stored_logs.read_clients(path / CLIENTS)[0] if rounds else []
        scores = [(index, found) for index, found in scores if index < rounds]
        matrices, safe = _kept_parts(path, rounds)
        log = replace(log, lines=lines, evaluated=scores, matrices=matrices)
        refuse_gaps(path, log)
        files.write_text(path / ROUNDS, "".join(files.to_json(line) + "\n" for line in lines))
        with files.whole(path / CLIENTS) as temporary:
            temporary.write_text(",".join(stored_logs.COLUMNS) + "\n", encoding="utf-8")
            for index, found in log.evaluated:
                stored_logs.append_clients(
                    temporary, stored_logs.client_rows(index, found, log.roster)
                )
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
                rows = stored_logs.client_rows(*self.log.evaluated[-1], self.log.roster)
                stored_logs.append_clients(self.path / CLIENTS, rows)
            if record.collaboration is not None:
                (self.path / PARTS).mkdir(exist_ok=True)
                part = self.path / PARTS / f"{record.index:08d}.npz"
                stored_arrays.write_matrices(part, self.log.matrices[-1:], self.log.roster)
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
        references: Mapping[str, History] | None = None,
        render: Render | None = None,
    ) -> RunData:
        """Finish the run: write matrices, models, summary, page and, last, the manifest."""
        log, path = self.log, self.path
        data = collect(log, predictors, self.config, self.environment, references)
        self.sync()
        if log.matrices:
            with files.whole(path / MATRICES) as temporary:
                stored_arrays.write_matrices(temporary, log.matrices, log.roster)
        if predictors.mixture is not None:
            with files.whole(path / MODELS) as temporary:
                stored_models.write_models(temporary, predictors.mixture)
        if log.outcomes is not None:
            with files.whole(path / PREDICTIONS) as temporary:
                stored_arrays.write_outcomes(temporary, log.outcomes, log.roster.rows)
        faults.at("finish.models")
        files.write_json(path / SUMMARY, data.summary)
        faults.at("finish.summary")
        data = replace(data, path=path, held=None)
        if render is not None:
            files.write_text(path / REPORT, render(data))
            faults.at("finish.page")
        files.write_json(path / files.MANIFEST, {"files": files.list_files(path)})
        faults.at("finish.manifest")
        tidy(path)
        return data


def _kept_parts(path: Path, rounds: int) -> tuple[list[tuple[int, Any]], checkpoint.Listing]:
    """The matrices of the first rounds and their files; files of later rounds are removed."""
    matrices: list[tuple[int, Any]] = []
    safe: checkpoint.Listing = {}
    for part in sorted((path / PARTS).glob("*.npz")):
        if not PART.fullmatch(part.name):
            continue
        if int(part.stem) < rounds:
            matrices += stored_arrays.read_matrices(part)[0]
            safe[f"{PARTS}/{part.name}"] = files.describe(part)
        else:
            part.unlink()
    return matrices, safe
