"""What a partition made: a manifest for the record, rows for people, and how unlike clients are."""

from typing import Any, NamedTuple

import numpy as np
import torch

from .deal import Floats, Ints
from .federation import Federation, Indices


class Distance(NamedTuple):
    """How far the clients' class shares are from everybody's, averaged over clients."""

    emd_p1: float  # as P1 computes it: classes a client holds count twice (spec 13.11)
    l1: float  # the plain sum of absolute differences, at most 2


class Row(NamedTuple):
    """One client, for a table."""

    client: str
    group: int | None
    train: int
    val: int
    test: int
    classes: tuple[int, ...]  # of the client's own train and validation data; () for a regression


def class_counts(federation: Federation, *splits: Indices) -> Ints:
    """How many samples of each (true) class each client holds in some splits ``[K, classes]``."""
    classes, y = federation.dataset.classes, federation.dataset.y
    rows = [torch.cat(parts) for parts in zip(*splits, strict=True)]
    return np.stack([np.bincount(y[mine].numpy(), minlength=classes) for mine in rows])


def distance(counts: Ints) -> Distance:
    """Both readings of the earth mover's distance, over clients that hold anything.

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


def describe(federation: Federation) -> list[Row]:
    """A row a client."""
    counts = None
    if not federation.dataset.regression:
        counts = class_counts(federation, federation.train, federation.own_val)
    return [
        Row(
            client=name,
            group=None if federation.groups is None else int(federation.groups[i]),
            train=len(federation.train[i]),
            val=len(federation.val[i]),
            test=len(federation.test[i]),
            classes=() if counts is None else tuple(counts[i].tolist()),
        )
        for i, name in enumerate(federation.clients)
    ]


def remarks(federation: Federation) -> list[str]:
    """What a user should know before training: clients that lack one kind of data."""
    found = []
    for split, meaning in (
        ("train", "never trained and left out of averages"),
        ("val", "weighed on their training data instead"),
        ("test", "without a score"),
    ):
        lists: Indices = getattr(federation, split)
        empty = [n for n, mine in zip(federation.clients, lists, strict=True) if len(mine) == 0]
        if empty:
            some = ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")
            found.append(f"{len(empty)} clients have no {split} data ({meaning}): {some}")
    return found


def manifest(federation: Federation) -> dict[str, Any]:
    """Everything about a partition, ready for JSON."""
    apart = emd(federation)
    return {
        "dataset": federation.dataset.name,
        "partition": federation.partition,
        "note": federation.note,
        "fingerprint": federation.fingerprint,
        "emd_p1": None if apart is None else apart.emd_p1,
        "l1": None if apart is None else apart.l1,
        "classes": list(federation.dataset.class_names),
        "clients": [_client(federation, i, row) for i, row in enumerate(describe(federation))],
    }


def _client(federation: Federation, i: int, row: Row) -> dict[str, Any]:
    relabel, foreign = federation.relabel, federation.foreign
    return {
        "name": row.client,
        "group": row.group,
        "histogram": list(row.classes),
        "permutation": None if relabel is None else relabel[i].tolist(),
        "judged_on": None if foreign is None else federation.clients[int(foreign[i])],
        "train": federation.train[i].tolist(),
        "val": federation.val[i].tolist(),
        "test": federation.test[i].tolist(),
    }
