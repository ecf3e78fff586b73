"""Spreads the clients of a round over a Ray cluster; each task computes its clients like ``loop``.

The clients are divided into groups. A group's shards are put into Ray's object store once per run,
and so are the problem and the algorithm; a task of a round receives the rows of its clients. Ray
starts a task again if its worker is lost. If the worker is lost again, the clients of the task are
submitted once more, each in a task of its own, so that a client which ends its process takes no
other client with it. The numbers do not depend on the groups, the number of workers or lost
workers: they are those of the loop engine with the same ``threads``.

The cluster is the one that ``ray.init()`` finds: the environment's RAY_ADDRESS, else a cluster that
runs on this machine, else one that is started here and ends with this process.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import Rejection
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..errors import ConfigError, EngineError
from . import ray_tasks
from .base import Computed, Predicted
from .loop import stacked, together
from .ray_tasks import Rows, Stage, Told, connected, failure, tensors
from .simulator import joined

RETRIES = 1  # how often Ray starts a task again whose worker was lost
GROUPS_PER_WORKER = 4  # more groups than workers, because clients differ in size


class RayBackend:
    """Computes the clients of a round in the tasks of a Ray cluster.

    A task takes ``threads`` CPUs of the cluster, by default one.
    """

    def __init__(self, problem: Problem, shards: Shards, *, threads: int | None = None) -> None:
        if problem.device.type != "cpu":
            raise ConfigError(
                f"engine.device: found '{problem.device}', but the engine 'ray' computes clients "
                "on CPUs; use engine.device = 'cpu', or engine.name = 'vmap' for a GPU"
            )
        self._ray = connected()
        self.problem, self.shards, self.threads = problem, shards, threads or 1
        cpus = self._ray.cluster_resources().get("CPU", 1)
        workers = max(1, int(cpus) // self.threads)
        self._groups = grouped(shards.splits["train"].sizes, GROUPS_PER_WORKER * workers)
        self._held = [self._ray.put(shards.of(*group)) for group in self._groups]
        options = {"num_cpus": self.threads, "max_retries": RETRIES}
        self._task = self._ray.remote(**options)(ray_tasks.work)
        self._told: tuple[AnyAlgorithm, Any] | None = None

    @property
    def choice(self) -> dict[str, Any]:
        """The resolved settings."""
        return {"engine": "ray", "threads": self.threads}

    @property
    def forms(self) -> tuple[Form, ...]:
        """Empty: every call is executed as it is written."""
        return ()

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, one row per client."""
        found = self._spread(algorithm, received, states, round, ray_tasks.local)
        return stacked([tensors(reply) for reply in self._complete(found, round)])

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """Uploads and new states; a client whose worker was lost every time is rejected."""
        found = self._spread(algorithm, received, states, round, ray_tasks.local)
        replies = [tensors(found[i]) for i in sorted(found)]
        clients = enumerate(round.clients.tolist())
        lost = tuple(Rejection(client, "lost") for i, client in clients if i not in found)
        made = together(replies, round, stacked)
        return made._replace(rejected=(*lost, *made.rejected))

    def predict(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        states: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = True,
    ) -> Predicted:
        """The scores of the predictors, and the predictors on the CPU."""
        stage = partial(ray_tasks.predict, metric=metric, keep=keep)
        found = self._complete(self._spread(algorithm, served, states, round, stage), round)
        parts = [part._replace(mixture=tensors(part.mixture)) for part in found]
        mixture: Mixture = tree.concat([part.mixture for part in parts])
        return joined(parts, mixture)

    def _complete(self, found: dict[int, Any], round: Round) -> list[Any]:
        """The results of all clients in the round's order; an error if one was lost."""
        for position, client in enumerate(round.clients.tolist()):
            if position not in found:
                raise EngineError(
                    f"client '{self.problem.clients[client]}' of round {round.index} was lost "
                    f"{2 * (RETRIES + 1)} times: its Ray worker ended; see Ray's logs on the "
                    "cluster's nodes (often a node without enough memory)"
                )
        return [found[position] for position in range(len(round.clients))]

    def _spread(
        self, algorithm: AnyAlgorithm, message: Tree, states: Tree, round: Round, stage: Stage
    ) -> dict[int, Any]:
        """One result per client, by its position in the round; lost clients are missing."""
        asked = {client: i for i, client in enumerate(round.clients.tolist())}
        parts = [(g, [asked[k] for k in m if k in asked]) for g, m in enumerate(self._groups)]
        found: dict[int, Any] = {}
        for _ in range(2):  # groups; then the clients of lost tasks one by one
            tasks = []
            for group, at in parts:
                if at:
                    rows = Rows.at(at, message, states, round)
                    tasks.append((self._submit(algorithm, stage, group, rows), group, at))
            parts = []
            for task, group, at in tasks:
                results = self._result(task)
                if results is None:
                    parts += [(group, [i]) for i in at]
                else:
                    found |= zip(at, results, strict=True)
        return found

    def _submit(self, algorithm: AnyAlgorithm, stage: Stage, group: int, rows: Rows) -> Any:
        if self._told is None or self._told[0] is not algorithm:
            told = Told.of((self.problem, algorithm))
            self._told = algorithm, self._ray.put(told)
        return self._task.remote(self._told[1], self._held[group], self.threads, stage, rows)

    def _result(self, task: Any) -> list[Any] | None:
        """The results of a task; None if its worker was lost.

        After an error the other tasks of the round are left to end by themselves: Ray aborts this
        process if a task ends in the moment in which it is cancelled (Ray 2.60: "Tried to complete
        task that was not pending").
        """
        try:
            results: list[Any] = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            raise failure(error) from error
        except self._ray.exceptions.RayError:
            return None
        return results


def grouped(sizes: Sequence[int], most: int) -> list[list[int]]:
    """At most so many groups of clients, each with about as many samples.

    >>> grouped([5, 1, 9, 2], 2)
    [[2, 3], [0, 1]]
    """
    order = sorted(range(len(sizes)), key=lambda client: -sizes[client])
    count = min(most, len(order))
    return [order[first::count] for first in range(count)]
