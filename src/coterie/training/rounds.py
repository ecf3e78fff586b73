"""The round loop: a generator, so that whoever drives it decides what happens between rounds."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import paired, random, tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, check_run, round_of
from ..core.algorithm import rows as rows_of
from ..core.buffers import governed
from ..core.paired import Outcomes
from ..core.rows import Allocate, StateRows
from ..core.task import Task
from ..core.tree import Tree
from ..engines.base import Engine, Evaluation
from ..storage import faults
from .guard import Guard, Rejection, aggregate, screen
from .states import in_files, in_memory, opened, put, shelve


class Traffic(NamedTuple):
    """Bytes of one round, all clients together, measured from the messages."""

    down: int
    up: int
    serve: int  # sent only to predict with


class Record(NamedTuple):
    """What one round left behind. ``server`` and ``states`` are read only.

    States are as the round left them until the next one begins.
    """

    index: int  # type: ignore[assignment]
    clients: tuple[int, ...]
    traffic: Traffic
    rejected: tuple[Rejection, ...]
    seconds: float
    evaluation: Evaluation | None
    collaboration: Any  # [K, K] an array, or a scipy.sparse.csr_array of many clients; or None
    mixture: Mixture | None  # every client's predictor, in the last round
    server: Tree
    kept: Tree  # the clients' states, on shelves
    observed: dict[str, Any] = {}  # noqa: RUF012  # what the method adds to the round's line
    outcomes: Outcomes | None = None  # every answer to a test sample, in the last round

    @property
    def states(self) -> Tree:
        """The clients' states, a row each."""
        return tree.map_leaves(lambda leaf: leaf, self.kept)


class Begin(NamedTuple):
    """Where a run goes on: the server and every client's state after some rounds."""

    rounds: int
    server: Tree
    states: Tree


DEFAULT_GUARD = Guard()
CPU = torch.device("cpu")
JUDGED_BYTES, JUDGED_CLIENTS = 1 << 28, 100  # predictors in memory together, or these at least
MATRIX_EVERY_ROUND = 500  # clients; where there are more, who works with whom is looked at only in
# evaluated rounds: with ten thousand it is a hundred million numbers


def run(
    algorithm: AnyAlgorithm,
    task: Task,
    engine: Engine,
    rounds: int,
    *,
    participation: float = 1.0,
    evaluate_every: int = 1,
    metric: str = "accuracy",
    guard: Guard = DEFAULT_GUARD,
    begin: Begin | None = None,
    scratch: Path | None = None,
) -> Iterator[Record]:
    """Train for ``rounds`` rounds and yield a record after each.

    The last round is always evaluated. Evaluating changes nothing: every draw is derived. So does
    stopping: ``begin`` is where an earlier call got to, and the rounds after it are the same.
    States that are kept on disk lie in the folder ``scratch``, or where temporary files go.
    """
    algorithm = governed(algorithm, task)
    check_run(algorithm, task, rounds)
    done, server, states = begin or Begin(0, *algorithm.init(task))
    on_disk = engine.choice["state"] == "disk"
    states = shelve(states, in_files(scratch) if on_disk else in_memory(engine.state_device))
    for index in range(done, rounds):
        began = time.perf_counter()
        clients = participants(algorithm, task, index, participation)
        round = round_of(task, index, rounds, clients)
        server, traffic, rejected = _exchange(algorithm, engine, server, states, round, guard)
        last = index == rounds - 1
        evaluation = mixture = collaboration = outcomes = None
        evaluated = last or (index + 1) % evaluate_every == 0
        if evaluated or task.population <= MATRIX_EVERY_ROUND:
            collaboration = _matrix(algorithm.collaboration(server, opened(states), round))
        if evaluated:
            predictors = Predictors(in_files(scratch) if on_disk else in_memory(CPU), last)
            evaluation, served, outcomes = _evaluate(
                algorithm, engine, server, states, round, metric, predictors
            )
            mixture, traffic = predictors.mixture, traffic._replace(serve=served)
        yield Record(
            index,
            tuple(clients.tolist()),
            traffic,
            rejected,
            time.perf_counter() - began,
            evaluation,
            collaboration,
            mixture,
            server,
            states,
            algorithm.observed(server),
            outcomes,
        )


def participants(algorithm: AnyAlgorithm, task: Task, index: int, participation: float) -> Tensor:
    """Who takes part: uniform without replacement among those who have data (spec 1.5)."""
    able = (task.sizes > 0).nonzero().flatten()
    if algorithm.everybody or participation >= 1.0:
        return able
    count = max(1, math.floor(participation * len(able) + 1e-9))
    luck = random.bits(task.seed, "participation", index, task.keys[able])
    return able[luck.argsort(stable=True)[:count]].sort().values


def _exchange(
    algorithm: AnyAlgorithm, engine: Engine, server: Tree, states: Tree, round: Round, guard: Guard
) -> tuple[Tree, Traffic, tuple[Rejection, ...]]:
    """Download, local work, guard, aggregation: one round for everybody who takes part.

    The new states are put on their shelves. Whoever is rejected keeps its state; where nobody is
    left nothing changes.
    """
    received = algorithm.download(server, round)
    before = tree.take(states, round.clients)
    uploads, after, answered, refused = engine.exchange(algorithm, received, before, round)
    traffic = Traffic(tree.count_bytes(received), tree.count_bytes(uploads), 0)
    round = round._replace(sent_to=round.clients)
    faults.at("round.local")
    if refused:
        at = torch.isin(round.clients, answered).nonzero().flatten()
        received, before = tree.take(received, at), tree.take(before, at)
        round = round._replace(clients=answered)
    sizes = engine.task.sizes
    kept, rejected = screen(uploads, round, sizes, guard, (received, before))
    if rejected:
        uploads, after = tree.take(uploads, kept), tree.take(after, kept)
        round = round._replace(clients=round.clients[kept])
    if len(round.clients):
        server, inside, spoilers = aggregate(algorithm, server, uploads, round, guard)
        faults.at("round.aggregated")
        if spoilers:
            after, round = tree.take(after, inside), round._replace(clients=round.clients[inside])
        put(states, round.clients, after)
        rejected = (*rejected, *spoilers)
    return server, traffic, (*refused, *rejected)


def _evaluate(
    algorithm: AnyAlgorithm,
    engine: Engine,
    server: Tree,
    states: Tree,
    round: Round,
    metric: str,
    predictors: "Predictors",
) -> tuple[Evaluation, int, Outcomes | None]:
    """How good all clients' predictors are after the round, what they had to fetch, what they said.

    Their answers to test samples are kept where the predictors are.
    """
    everybody = torch.arange(round.population, device=round.clients.device)
    after = round._replace(index=round.index + 1, clients=everybody)
    served, scores, said = algorithm.serve(server, after), [], []
    start = engine.task.start
    at_once = max(JUDGED_CLIENTS, JUDGED_BYTES // (start.numel() * start.element_size()))
    for block in everybody.split(at_once):
        part = after._replace(clients=block)
        message, rows = _some(served, part), _some(states, part)
        keep = predictors.wanted
        found, mixture, outcomes = engine.predict(algorithm, message, rows, part, metric, keep=keep)
        said += [outcomes] if outcomes is not None else []
        judged = (mixture.weights != 0).any(1).numpy()  # who has no predictor is in no metric
        scores.append([np.where(judged, column, np.nan) for column in found])
        predictors.add(mixture, part)
    whole = Evaluation(*map(np.concatenate, zip(*scores, strict=True)))
    every = paired.join(said) if said else None
    return _validated(whole, engine.task), tree.count_bytes(served), every


def _validated(found: Evaluation, task: Task) -> Evaluation:
    """The same without validation scores on data that was trained on."""
    unseen = np.array(task.unseen_validation)
    val, loss = (np.where(unseen, column, np.nan) for column in (found.val, found.val_loss))
    return found._replace(val=val, val_loss=loss)


def _some(of_all: Tree, round: Round) -> Tree:
    """The rows of a round's clients; no copy where they are everybody."""
    if len(round.clients) == round.population:
        return tree.map_leaves(lambda leaf: leaf, of_all)
    return tree.take(of_all, round.clients)


class Predictors:
    """Collects everybody's predictors, where they are wanted: a model that all have is held once.

    Nothing is copied where they come at once.
    """

    def __init__(self, room: Allocate, wanted: bool) -> None:
        self._room, self.wanted = room, wanted
        self._weights: list[Tensor] = []
        self._models: StateRows | None = None
        self.mixture: Mixture | None = None

    def add(self, mixture: Mixture, round: Round) -> None:
        """The predictors of a round's clients."""
        if not self.wanted:
            return
        if len(round.clients) == round.population:
            self.mixture = mixture
            return
        if self._models is None:
            self._models = StateRows(rows_of(mixture.models[0], round.population), self._room)
        first, models, at = self._models.begin[0], mixture.models, round.clients.cpu()
        other = torch.stack([~(model == first).all() for model in models])
        self._models.write(at[other], models[other])
        self._weights.append(mixture.weights)
        if sum(map(len, self._weights)) == round.population:
            unlike = len(self._models.written) > 0
            all_of = self._models.dense() if unlike else self._models.begin
            self.mixture = Mixture(torch.cat(self._weights), all_of)


def _matrix(A: Tensor | None) -> Any:
    """A copy for people to look at: the next round writes into the states this may be a view of.

    Many clients' is held by its non-zero entries, and converted a few rows at a time.
    """
    if A is None:
        return None
    if len(A) <= MATRIX_EVERY_ROUND:
        return A.to("cpu", torch.float64, copy=True).numpy()
    from scipy.sparse import csr_array, vstack

    blocks = (csr_array(rows.to("cpu", torch.float64).numpy()) for rows in A.split(256))
    return vstack(list(blocks), format="csr")
