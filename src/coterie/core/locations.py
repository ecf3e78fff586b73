"""Names the file and line of a user's code, in a method or a network, that an error is about."""

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CoterieError, EngineError
from .wrapper import Wrapper

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def unwrapped(algorithm: Any) -> Any:
    """The method inside its wrappers."""
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.algorithm
    return algorithm


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


@contextlib.contextmanager
def located(*owners: Any) -> Iterator[None]:
    """If code in a user's file fails in this block, raise an EngineError with its file and line.

    ``owners`` are the method and the network. Errors that do not pass through a file of theirs
    outside coterie are raised unchanged, and so are errors about configs, data and folders.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CoterieError) and not isinstance(error, EngineError):
            raise
        files = {file for owner in owners if (file := _file(unwrapped(owner))) is not None}
        frame = _last_in({file for file in files if not _within(file)}, error)
        if frame is None:
            raise
        where = f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        told = error if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        raise EngineError(f"{told}\n  {where}") from error


def _last_in(files: set[str], error: BaseException | None) -> traceback.FrameSummary | None:
    """The innermost frame in these files, of the error or of its causes."""
    found = None
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        found = next((frame for frame in reversed(frames) if frame.filename in files), found)
        error = error.__cause__
    return found


def _frame(error: BaseException, owner: Any) -> traceback.FrameSummary | None:
    """The innermost frame in the file of the method's class, else outside coterie and torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = _file(owner)
    mine = [frame for frame in frames if frame.filename == own]
    found = mine or [frame for frame in frames if not _within(frame.filename)]
    return found[-1] if found else None


def _file(owner: Any) -> str | None:
    """The file of an object's class; None if it is not known."""
    try:
        return inspect.getsourcefile(type(owner))
    except (OSError, TypeError):
        return None


def _within(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)
