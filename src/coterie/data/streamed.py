"""Samples that do not fit in memory: those of a map-style Dataset, read batch by batch."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from ..errors import ConfigError, DataError
from .arrays import Array, labels, normalisation, refuse_one_class, samples
from .federation import Dataset


class Streamed:
    """The samples of a map-style Dataset, which are read whenever they are asked for.

    It stands where a dataset's ``x`` stands; only the loop engine, and methods that share no
    samples, can do with it. Targets are those of the Dataset's attribute ``targets``, or are read
    once from all of its pairs.
    """

    def __init__(self, source: Any, device: torch.device | None = None) -> None:
        self.source, self.device = source, device or torch.device("cpu")
        if not len(source):
            raise DataError("data: found an empty Dataset; expected pairs (sample, target)")
        first = self._read(0)
        self.dtype, self.shape = first.dtype, torch.Size((len(source), *first.shape))
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice):
            index = torch.arange(len(self))[index]
        at = torch.as_tensor(index)
        if not at.numel():
            return torch.empty(*at.shape, *self.shape[1:], dtype=self.dtype, device=self.device)
        read = torch.stack([self._read(i) for i in at.flatten().tolist()])
        return read.view(*at.shape, *self.shape[1:]).to(self.device)

    def _read(self, index: int) -> Tensor:
        return samples(np.asarray(self.source[index][0])[None])[0]

    def to(self, device: torch.device) -> "Streamed":
        """The same samples, read onto a device."""
        return Streamed(self.source, device)

    def targets(self) -> Array:
        """The target of each sample."""
        parts = self.source.datasets if isinstance(self.source, ConcatDataset) else [self.source]
        return np.concatenate([_targets(part) for part in parts])


def _targets(source: Any) -> Array:
    known = getattr(source, "targets", None)
    if known is None:
        known = [source[i][1] for i in range(len(source))]
    return np.asarray(known)


def streamed(name: str, sites: Sequence[tuple[str, Streamed]], owned: bool) -> Dataset:
    """The dataset of one or several sites' Datasets."""
    x = Streamed(ConcatDataset([each.source for _, each in sites]))
    if x.dtype == torch.int64:
        raise DataError(f"{name}: found tokens, which are read into memory; pass arrays instead")
    y, class_names = labels(name, x.targets())
    owners = torch.arange(len(sites)).repeat_interleave(torch.tensor([len(s) for _, s in sites]))
    held = cast(Tensor, x)
    scale, shift = normalisation(name, held, "auto")
    made = Dataset(
        name,
        held,
        y,
        len(class_names),
        owners=owners if owned else None,
        owner_names=tuple(site for site, _ in sites) if owned else (),
        class_names=class_names,
        scale=scale,
        shift=shift,
    )
    return refuse_one_class(made)


def is_streamed(dataset: Dataset) -> bool:
    """Whether the samples are read one by one."""
    return not isinstance(dataset.x, Tensor)


def refuse_streamed(dataset: Dataset, what: str) -> None:
    """Refuse what needs all samples in memory."""
    if is_streamed(dataset):
        raise ConfigError(
            f"{what} needs all samples as one tensor, and {dataset.name} is read in batches; use "
            "engine.name = 'loop' and another method or partition, or a folder with x.npy and y.npy"
        )
