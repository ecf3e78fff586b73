"""Completing and standardising features, by what the training data says and nothing else."""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import DataError
from .federation import Dataset


def standardised(dataset: Dataset, training: Tensor) -> Dataset:
    """The dataset with missing numbers filled and numbers scaled, fitted on the training rows.

    Missing numbers become the training mean. Scaling is left to ``scale`` and ``shift``, as for
    images. Targets of a regression are standardised too; ``target_scale`` leads back.
    """
    if dataset.numeric is None:
        return dataset
    if len(training) == 0:
        raise DataError(f"{dataset.name}: no client has training data")
    mean, std = _moments(dataset.x[training])
    x = torch.where(dataset.x.isnan(), mean.float(), dataset.x)
    scale = torch.where(dataset.numeric, 1 / std, torch.ones(()))
    shift = torch.where(dataset.numeric, -mean / std, torch.zeros(()))
    ready = replace(dataset, x=x, scale=scale.float(), shift=shift.float())
    if not dataset.regression:
        return ready
    centre, spread = _moments(dataset.y[training, None])
    y = (dataset.y.double() - centre) / spread
    return replace(ready, y=y.float(), target_scale=float(spread), target_shift=float(centre))


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column over its known values; 0 and 1 where there are none."""
    rows = rows.double()
    mean = rows.nanmean(dim=0).nan_to_num(0.0)
    std = (rows - mean).square().nanmean(dim=0).sqrt().nan_to_num(1.0)
    return mean, torch.where(std > 1e-9 * (1 + mean.abs()), std, torch.ones(()))
