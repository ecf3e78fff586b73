"""Simulates all clients in one process: a backend computes, a store keeps the clients' states."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, rows
from ..core.answers import join
from ..core.calls import Form
from ..core.problem import Problem
from ..core.rows import Allocate, StateRows
from ..core.tree import Tree
from .base import Backend, Computed, Enrolment, Evaluation, Predicted, Replies, Scores

# The bytes of predictors that are evaluated at once, but at least this many clients.
JUDGED_BYTES, JUDGED_CLIENTS = 1 << 28, 100
CPU = torch.device("cpu")


class Simulator:
    """An engine whose clients are all in this process."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._store: StateStore | None = None
        self._answered: Computed | None = None

    @property
    def choice(self) -> dict[str, Any]:
        return self.backend.choice

    @property
    def forms(self) -> tuple[Form, ...]:
        return self.backend.forms

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        first = algorithm.init(problem)[1] if states is None else states
        self._store = StateStore(first, in_memory(self.backend.problem.device))
        return Enrolment(problem.clients, problem.counts)

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        states = self._states.rows(round.clients)
        found = self.backend.compute(algorithm, received, states, round)
        self._answered = found
        return Replies(found.uploads, found.clients, found.rejected)

    def commit(self, accepted: Tensor) -> None:
        found, self._answered = self._answered, None
        if found is None or not len(accepted):
            return
        new = found.states
        if len(accepted) < len(found.clients):
            new = tree.take(new, torch.isin(found.clients, accepted).nonzero().flatten())
        self._states.put(accepted, new)

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        return algorithm.shown(self._states.view())

    def evaluate(
        self, algorithm: AnyAlgorithm, served: Tree, round: Round, metric: str, keep: bool = False
    ) -> Predicted:
        """Evaluate the predictors of the round's clients, at least a hundred clients at a time."""
        parts, collected = [], _Predictors(in_memory(CPU), keep)
        start = self.backend.problem.start
        at_once = max(JUDGED_CLIENTS, JUDGED_BYTES // (start.numel() * start.element_size()))
        for at in torch.arange(len(round.clients)).split(at_once):
            part = round._replace(clients=round.clients[at.to(round.clients.device)])
            whole = len(part.clients) == round.population
            message = tree.map_leaves(lambda leaf: leaf, served) if whole else tree.take(served, at)
            states = self._states.all_rows() if whole else self._states.rows(part.clients)
            found = self.backend.predict(algorithm, message, states, part, metric, keep=keep)
            collected.add(found.mixture, part)
            parts.append(found)
        return joined(parts, collected.mixture)

    def snapshot(self) -> Tree:
        return self._states.states

    def close(self) -> None:
        self._store = self._answered = None

    @property
    def _states(self) -> "StateStore":
        if self._store is None:
            raise RuntimeError("the engine has no clients yet; call begin() first")
        return self._store


def joined(parts: list[Predicted], mixture: Mixture) -> Predicted:
    """Join the scores of several groups of clients; a client without a predictor scores NaN."""
    judged = np.concatenate([(part.mixture.weights != 0).any(1).numpy() for part in parts])

    def column(found: Iterable[Scores]) -> Scores:
        return np.where(judged, np.concatenate(list(found)), np.nan)

    said = [part.outcomes for part in parts if part.outcomes is not None]
    return Predicted(
        Evaluation(*map(column, zip(*(part.evaluation for part in parts), strict=True))),
        mixture,
        join(said) if said else None,
    )


class _Predictors:
    """Collects predictors if they are wanted; a model that all clients share is stored once.

    Nothing is copied if the predictors of all clients are added at once.
    """

    def __init__(self, allocate: Allocate, wanted: bool) -> None:
        self._allocate, self._wanted = allocate, wanted
        self._weights: list[Tensor] = []
        self._models: StateRows | None = None
        self._whole: Mixture | None = None

    def add(self, mixture: Mixture, round: Round) -> None:
        if len(round.clients) == round.population:
            self._whole = mixture
            return
        self._weights.append(mixture.weights)
        if not self._wanted:
            return
        if self._models is None:
            self._models = StateRows(rows(mixture.models[0], round.population), self._allocate)
        first, models, at = self._models.begin[0], mixture.models, round.clients.cpu()
        other = torch.stack([~(model == first).all() for model in models])
        self._models.write(at[other], models[other])

    @property
    def mixture(self) -> Mixture:
        """The predictors of all clients; without models unless these were wanted."""
        if self._whole is not None:
            return self._whole
        weights = torch.cat(self._weights)
        if self._models is None:
            return Mixture(weights, weights.new_zeros(*weights.shape, 0))
        unlike = len(self._models.written) > 0
        return Mixture(weights, self._models.dense() if unlike else self._models.begin)


# ---- the clients' states between rounds ----------------------------------------------------------


class StateStore:
    """The states of all clients, one row per client; a round reads and writes some rows.

    Clients whose states were never written share the initial row.
    """

    def __init__(self, states: Tree, allocate: Allocate) -> None:
        self.states: Tree = tree.walk(lambda rows: StateRows(rows, allocate), states)

    def rows(self, clients: Tensor) -> Tree:
        return tree.take(self.states, clients)

    def all_rows(self) -> Tree:
        """The states of all clients without a copy; read only."""
        return tree.map_leaves(lambda leaf: leaf, self.states)

    def put(self, clients: Tensor, rows: Tree) -> None:
        tree.walk(lambda held, new: held.write(clients, new), self.states, rows)

    def view(self) -> Any:
        """A lazy view of all states: an array is assembled when its field is read."""
        return _viewed(self.states)


def in_memory(device: torch.device) -> Allocate:
    """An allocator of tensors in the memory of a device."""

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return allocate


def _viewed(states: Tree) -> Any:
    if isinstance(states, StateRows):
        return states.dense()
    return tuple(map(_viewed, states)) if type(states) is tuple else _View(states)


class _View:
    def __init__(self, states: Tree) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return _viewed(getattr(self._states, name))
