"""Builds a :class:`Dataset` from the arrays of a file: parts, image layout, labels, scaling."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from .federation import BLOCK, Dataset

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Scale = Literal["auto", "unit", "standard"]

TRAIN, VALIDATION, TEST = 0, 1, 2
MOST_CLASSES = 100_000  # or ten per sample, if that is more; a larger number is not a class
MOST_TOKENS = 1_000_000  # different tokens; a network has one embedding row for each

AUTO_SCALE: Literal["unit", "standard"] = "standard"  # measured: docs/data.md
BRIGHTEST = {"digits": 16}  # the largest pixel value; 255 for all other images
# Mean and standard deviation of the channels of the training images, for pixels from 0 to 1.
PIXELS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3,), (0.38,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "emnist": ((0.1736,), (0.3317,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


class Piece(NamedTuple):
    """The samples of one part of a dataset."""

    x: Array
    y: Array
    part: int  # TRAIN, VALIDATION or TEST
    owners: Array | None = None


class Names(NamedTuple):
    """Names that the source gives, if it does."""

    classes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


def assemble(
    name: str,
    pieces: Sequence[Piece],
    names: Names | None = None,
    superclass: Array | None = None,
) -> Dataset:
    """Build one dataset from its parts.

    uint8 arrays of rank 3 or 4 are images. Arrays of rank 2 with non-negative integers of another
    type are tokens. All other arrays are features.
    """
    for piece in pieces:
        if len(piece.x) != len(piece.y):
            raise DataError(
                f"{name}: found {len(piece.x)} samples but {len(piece.y)} targets; they must be "
                "equally many"
            )
        if piece.x.shape[1:] != pieces[0].x.shape[1:]:
            raise DataError(
                f"{name}: found samples of shape {piece.x.shape[1:]} beside "
                f"{pieces[0].x.shape[1:]}; all must have one shape"
            )
    if sum(len(piece.y) for piece in pieces) == 0:
        raise DataError(f"{name}: found no samples at all")
    names = names or Names()
    as_tokens = are_tokens(name, pieces)
    parts = [samples(piece.x, as_tokens) for piece in pieces]
    x = parts[0] if len(parts) == 1 else torch.cat(parts)  # a copy would not stay on disk
    y, class_names = labels(name, np.concatenate([piece.y for piece in pieces]), names.classes)
    held = np.concatenate([np.full(len(p.y), p.part, np.int8) for p in pieces])
    owners = [p.owners.astype(np.int64) for p in pieces if p.owners is not None]
    scale, shift = normalisation(name, x, "auto")
    return Dataset(
        name=name,
        x=x,
        y=y,
        classes=len(class_names),
        fixed=torch.from_numpy(held) if len({p.part for p in pieces}) > 1 else None,
        owners=torch.from_numpy(np.concatenate(owners)) if owners else None,
        owner_names=names.owners,
        class_names=class_names,
        superclass=None if superclass is None else torch.from_numpy(superclass.astype(np.int64)),
        numeric=torch.ones(x.shape[1], dtype=torch.bool) if x.ndim == 2 and not as_tokens else None,
        scale=scale,
        shift=shift,
    )


def are_tokens(name: str, pieces: Sequence[Piece]) -> bool:
    """Whether samples are rows of tokens: numbers that stand for words and measure nothing.

    The dtype decides: measurements are stored as floats or bytes, numbers of words as integers.
    """
    if not all(p.x.ndim == 2 and p.x.dtype.kind in "iu" and p.x.dtype != np.uint8 for p in pieces):
        return False
    if min(int(p.x.min(initial=0)) for p in pieces) < 0:
        return False
    highest = max(int(p.x.max(initial=0)) for p in pieces)
    if highest >= MOST_TOKENS:
        raise DataError(
            f"{name}: found the integer {highest} in x, where integers are tokens and expected "
            f"below {MOST_TOKENS:,}; if they measure something, store them as floats"
        )
    return True


def samples(x: Array, tokens: bool = False) -> Tensor:
    """Tokens as int64, images as uint8 ``[N, channels, height, width]``, other data as float32."""
    if tokens:
        return _own(x.astype(np.int64))
    if x.dtype != np.uint8 or x.ndim < 3:
        return _numbers(x)
    if x.ndim == 3:
        return _own(x[:, None])
    if x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return _own(x.transpose(0, 3, 1, 2))
    return _own(x)


def _numbers(x: Array) -> Tensor:
    """Features as float32; NaN marks a missing number, and is allowed in rows of features only."""
    if x.dtype.kind not in "fiub":
        raise DataError(f"x: found {x.dtype}; expected numbers")
    with np.errstate(over="ignore"):
        found = x.astype(np.float32, copy=False)
    for start in range(0, len(found), BLOCK):
        block = found[start : start + BLOCK]
        odd = np.isinf(block) if found.ndim == 2 else ~np.isfinite(block)
        if not odd.any():
            continue
        at = start + int(np.argwhere(odd)[0][0])
        raise DataError(
            f"x: sample {at} holds a number that is not finite, or too large for float32; expected "
            "numbers of at most 3e38 (NaN for a missing one in rows of features); correct it"
        )
    return _own(found)


def _own(x: Array) -> Tensor:
    """A tensor on writable memory; copies an array only if it is read-only or not contiguous."""
    return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def labels(name: str, y: Array, known: tuple[str, ...] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """Convert targets to class numbers with class names, or to float32 without names."""
    if y.ndim != 1:
        raise DataError(f"{name}: targets have shape {y.shape}, expected one number a sample")
    if y.dtype.kind == "f":
        if not np.isfinite(y).all():
            raise DataError(f"{name}: targets contain NaN or infinity; remove those samples")
        return torch.from_numpy(y.astype(np.float32)), ()
    if y.dtype.kind in "US":
        found, y = np.unique(y.astype(str), return_inverse=True)
        known = tuple(found.tolist())
    if y.dtype.kind not in "iub":
        raise DataError(f"{name}: targets are {y.dtype}; expected classes, texts or numbers")
    if y.min() < 0 or y.max() >= max(MOST_CLASSES, 10 * len(y)):
        raise DataError(
            f"{name}: found classes from {y.min()} to {y.max()} in {len(y):,} samples; expected "
            "classes numbered from 0; give the names of the classes instead, or number them"
        )
    count = max(int(y.max()) + 1, len(known))
    names = known or tuple(str(c) for c in range(count))
    return torch.from_numpy(y.astype(np.int64)), names


def refuse_one_class(dataset: Dataset) -> Dataset:
    """The dataset; refuses one whose samples all have the same class."""
    if not dataset.regression and len(dataset.y.unique()) < 2:
        raise DataError(f"{dataset.name}: all samples have one class; there is nothing to learn")
    return dataset


def scaled(dataset: Dataset, scale: Scale) -> Dataset:
    """The dataset with another pixel scale for its images; ``auto`` leaves it unchanged."""
    if scale == "auto":
        return dataset
    if dataset.x.dtype != torch.uint8:
        raise ConfigError(
            f"data.scale: found '{scale}', but {dataset.name} has no images; leave it out (numbers "
            "of tables are always standardised)"
        )
    factor, shift = normalisation(dataset.name, dataset.x, scale)
    return replace(dataset, scale=factor, shift=shift)


def normalisation(name: str, x: Tensor, scale: Scale) -> tuple[Tensor | None, Tensor | None]:
    """The scale and the shift that bring images to pixels in [0, 1], or standardise them.

    For images of unknown mean and deviation, ``standard`` gives pixels in [-1, 1].
    """
    if x.dtype != torch.uint8:
        return None, None
    channels, one = x.shape[1], 1 / BRIGHTEST.get(name, 255)
    if (AUTO_SCALE if scale == "auto" else scale) == "unit":
        return torch.full((channels, 1, 1), one), torch.zeros(channels, 1, 1)
    mean, std = PIXELS.get(name, ((0.5,) * channels, (0.5,) * channels))
    if len(mean) != channels:
        mean, std = (0.5,) * channels, (0.5,) * channels
    m, s = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    return one / s, -m / s
