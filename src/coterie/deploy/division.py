"""A site's own division of its rows into train, validation and test, and which sums have left it.

The site divides its rows once, by random bytes of its own, and keeps the division for every
experiment: nobody can choose another or ask for a second one, and a test row never trains
anywhere. Folds, which its owner has to approve, are dealt and kept alike: each row tests in one of
them and trains in the others.

Rows are known by a keyed hash of their cells, so that files of the division hold no data. A row
that comes later is divided among the new ones; a row that returns has its old part.

A sum over training rows leaves only if it is of enough rows, and if it is of the same rows as any
sum that left before, or of rows of which enough came or went.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data.arrays import TEST, TRAIN, VALIDATION
from ..data.federation import Dataset
from ..data.partition import Fold, folds_of, take, three_ways
from ..data.site_data import SiteSource
from ..errors import ConfigError, DataError
from ..storage import files
from ..storage.archives import read_npz

FOLDER, PARTS, MASKED = "division", "parts.npz", "masked.json"
SUMS, CLASSES = "release", "classes"  # what leaves, as the names of its files begin
KEY = 16  # bytes of a row's hash
Bools = npt.NDArray[np.bool_]
Deal = Callable[[Dataset, Tensor, int], Tensor]  # the places of these new rows, by a seed


class ChangedError(DataError):
    """Rows came or went since the site was divided, or since sums left it.

    The sentence is for the site's owner alone: it says how many.
    """


def row_keys(source: SiteSource, secret: bytes) -> list[bytes]:
    """The keyed hash of every row, as it is in the site's own file; equal rows are numbered."""
    seen: Counter[bytes] = Counter()
    keys = []
    for row in _rows(source):
        plain = hashlib.blake2b(row, key=secret, digest_size=KEY).digest()
        seen[plain] += 1
        numbered = plain + seen[plain].to_bytes(4, "little")
        keys.append(hashlib.blake2b(numbered, key=secret, digest_size=KEY).digest())
    return keys


def _rows(source: SiteSource) -> Iterator[bytes]:
    if source.original is not None:
        columns = [column.to_pylist() for column in source.original.table.columns]
        yield from (repr(row).encode() for row in zip(*columns, strict=True))
        return
    assert source.samples is not None
    x, y, units = source.samples.x, source.samples.y, source.samples.units
    for at in range(len(y)):
        unit = b"" if units is None else units[at].numpy().tobytes()
        yield x[at].numpy().tobytes() + y[at].numpy().tobytes() + unit


class SiteDivision:
    """The division of one site, in its folder."""

    def __init__(self, home: Path, name: str, shares: tuple[float, float]) -> None:
        self._path, self._name, self._shares = home / FOLDER, name, shares

    def parts(self, dataset: Dataset, keys: list[bytes]) -> Tensor:
        """The part of every row; rows that the file itself divides keep the file's parts."""
        salt, known = self._stored(PARTS)
        if known and not known.keys() & {*keys}:
            raise ChangedError(
                f"{self._path}: none of this site's rows is as it was when they were divided; "
                "expected the same file with the same [data] options, or some rows more or less; "
                "if all of them are meant to be new: coterie site renew-division"
            )
        if dataset.fixed is None:
            return self._dealt(PARTS, dataset, keys, self._three_ways)
        return self._kept(PARTS, keys, _given(dataset.fixed, keys, known), salt)

    def fold(self, dataset: Dataset, keys: list[bytes], fold: Fold) -> Tensor:
        """The part of every row where a fold tests; other rows train, or are for validation."""
        if dataset.fixed is not None:
            raise ConfigError(
                f"run.folds: the file of '{self._name}' divides its rows itself; expected one "
                "without data.split, whose rows folds can divide; leave --folds out"
            )

        def deal(dataset: Dataset, new: Tensor, seed: int) -> Tensor:
            return folds_of(dataset, new, fold.of, seed)

        name = f"folds-{fold.of}.npz"
        tests = self._dealt(name, dataset, keys, deal) == fold.part
        rest, seed = (~tests).nonzero().flatten(), _seed(self._stored(name)[0], fold.part)
        _, val = take(dataset, self._name, rest, self._shares[0], seed, "val")
        parts = torch.where(tests, TEST, TRAIN)
        parts[val] = VALIDATION
        return parts

    def _three_ways(self, dataset: Dataset, new: Tensor, seed: int) -> Tensor:
        """The parts of new rows."""
        splits = three_ways(dataset, self._name, new, None, self._shares, seed, given=False)
        parts = torch.empty(len(dataset.y), dtype=torch.int64)
        for part, rows in zip((TRAIN, VALIDATION, TEST), splits, strict=True):
            parts[rows] = part
        return parts[new]

    def _dealt(self, name: str, dataset: Dataset, keys: list[bytes], deal: Deal) -> Tensor:
        """The places that are known, and new ones for new rows; a unit stays in one place."""
        salt, known = self._stored(name)
        parts = torch.tensor([known.get(key, -1) for key in keys])
        if dataset.units is not None:
            of_unit = dict(zip(dataset.units.tolist(), parts.tolist(), strict=True))
            of_unit |= {
                unit: part
                for unit, part in zip(dataset.units.tolist(), parts.tolist(), strict=True)
                if part >= 0
            }
            parts = torch.tensor([of_unit[unit] for unit in dataset.units.tolist()])
        new = (parts < 0).nonzero().flatten()
        parts[new] = deal(dataset, new, _seed(salt, len(known)))
        return self._kept(name, keys, parts, salt)

    def _kept(self, name: str, keys: list[bytes], found: Tensor, salt: bytes) -> Tensor:
        """The places of the rows, written down if any of them is new."""
        _, known = self._stored(name)
        told = known | dict(zip(keys, found.tolist(), strict=True))
        if told != known:
            self._path.mkdir(mode=0o700, exist_ok=True)
            values = np.array([*told.values()], np.uint8)
            drawn = np.frombuffer(salt, np.uint8)
            _save(self._path / name, {"salt": drawn, "keys": _table(told), "parts": values})
        return found

    def renew(self) -> None:
        """Forget the division, so that the rows are divided anew. What left is not forgotten."""
        for path in (self._path / PARTS, *self._path.glob("folds-*.npz")):
            path.unlink(missing_ok=True)

    def _stored(self, name: str) -> tuple[bytes, dict[bytes, int]]:
        path = self._path / name
        if not path.exists():
            return secrets.token_bytes(32), {}
        found = read_npz(path)
        keys = [row.tobytes() for row in found["keys"]]
        return found["salt"].tobytes(), dict(zip(keys, found["parts"].tolist(), strict=True))

    # ---- what has left -----------------------------------------------------------------------

    def release(self, columns: "Columns", rows: int, what: str = SUMS) -> "Release":
        """Which columns' sums may leave, of this or an earlier release; ChangedError if none may.

        ``rows`` is the smallest number of rows that a sum is of, and of which must come or go
        between two sums. A release is a set of rows: what is asked about it later is added to it.
        """
        before = [_Released.read(path) for path in sorted(self._path.glob(f"{what}-*.npz"))]
        mine = {*columns.keys}
        for one in before:
            came, went = len(mine - one.keys), len(one.keys - mine)
            if came + went and max(came, went) < rows:
                raise ChangedError(
                    f"{came} training rows came and {went} went since sums of them left; expected "
                    f"none, or at least {rows}, so that no difference of two sums is about a few "
                    "patients; undo the change, or wait for more rows"
                )
        left = {
            name: (bounds, held)
            for name, bounds, held in columns.each()
            if len(held) >= rows and all(one.may_differ(name, bounds, held, rows) for one in before)
        }
        same = next((one for one in before if one.keys == mine), None)
        made = (
            _Released(len(before), mine, left)
            if same is None
            else same._replace(left=left | same.left)
        )
        if made != same:
            self._path.mkdir(mode=0o700, exist_ok=True)
            made.write(self._path / f"{what}-{made.number:04d}.npz")
        return Release(made.number, np.isin(columns.names, [*left]))

    def mask(self, context: str, clients: Iterable[str], sums: str, *, by_hand: bool) -> None:
        """Note that masked sums leave for a set of sites; ChangedError if they would show one's.

        ``sums`` is a keyed hash of them: others under the same masks would show their difference.
        Totals of several sets may be combined to show a single site's sums (of four sites the four
        sets of three do), so another set needs an approval by hand.
        """
        path, now = self._path / MASKED, sorted(clients)
        stored = files.read_json(path) if path.exists() else {}
        if stored.get(context, {}).get("sums", sums) != sums:
            raise ChangedError(
                "this site's rows or [ranges] have changed since its masked sums left; expected "
                "the same, or a new request, which has new masks"
            )
        for before in (one["clients"] for one in stored.values()):
            if before != now and not by_hand:
                raise ChangedError(
                    f"masked sums left for {', '.join(before)}; with those of {', '.join(now)} the "
                    "coordinator may see single sites'; expected the same set, or an approval by "
                    "hand"
                )
        files.write_json(path, stored | {context: {"clients": now, "sums": sums}})


class Release(NamedTuple):
    """The sums of one set of training rows."""

    number: int
    allowed: Bools  # the columns whose sums may leave


class Columns(NamedTuple):
    """Some rows of a site, and in which of them each column has a value."""

    names: list[str]
    keys: list[bytes]
    known: Bools  # [n, D]
    ranges: dict[str, list[float]]  # by column; empty where none is declared

    def each(self) -> Iterator[tuple[str, list[float], set[bytes]]]:
        """The name of each column, its bounds, and the rows with a value."""
        for name, has in zip(self.names, self.known.T, strict=True):
            held = {key for key, known in zip(self.keys, has, strict=True) if known}
            yield name, self.ranges.get(name, []), held


class _Released(NamedTuple):
    number: int
    keys: set[bytes]
    left: dict[str, tuple[list[float], set[bytes]]]  # bounds, and rows with a value, by column

    def may_differ(self, name: str, bounds: list[float], held: set[bytes], rows: int) -> bool:
        """Whether a sum of these rows beside the one that left says nothing about a few rows."""
        if name not in self.left:
            return True
        before, had = self.left[name]
        if held == had:
            return bounds == before  # other bounds would show who is outside of them
        return max(len(held - had), len(had - held)) >= rows

    def write(self, path: Path) -> None:
        order, names = sorted(self.keys), [*self.left]
        held = [[key in self.left[name][1] for name in names] for key in order]
        known = np.array(held, bool).reshape(len(order), len(names))
        told = {"ranges": {name: self.left[name][0] for name in names}, "names": names}
        text = np.frombuffer(json.dumps(told).encode(), np.uint8)
        _save(path, {"keys": _table(order), "known": np.packbits(known, axis=0), "told": text})

    @classmethod
    def read(cls, path: Path) -> "_Released":
        found = read_npz(path)
        told = json.loads(found["told"].tobytes())
        keys = [row.tobytes() for row in found["keys"]]
        known = np.unpackbits(found["known"], axis=0)[: len(keys)].astype(bool)
        left = {
            name: (
                told["ranges"][name],
                {key for key, has in zip(keys, column, strict=True) if has},
            )
            for name, column in zip(told["names"], known.T, strict=True)
        }
        return cls(int(path.stem.rpartition("-")[2]), {*keys}, left)


def _seed(salt: bytes, count: int) -> int:
    return int.from_bytes(hashlib.sha256(salt + count.to_bytes(8, "big")).digest()[:7])


def _given(fixed: Tensor, keys: list[bytes], known: dict[bytes, int]) -> Tensor:
    """The parts that the file itself names."""
    if len(fixed) != len(keys):
        raise DataError("data.part: a site of a federation uses all rows of its file; leave it out")
    for key, part in zip(keys, fixed.tolist(), strict=True):
        if known.get(key, part) != TRAIN and part == TRAIN:
            raise ChangedError(
                "a row that was a test or validation row is marked as train now; expected that it "
                "never trains; undo the change, or: coterie site renew-division"
            )
    return fixed


def _table(keys: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY)


def _save(path: Path, arrays: dict[str, npt.NDArray[np.uint8]]) -> None:
    with files.whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
