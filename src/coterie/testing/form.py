"""Laws on the form of a method: its fields, its states, its messages, its predictors."""

import dataclasses
import json
import math
import typing
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from ..core.algorithm import Mixture
from ..core.fields import Field, fields
from ..core.locations import place_of
from ..core.policies import Wrapper
from ..core.ranges import fitted
from ..core.tree import Tree, leaves, row
from ..errors import CoterieError
from .differences import kind, misfit, named
from .laws import Case, NotApplicableError

TREES = "tensors, and NamedTuples or tuples of them"


# ---- fields --------------------------------------------------------------------------------------


def fields_are_checked(case: Case) -> Iterator[str]:
    """A frozen dataclass whose numbers have ranges, and which refuses what lies outside."""
    method, name = case.algorithm, type(case.algorithm).__name__
    if isinstance(method, Wrapper):
        raise NotApplicableError("a wrapper; its parts were checked when they were made")
    if not _frozen(type(method)):
        yield f"{name} is not a frozen dataclass: write @dataclass(frozen=True) above the class"
        return
    try:
        hash(method)
    except TypeError as error:
        yield f"{name} has no hash ({error}): use tuples in place of lists and dicts in its fields"
    for field in fields(type(method)):
        for limits in _numbers(field.type):
            if not any(_both_ends(limit) for limit in limits):
                yield (
                    f"the field {name}.{field.name} has no range: annotate it with one of "
                    "coterie.core.ranges, such as Share, Positive or Count"
                )
        yield from _accepted(case, field)


def _frozen(owner: type) -> bool:
    """Whether a class is a frozen dataclass."""
    made = getattr(owner, "__dataclass_params__", None)
    return made is not None and bool(made.frozen)


def _numbers(kind: Any) -> Iterator[Sequence[Any]]:
    """The annotations of every number in a type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType, tuple):
        for part in inner:
            yield from _numbers(part)
    elif origin is Annotated and inner[0] in (int, float):
        yield inner[1:]
    elif kind in (int, float):
        yield ()


def _both_ends(limit: Any) -> bool:
    if not isinstance(limit, Interval):
        return False
    return (limit.ge, limit.gt) != (None, None) and (limit.le, limit.lt) != (None, None)


def _accepted(case: Case, field: Field) -> Iterator[str]:
    """Values outside of a field's range or type that are not refused."""
    ends: list[Any] = [
        end
        for limits in _numbers(field.type)
        for limit in limits
        if isinstance(limit, Interval)
        for end in (limit.ge, limit.gt, limit.le, limit.lt)
        if end is not None
    ]
    beyond = [value for end in ends for value in (end - 1, end + 1)]
    for value in (math.nan, math.inf, object(), *beyond):
        if _fits(value, field.type):
            continue
        try:
            dataclasses.replace(case.algorithm, **{field.name: value})  # type: ignore[type-var]
        except CoterieError:
            continue
        except Exception as error:
            told = f"raises {type(error).__name__} for {value!r} where a ConfigError is expected"
        else:
            told = f"accepts {value!r}"
        name = type(case.algorithm).__name__
        yield (
            f"{name}.{field.name} {told}; expected {field.kind}: derive from Algorithm and leave "
            "__post_init__ to it (check_together() may refuse fields that do not go together)"
        )
        return


def _fits(value: Any, kind: Any) -> bool:
    try:
        fitted(value, kind)
    except ValueError:
        return False
    return True


# ---- states --------------------------------------------------------------------------------------


def init_gives_a_row_per_client(case: Case) -> Iterator[str]:
    """A server and a state, made of tensors, the state with one row per client."""
    case.trial.check()
    place, made = place_of(case.algorithm, "init"), _anything(case.trial.init())
    if not isinstance(made, tuple) or len(made) != 2:
        yield f"{place} returned a {type(made).__name__}; expected the pair (server, states)"
        return
    for part, path in zip(made, ("server", "states"), strict=True):
        if wrong := misfit(part, path):
            yield f"{place} returned something else than tensors: {wrong}; expected {TREES}"
            return
    yield from missing_rows(made[1], case.trial.population, "states", place)


def _anything(returned: Any) -> Any:
    """What a function returned, whatever its annotation promises."""
    return returned


def missing_rows(tree: Tree, count: int, path: str, place: str) -> Iterator[str]:
    """Tensors of a tree that have not one row per client."""
    if all(leaf.dim() and len(leaf) == count for leaf in leaves(tree)):
        return
    wrong = next(
        f"{name} is {kind(leaf)}"
        for name, leaf in named(tree, path)
        if not leaf.dim() or len(leaf) != count
    )
    yield (
        f"{place}: {wrong}; expected one row for each of the {count} clients of the round, so a "
        f"first dimension of {count}: rows(value, {count}) gives all the same without copies"
    )


# ---- messages ------------------------------------------------------------------------------------


def messages_have_a_row_per_client(case: Case) -> Iterator[str]:
    """What travels is made of tensors and has one row per client, of one form for all."""
    method, trial = case.algorithm, case.trial
    server, states = trial.init()
    round = trial.round(0)
    received, served = method.download(server, round), method.serve(server, round)
    for name, message in (("download", received), ("serve", served)):
        place = place_of(method, name)
        if wrong := misfit(message, "its message"):
            yield f"{place} returned something else than tensors: {wrong}; expected {TREES}"
            return
        found = list(missing_rows(message, trial.population, "its message", place))
        yield from found
        if found:
            return
    yield from _replies(case, received, states)
    observed = method.observed(server)
    try:
        json.dumps(observed)
    except (TypeError, ValueError) as error:
        yield f"{place_of(method, 'observed')} is no plain JSON ({error}): return plain numbers"


def _replies(case: Case, received: Tree, states: Tree) -> Iterator[str]:
    """Replies that are no pairs of trees of one form."""
    place, first = place_of(case.algorithm, "local"), None
    for i in range(case.trial.population):
        state = row(states, i)
        client = case.trial.client(i, 0)
        reply = _anything(case.algorithm.local(client, row(received, i), state))
        if not isinstance(reply, tuple) or len(reply) != 2:
            yield f"{place} returned a {type(reply).__name__}; expected the pair (upload, state)"
            return
        for part, path in zip(reply, ("its upload", "its new state"), strict=True):
            if wrong := misfit(part, path):
                yield f"{place} returned something else than tensors: {wrong}; expected {TREES}"
                return
        if _form(reply[1]) != _form(state):
            yield (
                f"{place} returned a state of the form {_told(reply[1])} for client {i}; expected "
                f"the form it was given, {_told(state)}"
            )
            return
        first = reply if first is None else first
        if _form(reply[0]) != _form(first[0]):
            yield (
                f"{place} returned an upload of the form {_told(reply[0])} for client {i} and "
                f"{_told(first[0])} for client 0; expected one form for all clients: fill what a "
                "client lacks with zeros and send a mask"
            )
            return


def _form(tree: Tree) -> list[tuple[str, str]]:
    return [(name, kind(leaf)) for name, leaf in named(tree, "")]


def _told(tree: Tree) -> str:
    return "(" + ", ".join(f"{name} {form}".strip() for name, form in _form(tree)) + ")"


def rounds_run(case: Case) -> Iterator[str]:
    """Two rounds of all clients, function by function; what fails in them is told by its line."""
    last = case.walk[-1].step
    case.predictors(last.server, last.states, len(case.walk))
    yield from ()


# ---- predictors ----------------------------------------------------------------------------------


def predictors_are_mixtures(case: Case) -> Iterator[str]:
    """Every client's predictor: models and weights that are finite and sum to one."""
    place, last = place_of(case.algorithm, "predictor"), case.walk[-1].step
    for i, mixture in enumerate(case.predictors(last.server, last.states, 2)):
        if wrong := _mixture(mixture, case.trial.start):
            yield f"{place} of client {i}: {wrong}"
            return


def _mixture(mixture: Any, start: Tensor) -> str | None:
    """What is wrong with a predictor."""
    if not isinstance(mixture, Mixture):
        return f"returned a {type(mixture).__name__}; expected a Mixture (single(w) makes one)"
    weights, models = mixture
    if weights.dim() != 1 or models.shape != (len(weights), len(start)):
        return (
            f"weights are {kind(weights)} and models {kind(models)}; expected [r] and "
            f"[r, {len(start)}]"
        )
    if not bool(torch.isfinite(weights).all() and torch.isfinite(models).all()):
        return "a weight or a model is NaN or infinite; expected finite numbers"
    total = float(weights.sum())
    if bool((weights < 0).any()) or (bool((weights != 0).any()) and abs(total - 1) > 1e-6):
        return (
            f"the weights {[round(float(w), 4) for w in weights]} sum to {total:.4g}; expected "
            "weights of at least 0 that sum to 1 (all 0: this client has no predictor)"
        )
    return None
