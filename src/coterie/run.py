"""The round loop: a generator, so that whoever drives it decides what happens between rounds."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import draws, tree
from .algorithm import AnyAlgorithm, Mixture, Round, round_of
from .engines.base import Engine, Evaluation
from .guard import Rejection, screen
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


def run(
    algorithm: AnyAlgorithm,
    task: Task,
    engine: Engine,
    rounds: int,
    *,
    participation: float = 1.0,
    evaluate_every: int = 1,
    metric: str = "accuracy",
) -> Iterator[Record]:
    """Train for ``rounds`` rounds and yield a record after each.

    The last round is always evaluated. Evaluating changes nothing: every draw is derived.
    """
    server, states = algorithm.init(task)
    states = tree.move(tree.map_leaves(torch.clone, states), engine.state_device)
    for index in range(rounds):
        began = time.perf_counter()
        clients = participants(algorithm, task, index, participation)
        round = round_of(task, index, rounds, clients)
        server, states, traffic, rejected = _exchange(algorithm, engine, server, states, round)
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
    algorithm: AnyAlgorithm, engine: Engine, server: Tree, states: Tree, round: Round
) -> tuple[Tree, Tree, Traffic, tuple[Rejection, ...]]:
    """Download, local work, guard, aggregation: one round for everybody who takes part."""
    received = algorithm.download(server, round)
    before = tree.take(states, round.clients)
    uploads, after = engine.local(algorithm, received, before, round)
    traffic = Traffic(tree.count_bytes(received), tree.count_bytes(uploads), 0)
    kept, rejected = screen(uploads, round)
    if rejected:
        uploads, after = tree.take(uploads, kept), tree.take(after, kept)
        round = round._replace(clients=round.clients[kept])
    if len(round.clients):
        server = algorithm.aggregate(server, uploads, round)
        states = tree.map_leaves(
            lambda old, new: old.index_copy_(0, round.clients.to(old.device), new), states, after
        )
    return server, states, traffic, rejected


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
    return None if A is None else A.to("cpu", torch.float64).numpy()
