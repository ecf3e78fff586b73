"""Datasets that need no download: digits, lines of plays, and two small synthetic regressions."""

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from ..core import random
from ..core.ranges import LARGEST, Count, CountOrZero, Interval, NotNegative
from ..errors import ConfigError
from .arrays import normalisation
from .federation import Dataset
from .sources.text import Targets, read_text

_MOST = 10**8  # the most numbers of a dataset, so that it fits in memory


def digits() -> Dataset:
    """1,797 grey 8x8 images of handwritten digits, ten classes."""
    from sklearn.datasets import load_digits  # slow to import, so imported only here

    raw = load_digits()
    x = torch.from_numpy(raw.images.astype(np.uint8)).unsqueeze(1)
    scale, shift = normalisation("digits", x, "auto")
    return Dataset(
        name="digits",
        x=x,
        y=torch.from_numpy(raw.target.astype(np.int64)),
        classes=10,
        class_names=tuple("0123456789"),
        scale=scale,
        shift=shift,
    )


def plays(
    *,
    length: Count = 40,
    stride: Count = 40,
    targets: Targets = "every",
    words: Count | None = None,
) -> Dataset:
    """Lines of eight of Shakespeare's characters, about 2,600 letters each, one client each.

    length: characters (or words) per sample
    stride: characters (or words) from the start of one sample to the start of the next
    targets: "last": the character after a sample; "every": the next one at every position
    words: tokens are the so many most frequent words, one token for all others; None: characters
    """
    return read_text(
        Path(__file__).parent / "plays",
        name="plays",
        length=length,
        stride=stride,
        targets=targets,
        words=words,
    )


def regression_groups(
    *,
    clients: Annotated[int, Interval(ge=2, le=LARGEST)] = 8,
    samples: Count = 40,
    features: Count = 5,
    noise: NotNegative = 0.1,
    seed: CountOrZero = 0,
) -> Dataset:
    """Clients of two groups: ``y = x·b`` for one half, ``y = -x·b`` for the other, plus noise.

    clients: the number of clients
    samples: samples per client
    features: features per sample
    noise: standard deviation of the noise that is added to y
    seed: the seed of all draws
    """
    _check_size("regression_groups", clients * samples * features)
    key = random.derive(seed, "regression_groups")
    total = clients * samples
    owners = torch.arange(clients).repeat_interleave(samples)
    groups = torch.arange(clients) * 2 // clients
    place = torch.arange(total * features).view(total, features)
    x = random.normal(key, "x", place)
    b = random.normal(key, "b", torch.arange(features))
    b = b / b.norm()
    sign = 1.0 - 2.0 * groups[owners]
    y = sign * (x @ b) + noise * random.normal(key, "noise", torch.arange(total))
    return Dataset(
        name="regression_groups",
        x=x.float(),
        y=y.float(),
        classes=0,
        owners=owners,
        owner_names=tuple(f"client{i}" for i in range(clients)),
        owner_groups=groups,
    )


def sine(
    *,
    clients: Count = 12,
    samples: Count = 20,
    noise: NotNegative = 0.1,
    seed: CountOrZero = 0,
) -> Dataset:
    """P2's Figure 1: noisy points of a sine curve; each client holds one interval of [0, 2π).

    clients: the number of clients
    samples: samples per client
    noise: standard deviation of the noise that is added to the curve
    seed: the seed of all draws
    """
    _check_size("sine", clients * samples)
    key = random.derive(seed, "sine")
    owners = torch.arange(clients).repeat_interleave(samples)
    place = torch.arange(clients * samples)
    x = (owners + random.uniform(key, "x", place)) * (2 * math.pi / clients)
    y = torch.sin(x) + noise * random.normal(key, "noise", place)
    return Dataset(
        name="sine",
        x=x.float().unsqueeze(1),
        y=y.float(),
        classes=0,
        owners=owners,
        owner_names=tuple(f"interval{i}" for i in range(clients)),
    )


def _check_size(name: str, numbers: int) -> None:
    """Refuse a dataset that does not fit in memory."""
    if numbers > _MOST:
        raise ConfigError(
            f"data: {name} would have {numbers:.3g} numbers; expected at most {_MOST:.0e}: ask for "
            "fewer clients or samples"
        )
