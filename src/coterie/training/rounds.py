"""The round loop: a generator, so that its caller decides what happens between rounds.

It computes the server half of a method. An engine owns the clients.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import random, tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, check_run, round_of, single
from ..core.answers import Outcomes
from ..core.batches import EVALUATION_BLOCK
from ..core.locations import check_rows, checked_init, checked_matrix, checked_server
from ..core.messages import Rejection
from ..core.metrics import mean_known, stalled
from ..core.policies import declared, governed, is_private
from ..core.privacy import When
from ..core.problem import Problem
from ..core.tree import Bank, Tree
from ..engines.base import Engine, Evaluation, Predicted
from ..engines.evaluation import hits, outputs
from ..storage import faults
from .guard import Guard, aggregate, remember, screen

DEFAULT_GUARD = Guard()
# With more clients than this, the collaboration matrix is computed in evaluated rounds only: with
# ten thousand clients it has a hundred million entries.
MATRIX_EVERY_ROUND = 500


Owners = dict[int, frozenset[int]]  # by client, the others whose own models it was sent


class Traffic(NamedTuple):
    """The bytes of one round, summed over all clients, measured from the messages."""

    down: int
    up: int
    serve: int  # sent only for evaluation


class Record(NamedTuple):
    """The results of one round. ``server`` and ``states`` are read only.

    The states are valid until the next round begins.
    """

    index: int  # type: ignore[assignment]
    clients: tuple[int, ...]
    traffic: Traffic
    rejected: tuple[Rejection, ...]
    seconds: float
    evaluation: Evaluation | None
    collaboration: Any  # [K, K] an array; a scipy.sparse.csr_array for many clients; or None
    mixture: Mixture | None  # every client's predictor, in the last round
    server: Tree
    accepted: Tensor  # [K] the largest norm of a vector accepted from each client, for the guard
    snapshot: Callable[[], Tree]  # the clients' states, as the engine holds them
    observed: dict[str, Any] = {}  # noqa: RUF012  # what the method adds to the round's line
    outcomes: Outcomes | None = None  # the answer to every test sample, in the last round
    digests: tuple[str, ...] | None = None  # of every predictor, where models stay at the clients
    federated: float | None = None  # the global model's accuracy on the federated test set
    raw: Owners = {}  # noqa: RUF012  # whose own models or samples each client was sent

    @property
    def states(self) -> Tree:
        """The clients' states, one row per client."""
        return tree.map_leaves(lambda leaf: leaf, self.snapshot())


class Begin(NamedTuple):
    """Where a run continues: the server and every client's state after some rounds."""

    rounds: int
    server: Tree
    states: Tree
    accepted: Tensor | None = None  # as in Record


def train(
    algorithm: AnyAlgorithm,
    problem: Problem,
    engine: Engine,
    rounds: int,
    *,
    participation: float = 1.0,
    evaluate_every: int = 1,
    metric: str = "accuracy",
    guard: Guard = DEFAULT_GUARD,
    patience: int | None = None,
    validated: Sequence[float] = (),
    begin: Begin | None = None,
) -> Iterator[Record]:
    """Train for ``rounds`` rounds and yield a record after each.

    The last round is always evaluated. Evaluation does not change the results, because every random
    draw is derived from the seed. Nor does stopping: with ``begin``, the state that an earlier call
    reached, the following rounds are the same.

    With ``patience`` the round is the last one in which the mean validation score has not exceeded
    its best for so many evaluations; ``validated`` are the means of those before ``begin``.
    """
    algorithm = governed(algorithm, problem)
    check_run(algorithm, problem, rounds)
    done, server, states, accepted = begin or _start(algorithm, problem)
    accepted = torch.zeros(problem.population).double() if accepted is None else accepted
    engine.begin(problem, algorithm, states)
    on = _Training(algorithm, problem, engine, metric, guard, patience)
    means = list(validated)  # validation scores of all evaluations
    for index in range(done, rounds):
        began = time.perf_counter()
        clients = participants(algorithm, problem, index, participation)
        round = round_of(problem, index, rounds, clients)
        server, accepted, traffic, rejected, raw = on.exchanged(server, accepted, round)
        found, collaboration, last = None, None, index == rounds - 1
        evaluated = last or (index + 1) % evaluate_every == 0
        if evaluated or problem.population <= MATRIX_EVERY_ROUND:
            collaboration = _weights(algorithm, engine, server, round)
        if evaluated:
            found, served, raw, last = on.judged(server, round, raw, last, means)
            traffic, rejected = traffic._replace(serve=served), (*rejected, *found.lost)
        yield Record(
            index=index,
            clients=tuple(clients.tolist()),
            traffic=traffic,
            rejected=rejected,
            seconds=time.perf_counter() - began,
            evaluation=None if found is None else found.evaluation,
            collaboration=collaboration,
            mixture=found.mixture if found is not None and last else None,
            server=server,
            accepted=accepted,
            snapshot=engine.snapshot,
            observed={**algorithm.observed(server), **_queried(algorithm, round)},
            outcomes=None if found is None else found.outcomes,
            digests=None if found is None else found.digests,
            federated=federated_accuracy(algorithm, problem, server) if evaluated else None,
            raw=raw,
        )
        if last:
            return


def owners(known: Owners, message: Tree, receivers: Tensor) -> Owners:
    """Whose own models or samples each client has, with those of one more message.

    A :class:`Bank` says whose each of its rows is; what was averaged before has no owner.
    """
    found = dict(known)
    for _, leaf in tree.flatten(message, (Bank,)):
        if isinstance(leaf, Bank):
            there = torch.where(leaf.slot >= 0, leaf.owner, -1).flatten(1).tolist()
            for client, of in zip(receivers.tolist(), there, strict=True):
                others = frozenset(owner for owner in of if owner >= 0 and owner != client)
                if others:
                    found[client] = others | found.get(client, frozenset())
    return found


def _start(algorithm: AnyAlgorithm, problem: Problem) -> Begin:
    return Begin(0, *checked_init(algorithm, algorithm.init(problem), problem.population))


def participants(
    algorithm: AnyAlgorithm, problem: Problem, index: int, participation: float
) -> Tensor:
    """The clients that take part: drawn uniformly without replacement among those with data."""
    able = problem.able
    if algorithm.traits.everybody or participation >= 1.0:
        return able
    count = max(1, math.floor(participation * len(able) + 1e-9))
    luck = random.bits(problem.seed, "participation", index, problem.keys[able])
    return able[luck.argsort(stable=True)[:count]].sort().values


class _Training(NamedTuple):
    """What stays the same in every round of a run."""

    algorithm: AnyAlgorithm
    problem: Problem
    engine: Engine
    metric: str
    guard: Guard
    patience: int | None

    def exchanged(
        self, server: Tree, accepted: Tensor, round: Round
    ) -> tuple[Tree, Tensor, Traffic, tuple[Rejection, ...], Owners]:
        """Compute one round for its clients: download, local work, guard, aggregation.

        A rejected client keeps its state; if no client is left, nothing changes.
        """
        received = self.algorithm.download(server, round)
        check_rows(self.algorithm, "download", received, len(round.clients))
        raw = owners({}, received, round.clients)
        replies = self.engine.exchange(self.algorithm, received, round)
        uploads, rejected = replies.uploads, replies.rejected
        traffic = Traffic(tree.count_bytes(received), tree.count_bytes(uploads), 0)
        round = round._replace(sent_to=round.clients)
        faults.at("round.local")
        if rejected:
            at = torch.isin(round.clients, replies.clients).nonzero().flatten()
            received = tree.take(received, at)
            round = round._replace(clients=replies.clients)
        kept, refused = screen(uploads, round, self.problem.sizes, self.guard, received, accepted)
        rejected = (*rejected, *refused)
        if refused:
            uploads = tree.take(uploads, kept)
            round = round._replace(clients=round.clients[kept])
        if len(round.clients):
            made, inside, spoilers = aggregate(self.algorithm, server, uploads, round, self.guard)
            server = checked_server(self.algorithm, made, server)
            faults.at("round.aggregated")
            if spoilers:
                uploads = tree.take(uploads, inside)
                round = round._replace(clients=round.clients[inside])
            accepted = remember(accepted, uploads, round.clients)
            rejected = (*rejected, *spoilers)
        self.engine.commit(round.clients)
        return server, accepted, traffic, rejected, raw

    def judged(
        self, server: Tree, round: Round, raw: Owners, last: bool, means: list[float]
    ) -> tuple[Predicted, int, Owners, bool]:
        """Evaluate a round, as :meth:`evaluated` does, and tell whether it is the last one."""
        found, served, seen = self.evaluated(server, round, raw, keep=last)
        means.append(float(mean_known(found.evaluation.val)))
        if last or not self.patience or stalled(means, self.metric) < self.patience:
            return found, served, seen, last
        again, served, seen = self.evaluated(server, round, raw, keep=True)
        return again._replace(evaluation=found.evaluation), served, seen, True

    def evaluated(
        self, server: Tree, round: Round, raw: Owners, *, keep: bool
    ) -> tuple[Predicted, int, Owners]:
        """Evaluate all clients' predictors after the round; also the bytes and models sent for it.

        There are no validation scores on data that was trained on.
        """
        everybody = torch.arange(round.population, device=round.clients.device)
        after = round._replace(index=round.index + 1, clients=everybody)
        served = self.algorithm.serve(server, after)
        check_rows(self.algorithm, "serve", served, round.population)
        found = self.engine.evaluate(self.algorithm, served, after, self.metric, keep=keep)
        told, unseen = found.evaluation, np.array(self.problem.counts.validated)
        val, loss = (np.where(unseen, column, np.nan) for column in (told.val, told.val_loss))
        found = found._replace(evaluation=told._replace(val=val, val_loss=loss))
        return found, tree.count_bytes(served), owners(raw, served, everybody)


def federated_accuracy(algorithm: AnyAlgorithm, problem: Problem, server: Tree) -> float | None:
    """The global model's accuracy in percent on the federated test set, which no client holds.

    None without such a test set, or without a global model.
    """
    held = problem.federated
    model = None if held is None else algorithm.global_model(server)
    if held is None or model is None:
        return None
    split = tree.row(held.splits["test"].rows([0]), 0)
    right, mixture = torch.zeros((), dtype=torch.int64, device=held.device), single(model)
    positions = held.y[:1].numel()  # targets of a sample
    for block in split.samples.split(max(1, EVALUATION_BLOCK // positions)):
        predicted = outputs(problem.model, mixture, held.inputs(block), regression=False)
        right = right + hits(predicted, held.y[block]).sum()
    return 100.0 * int(right) / held.y.numel()


def _queried(algorithm: AnyAlgorithm, round: Round) -> dict[str, Any]:
    """The gradients that every participant took, where they are private."""
    if not is_private(algorithm):
        return {}
    method, found = declared(algorithm)
    when = When(round.index, round.horizon, round.population)
    return {"queries": [list(query) for query in found.of(method, when)]}


def _weights(algorithm: AnyAlgorithm, engine: Engine, server: Tree, round: Round) -> Any:
    weights = algorithm.collaboration(server, engine.shown(algorithm), round)
    return _matrix(checked_matrix(algorithm, weights))


def _matrix(A: Tensor | None) -> Any:
    """Copy a collaboration matrix: it may be a view of states, which the next round overwrites.

    A matrix of many clients is stored as a sparse array, and converted a few rows at a time.
    """
    if A is None:
        return None
    if len(A) <= MATRIX_EVERY_ROUND:
        return A.to("cpu", torch.float64, copy=True).numpy()
    from scipy.sparse import csr_array, vstack

    blocks = (csr_array(rows.to("cpu", torch.float64).numpy()) for rows in A.split(256))
    return vstack(list(blocks), format="csr")
