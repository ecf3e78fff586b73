"""``collaboration.npz`` and ``predictions.npz``: collaboration matrices, test predictions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.answers import Outcomes
from ...results.history import Packed, Roster, dense
from ...results.judged_rows import JudgedRows
from ...storage.archives import read_npz
from .names import unreadable

ROWS = "rows_"  # begins the names of the arrays of JudgedRows
DENSE_UP_TO = 50_000_000  # entries of all matrices of a run together


def write_matrices(path: Path, matrices: Sequence[tuple[int, Packed]], roster: Roster) -> None:
    """Write ``A [R, K, K]``, ``rounds``, ``clients`` and, if known, ``groups`` and ``targets``.

    Above 5e7 entries the matrices are stacked and stored as one CSR matrix of ``R·K`` rows:
    ``data``, ``indices``, ``indptr``.
    """
    arrays: dict[str, Any] = {
        "rounds": np.array([index for index, _ in matrices]),
        "clients": np.array(roster.clients, dtype=str),
    }
    arrays |= {
        name: found
        for name in ("groups", "targets")
        if (found := getattr(roster, name)) is not None
    }
    if len(matrices) * len(roster) ** 2 > DENSE_UP_TO:
        from scipy.sparse import csr_array, vstack

        stacked = vstack([csr_array(matrix) for _, matrix in matrices], format="csr")
        arrays |= {"data": stacked.data, "indices": stacked.indices, "indptr": stacked.indptr}
    else:
        arrays["A"] = np.stack([dense(matrix) for _, matrix in matrices])
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_matrices(path: Path) -> tuple[list[tuple[int, Packed]], dict[str, Any]]:
    """Read the matrix of each recorded round, and ``groups`` and ``targets`` if they are known."""
    try:
        stored = read_npz(path)
        rounds = _integers(stored["rounds"]).tolist()
        truth: dict[str, Any] = {
            n: _integers(stored[n]) for n in ("groups", "targets") if n in stored
        }
        if "A" in stored:
            return list(zip(rounds, _numbers(stored["A"]), strict=True)), truth
        from scipy.sparse import csr_array

        K = len(stored["clients"])
        parts = _numbers(stored["data"]), _integers(stored["indices"]), _integers(stored["indptr"])
        stacked = csr_array(parts, shape=(len(rounds) * K, K))
        stacked.check_format(full_check=True)
        return [(t, stacked[i * K : (i + 1) * K]) for i, t in enumerate(rounds)], truth
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error, "the collaboration matrices of a run") from error


def _integers(array: Any) -> Any:
    """The array, if it is one-dimensional and holds integers; else ValueError."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"found {array.dtype} {list(array.shape)}, where integers were expected")
    return array


def _numbers(array: Any) -> Any:
    """The array, if it holds real numbers; else ValueError."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"found {array.dtype}, where numbers were expected")
    return array


def write_outcomes(path: Path, outcomes: Outcomes, rows: JudgedRows | None = None) -> None:
    """Write the predictions of test samples, and the names of classes and subgroups if known."""
    arrays: dict[str, Any] = outcomes._asdict()
    if rows is not None:
        *texts, codes = rows
        named = zip(JudgedRows._fields, texts, strict=False)
        arrays |= {f"{ROWS}{name}": np.array(text, dtype=str) for name, text in named}
        arrays[f"{ROWS}codes"] = codes
    with path.open("wb") as file:
        np.savez_compressed(file, **{k: part for k, part in arrays.items() if part is not None})


def read_outcomes(path: Path) -> tuple[Outcomes, JudgedRows | None]:
    """Read the predictions of all test samples, and what is known of the samples."""
    try:
        stored = read_npz(path)
        values, targets = _numbers(stored["values"]), _numbers(stored["targets"])
        units, sizes = _integers(stored["units"]), _integers(stored["sizes"])
        found = Outcomes(values, targets, units, sizes, _probabilities(stored, targets))
        if values.ndim not in (1, 2) or targets.ndim != 1 or bool((found.sizes < 0).any()):
            raise ValueError("its arrays do not fit together")
        if values.ndim == 2:
            _check_classes(targets, values.shape[1])
        if {len(part) for part in found[:3]} != {int(found.sizes.sum())}:
            raise ValueError("its parts differ in length")
        rows = _rows(stored, len(targets))
        chances = values if values.ndim == 2 else found.probabilities
        if rows is not None and chances is not None and len(rows.classes) != chances.shape[1]:
            raise ValueError("its names of classes do not fit its probabilities")
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise unreadable(path, error, "the answers to test samples of a run") from error
    return found, rows


def _probabilities(stored: Mapping[str, Any], targets: Any) -> Any:
    """The probabilities of all classes; None if they were not stored."""
    found = stored.get("probabilities")
    if found is None:
        return None
    if found.dtype != np.float32 or found.ndim != 2 or len(found) != len(targets):
        raise ValueError("its probabilities do not fit its answers")
    _check_classes(targets, found.shape[1])
    return found


def _rows(stored: Mapping[str, Any], samples: int) -> JudgedRows | None:
    """What is known of the test samples beside the answers to them; None in older folders."""
    if f"{ROWS}classes" not in stored:
        return None
    classes, names = (_texts(stored[f"{ROWS}{name}"], 1) for name in ("classes", "names"))
    target, column = (_texts(stored[f"{ROWS}{name}"], 0) for name in ("target", "column"))
    codes = stored.get(f"{ROWS}codes")
    if codes is not None:
        codes = _integers(codes).astype(np.int64)
        if len(codes) != samples or bool(((codes < 0) | (codes >= len(names))).any()):
            raise ValueError("its subgroups do not fit its answers")
    return JudgedRows(tuple(classes), str(target), str(column), tuple(names), codes)


def _texts(array: Any, ndim: int) -> Any:
    """The texts of an array; ValueError if it holds anything else."""
    if array.dtype.kind != "U" or array.ndim != ndim:
        raise ValueError("its names of classes and subgroups are not texts")
    return array.tolist()


def _check_classes(targets: Any, classes: int) -> None:
    """Refuse targets for which there is no column of probabilities."""
    if targets.dtype.kind not in "iu" or bool(((targets < 0) | (targets >= classes)).any()):
        raise ValueError(f"its targets are not among its {classes} classes")
