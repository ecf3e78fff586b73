"""Wraps a method as the recipe asks: where batch-norm statistics and optimiser states are kept."""

from .algorithm import AnyAlgorithm
from .buffers import Apart, apart
from .kept_optimizers import KeptOptimizers, continued
from .problem import Problem


def governed(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``train.buffers`` and ``train.optimizer_state``.

    A method that needs neither, or that is wrapped already, is returned unchanged.
    """
    if isinstance(algorithm, Apart | KeptOptimizers):
        return algorithm
    return continued(apart(algorithm, problem), problem)
