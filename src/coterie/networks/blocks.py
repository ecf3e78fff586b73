"""Building blocks of the networks, and checks that a network fits the samples."""

from collections import OrderedDict
from typing import Annotated

import torch
from torch import nn

from ..core.ranges import Interval
from ..errors import ConfigError

Shape = tuple[int, ...]  # of one sample
Width = Annotated[int, Interval(ge=1, le=100_000)]


def convolution(inputs: int, outputs: int, kernel: int, pad: int) -> list[nn.Module]:
    """A convolution and a ReLU."""
    return [nn.Conv2d(inputs, outputs, kernel, padding=pad), nn.ReLU()]


def with_dense(
    body: list[nn.Module], shape: Shape, hidden: tuple[int, ...], classes: int
) -> nn.Module:
    """Convolutions, then fully connected layers whose input width fits the convolutions' output."""
    features = nn.Sequential(*body, nn.Flatten())
    with torch.no_grad():
        width = features(torch.zeros(1, *shape)).shape[1]
    layers: list[nn.Module] = []
    for outputs in hidden:
        layers += [nn.Linear(width, outputs), nn.ReLU()]
        width = outputs
    return chain(features=features, body=nn.Sequential(*layers), head=head(width, classes))


def chain(**layers: nn.Module) -> nn.Module:
    """A sequence of named layers."""
    return nn.Sequential(OrderedDict(layers))


def head(inputs: int, classes: int) -> nn.Linear:
    """The last layer: a score for each class, or one value for a regression."""
    return nn.Linear(inputs, classes or 1)


def image_shape(name: str, shape: Shape, least: int) -> Shape:
    """The shape of one sample; refuses all but images of at least ``least`` pixels per side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ConfigError(
            f"model.name: {name} needs images [channels, height, width] of at least "
            f"{least}x{least} pixels; a sample here has shape {list(shape)}; use mlp or auto"
        )
    return shape


def refuse_other_than_tokens(name: str, shape: Shape) -> None:
    """Refuse samples that are not sequences of tokens."""
    if len(shape) != 1:
        raise ConfigError(
            f"model.name: {name} needs sequences of tokens [length]; a sample here has shape "
            f"{list(shape)}; use auto"
        )
