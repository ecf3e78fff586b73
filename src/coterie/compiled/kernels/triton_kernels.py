"""Convolutions and max pools for many clients on a GPU, in Triton's language.

A convolution is an implicit matrix product for each client: the patches of the images are gathered
while they are multiplied and are never stored. A pool is one pass over memory.
"""

from collections.abc import Sequence
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


def fits(x: Tensor, stride: Sequence[int] = (1, 1)) -> bool:
    """Whether these kernels support the arguments; else the caller falls back to torch."""
    return triton is not None and x.is_cuda and x.dtype == torch.float32 and list(stride) == [1, 1]


def convolve(
    x: Tensor, w: Tensor, padding: Sequence[int], bias: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """Convolve images ``[g, n, ci, h, w]`` with filters ``[g, co, ci, kh, kw]`` at stride 1."""
    clients, images, channels, high, wide = x.shape
    filters, (rows, columns) = w.shape[1], w.shape[3:]
    out_high, out_wide = high + 2 * padding[0] - rows + 1, wide + 2 * padding[1] - columns + 1
    out = x.new_empty(clients, images, filters, out_high, out_wide)
    pixels, depth = images * out_high * out_wide, channels * rows * columns
    block, tile, inner, turned, warps = _tiles(filters, depth, sum(padding))
    grid = (triton.cdiv(pixels, tile), triton.cdiv(filters, block), clients)
    _kernel(_convolve)[grid](
        x, w, w if bias is None else bias, out, images, channels, filters,
        HIGH=high, WIDE=wide, OUT_HIGH=out_high, OUT_WIDE=out_wide,
        ROWS=rows, COLUMNS=columns, UP=padding[0], LEFT=padding[1], DEPTH=depth,
        FILTERS=block, PIXELS=tile, INNER=inner, TURNED=turned,
        BIAS=bias is not None, RELU=relu, PRECISION=_precision(),
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def to_filters(g: Tensor, x: Tensor, size: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The derivative for filters of this size: a gradient ``[g, n, co, h', w']`` with images."""
    clients, images, channels, high, wide = x.shape
    filters, out_high, out_wide = g.shape[2:]
    depth = channels * size[0] * size[1]
    block = min(64, max(16, triton.next_power_of_2(filters)))
    tile, inner = (64, 16) if depth > 32 else (32, 32)  # the fastest on an H200
    if filters >= 128 and depth >= 128:
        tile = 128
    tiles = triton.cdiv(filters, block) * triton.cdiv(depth, tile) * clients
    shares = max(1, min(images, 1056 // tiles))  # a few blocks for each multiprocessor
    each = triton.cdiv(images, shares)
    shares = triton.cdiv(images, each)
    parts = x.new_empty(shares, clients, filters, channels, *size)
    grid = (triton.cdiv(depth, tile), triton.cdiv(filters, block), clients * shares)
    _kernel(_to_filters)[grid](
        g, x, parts, images, channels, filters, clients, each,
        HIGH=high, WIDE=wide, OUT_HIGH=out_high, OUT_WIDE=out_wide,
        ROWS=size[0], COLUMNS=size[1], UP=padding[0], LEFT=padding[1], DEPTH=depth,
        FILTERS=block, PATCH=tile, INNER=inner, PRECISION=_precision(),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return parts[0] if shares == 1 else parts.sum(0)


def _tiles(filters: int, depth: int, padding: int) -> tuple[int, int, int, bool, int]:
    """A tile's filters, pixels and depth, its orientation, and the warps: the fastest on an H200.

    Large tiles read the images less often; without tf32 they do not fit into the registers.
    """
    block = min(64, max(16, triton.next_power_of_2(filters)))
    if block < 64:
        return block, 128, 16, True, 4
    if filters >= 128 and depth >= 128 and _precision() == "tf32":
        return 128, 256, 32, False, 8
    if padding and _precision() == "tf32" and depth >= 128:
        return block, 128, 16, False, 8
    return (block, 64, 32, True, 4) if padding else (block, 128, 32, False, 4)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def pool(x: Tensor, size: int) -> Tensor:
    """The largest entry of every window of ``[..., h, w]``."""
    high, wide = x.shape[-2:]
    out = x.new_empty(*x.shape[:-2], high // size, wide // size)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _kernel(_pool)[grid](x, out, out.numel(), HIGH=high, WIDE=wide, SIZE=size, BLOCK=_BLOCK)
    return out


def gradient(g: Tensor, x: Tensor, out: Tensor, size: int, *, positive: bool) -> Tensor:
    """The gradient for ``x``: the first of a window's largest entries gets the whole gradient."""
    high, wide = x.shape[-2:]
    ragged = high % size or wide % size
    result = torch.zeros_like(x) if ragged else torch.empty_like(x)
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _kernel(_gradient)[grid](
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
def _kernel(function: Any) -> Any:
    return triton.jit(function)


# ---- the kernels ---------------------------------------------------------------------------


def _convolve(
    x_at, w_at, b_at, out_at, images, channels, filters,
    HIGH: "tl.constexpr", WIDE: "tl.constexpr",
    OUT_HIGH: "tl.constexpr", OUT_WIDE: "tl.constexpr",
    ROWS: "tl.constexpr", COLUMNS: "tl.constexpr", UP: "tl.constexpr", LEFT: "tl.constexpr",
    DEPTH: "tl.constexpr", FILTERS: "tl.constexpr", PIXELS: "tl.constexpr",
    INNER: "tl.constexpr", TURNED: "tl.constexpr",
    BIAS: "tl.constexpr", RELU: "tl.constexpr", PRECISION: "tl.constexpr",
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    filter_ = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    area: tl.constexpr = OUT_HIGH * OUT_WIDE
    image, place = pixel // area, pixel % area
    row, column = place // OUT_WIDE - UP, place % OUT_WIDE - LEFT
    real, known = pixel < images * area, filter_ < filters
    x_at += client * images * channels * HIGH * WIDE
    w_at += client * filters * DEPTH
    corner = image * channels * HIGH * WIDE + row * WIDE + column
    if TURNED:
        total = tl.zeros((PIXELS, FILTERS), dtype=tl.float32)
    else:
        total = tl.zeros((FILTERS, PIXELS), dtype=tl.float32)
    for first in range(0, DEPTH, INNER):
        inner = first + tl.arange(0, INNER)
        channel, tap = inner // (ROWS * COLUMNS), inner % (ROWS * COLUMNS)
        down, right = tap // COLUMNS, tap % COLUMNS
        inside = inner < DEPTH
        w = tl.load(
            w_at + filter_[:, None] * DEPTH + inner[None, :],
            mask=known[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        seen = inside[:, None] & real[None, :]
        if UP or LEFT:
            y, z = row[None, :] + down[:, None], column[None, :] + right[:, None]
            seen &= (y >= 0) & (y < HIGH) & (z >= 0) & (z < WIDE)
        shift = channel * HIGH * WIDE + down * WIDE + right
        x = tl.load(x_at + corner[None, :] + shift[:, None], mask=seen, other=0.0)
        if TURNED:
            total = tl.dot(tl.trans(x), tl.trans(w), total, input_precision=PRECISION)
        else:
            total = tl.dot(w, x, total, input_precision=PRECISION)
    out_at += client * images * filters * area
    to = (image * filters * area + place)[None, :] + filter_[:, None] * area
    if TURNED:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(b_at + client * filters + filter_, mask=known, other=0.0)[:, None]
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    tl.store(out_at + to, total, mask=known[:, None] & real[None, :])


def _to_filters(
    g_at, x_at, out_at, images, channels, filters, clients, each,
    HIGH: "tl.constexpr", WIDE: "tl.constexpr",
    OUT_HIGH: "tl.constexpr", OUT_WIDE: "tl.constexpr",
    ROWS: "tl.constexpr", COLUMNS: "tl.constexpr", UP: "tl.constexpr", LEFT: "tl.constexpr",
    DEPTH: "tl.constexpr", FILTERS: "tl.constexpr", PATCH: "tl.constexpr",
    INNER: "tl.constexpr", PRECISION: "tl.constexpr",
):  # fmt: skip
    area: tl.constexpr = OUT_HIGH * OUT_WIDE
    client = (tl.program_id(2) % clients).to(tl.int64)
    share = tl.program_id(2) // clients
    patch = tl.program_id(0) * PATCH + tl.arange(0, PATCH)
    filter_ = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    channel, tap = patch // (ROWS * COLUMNS), patch % (ROWS * COLUMNS)
    down, right = tap // COLUMNS - UP, tap % COLUMNS - LEFT
    shift = channel * HIGH * WIDE + down * WIDE + right
    known, inside = filter_ < filters, patch < DEPTH
    x_at += client * images * channels * HIGH * WIDE
    g_at += client * images * filters * area
    start = share * each * area
    stop = tl.minimum((share + 1) * each, images) * area
    total = tl.zeros((FILTERS, PATCH), dtype=tl.float32)
    for first in range(start, stop, INNER):
        pixel = first + tl.arange(0, INNER)
        image, place = pixel // area, pixel % area
        row, column = place // OUT_WIDE, place % OUT_WIDE
        real = pixel < stop
        g = tl.load(
            g_at + (image * filters * area + place)[None, :] + filter_[:, None] * area,
            mask=known[:, None] & real[None, :], other=0.0,
        )  # fmt: skip
        seen = inside[:, None] & real[None, :]
        if UP or LEFT:
            y, z = row[None, :] + down[:, None], column[None, :] + right[:, None]
            seen &= (y >= 0) & (y < HIGH) & (z >= 0) & (z < WIDE)
        corner = image * channels * HIGH * WIDE + row * WIDE + column
        x = tl.load(x_at + corner[None, :] + shift[:, None], mask=seen, other=0.0)
        total = tl.dot(g, tl.trans(x), total, input_precision=PRECISION)
    out_at += (share.to(tl.int64) * clients + client) * filters * DEPTH
    to = filter_[:, None] * DEPTH + patch[None, :]
    tl.store(out_at + to, total, mask=known[:, None] & inside[None, :])


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
