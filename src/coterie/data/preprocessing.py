"""How stored samples become the inputs of a network, and outputs become answers.

A :class:`Preprocessing` has everything that a trained model needs beside its weights: the columns
of a table with their kinds and levels, means and deviations, or the scale of pixels, and the names
of the classes. It is stored beside the models of a run, and it comes from other machines:
:meth:`Preprocessing.from_json` checks all of it.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import DataError
from .data_schema import Schema
from .federation import Dataset
from .site_data import described
from .standard import Moments, apply, checked_moments
from .untrusted import STRICT, parsed


@dataclass(frozen=True)
class Pixels:
    """The input of a network is ``pixel * scale + shift``, by channel."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    scale: tuple[float, ...]
    shift: tuple[float, ...]


@dataclass(frozen=True)
class Preprocessing:
    """How samples are encoded, filled in and scaled."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    schema: Schema
    moments: Moments | None  # of rows of features, if they are standardised
    pixels: Pixels | None  # of images

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit the schema."""
        example = self.schema.example()
        if self.moments is not None:
            if self.schema.numeric is None or len(self.moments.mean) != len(example.x[0]):
                raise DataError("preprocessing.moments: expected one mean for each feature")
            checked_moments(self.moments)
        if (self.pixels is None) != (self.schema.kind != "images"):
            raise DataError("preprocessing.pixels: expected a scale for images, and only for them")
        if self.pixels is not None:
            numbers = (*self.pixels.scale, *self.pixels.shift)
            if len(numbers) != 2 * self.schema.shape[0] or not all(map(math.isfinite, numbers)):
                raise DataError("preprocessing.pixels: expected two numbers for each channel")

    @classmethod
    def of(cls, schema: Schema, scaled: Dataset) -> "Preprocessing":
        """As a dataset of this schema was scaled."""
        pixels = None
        if schema.kind == "images" and scaled.scale is not None and scaled.shift is not None:
            scale, shift = scaled.scale.flatten().tolist(), scaled.shift.flatten().tolist()
            pixels = Pixels(tuple(scale), tuple(shift))
        return cls(schema, scaled.moments, pixels)

    def to_json(self) -> str:
        """All of it as JSON; Python reads the same bits back."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Preprocessing":
        """Read what :meth:`to_json` wrote; refuses anything else."""
        return parsed(text, cls, "preprocessing")

    def inputs(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The network's inputs for encoded samples ``[n, ...]``: filled in and scaled."""
        if self.schema.kind == "tokens":
            return x
        ready = self.scaled(replace(self.schema.example(), x=x))
        x = ready.x.to(dtype)
        if ready.scale is None or ready.shift is None:
            return x
        return x * ready.scale.to(dtype) + ready.shift.to(dtype)

    def scaled(self, dataset: Dataset) -> Dataset:
        """A dataset of this schema, filled in, with the scaling of the training data."""
        if self.moments is not None:
            dataset = apply(dataset, self.moments)
        if self.pixels is None:
            return dataset
        scale, shift = (torch.tensor(p).view(-1, 1, 1) for p in asdict(self.pixels).values())
        return replace(dataset, scale=scale, shift=shift)

    def in_units(self, values: Tensor) -> Tensor:
        """Outputs of a regression in the unit of the target."""
        moments = self.moments or Moments((), ())
        return values.double() * moments.target_std + moments.target_mean


def preprocessing_of(dataset: Dataset) -> Preprocessing | None:
    """How a dataset was preprocessed; None if no schema can describe it."""
    try:
        schema = described(dataset)
        if dataset.target is not None:
            schema = Schema("table", dataset.target, dataset.columns, parts=schema.parts)
        return Preprocessing.of(schema, dataset)
    except DataError:
        return None
