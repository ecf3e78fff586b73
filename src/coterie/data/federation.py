"""A federation: one dataset, and the indices of the samples that each client holds.

Samples are stored once. A client is three lists of indices (train, validation, test) into the
shared arrays, so that a hundred clients of CIFAR take no more memory than CIFAR.

A client's hashes (its :class:`Seal`) cover its own samples in their own order, so that a site can
compute them alone; the federation's fingerprint is a hash over them in client order. They cover the
data before it is standardised: a change of one client's data changes no other client's hash.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.random import name_key

if TYPE_CHECKING:
    from .sources.sheets import InputColumn, TargetColumn
    from .standard import Moments

BLOCK = 1024  # samples that are hashed or looked at together
Indices = tuple[Tensor, ...]  # a list of sample indices for every client


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and targets, before they are assigned to clients.

    ``x`` keeps the dtype of its source (uint8 images, float32 features, int64 tokens). The model
    input of a batch is ``(x * scale + shift)``, except for tokens.
    """

    name: str
    x: Tensor  # [N, ...]
    y: Tensor  # [N] int64 classes, [N, T] classes at every position, or [N] float32 targets
    classes: int  # 0 means regression
    fixed: Tensor | None = None  # [N] int8: 0 train, 1 validation, 2 test, as the source says
    owners: Tensor | None = None  # [N] natural client of each sample
    owner_names: tuple[str, ...] = ()
    owner_groups: Tensor | None = None  # [owners] the true hidden groups, if the data has them
    class_names: tuple[str, ...] = ()
    superclass: Tensor | None = None  # [classes] the coarse class of each class
    numeric: Tensor | None = None  # [features] columns that `federate` imputes and standardises
    feature_names: tuple[str, ...] = ()
    units: Tensor | None = None  # [N] int64: samples of one unit (a patient) stay together
    unit_names: tuple[str, ...] = ()  # [units]; a name that two clients use is two units
    times: Tensor | None = None  # [N] float64: each client is split by time, test data last
    subgroups: Tensor | None = None  # [N] int64: results are also reported by subgroup
    subgroup_names: tuple[str, ...] = ()
    subgroup_column: str = ""
    scale: Tensor | None = None  # broadcast against one sample
    shift: Tensor | None = None
    target_scale: float = 1.0  # a target in the source's units is y * target_scale + target_shift
    target_shift: float = 0.0
    columns: "tuple[InputColumn, ...]" = ()  # of a table: how its columns became features
    target: "TargetColumn | None" = None  # of a table
    moments: "Moments | None" = None  # that it was standardised by

    @property
    def regression(self) -> bool:
        """Whether targets are real numbers."""
        return self.classes == 0


class Seal(NamedTuple):
    """Two sha256 hashes of what one client holds."""

    data: str  # its samples, targets and units
    partition: str  # its splits, its group, its relabelling, and whose data judges it


@dataclass(frozen=True, eq=False)
class Federation:
    """The samples that each client holds; ``groups`` and ``relabel`` if the partition made them."""

    dataset: Dataset
    partition: str  # the partition's name and parameters, for display
    clients: tuple[str, ...]  # names, in order of first appearance
    train: Indices
    val: Indices  # data that client i is judged on, and that methods weigh models by
    test: Indices
    groups: Tensor | None = None  # [K] the true hidden groups, for scoring only
    relabel: Tensor | None = None  # [K, classes] client i reads class c as relabel[i, c]
    foreign: Tensor | None = None  # [K] the client whose validation and test data judge client i
    aux: Indices | None = None  # test samples of each client that the server holds instead
    federated: Indices | None = None  # samples of each client in the federated test set
    common_test: bool = False  # all clients have the same test samples
    source: Dataset | None = None  # the dataset before it was standardised, if that changed it
    note: str = ""  # other inputs of the partition (an embedding), for display

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def units(self) -> Tensor | None:
        """``[N]`` the unit of each sample, if the data has units: resampling draws whole units."""
        return self.dataset.units

    @property
    def own_val(self) -> Indices:
        """Each client's own validation data; with foreign targets it judges another client."""
        return self.of_owners(self.val)

    @property
    def own_test(self) -> Indices:
        """Each client's own test data; with foreign targets it judges another client."""
        return self.of_owners(self.test)

    def of_owners(self, judging: Indices) -> Indices:
        """Reorder index lists from the clients that they judge to the clients that own them."""
        if self.foreign is None:
            return judging
        return tuple(judging[i] for i in self.foreign.argsort().tolist())

    @property
    def target_groups(self) -> Tensor | None:
        """``[K]`` the group of the client whose data judges client i; None without groups."""
        if self.groups is None or self.foreign is None:
            return self.groups
        return self.groups[self.foreign]

    @property
    def keys(self) -> Tensor:
        """A number for each client, derived from its name: its key in every random draw."""
        return torch.tensor([name_key(name) for name in self.clients])

    @cached_property
    def seals(self) -> tuple[Seal, ...]:
        """Two hashes per client: of its data, and of how it is divided."""
        source = self.dataset if self.source is None else self.source
        parts = [self.train, self.own_val]
        if not self.common_test:
            parts.append(self.own_test)
        if self.aux is not None and not self.common_test:
            parts.append(self.of_owners(self.aux))
        if self.federated is not None:
            parts.append(self.federated)
        common = []  # the hash of test data that all clients have, which is computed once
        if self.common_test:
            aux = () if self.aux is None else self.aux[:1]
            common = [_of_samples(source, part).encode() for part in (self.test[0], *aux)]
        found = []
        for i, splits in enumerate(zip(*parts, strict=True)):
            held, sizes = torch.cat(splits), torch.tensor([len(split) for split in splits])
            order = held.argsort(stable=True)
            part = torch.arange(len(splits)).repeat_interleave(sizes)[order]
            data = _of_samples(source, held[order])
            found.append(Seal(data, _sha(_bytes(part), _text(_facts(self, i)), *common)))
        return tuple(found)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any client's data or with how it is divided."""
        return combined_fingerprint(self.clients, self.seals, self.dataset)


def _facts(federation: Federation, i: int) -> dict[str, object]:
    relabel, groups, foreign = federation.relabel, federation.groups, federation.foreign
    return {
        "permutation": None if relabel is None else relabel[i].tolist(),
        "group": None if groups is None else int(groups[i]),
        "judged_on": None if foreign is None else federation.clients[int(foreign[i])],
    }


def _of_samples(dataset: Dataset, held: Tensor) -> str:
    """The sha256 of these samples: inputs, targets, and which of them share a unit."""
    parts = [_bytes(dataset.y[held])]
    if dataset.units is not None:
        _, first, unit = np.unique(
            dataset.units[held].numpy(), return_index=True, return_inverse=True
        )
        parts.append(first[unit].astype("<i8").tobytes())
    return _sha(*parts, begun=_of_inputs(dataset.x, held))


def _of_inputs(x: Tensor, held: Tensor) -> "hashlib._Hash":
    """The digest so far of these inputs, which are read a few at a time, as :func:`_sha` has it."""
    start = _bytes(torch.empty(0, dtype=x.dtype))
    shape = [len(held), *x.shape[1:]]
    header = start[: start.index(b"[")] + f"{shape}".encode()
    size = math.prod(shape) * x.dtype.itemsize
    digest = hashlib.sha256((len(header) + size).to_bytes(8, "little") + header)
    for block in held.split(BLOCK):
        digest.update(_bytes(x[block], header=False))
    return digest


def combined_fingerprint(clients: tuple[str, ...], seals: tuple[Seal, ...], data: Dataset) -> str:
    """The fingerprint of clients with these seals; of ``data``, the classes and the scaling."""
    parts = [_text([name, *seal]) for name, seal in zip(clients, seals, strict=True)]
    parts += [_bytes(found) for found in (data.scale, data.shift) if found is not None]
    parts.append(_text([data.classes, data.target_scale, data.target_shift]))
    return _sha(*parts)[:16]


def _bytes(values: Tensor, *, header: bool = True) -> bytes:
    """The dtype, shape and entries of a tensor as bytes, the same on every machine."""
    array = values.detach().cpu().contiguous().numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    told = f"{array.dtype.str[1:]}{list(array.shape)}".encode() if header else b""
    return told + little.tobytes()


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def _sha(*parts: bytes, begun: "hashlib._Hash | None" = None) -> str:
    """The sha256 of several parts, each prefixed by its length, after those of ``begun``."""
    digest = hashlib.sha256() if begun is None else begun
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sample_hashes(x: Tensor, y: Tensor) -> list[bytes]:
    """A short hash of each sample with its target: equal ones have equal hashes."""
    pairs = zip(x.numpy(), y.numpy(), strict=True)
    return [
        hashlib.blake2b(one.tobytes() + target.tobytes(), digest_size=16).digest()
        for one, target in pairs
    ]
