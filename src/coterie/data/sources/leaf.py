"""Reads LEAF's json files: ``users`` and, for each user, ``x`` and ``y`` under ``user_data``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ..arrays import TEST, TRAIN, VALIDATION, Array, Names, Piece, assemble
from ..federation import Dataset

_PARTS = {"train": TRAIN, "val": VALIDATION, "test": TEST}


def read_leaf(path: Path, *, name: str = "") -> Dataset:
    """Read a json file, or a folder of them; subfolders train, val and test hold these parts."""
    sources = [path] if path.is_file() else sorted(path.rglob("*.json"))
    held: dict[tuple[str, int], dict[str, Any]] = {}
    for file in sources:
        part = _PARTS.get(file.parent.name, TRAIN)
        for user, data in _users(file):
            if (user, part) in held:
                raise DataError(f"{file}: user '{user}' appears twice; every user needs one entry")
            held[user, part] = data
    if not any(data["y"] for data in held.values()):
        raise DataError(f"{path}: found no samples in {len(sources)} json files")
    users = tuple(dict.fromkeys(user for user, _ in held))
    first = next(data["x"][0] for data in held.values() if data["x"])
    name = name or path.stem
    if isinstance(first, str):
        return _characters(name, held, users)
    number = {user: i for i, user in enumerate(users)}
    pieces = [_piece(path, held, part, number) for part in sorted({part for _, part in held})]
    return assemble(name, pieces, Names((), users))


def _users(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_bytes())
        for user in content["users"]:
            data = content["user_data"][user]
            if len(data["x"]) != len(data["y"]):
                raise DataError(
                    f"{file}: user '{user}' has {len(data['x'])} samples and {len(data['y'])} "
                    "targets; they must be equally many"
                )
            yield str(user), data
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: not a LEAF file ({type(error).__name__}: {error}); expected 'users' and "
            "'user_data' with 'x' and 'y' for every user"
        ) from error


def _piece(
    path: Path, held: dict[tuple[str, int], dict[str, Any]], part: int, number: dict[str, int]
) -> Piece:
    mine = [(number[user], data) for (user, p), data in held.items() if p == part and data["y"]]
    try:
        x = np.array([sample for _, data in mine for sample in data["x"]], np.float32)
        y = np.array([target for _, data in mine for target in data["y"]])
    except ValueError as error:
        raise DataError(f"{path}: samples differ in length or are not numbers: {error}") from error
    owners = np.repeat([i for i, _ in mine], [len(data["y"]) for _, data in mine])
    return Piece(_pixels(x), y, part, owners)


def _pixels(x: Array) -> Array:
    """FEMNIST's 784 grey values from 0 to 1 as uint8 images; other features are unchanged."""
    if x.ndim == 2 and x.shape[1] == 784 and x.min() >= 0 and x.max() <= 1:
        return np.asarray(np.rint(x * 255), np.uint8).reshape(-1, 28, 28)
    return x


def _characters(
    name: str, held: dict[tuple[str, int], dict[str, Any]], users: tuple[str, ...]
) -> Dataset:
    """Tokens of LEAF's Shakespeare: strings of equal length, each with the next character."""
    rows = [
        (str(x), str(y), part, user)
        for (user, part), data in held.items()
        for x, y in zip(data["x"], data["y"], strict=True)
    ]
    if len({len(x) for x, *_ in rows}) > 1 or any(len(y) != 1 for _, y, *_ in rows):
        raise DataError(
            f"{name}: expected strings of one length, each with one character to follow"
        )
    alphabet = sorted(set().union(*(x + y for x, y, *_ in rows)))
    number = {character: i for i, character in enumerate(alphabet)}
    owner = {user: i for i, user in enumerate(users)}
    parts = torch.tensor([part for *_, part, _ in rows], dtype=torch.int8)
    return Dataset(
        name=name,
        x=torch.tensor([[number[c] for c in x] for x, *_ in rows]),
        y=torch.tensor([number[y] for _, y, *_ in rows]),
        classes=len(alphabet),
        fixed=parts if len({part for _, part in held}) > 1 else None,
        owners=torch.tensor([owner[user] for *_, user in rows]),
        owner_names=users,
        class_names=tuple(alphabet),
    )
