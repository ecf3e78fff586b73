"""Data that needs no download: scikit-learn's digits, and two small regressions made here."""

import math

import numpy as np
import torch

from .. import draws
from ..errors import DataError
from .arrays import normalisation
from .federation import Dataset


def digits() -> Dataset:
    """1,797 grey 8x8 images of handwritten digits, ten classes."""
    from sklearn.datasets import load_digits  # slow to import, so only where it is used

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


def regression_groups(
    *,
    clients: int = 8,
    samples: int = 40,
    features: int = 5,
    noise: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Clients of two groups: ``y = x·b`` for one half, ``y = -x·b`` for the other, plus noise."""
    if clients < 2 or samples < 1 or features < 1:
        raise DataError(
            f"regression_groups: found clients = {clients}, samples = {samples}, "
            f"features = {features}; needs at least 2 clients, 1 sample and 1 feature"
        )
    key = draws.derive(seed, "regression_groups")
    total = clients * samples
    owners = torch.arange(clients).repeat_interleave(samples)
    groups = torch.arange(clients) * 2 // clients
    place = torch.arange(total * features).view(total, features)
    x = draws.normal(key, "x", place)
    b = draws.normal(key, "b", torch.arange(features))
    b = b / b.norm()
    sign = 1.0 - 2.0 * groups[owners]
    y = sign * (x @ b) + noise * draws.normal(key, "noise", torch.arange(total))
    return Dataset(
        name="regression_groups",
        x=x.float(),
        y=y.float(),
        classes=0,
        owners=owners,
        owner_names=tuple(f"client{i}" for i in range(clients)),
        owner_groups=groups,
    )


def sine(*, clients: int = 12, samples: int = 20, noise: float = 0.1, seed: int = 0) -> Dataset:
    """P2's Figure 1: noisy points of a sine curve; each client holds one interval of [0, 2π)."""
    if clients < 1 or samples < 1:
        raise DataError(
            f"sine: found clients = {clients}, samples = {samples}; needs at least 1 of each"
        )
    key = draws.derive(seed, "sine")
    owners = torch.arange(clients).repeat_interleave(samples)
    place = torch.arange(clients * samples)
    x = (owners + draws.uniform(key, "x", place)) * (2 * math.pi / clients)
    y = torch.sin(x) + noise * draws.normal(key, "noise", place)
    return Dataset(
        name="sine",
        x=x.float().unsqueeze(1),
        y=y.float(),
        classes=0,
        owners=owners,
        owner_names=tuple(f"interval{i}" for i in range(clients)),
    )
