"""Laws on rounds in which not all clients take part, or not all replies arrive."""

from collections.abc import Iterator
from math import nan

import torch

from ..core.locations import failure, place_of
from ..core.tree import leaves, take
from .differences import difference
from .form import missing_rows
from .hostility import Spoilt, WithValue
from .laws import Case, NotApplicableError

REPLIED = ([2], [0, 3])  # whose replies arrive in two rounds of all clients


def half_of_the_clients_are_enough(case: Case) -> Iterator[str]:
    """Rounds of half of the clients work, and the others keep their states."""
    if case.algorithm.traits.everybody:
        raise NotApplicableError(
            "it declares traits.everybody: all clients take part in every round"
        )
    wrong = list(_rows_of_some(case))
    yield from wrong
    if wrong:
        return
    if isinstance(case.halves, Exception):
        yield (
            f"a round of half of the clients fails: {failure(case.halves, case.algorithm)}; "
            "round.clients are those who take part: give and expect one row for each of them, and "
            "use round.population for the number of all; or declare traits.everybody"
        )
        return
    _, before = case.trial.init()
    for outcome in case.halves:
        absent = [i for i in range(case.trial.population) if i not in outcome.clients]
        rows = torch.tensor(absent)
        if words := difference(take(outcome.states, rows), take(before, rows), "states"):
            yield (
                f"the state of a client that was absent in round {outcome.index} changed: {words}; "
                "only local() makes a new state"
            )
            return
        before = outcome.states
    yield from _finite(case, "with half of the clients", case.halves[-1].mixture)


def _rows_of_some(case: Case) -> Iterator[str]:
    """Messages to two clients that have not two rows."""
    server, _ = case.trial.init()
    round = case.trial.round(0, (0, 3))
    for name in ("download", "serve"):
        message = getattr(case.algorithm, name)(server, round)
        yield from missing_rows(message, 2, "its message", place_of(case.algorithm, name))


def any_replies_are_enough(case: Case) -> Iterator[str]:
    """A round works where one reply arrives, or some, or none."""
    server, states = case.trial.init()
    for index, replied in enumerate(REPLIED):
        told = f"{len(replied)} of {case.trial.population} replies arrived"
        try:
            step = case.trial.step(server, states, case.trial.round(index), replied)
            server, states = step.server, step.states
            mixtures = case.predictors(server, states, index + 1)
        except Exception as error:
            yield (
                f"a round in which {told} fails: {failure(error, case.algorithm)}; in aggregate() "
                "round.clients are those who replied and uploads has a row for each of them; "
                "round.asked are all who were sent a message"
            )
            return
        if not all(bool(leaf.isfinite().all()) for leaf in leaves(tuple(mixtures))):
            yield (
                f"{place_of(case.algorithm, 'aggregate')}: after a round in which {told} a "
                "predictor is NaN or infinite; divide by sums over those who replied"
            )
            return
    yield from _nobody(case)


def _nobody(case: Case) -> Iterator[str]:
    """A run in whose first round every reply is rejected."""
    if not any(leaf.is_floating_point() for leaf in leaves(case.walk[0].step.uploads)):
        return
    silent = Spoilt(case.algorithm, WithValue(nan), by_all=True, only=(0,))
    try:
        outcomes = case.trial.of(silent).run(rounds=2, participation=case.participation)
    except Exception as error:
        yield (
            f"a run in whose first round no reply arrived fails: {failure(error, case.algorithm)}; "
            "then aggregate() is not called, and the server begins round 1 as init() made it"
        )
        return
    for outcome in outcomes[1:]:
        for client, reason in outcome.rejected[:1]:
            yield (
                f"after a round in which no reply arrived, an honest reply (of client {client}) "
                f"was rejected as '{reason}'; the server may begin round 1 as init() made it"
            )
            return
    yield from _finite(case, "after a round without replies", outcomes[-1].mixture)


def _finite(case: Case, told: str, mixture: object) -> Iterator[str]:
    if any(not bool(leaf.isfinite().all()) for leaf in leaves(mixture)):
        yield (
            f"{type(case.algorithm).__name__}: {told} a predictor of the last round is NaN or "
            "infinite; divide by sums over those who take part, and never by zero"
        )
