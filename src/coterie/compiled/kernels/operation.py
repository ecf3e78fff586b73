"""Registers our functions as torch operations, so that a trace holds each as one operation."""

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]

_LIBRARY = torch.library.Library("coterie", "DEF")


def operation(schema: str) -> Callable[[Function], Function]:
    """Register a function of plain tensors under ``torch.ops.coterie``."""

    def register(function: Function) -> Function:
        name = _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        made: Function = getattr(torch.ops.coterie, schema.partition("(")[0]).default
        return made

    return register
