"""How clients' images lie in a CPU's memory, and where ``vmap`` puts its dimension."""

from collections.abc import Iterable

import torch
from torch import Tensor

FIRST, LAST = torch.contiguous_format, torch.channels_last
_LARGE = 500_000  # entries


def faster(filters: int, outputs: int) -> torch.memory_format:
    """The layout in which one client's images are convolved faster, by the entries of both.

    Channels last, unless the filters are many and more than what they make, as for small images
    of many channels (docs/results/speed.md).
    """
    return FIRST if filters > max(_LARGE, outputs) else LAST


def laid_out(clients: Tensor, layout: torch.memory_format) -> list[Tensor]:
    """Each client's images or filters in a layout."""
    return [one.contiguous(memory_format=layout) for one in clients]


def layout_of(image: Tensor) -> torch.memory_format:
    """How images lie, or how they are brought to lie where they have gaps."""
    return LAST if image.is_contiguous(memory_format=LAST) else FIRST


def side_by_side(clients: Iterable[Tensor], count: int) -> Tensor:
    """What each client has as one tensor, in the layout of the first.

    Each is put there as it comes: what was just computed is still in the cache.
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
    """A tensor with the dimension of a ``vmap`` first; the same for all where it has none."""
    if dim is None:
        return value.unsqueeze(0).expand(many, *value.shape)
    return value.movedim(dim, 0)
