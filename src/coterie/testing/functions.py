"""Laws on a method's functions, called one by one: what they return, and that they are pure."""

import dataclasses
import json
import math
import random as python_random
import typing
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.fields import Field, fields
from ..core.locations import check_rows, checked_init, checked_local, checked_mixture, place_of
from ..core.policies import Wrapper
from ..core.ranges import fitted
from ..core.tree import Tree, row
from ..errors import CoterieError
from .harness import Begun, Case, NotApplicableError, copied, difference, kind, named, with_other

TWO = (0, 3)  # clients with many samples and with few

Call = tuple[str, Callable[..., Any], dict[str, Tree]]  # function, what to call, its trees

# ---- fields --------------------------------------------------------------------------------------


def fields_are_checked(case: Case) -> Iterator[str]:
    """It is a frozen dataclass; its numbers have ranges and values outside are refused."""
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
    """init() gives a server and one row of state per client, made of tensors."""
    case.trial.check()
    checked_init(case.algorithm, case.trial.init(), case.trial.population)
    yield from ()


# ---- messages ------------------------------------------------------------------------------------


def messages_have_a_row_per_client(case: Case) -> Iterator[str]:
    """Messages are tensors in tuples, one row per client, of one form for all clients."""
    method, trial = case.algorithm, case.trial
    server, states = trial.init()
    round = trial.round(0)
    for name in ("download", "serve"):
        check_rows(method, name, getattr(method, name)(server, round), trial.population)
    yield from _uploads(case, method.download(server, round), states)
    observed = method.observed(server)
    try:
        json.dumps(observed)
    except (TypeError, ValueError) as error:
        yield f"{place_of(method, 'observed')} is no plain JSON ({error}): return plain numbers"


def _uploads(case: Case, received: Tree, states: Tree) -> Iterator[str]:
    """Uploads that are not of one form for all clients."""
    method, first = case.algorithm, None
    for i in range(case.trial.population):
        state = row(states, i)
        reply = method.local(case.trial.client(i, 0), row(received, i), state)
        upload, _ = checked_local(method, reply, state)
        first = upload if first is None else first
        if _form(upload) != _form(first):
            yield (
                f"{place_of(method, 'local')} returned an upload of the form {_told(upload)} for "
                f"client {i} and {_told(first)} for client 0; expected one form for all clients: "
                "fill what a client lacks with zeros and send a mask"
            )
            return


def _form(tree: Tree) -> list[tuple[str, str]]:
    return [(name, kind(leaf)) for name, leaf in named(tree, "")]


def _told(tree: Tree) -> str:
    return "(" + ", ".join(f"{name} {form}".strip() for name, form in _form(tree)) + ")"


def rounds_run(case: Case) -> Iterator[str]:
    """Rounds of all clients run, from download() to the predictors."""
    last = case.walk[-1].step
    case.predictors(last.server, last.states, len(case.walk))
    yield from ()


# ---- predictors ----------------------------------------------------------------------------------


def predictors_are_mixtures(case: Case) -> Iterator[str]:
    """Predictors have finite models and finite weights that sum to one."""
    place, last = place_of(case.algorithm, "predictor"), case.walk[-1].step
    for i, mixture in enumerate(case.predictors(last.server, last.states, 2)):
        if wrong := _mixture(*checked_mixture(case.algorithm, mixture, len(case.trial.start))):
            yield f"{place} of client {i}: {wrong}"
            return


def _mixture(weights: Tensor, models: Tensor) -> str | None:
    """What is wrong with the numbers of a predictor."""
    if not bool(torch.isfinite(weights).all() and torch.isfinite(models).all()):
        return "a weight or a model is NaN or infinite; expected finite numbers"
    total = float(weights.sum())
    if bool((weights < 0).any()) or (bool((weights != 0).any()) and abs(total - 1) > 1e-6):
        return (
            f"the weights {[round(float(w), 4) for w in weights]} sum to {total:.4g}; expected "
            "weights of at least 0 that sum to 1 (all 0: this client has no predictor)"
        )
    return None


# ---- purity --------------------------------------------------------------------------------------


def calls(case: Case, method: AnyAlgorithm, begun: Begun) -> Iterator[Call]:
    """Every call of one round of all clients, of ``local`` and ``predictor`` those of two."""
    trial, step = case.trial, begun.step
    index = step.round.index
    round, after = trial.round(index), trial.round(index + 1)
    yield "download", lambda server: method.download(server, round), {"server": begun.server}
    for i in TWO:
        yield (
            "local",
            lambda received, state, i=i: method.local(trial.client(i, index), received, state),
            {"received": row(step.received, i), "state": row(begun.states, i)},
        )
    yield (
        "aggregate",
        lambda server, uploads: method.aggregate(server, uploads, step.round),
        {"server": begun.server, "uploads": step.uploads},
    )
    yield "serve", lambda server: method.serve(server, after), {"server": step.server}
    served = method.serve(copied(step.server), after)
    for i in TWO:
        yield (
            "predictor",
            lambda served, state, i=i: method.predictor(trial.client(i, index + 1), served, state),
            {"served": row(served, i), "state": row(step.states, i)},
        )
    yield (
        "collaboration",
        lambda server, states: method.collaboration(server, method.shown(states), round),
        {"server": step.server, "states": step.states},
    )


def inputs_are_left_unchanged(case: Case) -> Iterator[str]:
    """No function changes its arguments."""
    told: set[str] = set()
    start = case.trial.start.clone()
    case.trial.init()
    if not torch.equal(start, case.trial.start):
        yield f"{place_of(case.algorithm, 'init')} changed the common starting point in place"
        case.trial.start.copy_(start)
    for begun in case.walk:
        for name, call, given in calls(case, case.algorithm, begun):
            held = {argument: copied(value) for argument, value in given.items()}
            call(**held)
            for argument, value in given.items():
                found = difference(held[argument], copied(value), argument)
                words = (
                    f"{place_of(case.algorithm, name)} changed its argument "
                    f"{(found or argument).split(' ')[0]} in place; return a new tensor: clone() "
                    "it first, or use index_copy and not x[i] = ..."
                )
                if found and words not in told:
                    told.add(words)
                    yield words


def the_same_call_gives_the_same_numbers(case: Case) -> Iterator[str]:
    """The same call gives the same numbers."""
    told: set[str] = set()
    for begun in case.walk:
        for name, call, given in calls(case, case.algorithm, begun):
            if name in told:
                continue
            before = _generators()
            first = call(**{key: copied(value) for key, value in given.items()})
            drawn = [key for key, state in _generators().items() if state != before[key]]
            second = call(**{key: copied(value) for key, value in given.items()})
            found = None if first is None else difference(second, first, "its result")
            if found:
                told.add(name)
                yield (
                    f"{place_of(case.algorithm, name)} gives other numbers when it is called again "
                    f"with the same arguments: {found}; {_cause(drawn)}"
                )


def _generators() -> dict[str, Any]:
    """The states of the random generators that a method must not use."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002  # it is the global one that is watched
        "random": python_random.getstate(),
    }


def _cause(drawn: list[str]) -> str:
    if drawn:
        return (
            f"it draws from the random generator of {' and '.join(drawn)}: use "
            "client.draw(purpose, shape) or round.draw(purpose, clients)"
        )
    return "keep nothing between calls, neither on self nor in a global variable"


def clients_do_not_meet_in_local(case: Case) -> Iterator[str]:
    """local() of one client does not depend on which clients were computed before."""
    begun = case.walk[1]
    forward = _replies_in(case, begun, reverse=False)
    backward = _replies_in(case, begun, reverse=True)
    for i, reply in forward.items():
        found = difference(backward[i], reply, "(upload, state)")
        if found:
            yield (
                f"{place_of(case.algorithm, 'local')} of client {i} gives other numbers when other "
                f"clients of the same round were computed before it: {found}; what one client "
                "learns from others comes through download() and aggregate() only"
            )
            return


def _replies_in(case: Case, begun: Begun, *, reverse: bool) -> dict[int, Tree]:
    """All clients' replies of a round by a fresh copy of the method, in an order."""
    found, method = {}, case.again()
    named = [call for call in calls(case, method, begun) if call[0] == "local"]
    for i, (_, call, given) in sorted(zip(TWO, named, strict=True), reverse=reverse):
        found[i] = call(**{key: copied(value) for key, value in given.items()})
    return found


def only_scores_follow_test_data(case: Case) -> Iterator[str]:
    """Test data change test scores and nothing else."""
    other = case.trial.on(with_other("test", case.trial.federation))
    found = other.run(participation=case.participation)[-1]
    expected = case.reference[-1]
    words = difference(found.mixture, expected.mixture, "predictors") or difference(
        found.server, expected.server, "server"
    )
    if words:
        yield (
            f"training changes when only the clients' test data change: {words}; a method may read "
            "the splits 'train' and 'val' of its client, and nothing else"
        )
