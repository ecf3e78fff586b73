"""Checks what the functions of a method return, so that a wrong shape is told where it is made.

The checks read types and shapes only, and cost nothing beside a round. ``coterie.testing`` checks
much more.
"""

from typing import Any

from torch import Tensor

from ..errors import EngineError
from .algorithm import AnyAlgorithm, Mixture
from .locations import place_of, unwrapped
from .rows import RowTable, StateRows
from .tree import Bank, Tree, flatten

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
    """Refuse leaves that are no arrays."""
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


def checked_mixture(algorithm: AnyAlgorithm, made: Any, parameters: int) -> Mixture:
    """What ``predictor`` returned: weights ``[r]`` and models ``[r, P]``."""
    if not isinstance(made, Mixture):
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
