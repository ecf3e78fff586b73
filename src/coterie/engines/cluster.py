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

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import Rejection, Reply
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Bank, Tree
from ..errors import ConfigError, CoterieError, EngineError
from . import process
from .base import Computed, Predicted
from .loop import LoopBackend, stacked, together
from .simulator import joined

ADDRESS = "RAY_ADDRESS"  # the variable of the environment that Ray's users set
RETRIES = 1  # how often Ray starts a task again whose worker was lost
GROUPS_PER_WORKER = 4  # more groups than workers, because clients differ in size


def package() -> Any:
    """The package ray; without it, the error names the extra that brings it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "engine.name or run.spread is 'ray', but the package ray is not installed; install it "
            "with: pip install 'coterie[ray]', or use engine.name = 'loop' without run.spread, "
            "which gives the same numbers"
        ) from error
    return ray


def connected() -> Any:
    """The package ray, connected to a cluster; the signal handlers stay as they are."""
    ray = package()
    if ray.is_initialized():
        return ray
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise EngineError(
            f"no Ray cluster could be reached ({error}); RAY_ADDRESS is "
            f"{os.environ.get(ADDRESS, 'not set')}; expected the address of a cluster that runs, "
            "or no RAY_ADDRESS to start one here"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init sets its own
    return ray


def described() -> str:
    """The version of Ray, and the cluster that a run would use."""
    address = os.environ.get(ADDRESS)
    where = "the cluster on this machine, or one that is started for the run"
    return f"ray {package().__version__}, {f'RAY_ADDRESS={address}' if address else where}"


def failure(error: Any) -> Exception:
    """The exception that a task raised, as it would have been raised in this process."""
    if isinstance(error.cause, CoterieError):
        return error.cause
    return EngineError(f"a Ray worker failed: {error}")


# ---- what is sent --------------------------------------------------------------------------------

# Everything is pickled: a Ray cluster is one trust domain, and who can reach it can run code on it.


class Told(NamedTuple):
    """What several tasks have in common, pickled once."""

    path: list[str]  # sys.path of this process
    argv: list[str]  # the command, which the folder of a run names
    pickled: bytes

    @classmethod
    def of(cls, values: Any) -> "Told":
        """Pickle the values; classes that are not in a module that can be imported go with them."""
        try:
            return cls(list(sys.path), list(sys.argv), package().cloudpickle.dumps(values))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EngineError(
                "Ray computes in other processes, which cannot be told of this method or network "
                f"({error}); let it hold nothing but numbers, tensors and modules, or use "
                "engine.name = 'loop' without run.spread"
            ) from error

    def load(self) -> Any:
        """The values, in a task; modules are also looked for where the sender found them."""
        sys.path += [place for place in self.path if place not in sys.path]
        sys.argv[:] = self.argv
        try:
            return pickle.loads(self.pickled)
        except (ImportError, AttributeError) as error:
            raise EngineError(
                f"a Ray worker cannot load what it was sent ({error}); the same coterie, and the "
                "modules of your own methods and networks, must be importable on every node"
            ) from error


class Packed(NamedTuple):
    """A tree of tensors on its way to a task, which may first have to be told of its types."""

    leaves: list[Any]  # arrays of numpy
    like: bytes  # the pickled tree without its leaves

    @classmethod
    def of(cls, message: Tree) -> "Packed":
        """Pack a tree."""
        leaves = [leaf for _, leaf in tree.flatten(arrays(message))]
        like = tree.unflatten(message, [None] * len(leaves))
        return cls(leaves, package().cloudpickle.dumps(like))

    def load(self) -> Tree:
        """The tree, in a task."""
        return tensors(tree.unflatten(pickle.loads(self.like), self.leaves))


class Rows(NamedTuple):
    """The part of a round that one task computes."""

    round: Round  # of the clients of this task
    message: Packed  # one row per client
    states: Packed

    @classmethod
    def at(cls, at: list[int], message: Tree, states: Tree, round: Round) -> "Rows":
        """The rows of some positions of a round; of a Bank, only the models of their slots."""
        rows = torch.tensor(at)
        part = round._replace(clients=round.clients[rows], aux=None)
        leaves = [_needed(leaf) for _, leaf in tree.flatten(tree.take(message, rows), (Bank,))]
        message = tree.unflatten(message, leaves, (Bank,))
        return cls(part, Packed.of(message), Packed.of(tree.take(states, rows)))


# Computes one result per client from the messages and the states of the round's clients.
Stage = Callable[[LoopBackend, AnyAlgorithm, Tree, Tree, Round], list[Any]]


def _needed(leaf: Tensor | Bank) -> Tensor | Bank:
    if not isinstance(leaf, Bank):
        return leaf
    used = leaf.slot[leaf.slot >= 0].unique()
    models = leaf.models[used] if len(used) else leaf.models.new_zeros(1, leaf.models.shape[1])
    slot = torch.searchsorted(used, leaf.slot.contiguous())
    return Bank(models, torch.where(leaf.slot >= 0, slot, -1), leaf.owner)


def arrays(message: Tree) -> Tree:
    """A tree with arrays of numpy, which Ray sends without a copy, in place of tensors.

    A pickled tensor would bring all the memory with it of which it is a part.
    """
    return tree.unflatten(message, [_array(leaf) for _, leaf in tree.flatten(message)])


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    no_such_array = leaf.dtype == torch.bfloat16
    return leaf.detach().clone() if no_such_array else leaf.detach().numpy()


def tensors(message: Tree) -> Tree:
    """The tree that :func:`arrays` was given; arrays are copied, because Ray's are read-only."""
    leaves = [leaf for _, leaf in tree.flatten(message)]
    made = [torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for x in leaves]
    return tree.unflatten(message, made)


# ---- in a worker ---------------------------------------------------------------------------------


def work(told: Told, shards: Shards, threads: int, stage: Stage, rows: Rows) -> list[Any]:
    """The task: one result per client."""
    problem, algorithm = told.load()
    backend = LoopBackend(problem, shards, threads=threads)
    with process.settings(threads=threads):
        return stage(backend, algorithm, rows.message.load(), rows.states.load(), rows.round)


def local(
    backend: LoopBackend, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
) -> list[Reply]:
    """The clients' replies, with arrays of numpy."""
    return [arrays(reply) for reply in backend.replies(algorithm, received, states, round)]


def predict(
    backend: LoopBackend,
    algorithm: AnyAlgorithm,
    served: Tree,
    states: Tree,
    round: Round,
    *,
    metric: str,
    keep: bool,
) -> list[Predicted]:
    """The clients' predictors, one by one, with arrays of numpy."""
    found = []
    for at in torch.arange(len(round.clients)).split(1):
        one = round._replace(clients=round.clients[at])
        row, state = tree.take(served, at), tree.take(states, at)
        part = backend.predict(algorithm, row, state, one, metric, keep=keep)
        found.append(part._replace(mixture=arrays(part.mixture)))
    return found


# ---- the backend ---------------------------------------------------------------------------------


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
        self._task = self._ray.remote(**options)(work)
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
        found = self._spread(algorithm, received, states, round, local)
        return stacked([tensors(reply) for reply in self._complete(found, round)])

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """Uploads and new states; a client whose worker was lost every time is rejected."""
        found = self._spread(algorithm, received, states, round, local)
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
        stage = partial(predict, metric=metric, keep=keep)
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
