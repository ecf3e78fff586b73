"""The files of a run's folder that hold its numbers: one writer and one reader for each."""

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Mixture, client_digest, combined_digest
from ..core.answers import Outcomes
from ..errors import StoreError
from ..storage import archives, files
from ..storage.archives import read_npz
from . import kinds
from .run import FEDERATED, RAW, SCORES, JudgedRows, Line, Packed, Roster, Scores, dense

INTEGERS, NUMBERS, TEXTS = "iu", "biuf", "U"  # kinds of numpy
ROWS = "rows_"  # begins the names of the arrays of JudgedRows
DENSE_UP_TO = 50_000_000  # entries of all matrices of a run together


def unreadable(path: Path, error: Exception, expected: str) -> StoreError:
    """The error for a file that is not as a run writes it."""
    return StoreError(
        f"{path}: cannot be read ({error}); expected {expected}; check the folder with "
        "'coterie verify'"
    )


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
        rounds = _part(stored, "rounds", INTEGERS, 1).tolist()
        known = [name for name in ("groups", "targets") if name in stored]
        truth: dict[str, Any] = {name: _part(stored, name, INTEGERS, 1) for name in known}
        if "A" in stored:
            return list(zip(rounds, _part(stored, "A", NUMBERS), strict=True)), truth
        from scipy.sparse import csr_array

        K = len(stored["clients"])
        places = [_part(stored, name, INTEGERS, 1) for name in ("indices", "indptr")]
        parts = _part(stored, "data", NUMBERS), *places
        stacked = csr_array(parts, shape=(len(rounds) * K, K))
        stacked.check_format(full_check=True)
        return [(t, stacked[i * K : (i + 1) * K]) for i, t in enumerate(rounds)], truth
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error, "the collaboration matrices of a run") from error


def _part(stored: Mapping[str, Any], name: str, kinds: str, ndim: int | None = None) -> Any:
    """An array of a file; ValueError unless its values are of these kinds of numpy."""
    array = stored[name]
    if array.dtype.kind not in kinds or (ndim is not None and array.ndim != ndim):
        raise ValueError(f"{name}: found {array.dtype} {list(array.shape)}")
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
        values, targets = _part(stored, "values", NUMBERS), _part(stored, "targets", NUMBERS, 1)
        units, sizes = (_part(stored, name, INTEGERS, 1) for name in ("units", "sizes"))
        chances = None
        if "probabilities" in stored:
            chances = _part(stored, "probabilities", "f", 2)
        found = Outcomes(values, targets, units, sizes, chances)
        if values.ndim not in (1, 2) or bool((sizes < 0).any()):
            raise ValueError("its arrays do not fit together")
        if {len(part) for part in found if part is not None and part is not sizes} != {sizes.sum()}:
            raise ValueError("its parts differ in length")
        rows = _rows(stored, len(targets))
        for each in (part for part in (values, chances) if part is not None and part.ndim == 2):
            _check_classes(each.shape[1], targets, rows)
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise unreadable(path, error, "the answers to test samples of a run") from error
    return found, rows


def _check_classes(classes: int, targets: Any, rows: JudgedRows | None) -> None:
    """Refuse targets or names of classes for which there is no column of probabilities."""
    if targets.dtype.kind not in INTEGERS or bool(((targets < 0) | (targets >= classes)).any()):
        raise ValueError(f"its targets are not among its {classes} classes")
    if rows is not None and len(rows.classes) != classes:
        raise ValueError("its names of classes do not fit its probabilities")


def _rows(stored: Mapping[str, Any], samples: int) -> JudgedRows | None:
    """What is known of the test samples beside the answers to them; None if it was not written."""
    if f"{ROWS}classes" not in stored:
        return None
    classes, names = (_part(stored, f"{ROWS}{n}", TEXTS, 1).tolist() for n in ("classes", "names"))
    target, column = (str(_part(stored, f"{ROWS}{n}", TEXTS, 0)) for n in ("target", "column"))
    codes = None
    if f"{ROWS}codes" in stored:
        codes = _part(stored, f"{ROWS}codes", INTEGERS, 1).astype(np.int64)
        if len(codes) != samples or bool(((codes < 0) | (codes >= len(names))).any()):
            raise ValueError("its subgroups do not fit its answers")
    return JudgedRows(tuple(classes), target, column, tuple(names), codes)


# ---- rounds.jsonl and clients.csv ----------------------------------------------------------------

COLUMNS = ("round", "client", "n_train", "n_val", "n_test", *SCORES)
# A spreadsheet reads a cell that begins with one of these as a formula, so a quote is put before
# it. A quote itself is quoted too, so that reading restores the name.
_FORMULA = re.compile(r"(^|[,;\t\r\n])(?=[=+\-@\t\r\n＝＋－＠'])")
_QUOTED = re.compile(r"(^|[,;\t\r\n])'")
LINE = {  # the fields that every line has, and their kinds
    "round": "a count",
    "clients": "a list of counts",
    "bytes_down": "a count",
    "bytes_up": "a count",
    "bytes_serve": "a count",
    "seconds": "finite seconds",
    "rejected": "a list of clients and reasons",
}
LINE_MAY = {  # the fields that some lines have
    **dict.fromkeys((*SCORES, FEDERATED), "a number or null"),
    "in_group_weight": "a finite number or null",
    "off_diagonal": "zero, uniform or varied",
    "distillation": "two numbers",
    RAW: "a list of clients and owners",
    "coalition": "a list of counts",
}


def read_rounds(path: Path) -> list[Line]:
    """Read the complete lines of ``rounds.jsonl``; a last line cut short by a crash is dropped."""
    lines: list[Line] = []
    for text in _read_lines(path).split("\n")[:-1]:
        try:
            lines.append(_checked_line(files.from_json(text)))
        except ValueError as error:
            raise unreadable(path, error, "one JSON object per line") from error
    return lines


def _checked_line(line: Any) -> Line:
    """Check a line of ``rounds.jsonl``; ValueError names the first field that is wrong.

    Fields of a user's own method may hold anything.
    """
    if not isinstance(line, dict):
        raise ValueError(f"a line is {kinds.shown(line)}")
    for name, kind in LINE.items():
        kinds.check(name, line.get(name), kind)
    for name in LINE_MAY.keys() & line.keys():
        kinds.check(name, line[name], LINE_MAY[name])
    if "distillation" in line:
        return {**line, "distillation": [kinds.number(part) for part in line["distillation"]]}
    return line


def client_rows(index: int, scores: Scores, roster: Roster) -> Iterator[tuple[Any, ...]]:
    """The lines of one round for ``clients.csv``; the cell of a missing score is empty.

    A quote is put before a client's name that a spreadsheet would read as a formula.
    """
    for i, name in enumerate(roster.clients):
        numbers = [float(scores[column][i]) for column in SCORES]
        cells = ["" if math.isnan(number) else repr(number) for number in numbers]
        yield (
            index,
            _FORMULA.sub(r"\1'", name),
            roster.n_train[i],
            roster.n_val[i],
            roster.n_test[i],
            *cells,
        )


def append_clients(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        file.writelines(map(_csv_line, rows))


def _csv_line(row: tuple[Any, ...]) -> str:
    """One line of CSV.

    The writer quotes line ends in a cell only if its own line end has the same characters.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_clients(path: Path) -> tuple[list[tuple[int, Scores]], Roster]:
    """Read the scores of every evaluated round, and the clients; an incomplete round is dropped."""
    table = csv.DictReader(io.StringIO(_read_lines(path), newline=""))
    rounds: dict[int, list[dict[str, str]]] = {}
    try:
        for row in table:
            row["client"] = _QUOTED.sub(r"\1", row["client"])
            rounds.setdefault(int(row["round"]), []).append(row)
        first = next(iter(rounds.values()), [])
        sizes = {name: _sizes(first, name) for name in COLUMNS[2:5]}
        names = tuple(row["client"] for row in first)
        scores = [
            (index, {name: _column(rows, name) for name in SCORES})
            for index, rows in rounds.items()
            if tuple(row["client"] for row in rows) == names
        ]
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise unreadable(path, error, f"a table with columns {', '.join(COLUMNS)}") from error
    return scores, Roster(names, **sizes, groups=None, fingerprint="", weak={})


def _sizes(rows: list[dict[str, str]], name: str) -> Any:
    sizes = np.array([int(row[name]) for row in rows], dtype=np.int64)
    if bool((sizes < 0).any()):
        raise ValueError(f"{name} is {sizes.min()}, below 0")
    return sizes


def _column(rows: list[dict[str, str]], name: str) -> Any:
    return np.array([float(row[name]) if row[name] else math.nan for row in rows])


def _read_lines(path: Path) -> str:
    """The text of a file up to its last line end; a crash cut short what follows."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        return text[: text.rfind("\n") + 1]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "a text file of a run") from error


# ---- models.safetensors --------------------------------------------------------------------------


def write_models(path: Path, mixture: Mixture) -> None:
    """Write all predictors: distinct ``models [U, P]``, ``index [K, r]`` and ``weights [K, r]``."""
    weights, models = mixture.weights.detach().cpu(), mixture.models.detach().cpu()
    # a stride of 0: all clients share the same models
    flat = (models[:1] if models.stride(0) == 0 else models).flatten(0, 1)
    places: dict[bytes, int] = {}
    kept: list[int] = []
    index = torch.zeros(len(flat), dtype=torch.int64)
    for at, model in enumerate(flat):
        key = hashlib.sha256(model.contiguous().numpy().tobytes()).digest()
        if key not in places:
            places[key] = len(kept)
            kept.append(at)
        index[at] = places[key]
    whose = index.view(-1, weights.shape[1]).expand(weights.shape)
    once = archives.Some.of(flat, torch.tensor(kept))
    archives.write_arrays(path, {"models": once, "index": whose, "weights": weights})


def read_models(path: Path) -> Mixture:
    """Read all predictors: ``weights [K, r]``, ``models [K, r, P]``."""
    weights, models, index = _stored_models(path)
    return Mixture(weights, models[index])


def read_predictor(path: Path, client: int) -> Mixture:
    """Read one client's predictor: ``weights [r]``, ``models [r, P]``."""
    weights, models, index = _stored_models(path)
    return Mixture(weights[client], models[index[client]])


def stored_digest(path: Path) -> str:
    """The digest of stored predictors, with one client's models in memory at a time."""
    weights, models, index = _stored_models(path)
    each = zip(weights, index, strict=True)
    return combined_digest(client_digest(Mixture(w, models[at])) for w, at in each)


def _stored_models(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """``weights [K, r]``, ``models [U, P]`` and ``index [K, r]`` into them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        weights, models, index = tensors["weights"], tensors["models"], tensors["index"]
        fits = weights.shape == index.shape and models.dim() == 2 and index.dtype == torch.int64
        if not fits or bool(((index < 0) | (index >= len(models))).any()):
            raise ValueError("its arrays do not fit together")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise unreadable(path, error, "the models of a run") from error
    return weights, models, index
