"""Fully connected networks."""

import itertools
import math

from torch import nn

from .blocks import Shape, Width, chain, head


def linear(shape: Shape, classes: int) -> nn.Module:
    """One linear layer: logistic or linear regression."""
    return chain(flat=nn.Flatten(), head=head(math.prod(shape), classes))


def mlp(shape: Shape, classes: int, *, hidden: tuple[Width, ...] = (64,)) -> nn.Module:
    """Fully connected layers with ReLU; P2's Office-Home network is hidden = [1000, 200].

    hidden: the width of each hidden layer; an empty list is one linear layer
    """
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return chain(body=nn.Sequential(*layers), head=head(widths[-1], classes))
