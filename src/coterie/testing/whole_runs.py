"""Laws on whole runs: on any engine, in any order, with any replies, with hostile clients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import AnyAlgorithm
from ..core.client import Client
from ..core.locations import check_rows, failure, place_of
from ..core.policies import Wrapper
from ..core.tree import Tree, leaves, map_leaves, take
from ..training.rounds import Record
from .harness import Case, NotApplicableError, difference, federation, named

TOLERANCE = 1e-9
ORDER = (3, 0, 4, 2, 1)
REPLIED = ([2], [0, 3])  # whose replies arrive in two rounds of all clients
BAD = 2  # the client that misbehaves

Spoil = Callable[[Tree, Tensor], Tree]  # (upload, whether this is the client) -> upload


def unlike(found: Record, expected: Record, tolerance: float = 0.0) -> str | None:
    """What differs between the last rounds of two runs."""
    words = difference(found.mixture, expected.mixture, "predictors", tolerance)
    if words:
        return words
    one, other = (np.stack(record.evaluation or ()) for record in (found, expected))
    if not np.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True):
        return "the scores of the evaluation differ"
    if found.traffic != expected.traffic:
        sent, wanted = tuple(found.traffic), tuple(expected.traffic)
        return f"the messages weigh {sent} bytes (down, up, to predict) and not {wanted}"
    return None


def engines_agree(case: Case) -> Iterator[str]:
    """The engines loop, wire and vmap give the same numbers to 1e-9."""
    expected, share = case.reference[-1], case.participation
    words = unlike(case.trial.run("wire", participation=share)[-1], expected, TOLERANCE)
    if words:
        yield (
            f"the wire engine, on which all that a client reads travels as bytes, gives other "
            f"numbers than the loop engine: {words}; a client may read its message, its state and "
            "its data, and of a Bank only what rows() gives"
        )
    batched = case.batched
    if isinstance(batched, Exception):
        yield (
            f"the vmap engine, which computes many clients at once, cannot run it: "
            f"{failure(batched, case.algorithm)}; use torch.where() in place of an if on a "
            "tensor's value, no .item(), and new tensors in place of assignments; until then it "
            "runs with engine.name = 'loop', slower"
        )
    elif words := unlike(batched, expected, TOLERANCE):
        yield (
            f"the vmap engine, which computes many clients at once, gives other numbers than the "
            f"loop engine: {words}; write local() and predictor() for one client, take losses from "
            "client.loss() or client.losses() with batch.mask, and train by client.train() or "
            "client.scan(), which mask what is padding"
        )


def replayed_rounds_agree(case: Case) -> Iterator[str]:
    """Rounds that are traced once and replayed give the same numbers to 1e-9."""
    expected = case.batched
    if isinstance(expected, Exception) or unlike(expected, case.reference[-1], TOLERANCE):
        raise NotApplicableError("the vmap engine does not run it rightly; see the law 'engines'")
    found = case.trial.run("traced", participation=case.participation)[-1]
    if words := unlike(found, expected, TOLERANCE):
        yield (
            f"rounds that are traced once and replayed give other numbers than rounds that are "
            f"computed: {words}; what changes from round to round must come from the client, the "
            "message or the state, and trace_key() must tell rounds apart that do different things"
        )


def the_order_of_clients_does_not_matter(case: Case) -> Iterator[str]:
    """Listing the clients in another order changes nothing."""
    trial, order = case.trial.on(federation(ORDER)), torch.tensor(ORDER)
    found = trial.run(participation=case.participation)[-1].mixture
    expected = take(case.reference[-1].mixture, order)
    if words := difference(found, expected, "predictors", TOLERANCE):
        yield (
            f"listing the same clients in another order changes the result: {words}; draw with "
            "round.draw(purpose, clients), break ties by such a draw, and never by the index of a "
            "client"
        )


def evaluating_changes_nothing(case: Case) -> Iterator[str]:
    """Evaluating more often changes nothing."""
    run = case.trial.run(participation=case.participation, evaluate_every=1)
    found, expected = run[-1], case.reference[-1]
    if difference((found.server, found.mixture), (expected.server, expected.mixture), "it"):
        yield (
            "evaluating more or less often changes the result: serve(), predictor() and "
            "collaboration() must not leave anything behind, and state changes in local() only"
        )


def a_stopped_run_ends_the_same(case: Case) -> Iterator[str]:
    """A run that is stopped after any round and resumed ends with the same digest."""
    trial, expected = case.trial.of(case.again()), case.reference
    like = trial.init()
    for outcome in expected[:-1]:
        told = f"after round {outcome.index}"
        for part, start, path in zip(
            (outcome.server, outcome.states), like, ("server", "states"), strict=True
        ):
            if words := _other_form(part, start, path):
                yield (
                    f"a run cannot be resumed {told}: {words}; a run goes on in the structure that "
                    "init() returns, so keep its parts, types and numbers of dimensions"
                )
                return
        begin = trial.saved_and_read(outcome)
        rest = trial.run(begin=begin, participation=case.participation)[-1]
        if difference(rest.mixture, expected[-1].mixture, "predictors"):
            yield (
                f"a run that is stopped {told} and resumed ends with other predictors; all that a "
                "later round needs belongs into the server or the state, not on self or in a "
                "global variable"
            )
            return


def _other_form(found: Tree, start: Tree, path: str) -> str | None:
    """What a checkpoint could not give back in the structure that a method begins with."""
    now, then = dict(named(found, path)), dict(named(start, path))
    if now.keys() != then.keys():
        return (
            f"{path} has the parts {', '.join(now) or '(none)'} and began with "
            f"{', '.join(then) or '(none)'}"
        )
    for name, leaf in now.items():
        if (leaf.dtype, leaf.dim()) != (then[name].dtype, then[name].dim()):
            return (
                f"{name} is {leaf.dtype} with {leaf.dim()} dimensions and began as "
                f"{then[name].dtype} with {then[name].dim()}"
            )
    return None


# ---- who takes part, and whose replies arrive ----------------------------------------------------


def half_of_the_clients_are_enough(case: Case) -> Iterator[str]:
    """Half of the clients are enough for a round, and absent clients keep their state."""
    if case.algorithm.traits.everybody:
        raise NotApplicableError(
            "it declares traits.everybody: all clients take part in every round"
        )
    server, _ = case.trial.init()
    for name in ("download", "serve"):
        message = getattr(case.algorithm, name)(server, case.trial.round(0, (0, 3)))
        check_rows(case.algorithm, name, message, 2)
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


def any_replies_are_enough(case: Case) -> Iterator[str]:
    """A round works whether one, some or none of the replies arrive."""
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


# ---- clients that send what they should not ------------------------------------------------------


@dataclass(frozen=True)
class WithValue:
    """One number of every floating array replaced."""

    value: float

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        def one(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            first = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) == 0
            return torch.where(bad & first, self.value, leaf)

        return map_leaves(one, upload)


@dataclass(frozen=True)
class Scaled:
    """Every number multiplied."""

    factor: float

    def __call__(self, upload: Tree, bad: Tensor) -> Tree:
        def one(leaf: Tensor) -> Tensor:
            return torch.where(bad, self.factor * leaf, leaf) if leaf.is_floating_point() else leaf

        return map_leaves(one, upload)


def longer(upload: Tree, bad: Tensor) -> Tree:
    """Every array with a dimension too many; only where clients are apart."""
    return map_leaves(lambda leaf: leaf[None] if bool(bad) else leaf, upload)


@dataclass(frozen=True)
class Spoilt(Wrapper[Any, Any, Any, Any]):
    """Any method in which uploads are spoilt.

    ``apart``: only outside of vmap; ``by_all``: by all clients, not one; ``only``: in these
    rounds, not in all.
    """

    spoil: Spoil
    apart: bool = False
    by_all: bool = False
    only: tuple[int, ...] | None = None

    def local(self, client: Client, received: Tree, state: Tree) -> tuple[Tree, Tree]:
        upload, after = self.algorithm.local(client, received, state)
        if self.only is not None and client.round not in self.only:
            return upload, after
        bad = (client.id == BAD) | self.by_all
        if self.apart and not bool(bad):
            return upload, after
        return self.spoil(upload, bad), after


ATTACKS: tuple[tuple[str, Spoil, str], ...] = (
    ("a NaN", WithValue(nan), "not_finite"),
    ("an infinite number", WithValue(inf), "not_finite"),
    ("numbers 1e30 times too large", Scaled(1e30), "outsized"),
    ("arrays with a dimension too many", longer, "shape"),
)


def hostile_uploads_harm_nobody_else(case: Case) -> Iterator[str]:
    """Honest replies pass the guard; a hostile one is rejected and harms nobody else."""
    for outcome in case.reference:
        if outcome.rejected:
            client, reason = outcome.rejected[0]
            yield (
                f"the guard rejected an honest reply, of client {client} in round {outcome.index}, "
                f"as '{reason}': upload finite numbers; a field 'size' must be a sample count from "
                "1 to client.own"
            )
            return
    if not any(leaf.is_floating_point() for leaf in leaves(case.walk[0].step.uploads)):
        raise NotApplicableError("its uploads hold no numbers that could be spoilt")
    spoilt: AnyAlgorithm = case.algorithm
    for index, (_, spoil, _) in enumerate(ATTACKS):
        spoilt = Spoilt(spoilt, spoil, apart=spoil is longer, only=(index,))
    outcomes = case.trial.of(spoilt).run(rounds=len(ATTACKS), participation=1.0)
    for (told, _, reason), outcome in zip(ATTACKS, outcomes, strict=True):
        if outcome.rejected != ((BAD, reason),):
            yield (
                f"client {BAD} uploaded {told}, and the guard rejected "
                f"{outcome.rejected or 'nobody'}; expected {((BAD, reason),)}: upload numbers as "
                "they are, in floating types, and let the guard judge them"
            )
            return
    yield from _harm(case, outcomes[-1])


def _harm(case: Case, last: Record) -> Iterator[str]:
    """What hostile uploads that were rejected changed all the same."""
    mine, (_, start) = torch.tensor([BAD]), case.trial.init()
    if words := difference(take(last.states, mine), take(start, mine), "state"):
        yield f"client {BAD}, all of whose uploads were rejected, lost its state: {words}"
    if not all(bool(leaf.isfinite().all()) for leaf in leaves(last.mixture)):
        yield (
            f"{place_of(case.algorithm, 'aggregate')}: hostile uploads were rejected, and yet a "
            "predictor is not finite; divide by sums over those who replied"
        )
