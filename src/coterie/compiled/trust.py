"""Tests whether a trace computes what its call computes, relative to what the call changes.

A round at a small learning rate moves a model by less than a thousandth of its norm. So a trace is
judged by *changes*: the difference between a result tensor and the nearest input tensor, for each
client and each layer of a model vector; other results as a whole.

The comparison is made in float64 (``trace.InDouble``), where rounding is far below every change.
The clients are in other positions, and all numbers are perturbed, so that a value that was wrongly
traced as a constant is detected. A trace that passes is replayed in float32 too, where it may
differ by the rounding error of the call. Compiled steps may differ by the rounding error of the
trace; if that could hide more than a part of one step, the steps are compiled and compared in
float64 as well.

Only a few steps of every loop are compared (``trace.sampled``). In float64 a whole round would
take longer than many rounds of the run, and over hundreds of steps at a high rate the last bits of
float64 grow into differences that no comparison can tell from mistakes.

In float32 rounding may turn the decision of a ReLU or of a max pool. That changes the result by
more than rounding alone, and looks like a mistake. A mistake shows on other numbers as well, so a
trace that is right in float64 is refused only if it fails twice (:func:`passed`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.tree import Bank, Tree, flatten, unflatten
from ..errors import MismatchError
from .trace import InDouble, doubled, sampled

Call = Callable[..., Tree]
_NOISE = 65_537  # draws, used cyclically; a prime, so that rows of a tensor get different ones
_PERTURBATION = 0.01  # the relative perturbation of the inputs
_EXACTLY = 1e-6  # of a change: the error that float64 may show
_AT_MOST = 1e-3  # of a change: more is never allowed in float64
_NOTHING = 1e-12  # of a vector: a smaller change counts as none
_CONSTANTS = 1e-7  # relative error of the float32 constants of a trace
_ROUNDING = 1e-6  # a perturbation slightly above float32's rounding
_TIMES = 4  # the allowed error, as a multiple of the error of the call itself
_STORED = 2 * torch.finfo(torch.float32).eps  # rounding of a vector that is updated many times
_VISIBLE = 0.01  # of a change, which is that of ten steps at most: a tenth of a step must show
_FEW = 3  # clients for which the call itself is executed
_CANDIDATES = 64  # input tensors, at most, that a result is compared with


class Off(NamedTuple):
    """The error of one result tensor, for each layer and client ``[layers, rows]``."""

    far: Tensor
    change: Tensor  # the result's distance from the nearest input
    length: Tensor  # the result's norm
    layered: bool  # whether the result is a model vector, compared layer by layer
    what: str


class TraceTrial:
    """A call on perturbed inputs, and its result in float64.

    The call is executed for few clients. Traces are replayed for as many clients as they were made
    for: the same few, each in several positions.
    """

    def __init__(
        self, call: Call, inputs: tuple[Tree, ...], layers: Sequence[int], draw: int = 0
    ) -> None:
        self._call, self._inputs, self._layers, self._draw = call, inputs, tuple(layers), draw
        self._places = _places(len(next(tree.leaves(inputs))))
        few = tree.map_leaves(lambda leaf: leaf[: int(self._places.max()) + 1], inputs)
        self._few = perturbed(few, _PERTURBATION, draw)
        floats = [leaf for leaf in tensors(inputs) if leaf.is_floating_point()]
        self.single = any(leaf.dtype != torch.float64 for leaf in floats)
        self._exact = doubled(self._few)
        self._many = self._spread(self._exact)
        self._expected = tensors(self._spread(self._in_double(call, self._exact)))
        self._changes = [self._change(leaf) for leaf in self._expected]
        self._rounded: list[Off] | None = None

    def again(self) -> "TraceTrial":
        """The same trial on other numbers."""
        return TraceTrial(self._call, self._inputs, self._layers, self._draw + 1)

    def traced(self, replay: Call) -> None:
        """Refuse a trace that does not compute what the call computes."""
        self.exact(replay)
        self.rounded(replay)

    def rounded(self, replay: Call) -> None:
        """Refuse a trace that differs from the call by more than rounding, in its precision."""
        if self.single:
            self._rounded = self._only_rounded(replay)

    def exact(self, replay: Call) -> None:
        """Refuse a replay that does not give the call's own result in float64."""
        found = self._off(self._replayed_in_double(replay))
        if all(map(_exactly, found)):
            return
        again = self._off(self._spread(self._in_double(self._call, self._exact)))
        if not all(map(_exactly, again)):
            raise MismatchError("the same call gives a different result every time")
        nudged = perturbed(self._exact, _CONSTANTS)
        own = self._off(self._spread(self._in_double(self._call, nudged)))
        for off, mine in zip(found, own, strict=True):
            allowed = torch.minimum(_TIMES * mine.far, _AT_MOST * off.change)
            _refuse(off, torch.maximum(allowed, _exact_bound(off)))

    def _only_rounded(self, replay: Call) -> list[Off]:
        """Refuse a replay that differs from the call by more than rounding, in its precision."""
        found = self._off(self._replayed(replay))
        bounds = [_AT_MOST * off.change for off in found]
        for roughly in (self._nudged, self._as_written):
            if not _all_within(found, bounds):
                own = [_rounding(off) for off in roughly(replay)]
                bounds = [torch.maximum(*pair) for pair in zip(bounds, own, strict=True)]
        for off, bound in zip(found, bounds, strict=True):
            _refuse(off, bound)
        return found

    def compiled(self, replay: Call) -> bool:
        """Refuse a larger error than the trace's; True if an error of part of a step would show."""
        if self._rounded is None:
            self.exact(replay)
            return True
        found, bounds = self._off(self._replayed(replay)), list(map(_rounding, self._rounded))
        for off, bound in zip(found, bounds, strict=True):
            _refuse(off, bound)
        pairs = zip(found, bounds, strict=True)
        return all(_shows(off, bound) for off, bound in pairs if off.layered)

    def captured(self, graph: Call, replay: Call) -> None:
        """Refuse a CUDA graph that differs from its trace by more than rounding.

        Both compute in the precision of the run, which may be tf32: a graph cannot change it. It
        runs all steps, so that it is compared with the replay of all steps, and rounding is what
        the replay makes of inputs that differ by about as much.
        """
        given = self._spread(self._few)
        expected = [doubled(leaf) for leaf in tensors(replay(*given))]
        changes = [self._change(leaf) for leaf in expected]
        found = self._apart(graph(*given), expected, changes)
        if not any(bool(off.far.any()) for off in found):
            return  # the same bits, as a rule: the same kernels on the same numbers
        nudged = replay(*perturbed(given, _ROUNDING))
        bounds = map(_rounding, self._apart(nudged, expected, changes))
        for off, bound in zip(found, bounds, strict=True):
            _refuse(off, bound)

    def _nudged(self, replay: Call) -> list[Off]:
        """The error that a perturbation of about the size of rounding causes."""
        return self._off(self._in_double(replay, perturbed(self._many, _ROUNDING)))

    def _as_written(self, replay: Call) -> list[Off]:
        """The rounding error of the call itself."""
        with full_precision(), sampled():
            return self._off(self._spread(self._call(*self._few)))

    def _replayed(self, replay: Call) -> Tree:
        with full_precision(), sampled():
            return replay(*self._spread(self._few))

    def _replayed_in_double(self, replay: Call) -> Tree:
        try:
            return self._in_double(replay, self._many)
        except RuntimeError as error:
            if not self.single:
                raise
            self._replayed(replay)  # raises an error that occurs in the call's own precision too
            raise MismatchError(f"it cannot be replayed in float64: {error}") from error

    def _spread(self, few: Tree) -> Tree:
        return tree.take(few, self._places)

    def _in_double(self, call: Call, inputs: tuple[Tree, ...]) -> Tree:
        exactly = InDouble() if self.single else nullcontext()
        with full_precision(), sampled(), exactly:
            return call(*inputs)

    def _off(self, result: Tree) -> list[Off]:
        return self._apart(result, self._expected, self._changes)

    def _apart(
        self, result: Tree, expected: Sequence[Tensor], changes: Sequence[Tensor]
    ) -> list[Off]:
        pairs = zip(tensors(result), expected, changes, strict=True)
        return [self._one(at, *pair) for at, pair in enumerate(pairs)]

    def _one(self, at: int, found: Tensor, expected: Tensor, change: Tensor) -> Off:
        what = f"result {at}, {tuple(expected.shape)} of {expected.dtype},"
        if not expected.is_floating_point():
            far = (found != expected).double().mean().view(1, 1)  # the share of unequal entries
            return Off(far, torch.zeros_like(far), torch.zeros_like(far), False, what)
        difference = found.double() - expected
        both = (found == expected) | (found.isnan() & expected.isnan())
        difference = torch.where(both, 0.0, difference).nan_to_num(nan=torch.inf)
        length = self._norms(expected.nan_to_num(0.0, 0.0, 0.0))
        return Off(self._norms(difference), change, length, self._cut(expected) is not None, what)

    def _change(self, leaf: Tensor) -> Tensor:
        """The distance of a result from the nearest input tensor, or from zero."""
        if not leaf.is_floating_point():
            return leaf.new_zeros(1, 1, dtype=torch.float64)
        leaf = leaf.nan_to_num(0.0, 0.0, 0.0)
        nearest = self._norms(leaf)
        for other in _alike(leaf, self._many, self._cut(leaf) is not None):
            nearest = torch.minimum(nearest, self._norms(leaf - other.nan_to_num(0.0, 0.0, 0.0)))
        return nearest

    def _norms(self, leaf: Tensor) -> Tensor:
        """Norms ``[layers, rows]``; other tensors are one layer, one row per client."""
        cut = self._cut(leaf)
        parts: Sequence[Tensor] = (leaf.reshape(len(leaf), -1),)
        if cut is not None:
            parts = leaf.reshape(-1, leaf.shape[-1]).split(cut, 1)
        return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts])

    def _cut(self, leaf: Tensor) -> list[int] | None:
        """The sizes of a model's layers; None for a tensor that is not a model."""
        ends = list(accumulate(self._layers))
        if leaf.dim() < 2 or leaf.shape[-1] not in ends:
            return None
        return list(self._layers[: ends.index(leaf.shape[-1]) + 1])


def passed(trial: TraceTrial, replay: Call) -> TraceTrial:
    """The trial that a trace passes, this one or another; a trace that passes none is refused."""
    trial.exact(replay)
    try:
        trial.rounded(replay)
        return trial
    except MismatchError:
        other = trial.again()
    other.traced(replay)
    return other


def passed_compiled(
    trial: TraceTrial, replay: Call, uncompile: Callable[[], None], compile_anew: Callable[[], None]
) -> tuple[TraceTrial, bool]:
    """As :func:`passed` for compiled steps; also whether an error of part of a step would show."""
    try:
        return trial, trial.compiled(replay)
    except MismatchError:
        other = trial.again()
    uncompile()  # compiled steps may differ from the call by what the trace does
    other.traced(replay)
    compile_anew()
    return other, other.compiled(replay)


# ---- inputs, results and bounds -----------------------------------------------------------------


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable tf32, which would round away the differences that are compared."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def tensors(value: Any) -> list[Tensor]:
    """Every tensor, including the table of a Bank."""
    return [leaf for _, leaf in flatten(value)]


def perturbed(inputs: tuple[Tree, ...], share: float, draw: int = 0) -> tuple[Tree, ...]:
    """The same inputs with every floating-point number changed by about this share."""
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)

    def one(at: int, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factors, times = 1 + share * noise.roll(at), -(-leaf.numel() // _NOISE)
        return leaf * factors.to(leaf).repeat(times)[: leaf.numel()].view(leaf.shape)

    leaves = (one(at, leaf) for at, leaf in enumerate(tensors(inputs)))
    changed: tuple[Tree, ...] = unflatten(inputs, leaves)
    return changed


def _places(count: int) -> Tensor:
    """The client in each of ``count`` positions, of a few clients; the first are reversed."""
    few = min(count, _FEW)
    luck = torch.randint(few, (count,), generator=torch.Generator().manual_seed(0))
    luck[:few] = torch.arange(few).flip(0)
    return luck


def _alike(leaf: Tensor, inputs: Tree, model: bool) -> Iterator[Tensor]:
    """The input tensors that a result may have started from; several models one at a time."""
    left = _CANDIDATES
    for given in _rows(inputs):
        if not given.is_floating_point() or not left:
            continue
        if given.shape == leaf.shape:
            left -= 1
            yield given
        if model and len(given) == len(leaf) and given.dim() > 1:
            if given.shape[-1] != leaf.shape[-1] or given.dim() == leaf.dim() == 2:
                continue
            models = given.reshape(len(given), -1, given.shape[-1]).unbind(1)
            for one in models[:left]:
                left -= 1
                yield one.view(len(one), *[1] * (leaf.dim() - 2), -1).expand(leaf.shape)


def _rows(value: Any) -> Iterator[Tensor]:
    """Every tensor with one row per client; of a Bank each client's models, slot by slot."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Bank):
        for slot in value.slot.flatten(1).unbind(1)[:_CANDIDATES]:
            yield value.models[slot.clamp(min=0)]
    else:
        for part in value:
            yield from _rows(part)


def _exact_bound(off: Off) -> Tensor:
    whole = off.length.square().sum(0, keepdim=True).sqrt()
    return _EXACTLY * off.change + _NOTHING * whole


def _exactly(off: Off) -> bool:
    return bool((off.far <= _exact_bound(off)).all())


def _rounding(own: Off) -> Tensor:
    """The error that rounding may cause: the error seen in this layer or in its whole vector.

    The error of a layer of few entries may be small by chance.
    """
    far, change = (part.square().sum(0).sqrt() for part in (own.far, own.change))
    share = (far / change.clamp(min=1e-300)).max()
    spread = torch.where(own.change > 0, share * own.change, 0.0)
    return _TIMES * torch.stack([own.far, spread, _STORED * own.length]).amax(0)


def _all_within(found: Sequence[Off], bounds: Sequence[Tensor]) -> bool:
    return all(bool((o.far <= b).all()) for o, b in zip(found, bounds, strict=True))


def _shows(off: Off, bound: Tensor) -> bool:
    """Whether a bound is below a tenth of a step in every layer that changes."""
    whole = off.length.square().sum(0, keepdim=True).sqrt()
    still = off.change <= _NOTHING * whole
    return bool((still | (bound <= _VISIBLE * off.change)).all())


def _refuse(off: Off, bound: Tensor) -> None:
    inside = off.far <= bound
    if bool(inside.all()):
        return
    layer, row = (int(i) for i in (~inside).nonzero()[0])
    far, most, change = (float(part[layer, row]) for part in (off.far, bound, off.change))
    where = f" layer {layer}," if off.layered else ""
    raise MismatchError(
        f"on other numbers it gives something else: {off.what}{where} row {row} changes by "
        f"{change:.2g} and is off by {far:.2g}, expected at most {most:.2g}"
    )
