"""What a client's training changes beside its models: batch-norm statistics, optimiser states.

Both objects are made for one call of a method's ``local`` or ``predictor`` and are updated by the
:class:`~coterie.core.client.Client` that holds them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import EngineError
from . import tree
from .tree import Tree


class Statistics:
    """A client's batch-norm buffers where models exclude them: one set, updated by training."""

    def __init__(self, buffers: Tensor, *, fixed: bool = False) -> None:
        self.buffers, self.fixed = buffers, fixed
        self.crowded = False  # whether several models are being trained side by side

    def move(self, buffers: Tensor) -> None:
        """Replace the buffers by those after a training pass, unless they are fixed."""
        if self.crowded:
            raise EngineError(
                "train.buffers: this method trains several models side by side on each client, and "
                "one set of batch-norm statistics cannot serve them all; use buffers = 'average', "
                "or a network with another norm (norm = 'group')"
            )
        self.buffers = self.buffers if self.fixed else buffers


class OptimizerStates:
    """The optimiser states that a client keeps between rounds ``[n, ...]``.

    The first training of a round begins with the first state, the second with the second, and so
    on. Models that are trained side by side (:meth:`beside`) begin with one state each; if the
    client keeps a single state, all of them begin with it, and a weighted mean of their last states
    is kept.
    """

    def __init__(self, states: Tree) -> None:
        self._before, self._begun = states, 0
        self._after: list[Tree] = []

    @property
    def _count(self) -> int:
        return len(next(tree.leaves(self._before)))

    def again(self) -> "OptimizerStates":
        """A copy that begins with the same states; what it is given does not change this one."""
        return OptimizerStates(self._before)

    def begin(self) -> Tree:
        """The state that the next training of the round begins with."""
        if self._begun == self._count:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs one state per model that a client trains in "
                f"a round; found more trainings than the {self._count} that optimizers() of the "
                "method declares: raise it, or use optimizer_state = 'round'"
            )
        self._begun += 1
        return tree.row(self._before, self._begun - 1)

    def end(self, state: Tree) -> None:
        """Keep the state after the last step of a training."""
        self._after.append(state)

    def after(self) -> Tree:
        """The states after the round; one whose training did not begin is unchanged."""
        if len(self._after) != self._begun:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs the state after every training; the method "
                f"began {self._begun} with client.begin() and gave {len(self._after)} back: call "
                "client.end(state) after client.scan(), or use optimizer_state = 'round'"
            )
        idle = [tree.row(self._before, n) for n in range(self._begun, self._count)]
        return tree.stack([*self._after, *idle])

    def rows(self, count: int) -> Tree:
        """The states that ``count`` models begin with which are trained side by side."""
        if self._count == count:
            return self._before
        return tree.map_leaves(lambda leaf: leaf[:1].expand(count, *leaf.shape[1:]), self._before)

    def within(self, f: Callable[..., Tree]) -> Callable[..., Tree]:
        """``f`` as a function of one model's state too; returns also the state after its training.

        The second result is () where ``f`` trains nothing.
        """

        def one(state: Tree, *parts: Tensor) -> Tree:
            outer = self._before, self._begun, self._after
            own = tree.map_leaves(lambda leaf: leaf.unsqueeze(0), state)
            self._before, self._begun, self._after = own, 0, []
            try:
                made = f(*parts)
                return made, tree.row(self.after(), 0) if self._begun else ()
            finally:
                self._before, self._begun, self._after = outer

        return one

    def beside(self, ends: Tree, count: int, shares: Tensor | None) -> None:
        """Keep the states ``ends`` of ``count`` models after training side by side."""
        if not tuple(tree.flatten(ends)):
            return
        if self._count == count:
            self._begun, self._after = count, [tree.row(ends, n) for n in range(count)]
            return
        if self._count > 1 or shares is None:
            raise EngineError(
                f"train.optimizer_state: 'kept' needs a state per model; the method trains {count} "
                f"models side by side and its optimizers() declares {self._count}: declare "
                f"{count}, or 1 and give client.map() the shares of the models, or use "
                "optimizer_state = 'round'"
            )
        self._begun, self._after = 1, [_mean(ends, shares)]


def _mean(states: Tree, shares: Tensor) -> Tree:
    """The mean of the rows, weighted by ``shares``; the first row where all shares are zero."""
    total = shares.sum()
    first = torch.arange(len(shares), device=shares.device) == 0
    p = torch.where(total > 0, shares / total, first.to(shares.dtype))

    def of(leaf: Tensor) -> Tensor:
        weight = p.to(leaf.dtype).view(-1, *[1] * (leaf.dim() - 1))
        return torch.where(weight > 0, weight * leaf, 0.0).sum(0)  # a share of 0 hides a NaN

    return tree.map_leaves(of, states)
