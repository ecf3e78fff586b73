"""Scores a method's global model on the federated test set, which no client holds (spec 13.9)."""

import torch

from ..core import tree
from ..core.algorithm import AnyAlgorithm, single
from ..core.batches import EVALUATION_BLOCK
from ..core.problem import Problem
from ..core.tree import Tree
from ..engines.evaluation import hits, outputs


def federated_accuracy(algorithm: AnyAlgorithm, problem: Problem, server: Tree) -> float | None:
    """The accuracy in percent; None without such a test set, or without a global model."""
    held = problem.federated
    model = None if held is None else algorithm.global_model(server)
    if held is None or model is None:
        return None
    split = tree.row(held.splits["test"].rows([0]), 0)
    right, mixture = torch.zeros((), dtype=torch.int64, device=held.device), single(model)
    positions = held.y[:1].numel()  # targets of a sample
    for block in split.samples.split(max(1, EVALUATION_BLOCK // positions)):
        predicted = outputs(problem.model, mixture, held.inputs(block), regression=False)
        right = right + hits(predicted, held.y[block]).sum()
    return 100.0 * int(right) / held.y.numel()
