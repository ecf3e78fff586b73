"""Reads text: each client's text is cut into windows of characters or words, to predict the next.

A window has one target, the token that follows it, or one at every position (spec 13.9). With one
target, a source without parts of its own is divided here: the last fifth of a client's text is for
testing and the last fifth of the rest for validation, so that no window overlaps two parts. With a
target at every position, windows have times, by which each client is split: its latest windows are
for testing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from ...core.ranges import Count
from ...errors import ConfigError, DataError
from ..arrays import TEST, TRAIN, VALIDATION
from ..assign import Ints
from ..federation import Dataset

Targets = Literal["last", "every"]
OTHER = "<other>"  # the token for all words that are not among the most frequent ones
_WORD = re.compile(r"\w+|[^\w\s]")


class Passage(NamedTuple):
    """A text of one client; a text without a part is divided into train, validation and test."""

    client: str
    text: str
    part: int | None = None


class Cut(NamedTuple):
    """How texts are cut into samples."""

    length: int = 80  # tokens per sample
    stride: int = 80  # tokens from the start of one sample to the start of the next
    targets: Targets = "last"
    words: int | None = None  # tokens are the so many most frequent words; None: characters


def read_text(
    path: Path,
    *,
    name: str = "",
    length: Count = 80,
    stride: Count = 80,
    targets: Targets = "last",
    words: Count | None = None,
) -> Dataset:
    """Read a folder with one ``.txt`` file per client (UTF-8).

    length: characters (or words) per sample
    stride: characters (or words) from the start of one sample to the start of the next
    targets: "last": the character after a sample; "every": the next one at every position
    words: tokens are the so many most frequent words, one token for all others; None: characters
    """
    found = sorted(path.glob("*.txt"))
    if not found:
        raise DataError(f"{path}: found no .txt files; expected one per client")
    passages = [Passage(file.stem, _decode(file)) for file in found]
    return windows(name or path.name, passages, Cut(length, stride, targets, words))


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
    texts = [_tokens(passage.text, cut.words) for passage in passages]
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


def _tokens(text: str, words: int | None) -> Sequence[str]:
    return text if words is None else _WORD.findall(text)


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
