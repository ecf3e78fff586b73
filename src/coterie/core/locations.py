"""Errors of a user's code, in a method or a network: where they are, and what it returned."""

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CoterieError, EngineError
from .algorithm import AnyAlgorithm, Mixture, Predictor, Recalling
from .policies import Wrapper
from .rows import RowTable, StateRows
from .tree import Bank, Tree, flatten

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


def unwrapped(algorithm: Any) -> Any:
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


# ---- checks of what the functions of a method return ---------------------------------------------

# The checks read types and shapes only, and cost nothing beside a round. ``coterie.testing`` checks
# much more.

ARRAYS = Tensor | RowTable | StateRows


def _wrong(algorithm: AnyAlgorithm, name: str, found: str, expected: str) -> EngineError:
    place = place_of(unwrapped(algorithm), name)
    return EngineError(
        f"{place} returned {found}; expected {expected}; coterie.testing.check_method checks the "
        "whole method"
    )


def kind(value: Any) -> str:
    """A value in words: the shape of a tensor, the number of parts of a tuple, else its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a {type(value).__name__} of {len(value)} parts"
    return "None" if value is None else f"a {type(value).__name__}"


def _check_arrays(algorithm: AnyAlgorithm, name: str, what: str, made: Tree) -> None:
    for path, leaf in flatten(made):
        if not isinstance(leaf, ARRAYS):
            raise _wrong(
                algorithm,
                name,
                f"{kind(leaf)} in its {what}{path}",
                "tensors, and NamedTuples or tuples of them",
            )


def check_rows(algorithm: AnyAlgorithm, name: str, made: Tree, rows: int) -> None:
    """Refuse a message that does not have one row per client."""
    _check_arrays(algorithm, name, "message", made)
    for path, leaf in flatten(made, (Bank,)):
        held = leaf.slot if isinstance(leaf, Bank) else leaf
        if isinstance(held, Tensor) and (held.dim() == 0 or len(held) != rows):
            found = f"{kind(held)} in its message{path}"
            raise _wrong(algorithm, name, found, f"one row per client: [{rows}, ...]")


def checked_init(algorithm: AnyAlgorithm, made: Any, clients: int) -> tuple[Tree, Tree]:
    """What ``init`` returned: a server, and states with one row per client."""
    if type(made) is not tuple or len(made) != 2:
        raise _wrong(algorithm, "init", kind(made), "a pair: the server, and the clients' states")
    _check_arrays(algorithm, "init", "server", made[0])
    check_rows(algorithm, "init", made[1], clients)
    return made


def checked_local(algorithm: AnyAlgorithm, made: Any, state: Tree) -> tuple[Tree, Tree]:
    """What ``local`` returned: an upload, and a state of the form of the old one."""
    if type(made) is not tuple or len(made) != 2:
        raise _wrong(algorithm, "local", kind(made), "a pair: the upload, and the new state")
    _check_arrays(algorithm, "local", "upload", made[0])
    _check_arrays(algorithm, "local", "state", made[1])
    old, new = dict(flatten(state)), dict(flatten(made[1]))
    if list(old) != list(new):
        expected = f"a state with the parts of the old one ({_listed(old)})"
        raise _wrong(algorithm, "local", f"a state with the parts {_listed(new)}", expected)
    for path, leaf in new.items():
        if leaf.shape != old[path].shape:
            found = f"{kind(leaf)} in its state{path}"
            raise _wrong(algorithm, "local", found, f"the old shape {list(old[path].shape)}")
    return made


def _listed(parts: dict[str, Any]) -> str:
    return ", ".join(path.removeprefix(".") or "one tensor" for path in parts) or "none"


def checked_mixture(algorithm: AnyAlgorithm, made: Any, parameters: int) -> Predictor:
    """What ``predictor`` returned: weights ``[r]`` and models ``[r, P]``."""
    if not isinstance(made, Mixture | Recalling):
        raise _wrong(algorithm, "predictor", kind(made), "a Mixture(weights [r], models [r, P])")
    _check_arrays(algorithm, "predictor", "mixture", made)
    wanted = [*made.weights.shape, parameters]
    if made.weights.dim() != 1 or list(made.models.shape) != wanted:
        found = f"weights {list(made.weights.shape)} and models {list(made.models.shape)}"
        expected = f"weights [r] and models [r, {parameters}]"
        raise _wrong(algorithm, "predictor", found, expected)
    return made


def checked_stage(code: Any, made: Any, state: Tree, parameters: int) -> Tree:
    """What ``code`` returned, a method's ``local`` or ``predictor``, for a client in ``state``."""
    if code.__name__ == "local":
        return checked_local(code.__self__, made, state)
    return checked_mixture(code.__self__, made, parameters)


def checked_server(algorithm: AnyAlgorithm, made: Any, server: Tree) -> Tree:
    """What ``aggregate`` returned: a server of the type of the old one."""
    if type(made) is not type(server):
        expected = f"the new server, {kind(server)} as before"
        raise _wrong(algorithm, "aggregate", kind(made), expected)
    _check_arrays(algorithm, "aggregate", "server", made)
    return made


def checked_matrix(algorithm: AnyAlgorithm, made: Any) -> Tensor | None:
    """What ``collaboration`` returned: None, or a tensor."""
    if made is not None and not isinstance(made, Tensor):
        raise _wrong(algorithm, "collaboration", kind(made), "None, or weights [K, K]")
    return made


def check_square(algorithm: AnyAlgorithm, shape: tuple[int, ...], clients: int) -> None:
    """Refuse a collaboration matrix without one row and one column per client."""
    if tuple(shape) != (clients, clients):
        found, expected = f"weights {list(shape)}", f"weights [{clients}, {clients}], or None"
        raise _wrong(algorithm, "collaboration", found, expected)
