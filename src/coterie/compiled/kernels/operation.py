"""What the kernels share: registration as torch operations, and the layout of images in memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]

_LIBRARY = torch.library.Library("coterie", "DEF")
FIRST, LAST = torch.contiguous_format, torch.channels_last
_LARGE = 500_000  # entries


def operation(schema: str) -> Callable[[Function], Function]:
    """Register a function of plain tensors under ``torch.ops.coterie``.

    A trace then holds each call of it as one operation.
    """

    def register(function: Function) -> Function:
        name = _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        made: Function = getattr(torch.ops.coterie, schema.partition("(")[0]).default
        return made

    return register


def faster(filters: int, outputs: int) -> torch.memory_format:
    """The faster layout to convolve one client's images, by the entries of filters and outputs.

    Channels last, unless the filters have many entries and more than the outputs, as for small
    images of many channels (docs/results/speed.md).
    """
    return FIRST if filters > max(_LARGE, outputs) else LAST


def laid_out(clients: Tensor, layout: torch.memory_format) -> list[Tensor]:
    """Each client's images or filters, in this layout."""
    return [one.contiguous(memory_format=layout) for one in clients]


def layout_of(image: Tensor) -> torch.memory_format:
    """The layout of images, or the layout to which images with gaps are copied."""
    return LAST if image.is_contiguous(memory_format=LAST) else FIRST


def side_by_side(clients: Iterable[Tensor], count: int) -> Tensor:
    """Stack the clients' tensors into one, in the layout of the first.

    Each tensor is copied as soon as it is computed, while it is still in the cache.
    """
    given = iter(clients)
    first = next(given)
    if count == 1:
        return first.unsqueeze(0)
    if layout_of(first) is LAST:
        n, c, h, w = first.shape
        out = first.new_empty(count, n, h, w, c).permute(0, 1, 4, 2, 3)
    else:
        out = first.new_empty(count, *first.shape)
    out[0] = first
    for place, one in zip(out[1:], given, strict=True):
        place.copy_(one)
    return out


def in_front(value: Tensor, dim: int | None, many: int) -> Tensor:
    """A tensor with the ``vmap`` dimension first; a tensor without one is expanded."""
    if dim is None:
        return value.unsqueeze(0).expand(many, *value.shape)
    return value.movedim(dim, 0)
