"""The round loop: a generator, so that whoever drives it decides what happens between rounds."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import draws, faults, tree
from .algorithm import AnyAlgorithm, Mixture, Round, round_of
from .buffers import governed
from .engines.base import Engine, Evaluation
from .guard import Guard, Rejection, screen
from .task import Task
from .tree import Tree


class Traffic(NamedTuple):
    """Bytes of one round, all clients together, measured from the messages."""

    down: int
    up: int
    serve: int  # sent only to predict with


class Record(NamedTuple):
    """What one round left behind. ``server`` and ``states`` are read only."""

    index: int  # type: ignore[assignment]
    clients: tuple[int, ...]
    traffic: Traffic
    rejected: tuple[Rejection, ...]
    seconds: float
    evaluation: Evaluation | None
    collaboration: NDArray[np.float64] | None
    mixture: Mixture | None  # every client's predictor, in the last round
    server: Tree
    states: Tree


class Begin(NamedTuple):
    """Where a run goes on: the server and every client's state after some rounds."""

    rounds: int
    server: Tree
    states: Tree


DEFAULT_GUARD = Guard()


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
) -> Iterator[Record]:
    """Train for ``rounds`` rounds and yield a record after each.

    The last round is always evaluated. Evaluating changes nothing: every draw is derived. So does
    stopping: ``begin`` is where an earlier call got to, and the rounds after it are the same.
    """
    algorithm = governed(algorithm, task)
    done, server, states = begin or Begin(0, *algorithm.init(task))
    states = tree.move(tree.map_leaves(torch.clone, states), engine.state_device)
    for index in range(done, rounds):
        began = time.perf_counter()
        clients = participants(algorithm, task, index, participation)
        round = round_of(task, index, rounds, clients)
        server, states, traffic, rejected = _exchange(
            algorithm, engine, server, states, round, guard
        )
        last = index == rounds - 1
        evaluation = mixture = None
        collaboration = _matrix(algorithm.collaboration(server, states, round))
        if last or (index + 1) % evaluate_every == 0:
            evaluation, mixture, served = _evaluate(
                algorithm, engine, server, states, round, metric
            )
            traffic = traffic._replace(serve=served)
        yield Record(
            index,
            tuple(clients.tolist()),
            traffic,
            rejected,
            time.perf_counter() - began,
            evaluation,
            collaboration,
            mixture if last else None,
            server,
            states,
        )


def participants(algorithm: AnyAlgorithm, task: Task, index: int, participation: float) -> Tensor:
    """Who takes part: uniform without replacement among those who have data (spec 1.5)."""
    able = (task.sizes > 0).nonzero().flatten()
    if algorithm.everybody or participation >= 1.0:
        return able
    count = max(1, math.floor(participation * len(able) + 1e-9))
    luck = draws.bits(task.seed, "participation", index, task.keys[able])
    return able[luck.argsort(stable=True)[:count]].sort().values


def _exchange(
    algorithm: AnyAlgorithm, engine: Engine, server: Tree, states: Tree, round: Round, guard: Guard
) -> tuple[Tree, Tree, Traffic, tuple[Rejection, ...]]:
    """Download, local work, guard, aggregation: one round for everybody who takes part.

    Whoever is rejected keeps its state; where nobody is left nothing changes.
    """
    received = algorithm.download(server, round)
    before = tree.take(states, round.clients)
    uploads, after, answered, refused = engine.exchange(algorithm, received, before, round)
    traffic = Traffic(tree.count_bytes(received), tree.count_bytes(uploads), 0)
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
        server = algorithm.aggregate(server, uploads, round)
        faults.at("round.aggregated")
        states = tree.map_leaves(
            lambda old, new: old.index_copy_(0, round.clients.to(old.device), new), states, after
        )
    return server, states, traffic, (*refused, *rejected)


def _evaluate(
    algorithm: AnyAlgorithm, engine: Engine, server: Tree, states: Tree, round: Round, metric: str
) -> tuple[Evaluation, Mixture, int]:
    """All clients' predictors after the round, and what they had to fetch for it."""
    everybody = torch.arange(round.population, device=round.clients.device)
    after = round._replace(index=round.index + 1, clients=everybody)
    served = algorithm.serve(server, after)
    evaluation, mixture = engine.predict(algorithm, served, states, after, metric)
    judged = (mixture.weights != 0).any(1).numpy()  # who has no predictor is in no metric
    scores = Evaluation(*(np.where(judged, column, np.nan) for column in evaluation))
    return scores, mixture, tree.count_bytes(served)


def _matrix(A: Tensor | None) -> NDArray[np.float64] | None:
    # a copy: the next round writes into the states that this may be a view of
    return None if A is None else A.to("cpu", torch.float64, copy=True).numpy()
