"""Laws on purity: no argument is changed, the same call gives the same numbers, no test data."""

import random as python_random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..core.algorithm import AnyAlgorithm
from ..core.locations import place_of
from ..core.tree import Tree, row
from .differences import copied, difference
from .harness import with_other
from .laws import Begun, Case

TWO = (0, 3)  # clients with many samples and with few

Call = tuple[str, Callable[..., Any], dict[str, Tree]]  # function, what to call, its trees


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
    """No function changes what it is given."""
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
                if found and (words := _changed(case, name, found)) not in told:
                    told.add(words)
                    yield words


def _changed(case: Case, name: str, found: str) -> str:
    return (
        f"{place_of(case.algorithm, name)} changed its argument {found.split(' ')[0]} in place; "
        "return a new tensor: clone() it first, or use index_copy and not x[i] = ..."
    )


def the_same_call_gives_the_same_numbers(case: Case) -> Iterator[str]:
    """A function's result depends on its arguments alone."""
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
    """One client's round is the same whoever else takes part and whoever was computed before."""
    begun = case.walk[1]
    forward = _replies(case, begun, reverse=False)
    backward = _replies(case, begun, reverse=True)
    for i, reply in forward.items():
        found = difference(backward[i], reply, "(upload, state)")
        if found:
            yield (
                f"{place_of(case.algorithm, 'local')} of client {i} gives other numbers when other "
                f"clients of the same round were computed before it: {found}; what one client "
                "learns from others comes through download() and aggregate() only"
            )
            return


def _replies(case: Case, begun: Begun, *, reverse: bool) -> dict[int, Tree]:
    """All clients' replies of a round by a fresh copy of the method, in an order."""
    found, method = {}, case.again()
    named = [call for call in calls(case, method, begun) if call[0] == "local"]
    for i, (_, call, given) in sorted(zip(TWO, named, strict=True), reverse=reverse):
        found[i] = call(**{key: copied(value) for key, value in given.items()})
    return found


def only_scores_follow_test_data(case: Case) -> Iterator[str]:
    """Other test data change test scores and nothing else."""
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
