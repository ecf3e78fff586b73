"""Names the file and line of a user's code that a finding is about."""

import inspect
import traceback
from pathlib import Path
from typing import Any

import torch

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def place_of(owner: Any, name: str) -> str:
    """A function of a method with its file and line: ``Twin.local (twin.py, line 47)``."""
    told = f"{type(owner).__name__}.{name}"
    function = getattr(type(owner), name, None)
    try:
        _, line = inspect.getsourcelines(function)  # type: ignore[arg-type]
        file = inspect.getsourcefile(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"{told}()"
    return f"{told}() ({Path(file or '').name}, line {line})"


def failure(error: BaseException, owner: Any) -> str:
    """An exception in words, with the line of the user's code that it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    told = f"{type(error).__name__}: {error}"
    frame = _frame(error, owner)
    if frame is None:
        return told
    return f"{frame.name}() raised {told} ({Path(frame.filename).name}, line {frame.lineno})"


def _frame(error: BaseException, owner: Any) -> traceback.FrameSummary | None:
    """The innermost frame in the file of the method's class, else outside coterie and torch."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own = inspect.getsourcefile(type(owner))
    except (OSError, TypeError):
        own = None
    mine = [frame for frame in frames if frame.filename == own]
    found = mine or [frame for frame in frames if not _within(frame.filename)]
    return found[-1] if found else None


def _within(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)
