"""Writes a network out as plain PyTorch code, which needs no coterie and loads no foreign code.

A network of ordinary layers is one expression. The residual block and the recurrent network are
classes; their own source text stands before the expression.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from .blocks import head
from .convolutional import Residual, norm_layer
from .recurrent import Recurrent

# Layers whose ``repr`` is the call that makes them.
PLAIN: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.ReLU, nn.Flatten),
    *(nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d),
)
WIDTH = 88  # characters of a line


class WrittenNetwork(NamedTuple):
    """The code of a network."""

    definitions: str  # of classes and functions that the expression needs; may be empty
    expression: str  # makes the network


class _Writer(NamedTuple):
    """How a layer is written whose ``repr`` is not the call that makes it."""

    call: Callable[[Any], str]
    source: tuple[Callable[..., Any], ...] = ()  # what to define


def _residual(block: Residual) -> str:
    first = block.first
    norm = "batch" if isinstance(block.norm1, nn.BatchNorm2d) else "group"
    return f"Residual({first.in_channels}, {first.out_channels}, {first.stride[0]}, {norm!r})"


def _recurrent(network: Recurrent) -> str:
    table, layer = network.embedding, network.lstm[0]
    sizes = f"embedding={table.embedding_dim}, hidden={layer.hidden_size}"
    sizes += ", every_position=True" if network.every_position else ""
    return f"Recurrent({table.num_embeddings}, {network.head.out_features}, {sizes})"


def _group_norm(norm: nn.GroupNorm) -> str:
    return f"nn.GroupNorm({norm.num_groups}, {norm.num_channels}, eps={norm.eps})"


_WRITERS: dict[type[nn.Module], _Writer] = {
    nn.GroupNorm: _Writer(_group_norm),  # its repr has an argument that older versions do not know
    Residual: _Writer(_residual, (norm_layer, Residual)),
    Recurrent: _Writer(_recurrent, (head, Recurrent)),
}


def written_network(module: nn.Module) -> WrittenNetwork | None:
    """The code that makes such a network, in evaluation mode; None if it has foreign classes."""
    expression = _expression(module, 0)
    if expression is None:
        return None
    kinds = [type(part) for part in module.modules()]
    needed = [part for kind in kinds if kind in _WRITERS for part in _WRITERS[kind].source]
    definitions = "\n\n".join(inspect.getsource(part) for part in dict.fromkeys(needed))
    return WrittenNetwork(definitions, expression)


def _expression(module: nn.Module, depth: int) -> str | None:
    """The call that makes a module; None if a class is not known."""
    if type(module) in _WRITERS:
        return _WRITERS[type(module)].call(module)
    if type(module) in PLAIN:
        return f"nn.{module!r}"
    if type(module) is not nn.Sequential:
        return None
    inside = [(name, _expression(part, depth + 1)) for name, part in module.named_children()]
    if any(part is None for _, part in inside):
        return None
    named = any(not name.isdigit() for name, _ in inside)
    parts = [f"{name}={part}" if named else f"{part}" for name, part in inside]
    pad, line = "    " * (depth + 2), ", ".join(parts)
    if len(pad) + len(line) > WIDTH or "\n" in line:
        line = "\n" + "".join(f"{pad}{part},\n" for part in parts) + pad[4:]
    return f"nn.Sequential(OrderedDict({line}))" if named else f"nn.Sequential({line})"
