"""Describes a partition: a manifest to store, rows for a table, and how much clients differ."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import few
from .arrays import Floats, Ints
from .federation import Federation, Indices, Seal

SPLITS = ("train", "val", "test")
MOST_RANGES = 200_000  # the most ranges of indices that a manifest lists


class Distance(NamedTuple):
    """The mean distance of a client's class shares from those of all clients together."""

    emd_p1: float  # as P1 computes it: classes that a client holds count twice (reading P1-12)
    l1: float  # the plain sum of absolute differences, at most 2


class ClientRow(NamedTuple):
    """One client's row of a table."""

    client: str
    group: int | None
    train: int
    val: int
    test: int
    classes: tuple[int, ...]  # of the client's own train and validation data; () for a regression


def class_counts(federation: Federation, *splits: Indices) -> Ints:
    """The number of samples of each true class that each client holds in these splits.

    The result is ``[K, classes]``. Where samples have several targets, these are counted.
    """
    classes, y = federation.dataset.classes, federation.dataset.y
    rows = [torch.cat(parts) for parts in zip(*splits, strict=True)]
    return np.stack([np.bincount(y[mine].flatten().numpy(), minlength=classes) for mine in rows])


def distance(counts: Ints) -> Distance:
    """Both versions of the earth mover's distance, over the clients that hold any samples.

    >>> distance(np.eye(10, dtype=int) * 7)
    Distance(emd_p1=2.7, l1=1.8)
    """
    held = counts[counts.sum(axis=1) > 0].astype(np.float64)
    if len(held) == 0:
        return Distance(0.0, 0.0)
    mine: Floats = held / held.sum(axis=1, keepdims=True)
    everybody = held.sum(axis=0) / held.sum()
    apart = np.abs(mine - everybody)
    l1 = apart.sum(axis=1).mean()
    twice = (apart * (held > 0)).sum(axis=1).mean()
    return Distance(round(float(l1 + twice), 12), round(float(l1), 12))


def emd(federation: Federation) -> Distance | None:
    """The distance of the clients' own training and validation data; None for a regression."""
    if federation.dataset.regression:
        return None
    return distance(class_counts(federation, federation.train, federation.own_val))


def describe(federation: Federation) -> list[ClientRow]:
    """One row per client, for a table."""
    counts = None
    if not federation.dataset.regression:
        counts = class_counts(federation, federation.train, federation.own_val)
    return [
        ClientRow(
            client=name,
            group=None if federation.groups is None else int(federation.groups[i]),
            train=len(federation.train[i]),
            val=len(federation.val[i]),
            test=len(federation.test[i]),
            classes=() if counts is None else tuple(counts[i].tolist()),
        )
        for i, name in enumerate(federation.clients)
    ]


def manifest(federation: Federation) -> dict[str, Any]:
    """The full description of a partition as JSON values: a run's ``partition.json``.

    Indices are written as ranges (``0-4,7``). If there are more than ``MOST_RANGES`` ranges, they
    are left out; ``partition`` is a hash of them.
    """
    data, relabel, foreign = federation.dataset, federation.relabel, federation.foreign
    target = (data.target_scale, data.target_shift) if data.regression else None
    rows, apart = describe(federation), emd(federation)
    found = listed(federation, rows, data.name, data.class_names, target, federation.partition)
    found |= {"note": federation.note, **(apart._asdict() if apart else {})}
    splits = {name: getattr(federation, name) for name in SPLITS}
    written = {name: [ranges(mine) for mine in split] for name, split in splits.items()}
    short = sum(text.count(",") + 1 for texts in written.values() for text in texts) <= MOST_RANGES
    for i, client in enumerate(found["clients"]):
        if relabel is not None:
            client["permutation"] = relabel[i].tolist()
        if foreign is not None:
            client["judged_on"] = federation.clients[int(foreign[i])]
        if federation.federated is not None:
            client["federated"] = len(federation.federated[i])
        if short:
            client["indices"] = {name: texts[i] for name, texts in written.items()}
    return found


def listed(
    identity: "Identity",
    rows: Sequence[ClientRow],
    dataset: str,
    classes: Sequence[str],
    target: tuple[float, float] | None,
    partition: str,
) -> dict[str, Any]:
    """What ``partition.json`` holds of clients in this process or at sites.

    ``target`` is the scale and the shift of a regression's targets.
    """
    return {
        "dataset": dataset,
        "partition": partition,
        "note": "",
        "fingerprint": identity.fingerprint,
        "emd_p1": None,
        "l1": None,
        "classes": list(classes),
        "target": None if target is None else dict(zip(("scale", "shift"), target, strict=True)),
        "clients": [
            {
                "name": row.client,
                "group": row.group,
                "histogram": list(row.classes),
                "permutation": None,
                "judged_on": None,
                **{"train": row.train, "val": row.val, "test": row.test},
                **seal._asdict(),
            }
            for row, seal in zip(rows, identity.seals, strict=True)
        ],
    }


def ranges(indices: Tensor) -> str:
    """Write indices as text ranges, in their own order.

    >>> ranges(torch.tensor([0, 1, 2, 3, 7, 9, 10]))
    '0-3,7,9-10'
    """
    values = indices.numpy()
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 2) != 1)
    ends = np.append(starts[1:], len(values))[: len(starts)] - 1
    pairs = zip(values[starts].tolist(), values[ends].tolist(), strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


class Identity(Protocol):
    """Hashes of the clients' data: those of a :class:`Federation`, or those that sites sent."""

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""

    @property
    def seals(self) -> tuple[Seal, ...]:
        """Two hashes per client: of its data, and of how it is divided."""

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any client's data or with how it is divided."""


def changes(stored: Mapping[str, Any], now: Identity) -> list[str]:
    """The differences from a stored manifest, in words; empty if there are none."""
    try:
        before = {c["name"]: Seal(c["data"], c["partition"]) for c in stored["clients"]}
        same = stored["fingerprint"] == now.fingerprint
    except (KeyError, TypeError):
        return ["the stored partition is not as a run writes it"]
    seals = dict(zip(now.clients, now.seals, strict=True))
    both = [name for name in seals if name in before]
    data = [name for name in both if seals[name].data != before[name].data]
    other = [name for name in both if seals[name].partition != before[name].partition]
    found = [
        f"{what} {few(names)}"
        for what, names in (
            ("clients are gone:", [name for name in before if name not in seals]),
            ("clients are new:", [name for name in seals if name not in before]),
            ("other data:", data),
            ("the same data divided in another way:", [n for n in other if n not in data]),
        )
        if names
    ]
    return found or ([] if same else ["the order of clients, or how inputs are scaled"])
