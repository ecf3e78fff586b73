"""The sums of training rows from which all sites' common means and deviations are computed.

A site tells of every numeric column how many values it has, their sum and the sum of their squares,
as exact whole numbers: nothing that a coordinator sends has an influence on them. So that the
coordinator sees the totals of all sites alone, every pair of sites adds and subtracts one number
that only these two know (Bonawitz et al. 2017, without its recovery of single sites: a new set of
sites has new masks). A site may add noise, which is the same whenever the same rows are asked for.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.random import secret_normal
from ..data.standard import Moments, checked_moments
from ..errors import EngineError

FINEST = 172  # bits behind the point: every float32 is a whole number of 2**-172
MODULUS = 1 << 704  # above every sum of squares
CHUNK = 1 << 14  # squares of 24 bits, of which so many fit into 63 bits


class ExactSums(NamedTuple):
    """Of each column: the number of values, their sum, and the sum of their squares."""

    known: tuple[int, ...]
    total: tuple[int, ...]  # times 2**FINEST
    squares: tuple[int, ...]  # times 2**(2 * FINEST)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of them, in one row."""
        return (*self.known, *self.total, *self.squares)


def sums_of(rows: Tensor, allowed: npt.NDArray[np.bool_]) -> ExactSums:
    """The sums of rows ``[n, D]``, NaN where there is no value; 0 for columns not ``allowed``."""
    columns = [
        _column(values[~np.isnan(values)]) if may else (0, 0, 0)
        for values, may in zip(rows.float().double().numpy().T, allowed, strict=True)
    ]
    return ExactSums(*zip(*columns, strict=True)) if columns else ExactSums((), (), ())


def _column(values: npt.NDArray[np.float64]) -> tuple[int, int, int]:
    """Exact sums of float32 numbers: whole numbers of 24 bits, added up by their exponent."""
    parts, powers = np.frexp(values)
    whole, total, squares = (parts * 2.0**24).astype(np.int64), 0, 0
    for power in np.unique(powers).tolist():
        chosen, shift = whole[powers == power], FINEST + power - 24
        for start in range(0, len(chosen), CHUNK):
            some = chosen[start : start + CHUNK]
            total += int(some.sum()) << shift
            squares += int((some * some).sum()) << (2 * shift)
    return len(values), total, squares


def noisy(
    sums: ExactSums,
    ranges: Mapping[str, tuple[float, float]],
    noise: float,
    secret: bytes,
    release: int,
) -> ExactSums:
    """The sums with normal noise: ``noise`` times the most that one row can change each of them.

    A column has the same noise wherever a schema names it: another order is no other draw. Another
    ``noise`` is one, else two answers would differ by a known share of it.
    """
    total, squares = list(sums.total), list(sums.squares)
    for at, (name, (low, high)) in enumerate(ranges.items()):
        if sums.known[at]:
            first, second = secret_normal(secret, 2, "sums", release, name, repr(noise)).tolist()
            largest = max(abs(low), abs(high))
            total[at] += _scaled(noise * (high - low) * first, FINEST)
            squares[at] += _scaled(noise * largest**2 * second, 2 * FINEST)
    return sums._replace(total=tuple(total), squares=tuple(squares))


def _scaled(value: float, bits: int) -> int:
    return int(Fraction(value) * (1 << bits))


# ---- masks ---------------------------------------------------------------------------------------


def masked(sums: ExactSums, me: str, shared: Mapping[str, bytes], context: bytes) -> list[int]:
    """The numbers of a site with its masks; ``shared`` are its secrets with the other sites."""
    found = [number % MODULUS for number in sums.numbers]
    for name, secret in shared.items():
        sign = 1 if me < name else -1
        for at, mask in enumerate(_masks(secret, context, len(found))):
            found[at] = (found[at] + sign * mask) % MODULUS
    return found


def _masks(secret: bytes, context: bytes, count: int) -> Iterable[int]:
    size = MODULUS.bit_length() // 8
    stream = hashlib.shake_256(b"coterie mask" + secret + context).digest(size * count)
    return (int.from_bytes(stream[at : at + size]) for at in range(0, len(stream), size))


# ---- as they are sent and added up ---------------------------------------------------------------


def to_hex(numbers: Iterable[int]) -> tuple[str, ...]:
    """Numbers below MODULUS as they are sent."""
    return tuple(f"{number % MODULUS:x}" for number in numbers)


def total_of(sent: Iterable[tuple[str, ...]], columns: int, rows: int) -> ExactSums:
    """The total of what all sites sent; refuses what no ``rows`` rows add up to."""
    total = [0] * (3 * columns)
    for numbers in sent:
        if len(numbers) != 3 * columns:
            raise EngineError(f"found sums of {len(numbers)} numbers; expected {3 * columns}")
        total = [(a + int(b, 16)) % MODULUS for a, b in zip(total, numbers, strict=True)]
    signed = [number - MODULUS if 2 * number > MODULUS else number for number in total]
    found = ExactSums(*(tuple(signed[at * columns : (at + 1) * columns]) for at in range(3)))
    for known, value, square in zip(*found, strict=True):
        finite = abs(value) >> FINEST <= known << 128 >= abs(square) >> (2 * FINEST + 128)
        if not 0 <= known <= rows or not finite:
            raise EngineError(
                f"the sites' sums are of {known} values; expected 0 to {rows} and finite numbers; "
                "a site sent what it did not count, or another set of sites has masked its sums"
            )
    return found


def moments_of(total: ExactSums, numeric: Tensor, regression: bool) -> Moments:
    """The means and deviations of all inputs, and of the target of a regression.

    Inputs that are no numbers have mean 0 and deviation 1, as has a column without values; the
    deviation is 1 for a constant column.
    """
    found = [_moment(*column) for column in zip(*total, strict=True)]
    target = found.pop() if regression else (0.0, 1.0)
    each = iter(found)
    moments = [next(each) if number else (0.0, 1.0) for number in numeric.tolist()]
    mean, std = (tuple(part) for part in zip(*moments, strict=True))
    return checked_moments(Moments(mean, std, *target))


def _moment(known: int, total: int, squares: int) -> tuple[float, float]:
    if not known:
        return 0.0, 1.0
    mean = Fraction(total, known << FINEST)
    variance = Fraction(squares, known << 2 * FINEST) - mean * mean
    std = math.sqrt(max(float(variance), 0.0))
    return float(mean), std if std > 1e-9 * (1 + abs(mean)) else 1.0


def numeric_rows(x: Tensor, y: Tensor, numeric: Tensor, regression: bool) -> Tensor:
    """The columns that sums are of: the numbers among the inputs, and a regression's target."""
    inputs = x[:, numeric]
    return torch.cat([inputs, y[:, None].to(inputs.dtype)], 1) if regression else inputs
