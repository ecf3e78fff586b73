"""Reads a finished run from its folder; every value is checked before it is used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.metrics import METRICS
from ...data.preprocessing import Preprocessing
from ...errors import StoreError
from ...results import kinds
from ...results.history import Log
from ...results.summary import checked
from ...storage import files
from . import stored_arrays, stored_logs
from .finished_run import RunData
from .names import (
    CLIENTS,
    CONFIG,
    ENVIRONMENT,
    MATRICES,
    PREDICTIONS,
    PREPROCESSING,
    ROUNDS,
    SUMMARY,
    finished,
    refuse_links,
    refuse_newer,
)

_FAULTS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError)


def read(path: Path) -> RunData:
    """Read a finished run from its folder."""
    if not finished(path):
        raise StoreError(
            f"{path}: holds no finished run (no {files.MANIFEST}); expected a folder written by "
            "'coterie run'; finish it with 'coterie resume' or run it again"
        )
    refuse_links(path)
    refuse_newer(path / CONFIG)
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


def _read(path: Path) -> RunData:
    try:
        summary = checked(files.read_json(path / SUMMARY))
    except ValueError as error:
        raise StoreError(
            f"{path / SUMMARY}: {error}; check the folder with 'coterie verify'"
        ) from error
    log = _log(path, summary)
    _check_clients(log)
    config, where = files.read_json(path / CONFIG), files.read_json(path / ENVIRONMENT)
    if not all(isinstance(part, dict) for part in (config, where, config.get("run", {}))):
        raise TypeError(f"expected tables in {CONFIG} and {ENVIRONMENT}")
    kinds.check("argv", where.get("argv", []), "a list of texts")
    return RunData(log.history(), config, where, summary, path)


def _log(path: Path, summary: dict[str, Any]) -> Log:
    """Read the log of all rounds of a run."""
    scores, roster = stored_logs.read_clients(path / CLIENTS)
    facts = {"fingerprint": summary["partition_fingerprint"], "weak": summary["weak_clients"]}
    matrices: list[tuple[int, Any]] = []
    truth: dict[str, Any] = {}
    outcomes = rows = None
    if (path / MATRICES).exists():
        matrices, truth = stored_arrays.read_matrices(path / MATRICES)
    if (path / PREDICTIONS).exists():
        outcomes, rows = stored_arrays.read_outcomes(path / PREDICTIONS)
    return Log(
        summary["method"],
        summary["seed"],
        summary["metric"],
        replace(roster, **facts, **truth, rows=rows),
        swaps=summary["in_group_weight_of"] != "A",
        merge_val=summary["merge_val"],
        lines=stored_logs.read_rounds(path / ROUNDS),
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
