"""Reads text for next-character prediction: each client's text is cut into windows of characters.

If the source has no parts of its own, the last fifth of a client's text is for testing and the last
fifth of the rest for validation, so that no window overlaps two parts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...core.ranges import Count
from ...errors import DataError
from ..arrays import TEST, TRAIN, VALIDATION
from ..federation import Dataset


class Passage(NamedTuple):
    """A text of one client; a text without a part is divided into train, validation and test."""

    client: str
    text: str
    part: int | None = None


def read_text(path: Path, *, name: str = "", length: Count = 80, stride: Count = 80) -> Dataset:
    """Read a folder with one ``.txt`` file per client (UTF-8).

    length: characters per sample
    stride: characters from the start of one sample to the start of the next
    """
    found = sorted(path.glob("*.txt"))
    if not found:
        raise DataError(f"{path}: found no .txt files; expected one per client")
    passages = [Passage(file.stem, _decode(file)) for file in found]
    return windows(name or path.name, passages, length=length, stride=stride)


def _decode(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 text (byte {error.start}); save the file as UTF-8"
        ) from error


def windows(name: str, passages: Sequence[Passage], *, length: int, stride: int) -> Dataset:
    """A dataset of windows ``[N, length]`` of character numbers, with the next character as y."""
    owner_names = tuple(dict.fromkeys(passage.client for passage in passages))
    alphabet = sorted(set().union(*(passage.text for passage in passages)))
    number = {character: i for i, character in enumerate(alphabet)}
    x, y, parts, owners = [], [], [], []
    for passage in passages:
        owner = owner_names.index(passage.client)
        for text, part in _parts(passage):
            codes = np.array([number[c] for c in text], np.int64)
            if len(codes) <= length:
                continue
            cut = np.lib.stride_tricks.sliding_window_view(codes, length + 1)[::stride]
            x.append(cut[:, :-1])
            y.append(cut[:, -1])
            parts.append(np.full(len(cut), part, np.int8))
            owners.append(np.full(len(cut), owner, np.int64))
    if not x:
        raise DataError(f"{name}: no text is longer than data.length = {length} characters")
    return Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate(x)),
        y=torch.from_numpy(np.concatenate(y)),
        classes=len(alphabet),
        fixed=torch.from_numpy(np.concatenate(parts)),
        owners=torch.from_numpy(np.concatenate(owners)),
        owner_names=owner_names,
        class_names=tuple(alphabet),
    )


def _parts(passage: Passage) -> list[tuple[str, int]]:
    text = passage.text
    if passage.part is not None:
        return [(text, passage.part)]
    test = len(text) - len(text) // 5
    val = test - test // 5
    return [(text[:val], TRAIN), (text[val:test], VALIDATION), (text[test:], TEST)]
