"""Says in words where two trees of tensors differ, and which part of a tree is not a tensor."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.rows import RowTable, StateRows, dense
from ..core.tree import Tree, flatten, unflatten

ARRAYS = Tensor | RowTable | StateRows


def named(tree: Tree, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its name, such as ``server.models``."""
    for steps, leaf in flatten(tree):
        if isinstance(leaf, ARRAYS):
            yield _name(path, steps), dense(leaf)


def misfit(tree: Tree, path: str) -> str | None:
    """What part of a tree is neither a tensor nor a tuple; None where all of it is."""
    for steps, leaf in flatten(tree):
        if not isinstance(leaf, ARRAYS):
            return f"{_name(path, steps)} is a {type(leaf).__name__}"
    return None


def _name(path: str, steps: str) -> str:
    """Fields after a dot, numbers in brackets."""
    return path + re.sub(r"\.(\d+)", r"[\1]", steps)


def copied(tree: Tree) -> Tree:
    """A copy that shares no memory; a Bank's table is copied too."""
    return unflatten(tree, [dense(leaf).clone() for _, leaf in flatten(tree)])


def difference(found: Tree, expected: Tree, path: str, tolerance: float = 0.0) -> str | None:
    """Where two trees differ by more than a tolerance, relative or absolute; None where nowhere."""
    pairs = list(named(found, path)), list(named(expected, path))
    names = [[name for name, _ in part] for part in pairs]
    if names[0] != names[1]:
        return f"{path} has the parts {_listed(names[0])} and not {_listed(names[1])}"
    for (name, a), (_, b) in zip(*pairs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {kind(a)} and not {kind(b)}"
        apart = _apart(a, b, tolerance)
        if apart is not None:
            return f"{name} differs by up to {apart:.1e}"
    return None


def kind(leaf: Tensor) -> str:
    """The type and shape of a tensor in words."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "(none)"


def _apart(a: Tensor, b: Tensor, tolerance: float) -> float | None:
    """The largest difference of two tensors of one form where it is too large."""
    close = torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return None
    gap = (a.double() - b.double()).abs()[~close]
    return float(gap.max())
