"""Laws on runs that must agree: on every engine, in every order, evaluated or stopped anywhere."""

from collections.abc import Iterator

import numpy as np
import torch

from ..core.locations import failure
from ..core.tree import Tree, take
from .differences import difference, named
from .harness import ROUNDS, Outcome, Trial, federation
from .laws import Case, NotApplicableError

TOLERANCE = 1e-9
ORDER = (3, 0, 4, 2, 1)


def unlike(found: Outcome, expected: Outcome, tolerance: float = 0.0) -> str | None:
    """What differs between the last rounds of two runs."""
    words = difference(found.mixture, expected.mixture, "predictors", tolerance)
    if words:
        return words
    if not np.allclose(found.scores, expected.scores, rtol=0, atol=tolerance, equal_nan=True):
        return "the scores of the evaluation differ"
    if found.bytes != expected.bytes:
        return (
            f"the messages weigh {found.bytes} bytes (down, up, to predict) and not "
            f"{expected.bytes}"
        )
    return None


def engines_agree(case: Case) -> Iterator[str]:
    """The engines loop, wire and vmap give the same to 1e-9."""
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
    """Rounds that are traced once and replayed give the same to 1e-9."""
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
    """A run that is evaluated in its last round only ends as one that is evaluated in all."""
    run = case.trial.run(participation=case.participation, evaluate_every=ROUNDS)
    found, expected = run[-1], case.reference[-1]
    words = difference(found.server, expected.server, "server")
    if words or found.digest != expected.digest:
        yield (
            "evaluating more or less often changes the result: serve(), predictor() and "
            "collaboration() must not leave anything behind, and state changes in local() only"
        )


def a_stopped_run_ends_the_same(case: Case) -> Iterator[str]:
    """A run that is stopped after any round, written to files and resumed has the same digest."""
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
        rest = _resumed(trial, outcome, case.participation)
        if rest.digest != expected[-1].digest:
            yield (
                f"a run that is stopped {told} and resumed ends with other predictors; all that a "
                "later round needs belongs into the server or the state, not on self or in a "
                "global variable"
            )
            return


def _resumed(trial: Trial, after: Outcome, participation: float) -> Outcome:
    """The last round of a run that goes on from files."""
    return trial.run(begin=trial.saved_and_read(after), participation=participation)[-1]


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
