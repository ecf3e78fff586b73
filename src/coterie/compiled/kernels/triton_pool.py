"""Max pooling on a GPU in one pass over memory."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without triton
    triton = None

_BLOCK = 1024


def fits(x: Tensor) -> bool:
    """Whether these kernels support the tensor; else the caller falls back to torch."""
    return triton is not None and x.is_cuda and x.dtype == torch.float32


def pool(x: Tensor, size: int) -> Tensor:
    """The largest entry of every window of ``[..., h, w]``."""
    high, wide = x.shape[-2:]
    out = x.new_empty(*x.shape[:-2], high // size, wide // size)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _kernels()[0][grid](x, out, out.numel(), HIGH=high, WIDE=wide, SIZE=size, BLOCK=_BLOCK)
    return out


def gradient(g: Tensor, x: Tensor, out: Tensor, size: int, *, positive: bool) -> Tensor:
    """The gradient for ``x``: the first of a window's largest entries gets the whole gradient."""
    high, wide = x.shape[-2:]
    ragged = high % size or wide % size
    result = torch.zeros_like(x) if ragged else torch.empty_like(x)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _kernels()[1][grid](
        g,
        x,
        out,
        result,
        out.numel(),
        HIGH=high,
        WIDE=wide,
        SIZE=size,
        POSITIVE=positive,
        BLOCK=_BLOCK,
    )
    return result


@cache
def _kernels() -> tuple[Any, Any]:
    return triton.jit(_pool), triton.jit(_gradient)


def _pool(x_at, out_at, count, HIGH: "tl.constexpr", WIDE: "tl.constexpr",
          SIZE: "tl.constexpr", BLOCK: "tl.constexpr"):  # fmt: skip
    window = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = window < count
    across: tl.constexpr = WIDE // SIZE
    down: tl.constexpr = HIGH // SIZE
    column, row, plane = window % across, window // across % down, window // (across * down)
    corner = x_at + plane * HIGH * WIDE + row * SIZE * WIDE + column * SIZE
    best = tl.load(corner, mask=real)
    for i in tl.static_range(1, SIZE * SIZE):
        value = tl.load(corner + (i // SIZE) * WIDE + i % SIZE, mask=real)
        best = tl.where((value > best) | (value != value), value, best)
    tl.store(out_at + window, best, mask=real)


def _gradient(
    g_at, x_at, out_at, result_at, count, HIGH: "tl.constexpr", WIDE: "tl.constexpr",
    SIZE: "tl.constexpr", POSITIVE: "tl.constexpr", BLOCK: "tl.constexpr",
):  # fmt: skip
    window = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = window < count
    across: tl.constexpr = WIDE // SIZE
    down: tl.constexpr = HIGH // SIZE
    column, row, plane = window % across, window // across % down, window // (across * down)
    corner = plane * HIGH * WIDE + row * SIZE * WIDE + column * SIZE
    left, best = tl.load(g_at + window, mask=real), tl.load(out_at + window, mask=real)
    if POSITIVE:
        left = tl.where(best > 0, left, 0.0)
    if SIZE == 2:  # two adjacent entries at a time
        pair, both = tl.arange(0, 2), real[:, None]
        for i in tl.static_range(2):
            at = (corner + i * WIDE)[:, None] + pair[None, :]
            first, second = tl.split(tl.load(x_at + at, mask=both))
            mine = first == best
            taken = tl.where(mine, left, 0.0)
            left = tl.where(mine, 0.0, left)
            mine = second == best
            tl.store(result_at + at, tl.join(taken, tl.where(mine, left, 0.0)), mask=both)
            left = tl.where(mine, 0.0, left)
    else:
        for i in tl.static_range(SIZE * SIZE):
            at = corner + (i // SIZE) * WIDE + i % SIZE
            mine = tl.load(x_at + at, mask=real) == best
            tl.store(result_at + at, tl.where(mine, left, 0.0), mask=real)
            left = tl.where(mine, 0.0, left)
