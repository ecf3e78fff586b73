"""Reads text and LEAF's json files; text is cut into windows, to predict the next token.

A window has one target, the token that follows it, or one at every position (reading P3-14). With
one target, a source without parts of its own is divided here: the last fifth of a client's text is
for testing and the last fifth of the rest for validation, so that no window overlaps two parts.
With a target at every position, windows have times, by which each client is split: its latest
windows are for testing.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ...core.fields import Checked
from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ..arrays import TEST, TRAIN, VALIDATION, Ints, Names, Piece, assemble
from ..federation import Dataset

Targets = Literal["last", "every"]
OTHER = "<other>"  # the token for all words that are not among the most frequent ones
_WORD = re.compile(r"\w+|[^\w\s]")


class Passage(NamedTuple):
    """A text of one client; a text without a part is divided into train, validation and test."""

    client: str
    text: str
    part: int | None = None


@dataclass(frozen=True)
class Cut(Checked):
    """How texts are cut into samples.

    length: characters (or words) per sample
    stride: characters (or words) from the start of one sample to the start of the next
    targets: "last": the character after a sample; "every": the next one at every position
    words: tokens are the so many most frequent words, one token for all others; None: characters
    """

    length: Count = 80
    stride: Count = 80
    targets: Targets = "last"
    words: Count | None = None


def read_text(path: Path, *, name: str = "", **options: Any) -> Dataset:
    """Read a folder with one ``.txt`` file per client (UTF-8), with the options of :class:`Cut`."""
    found = sorted(path.glob("*.txt"))
    if not found:
        raise DataError(f"{path}: found no .txt files; expected one per client")
    passages = [Passage(file.stem, _decode(file)) for file in found]
    return windows(name or path.name, passages, Cut(**options))


def _decode(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 text (byte {error.start}); save the file as UTF-8"
        ) from error


def windows(name: str, passages: Sequence[Passage], cut: Cut) -> Dataset:
    """A dataset of windows ``[N, length]`` of token numbers, with the next tokens as targets."""
    every = cut.targets == "every"
    if every and cut.stride < cut.length:
        raise ConfigError(
            f"data.stride: found {cut.stride}, less than data.length = {cut.length}; with targets "
            "at every position a token would be a target of two samples; use the length or more"
        )
    owner_names = tuple(dict.fromkeys(passage.client for passage in passages))
    texts = [p.text if cut.words is None else _WORD.findall(p.text) for p in passages]
    alphabet = _alphabet(texts, cut.words)
    number = {token: i for i, token in enumerate(alphabet)}
    found, facts, read = [], [], dict.fromkeys(owner_names, 0)
    for passage, text in zip(passages, texts, strict=True):
        codes = np.array([number.get(token, 0) for token in text], np.int64)
        for start, end, part in _parts(passage.part, len(codes), every):
            made = _windows(codes[start:end], cut)
            first = read[passage.client] + start
            when = np.arange(first, first + cut.stride * len(made), cut.stride)
            what = [np.full(len(made), n) for n in (part, owner_names.index(passage.client))]
            found.append(made)
            facts.append(np.stack([*what, when]))
        read[passage.client] += len(codes)
    if not sum(map(len, found)):
        unit = "characters" if cut.words is None else "words"
        raise DataError(f"{name}: no text is longer than data.length = {cut.length} {unit}")
    rows, (parts, owners, times) = np.concatenate(found), np.concatenate(facts, 1)
    return Dataset(
        name=name,
        x=torch.from_numpy(rows[:, :-1].copy()),
        y=torch.from_numpy((rows[:, 1:] if every else rows[:, -1]).copy()),
        classes=len(alphabet),
        fixed=None if (parts < 0).any() else torch.from_numpy(parts.astype(np.int8)),
        owners=torch.from_numpy(owners),
        owner_names=owner_names,
        class_names=tuple(alphabet),
        times=torch.from_numpy(times.astype(np.float64)) if every else None,
    )


def _alphabet(texts: Iterable[Sequence[str]], words: int | None) -> list[str]:
    """All characters, sorted; or the most frequent words, by frequency, behind the other words'."""
    if words is None:
        return sorted(set().union(*texts))
    often = Counter(word for text in texts for word in text)
    return [OTHER, *sorted(often, key=lambda word: (-often[word], word))[:words]]


def _windows(codes: Ints, cut: Cut) -> Ints:
    """Windows of a text with one token more than a sample has ``[n, length + 1]``."""
    if len(codes) <= cut.length:
        return np.zeros((0, cut.length + 1), np.int64)
    return np.lib.stride_tricks.sliding_window_view(codes, cut.length + 1)[:: cut.stride]


def _parts(part: int | None, length: int, every: bool) -> list[tuple[int, int, int]]:
    """Start, end and part of each part of a text; -1 where windows are split by time."""
    if part is not None or every:
        return [(0, length, -1 if part is None else part)]
    test = length - length // 5
    val = test - test // 5
    return [(0, val, TRAIN), (val, test, VALIDATION), (test, length, TEST)]


# ---- LEAF's json files: ``users`` and, for each user, ``x`` and ``y`` under ``user_data`` --------

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
    if x.ndim == 2 and x.shape[1] == 784 and x.min() >= 0 and x.max() <= 1:  # FEMNIST's images
        return Piece(np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28), y, part, owners)
    return Piece(x, y, part, owners)


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
