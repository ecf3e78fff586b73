"""Laws on what a method says of itself: its traits and its collaboration matrix."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from ..core.locations import place_of
from ..core.tree import Tree, row, take
from ..data.federation import Federation
from ..training.rounds import Record
from .harness import PIXELS, Case, NotApplicableError, copied, difference, named, with_other

HORIZON = 5  # rounds over which trace keys are looked at
OTHER = 0  # the client whose training data are changed
SHOWN = 1e-3  # a weight that a matrix shows
SUBSETS = ([0, 1, 3], [1, 2, 4], [0, 2, 3])  # who takes part in three rounds


def validation_is_declared(case: Case) -> Iterator[str]:
    """traits.uses_validation says whether validation data are read."""
    changed = with_other("val", case.trial.federation)
    found = case.trial.on(changed).run(participation=case.participation)[-1]
    words = difference(found.mixture, case.reference[-1].mixture, "predictors")
    if words and not case.algorithm.traits.uses_validation:
        yield from _undeclared(case, changed)
    if not words and case.algorithm.traits.uses_validation:
        yield (
            "it declares traits.uses_validation, but other validation data change nothing; leave "
            "the declaration out: it keeps validation data from training"
        )


def _undeclared(case: Case, changed: Federation) -> Iterator[str]:
    """Validation data that are read where ``client.validated`` says that they may be trained on."""
    pair = [
        trial.unvalidated().run(participation=case.participation)[-1].mixture
        for trial in (case.trial, case.trial.on(changed))
    ]
    if words := difference(pair[1], pair[0], "predictors"):
        yield (
            f"it reads validation data and does not say so: with other validation data {words}; "
            "declare traits.uses_validation, so that no run trains on these data, or use them only "
            "where client.validated"
        )


def chapters_are_declared(case: Case) -> Iterator[str]:
    """trace_key() says what a client reads off client.round."""
    method, trial = case.algorithm, case.trial
    keys = [method.trace_key(index, HORIZON) for index in range(HORIZON)]
    if any(key is None for key in keys):
        raise NotApplicableError("trace_key() declares nothing: a call that asks is not traced")
    server, states = trial.init()
    for first, other in combinations(range(HORIZON), 2):
        if keys[first] != keys[other]:
            continue
        round = trial.round(first, horizon=HORIZON)
        given = {"local": method.download(server, round), "predictor": method.serve(server, round)}
        for name, message in given.items():
            results = [
                getattr(method, name)(
                    trial.client(0, first, told=(index, HORIZON)),
                    copied(row(message, 0)),
                    copied(row(states, 0)),
                )
                for index in (first, other)
            ]
            if words := difference(results[1], results[0], "its result"):
                yield (
                    f"{place_of(method, name)} acts on client.round in a way that trace_key() does "
                    f"not declare: rounds {first} and {other} of {HORIZON} have one key, "
                    f"{keys[first]!r}, but {words}; let trace_key() return what is read off it"
                )
                return


def shared_samples_are_declared(case: Case) -> Iterator[str]:
    """Raw samples travel only where traits.sharing says so."""
    if case.algorithm.traits.sharing is not None:
        raise NotApplicableError("it declares traits.sharing: every site must consent")
    for begun in case.walk:
        for i in range(case.trial.population):
            for name, leaf in named(row(begun.step.uploads, i), "upload"):
                if _holds(leaf, case.trial.samples(i)):
                    yield (
                        f"{place_of(case.algorithm, 'local')} uploads raw training samples of "
                        f"client {i} in {name}; declare traits.sharing, so that every site is "
                        "asked for its consent, or upload models and statistics only"
                    )
                    return


def _holds(leaf: Tensor, samples: Tensor) -> bool:
    """Whether the numbers of a sample stand one after the other in a tensor."""
    if not leaf.is_floating_point() or leaf.numel() < PIXELS:
        return False
    windows = leaf.double().flatten().unfold(0, PIXELS, 1)
    begins = torch.isin(windows[:, 0], samples[:, 0])
    return any(bool((samples - window).abs().amax(1).min() < 1e-9) for window in windows[begins])


# ---- the collaboration matrix --------------------------------------------------------------------


def the_matrix_is_what_was_applied(case: Case) -> Iterator[str]:
    """The collaboration matrix has the right shape and shows what was applied."""
    method, place = case.algorithm, place_of(case.algorithm, "collaboration")
    matrices = [outcome.collaboration for outcome in case.reference]
    if all(matrix is None for matrix in matrices):
        if method.traits.models_change_hands:
            yield (
                "it declares traits.models_change_hands but has no collaboration matrix, which the "
                "declaration is about: leave it out, or return a matrix"
            )
            return
        raise NotApplicableError("it has no collaboration matrix")
    size = (case.trial.population, case.trial.population)
    for matrix in matrices:
        if matrix is None or matrix.shape != size or not np.isfinite(matrix).all():
            told = "nothing" if matrix is None else f"a matrix {list(matrix.shape)}"
            yield f"{place} returned {told}; expected finite numbers {list(size)} in every round"
            return
    yield from _unapplied(case, place)
    if not method.traits.everybody:
        yield from _of_the_absent(case, place)


def _unapplied(case: Case, place: str) -> Iterator[str]:
    """Weights that the matrix shows though the other's data change nothing.

    In round 0 a method may draw on the starting points of others, which depend on nobody's data.
    """
    federated = with_other("train", case.trial.federation, OTHER)
    other = case.trial.on(federated).run(participation=1.0)
    for i in range(case.trial.population):
        shown = max(float(outcome.collaboration[i, OTHER]) for outcome in case.full[1:])
        if i != OTHER and shown > SHOWN and _same(case.full[-1], other[-1], i):
            yield (
                f"{place} shows that client {i} draws on client {OTHER} with weight {shown:.2g}, "
                f"but client {i}'s model is the same with other training data of client {OTHER}; "
                "return the weights that were applied in the round"
            )
            return


def _same(one: Record, other: Record, i: int) -> bool:
    """Whether a client that has a predictor has the same in both runs."""
    first, second = (take(outcome.mixture, torch.tensor([i])) for outcome in (one, other))
    return bool((first.weights != 0).any()) and not difference(first, second, "predictor")


def _of_the_absent(case: Case, place: str) -> Iterator[str]:
    """Rows of absent clients that changed though their predictors did not."""
    server, states = case.trial.init()
    before: tuple[Tensor, list[Tree]] | None = None
    for index, clients in enumerate(SUBSETS):
        step = case.trial.step(server, states, case.trial.round(index, clients))
        server, states = step.server, step.states
        matrix = case.algorithm.collaboration(server, case.algorithm.shown(states), step.round)
        now = torch.as_tensor(matrix).clone(), case.predictors(server, states, index + 1)
        for i in set(range(case.trial.population)) - set(clients):
            if before is None or torch.equal(now[0][i], before[0][i]):
                continue
            if not difference(now[1][i], before[1][i], "predictor"):
                yield (
                    f"{place} shows another row for client {i} after round {index}, in which it "
                    "was absent and its model stayed as it was; keep the row of the last round "
                    "that it took part in (store it in aggregate())"
                )
                return
        before = now
