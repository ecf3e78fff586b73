"""The files of a run's folder, one writer and one reader each."""

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Mixture
from ..core.paired import Outcomes
from ..errors import StoreError
from ..results import kinds
from ..results.history import SCORES, Line, Packed, Roster, Scores, dense
from ..storage import files, packing
from ..storage.archives import read_npz

COLUMNS = ("round", "client", "n_train", "n_val", "n_test", *SCORES)
# A cell that begins with one of these is a formula to a spreadsheet; the quote is for reading back.
_FORMULA = re.compile(r"(^|[,;\t\r\n])(?=[=+\-@\t\r\n＝＋－＠'])")
_QUOTED = re.compile(r"(^|[,;\t\r\n])'")
DENSE_UP_TO = 50_000_000  # entries of all matrices of a run together


def client_digest(predictor: Mixture) -> str:
    """The sha256 of one client's predictor: weights ``[r]``, then models ``[r, P]``.

    Models of weight zero predict nothing and are left out, so that engines which fill up a mixture
    give the same digest. Numbers are written in little-endian order.
    """
    used = predictor.weights != 0
    total = hashlib.sha256()
    for part in (predictor.weights[used], predictor.models[used]):
        array = part.detach().cpu().contiguous().numpy()
        total.update(f"{array.dtype.str[1:]}{list(array.shape)}".encode())
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()


def combined_digest(clients: Iterable[str]) -> str:
    """The digest of a run: the sha256 over its clients' own, in client order."""
    return hashlib.sha256("\n".join(clients).encode()).hexdigest()


def digest(mixture: Mixture) -> str:
    """The digest of all clients' predictors, ``weights [K, r]`` and ``models [K, r, P]``."""
    each = zip(mixture.weights.cpu(), mixture.models, strict=True)
    return combined_digest(client_digest(Mixture(*predictor)) for predictor in each)


def write_models(path: Path, mixture: Mixture) -> None:
    """Every client's predictor: ``models [U, P]``, each once, ``index [K, r]``, ``weights``."""
    weights, models = mixture.weights.detach().cpu(), mixture.models.detach().cpu()
    flat = (models[:1] if models.stride(0) == 0 else models).flatten(0, 1)  # or all have the same
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
    once = packing.Some.of(flat, torch.tensor(kept))
    packing.write_arrays(path, {"models": once, "index": whose, "weights": weights})


def read_models(path: Path) -> Mixture:
    """Every client's predictor: ``weights [K, r]``, ``models [K, r, P]``."""
    weights, models, index = _stored_models(path)
    return Mixture(weights, models[index])


def stored_digest(path: Path) -> str:
    """The :func:`digest` of stored predictors, with one client's models in memory at a time."""
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
        raise _unreadable(path, error, "the models of a run") from error
    return weights, models, index


def write_matrices(path: Path, matrices: Sequence[tuple[int, Packed]], roster: Roster) -> None:
    """``A [R, K, K]`` with ``rounds``, ``clients`` and, where known, ``groups`` and ``targets``.

    Above 5e7 entries the matrices are stored by their non-zero entries, one under the other, as
    the parts of one CSR matrix of ``R·K`` rows: ``data``, ``indices``, ``indptr``.
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
    """The matrices of each recorded round, and ``groups`` and ``targets`` where they are known."""
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
        raise _unreadable(path, error, "the collaboration matrices of a run") from error


def _integers(array: Any) -> Any:
    """The array, if it is a list of integers."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"found {array.dtype} {list(array.shape)}, where integers were expected")
    return array


def _numbers(array: Any) -> Any:
    """The array, if it holds real numbers."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"found {array.dtype}, where numbers were expected")
    return array


def write_outcomes(path: Path, outcomes: Outcomes) -> None:
    """``values``, ``targets``, ``units`` and ``sizes`` of the answers to test samples."""
    with path.open("wb") as file:
        np.savez_compressed(file, **outcomes._asdict())


def read_outcomes(path: Path) -> Outcomes:
    """Every answer to a test sample."""
    try:
        stored = read_npz(path)
        values, targets = _numbers(stored["values"]), _numbers(stored["targets"])
        found = Outcomes(values, targets, _integers(stored["units"]), _integers(stored["sizes"]))
        if values.ndim not in (1, 2) or targets.ndim != 1 or bool((found.sizes < 0).any()):
            raise ValueError("its arrays do not fit together")
        if values.ndim == 2:
            _check_classes(targets, values.shape[1])
        if {len(part) for part in found[:3]} != {int(found.sizes.sum())}:
            raise ValueError("its parts differ in length")
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise _unreadable(path, error, "the answers to test samples of a run") from error
    return found


def _check_classes(targets: Any, classes: int) -> None:
    """Refuse targets that no column of probabilities belongs to."""
    if targets.dtype.kind not in "iu" or bool(((targets < 0) | (targets >= classes)).any()):
        raise ValueError(f"its targets are not among its {classes} classes")


def read_rounds(path: Path) -> list[Line]:
    """The whole lines of ``rounds.jsonl``; a last line that a crash cut short is left out."""
    lines: list[Line] = []
    for text in _read_lines(path).split("\n")[:-1]:
        try:
            lines.append(_checked_line(files.from_json(text)))
        except ValueError as error:
            raise _unreadable(path, error, "a JSON object a line") from error
    return lines


LINE = {  # the fields that every line has, and what they hold
    "round": "a count",
    "clients": "a list of counts",
    "bytes_down": "a count",
    "bytes_up": "a count",
    "bytes_serve": "a count",
    "seconds": "finite seconds",
    "rejected": "a list of clients and reasons",
}
LINE_MAY = {  # those that some lines have
    **dict.fromkeys(SCORES, "a number or null"),
    "in_group_weight": "a finite number or null",
    "off_diagonal": "zero, uniform or varied",
    "distillation": "two numbers",
}


def _checked_line(line: Any) -> Line:
    """A line of ``rounds.jsonl``; else ValueError says which of its fields is wrong.

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
    """The lines of one round for ``clients.csv``; an empty cell is a score that does not exist.

    A client's name that a spreadsheet would run as a formula has a quote before it.
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
    """Add lines to ``clients.csv``."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.writelines(map(_csv_line, rows))


def _csv_line(row: tuple[Any, ...]) -> str:
    """One line; the writer quotes the line ends in a cell only if they are its own as well."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_clients(path: Path) -> tuple[list[tuple[int, Scores]], Roster]:
    """The scores of every evaluated round and who was scored; a round cut short is left out."""
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
        raise _unreadable(path, error, f"a table with columns {', '.join(COLUMNS)}") from error
    return scores, Roster(names, **sizes, groups=None, fingerprint="", weak={})


def _sizes(rows: list[dict[str, str]], name: str) -> Any:
    sizes = np.array([int(row[name]) for row in rows], dtype=np.int64)
    if bool((sizes < 0).any()):
        raise ValueError(f"{name} is {sizes.min()}, below 0")
    return sizes


def _column(rows: list[dict[str, str]], name: str) -> Any:
    return np.array([float(row[name]) if row[name] else math.nan for row in rows])


def _read_lines(path: Path) -> str:
    """A text file up to its last line's end: what follows was cut short by a crash."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        return text[: text.rfind("\n") + 1]
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, "a text file of a run") from error


def _unreadable(path: Path, error: Exception, expected: str) -> StoreError:
    return StoreError(
        f"{path}: cannot be read ({error}); expected {expected}; check the folder with "
        "'coterie verify'"
    )
