"""Hashes each client's data, how it is divided, and the whole federation.

A client's hashes cover its own samples in their own order, so that a site can compute them alone;
the federation's fingerprint is a hash over them in client order. They cover the data before it is
standardised: a change of one client's data does not change another client's hash.
"""

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .federation import Dataset, Federation


class Seal(NamedTuple):
    """Two sha256 hashes of what one client holds."""

    data: str  # its samples, targets and units
    partition: str  # its splits, its group, its relabelling, and whose data judges it


def seals(federation: "Federation") -> tuple[Seal, ...]:
    """The seal of every client."""
    source = federation.dataset if federation.source is None else federation.source
    parts = [federation.train, federation.own_val]
    if not federation.common_test:
        parts.append(federation.own_test)
    if federation.aux is not None and not federation.common_test:
        parts.append(federation.of_owners(federation.aux))
    if federation.federated is not None:
        parts.append(federation.federated)
    common = _common(federation, source)
    found = []
    for i, splits in enumerate(zip(*parts, strict=True)):
        held, sizes = torch.cat(splits), torch.tensor([len(split) for split in splits])
        order = held.argsort(stable=True)
        part = torch.arange(len(splits)).repeat_interleave(sizes)[order]
        data = _of_samples(source, held[order])
        found.append(Seal(data, _sha(_bytes(part), _text(_facts(federation, i)), *common)))
    return tuple(found)


def _common(federation: "Federation", source: "Dataset") -> list[bytes]:
    """The sha256 of test data that all clients have, which is computed once; else nothing."""
    if not federation.common_test:
        return []
    aux = () if federation.aux is None else federation.aux[:1]
    return [_of_samples(source, part).encode() for part in (federation.test[0], *aux)]


def _facts(federation: "Federation", i: int) -> dict[str, object]:
    relabel, groups, foreign = federation.relabel, federation.groups, federation.foreign
    return {
        "permutation": None if relabel is None else relabel[i].tolist(),
        "group": None if groups is None else int(groups[i]),
        "judged_on": None if foreign is None else federation.clients[int(foreign[i])],
    }


def _of_samples(dataset: "Dataset", held: Tensor) -> str:
    """The sha256 of these samples: inputs, targets, and which of them share a unit."""
    parts = [_bytes(dataset.x[held]), _bytes(dataset.y[held])]
    if dataset.units is not None:
        _, first, unit = np.unique(
            dataset.units[held].numpy(), return_index=True, return_inverse=True
        )
        parts.append(first[unit].astype("<i8").tobytes())
    return _sha(*parts)


def fingerprint(federation: "Federation") -> str:
    """Sixteen hex digits that change with any client's data or with how it is divided."""
    return combined_fingerprint(federation.clients, federation.seals, federation.dataset)


def combined_fingerprint(clients: tuple[str, ...], seals: tuple[Seal, ...], data: "Dataset") -> str:
    """The fingerprint of clients with these seals; of ``data``, the classes and the scaling."""
    parts = [_text([name, *seal]) for name, seal in zip(clients, seals, strict=True)]
    parts += [_bytes(found) for found in (data.scale, data.shift) if found is not None]
    parts.append(_text([data.classes, data.target_scale, data.target_shift]))
    return _sha(*parts)[:16]


def _bytes(values: Tensor) -> bytes:
    """The shape, dtype and entries of a tensor as bytes, the same on every machine."""
    array = values.detach().cpu().contiguous().numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return f"{array.dtype.str[1:]}{list(array.shape)}".encode() + little.tobytes()


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def _sha(*parts: bytes) -> str:
    """The sha256 of several parts, each prefixed by its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
