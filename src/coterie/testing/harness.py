"""Puts a method on a small federation in memory, runs it, and compares what comes out.

The laws call only what is here, so that a change of the seam (tasks, engines, records) changes this
file and no law.

The federation has five clients in two hidden groups that read the labels differently. No two hold
equally many samples; client 3 holds three, fewer than a batch; client 1 has no validation data.
Samples are pictures ``[1, 6, 6]`` of three classes. All numbers are float64.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import tree
from ..core.algorithm import AnyAlgorithm, Mixture, Round, check_run, round_of
from ..core.batches import shape_of, views
from ..core.calls import Clock
from ..core.client import Client
from ..core.optim import Recipe
from ..core.rows import RowTable, StateRows, dense
from ..core.tree import Tree, flatten, row, unflatten
from ..data.federation import Dataset, Federation
from ..data.simulation import simulate
from ..engines import Engine, EngineSettings, make_engine
from ..engines.loop import LoopBackend
from ..runs import checkpoint
from ..training.guard import Guard
from ..training.rounds import Begin, Record, train

SIZES = (23, 12, 16, 3, 27)  # training samples of each client
VALIDATION, TEST = (6, 0, 6, 6, 6), 7
CLASSES, PIXELS = 3, 36
RECIPE = Recipe(lr=0.1, epochs=1, batch=10, momentum=0.5, weight_decay=1e-3)
ROUNDS = 3
ARRAYS = Tensor | RowTable | StateRows

Network = Callable[[], nn.Module]


def mlp() -> nn.Module:
    """A network with one hidden layer for the pictures of the federation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@cache
def federation(order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Federation:
    """The federation of the module's docstring, its clients listed in an order."""
    data = _pictures(sum(SIZES) + sum(VALIDATION) + len(SIZES) * TEST)
    left = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(1))
    parts: list[list[Tensor]] = [[], [], []]  # a list of indices per client, for each split
    for lengths in zip(SIZES, VALIDATION, (TEST,) * len(SIZES), strict=True):
        for split, length in zip(parts, lengths, strict=True):
            split.append(left[:length])
            left = left[length:]
    train, val, test = (tuple(split[i] for i in order) for split in parts)
    group = torch.arange(len(SIZES)) % 2
    relabel = torch.stack([torch.arange(CLASSES).roll(int(g)) for g in group])
    return Federation(
        data,
        "coterie.testing",
        tuple(f"site {i}" for i in order),
        train,
        val,
        test,
        groups=group[list(order)],
        relabel=relabel[list(order)],
    )


def _pictures(samples: int) -> Dataset:
    """Classes that are noisy versions of random pictures."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % CLASSES
    centre = torch.randn(CLASSES, 1, 6, 6, generator=generator)
    x = centre[y] + 0.7 * torch.randn(samples, 1, 6, 6, generator=generator)
    return Dataset("pictures", x.float(), y, CLASSES)


def with_other(split: str, federated: Federation, client: int | None = None) -> Federation:
    """The same federation with other samples and labels in one split, of all clients or of one."""
    lists = {"train": federated.train, "val": federated.val, "test": federated.test}[split]
    at = torch.cat(lists) if client is None else lists[client]
    data = federated.dataset
    x, y = data.x.clone(), data.y.clone()
    x[at], y[at] = x[at].flip(0) * 3 + 1, (y[at] + 1) % CLASSES
    return replace(federated, dataset=replace(data, x=x, y=y))


class Step(NamedTuple):
    """One round taken function by function."""

    round: Round  # as ``aggregate`` saw it: its clients are those who replied
    received: Tree
    uploads: Tree  # a row for each of those who replied
    server: Tree  # after the round
    states: Tree  # of all clients, after the round


class Trial:
    """A method on a federation."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        network: Network = mlp,
        federated: Federation | None = None,
        recipe: Recipe = RECIPE,
    ) -> None:
        self.algorithm, self.network = algorithm, network
        self.federation = federation() if federated is None else federated
        self._problem, self._shards, _ = simulate(
            self.federation, network, recipe, dtype=torch.float64, sharing=algorithm.traits.sharing
        )

    def unvalidated(self) -> "Trial":
        """The same where no client's validation data may choose: as if it were trained on."""
        other = self.on(self.federation)
        counts = other._problem.counts
        nobody = counts._replace(validated=(False,) * self.population)
        other._problem = replace(other._problem, counts=nobody)
        return other

    @property
    def population(self) -> int:
        return self._problem.population

    @property
    def start(self) -> Tensor:
        """The common starting point ``[P]``."""
        return self._problem.start

    def on(self, federated: Federation) -> "Trial":
        """The same method on another federation."""
        return Trial(self.algorithm, self.network, federated, self._problem.recipe)

    def of(self, algorithm: AnyAlgorithm) -> "Trial":
        """Another method on the same federation."""
        return Trial(algorithm, self.network, self.federation, self._problem.recipe)

    def check(self, rounds: int = ROUNDS) -> None:
        check_run(self.algorithm, self._problem, rounds)

    def init(self) -> tuple[Tree, Tree]:
        return self.algorithm.init(self._problem)

    def round(
        self, index: int, clients: Sequence[int] | None = None, horizon: int = ROUNDS
    ) -> Round:
        """A round for some clients, or for all."""
        ids = range(self.population) if clients is None else clients
        return round_of(self._problem, index, horizon, torch.tensor(list(ids), dtype=torch.int64))

    def client(
        self, i: int, index: int, told: tuple[int, int] | None = None, horizon: int = ROUNDS
    ) -> Client:
        """Client ``i`` in round ``index``; ``told`` is another (round, horizon) on its clock."""
        view = tree.row(views(self._problem, self._shards, [i], index), 0)
        shape = shape_of(self._shards, [i], batched=False)
        clock = Clock(*(told or (index, horizon)))
        return Client(self._problem, self._shards, view, shape, clock)

    def step(
        self, server: Tree, states: Tree, round: Round, replied: Sequence[int] | None = None
    ) -> Step:
        """One round; ``replied`` are positions among its clients whose replies arrived."""
        received = self.algorithm.download(server, round)
        backend, mine = LoopBackend(self._problem, self._shards), tree.take(states, round.clients)
        uploads, kept = backend.local(self.algorithm, received, mine, round)
        at = torch.tensor(list(range(len(round.clients)) if replied is None else replied))
        narrow = round._replace(clients=round.clients[at], sent_to=round.clients)
        uploads, kept = tree.take(uploads, at), tree.take(kept, at)
        new = self.algorithm.aggregate(server, uploads, narrow)
        after = tree.map_leaves(
            lambda old, rows: old.index_copy(0, narrow.clients, rows), states, kept
        )
        return Step(narrow, received, uploads, new, after)

    def run(
        self,
        engine: str = "loop",
        *,
        rounds: int = ROUNDS,
        participation: float = 0.5,
        evaluate_every: int = ROUNDS,
        guarded: bool = True,
        begin: Begin | None = None,
    ) -> list[Record]:
        """A whole run. ``engine`` is loop, wire, vmap, or traced: vmap that replays its rounds."""
        made = self._engine(engine)
        records = train(
            self.algorithm,
            self._problem,
            made,
            rounds,
            participation=participation,
            evaluate_every=evaluate_every,
            guard=Guard(on=guarded),
            begin=begin,
        )
        try:
            return list(map(_held, records))
        finally:
            made.close()

    def _engine(self, name: str) -> Engine:
        settings = EngineSettings(name)
        if name not in ("loop", "wire"):
            settings = EngineSettings(
                "vmap",
                chunk=5 if name == "traced" else 2,  # one chunk is traced sooner than three
                threads=1,  # more would be the whole process's
                trace=name == "traced",
                compiled=False,
            )
        return make_engine(settings, self._problem, self._shards)

    def saved_and_read(self, after: Record) -> Begin:
        """Where a run can go on: a round written as a checkpoint and read again."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            server = after.server, after.accepted
            checkpoint.write(place, after.index + 1, server, after.states, {})
            stored, wrong = checkpoint.newest(place)
            if stored is None:
                raise ValueError(f"the checkpoint could not be read: {wrong}")
            first, states = self.init()
            (first, accepted), states = checkpoint.restore(stored, (first, server[1]), states)
            return Begin(stored.rounds, first, states, accepted)

    def samples(self, i: int) -> Tensor:
        """The training samples of a client as the network sees them, one row per sample."""
        x = self.federation.dataset.x[self.federation.train[i]]
        return x.flatten(1).double()


def _held(record: Record) -> Record:
    """A record with a copy of the states, which the next round overwrites."""
    states = tree.map_leaves(torch.clone, record.states)
    return record._replace(snapshot=lambda: states)


# ---- the method that the laws look at ------------------------------------------------------------


class NotApplicableError(Exception):
    """A law says nothing about this method; the message says why."""


class Begun(NamedTuple):
    """Where a round begins, and the round."""

    server: Tree
    states: Tree
    step: Step


class Case:
    """A method under test. Runs that several laws look at are made once."""

    def __init__(self, algorithm: AnyAlgorithm, network: Network) -> None:
        self.trial = Trial(algorithm, network)

    @property
    def algorithm(self) -> AnyAlgorithm:
        return self.trial.algorithm

    def again(self) -> AnyAlgorithm:
        """The same method as another object, without what the first may have kept."""
        return replace(self.algorithm)  # type: ignore[type-var]

    @cached_property
    def walk(self) -> list[Begun]:
        """Two rounds of all clients, taken function by function; arguments are copies."""
        server, states = self.trial.init()
        begun = []
        for index in range(2):
            step = self.trial.step(copied(server), copied(states), self.trial.round(index))
            begun.append(Begun(server, states, copied_step(step)))
            server, states = begun[-1].step.server, begun[-1].step.states
        return begun

    @cached_property
    def halves(self) -> list[Record] | Exception:
        """A run on the loop engine in which half of the clients take part, or why there is none."""
        try:
            return self.trial.run()
        except Exception as error:
            return error

    @cached_property
    def reference(self) -> list[Record]:
        """The run that others are compared with; of all clients if half of them cannot run."""
        if isinstance(self.halves, Exception):
            return self.full
        return self.halves

    @cached_property
    def full(self) -> list[Record]:
        """A run on the loop engine in which all clients take part."""
        return self.trial.run(participation=1.0)

    @property
    def participation(self) -> float:
        """The share of clients in :attr:`reference`."""
        return 1.0 if isinstance(self.halves, Exception) else 0.5

    @cached_property
    def batched(self) -> Record | Exception:
        """The last round of the same run on the vmap engine, or why there is none."""
        try:
            return self.trial.run("vmap", participation=self.participation)[-1]
        except Exception as error:
            return error

    def predictors(self, server: Tree, states: Tree, index: int) -> list[Mixture]:
        """Every client's predictor after some rounds."""
        round = self.trial.round(index)
        served = self.algorithm.serve(server, round)
        return [
            self.algorithm.predictor(self.trial.client(i, index), row(served, i), row(states, i))
            for i in range(self.trial.population)
        ]


def copied_step(step: Step) -> Step:
    """A step whose trees share no memory with anything."""
    trees = copied((step.received, step.uploads, step.server, step.states))
    return step._replace(received=trees[0], uploads=trees[1], server=trees[2], states=trees[3])


# ---- where two trees differ, in words ------------------------------------------------------------


def named(tree: Tree, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its name, such as ``server.models``."""
    for steps, leaf in flatten(tree):
        if isinstance(leaf, ARRAYS):
            yield path + re.sub(r"\.(\d+)", r"[\1]", steps), dense(leaf)


def copied(tree: Tree) -> Tree:
    """A copy that shares no memory; a Bank's table is copied too."""
    return unflatten(tree, [dense(leaf).clone() for _, leaf in flatten(tree)])


def difference(found: Tree, expected: Tree, path: str, tolerance: float = 0.0) -> str | None:
    """Where two trees differ by more than a tolerance, relative or absolute; None where nowhere."""
    pairs = list(named(found, path)), list(named(expected, path))
    names = [[name for name, _ in part] for part in pairs]
    if names[0] != names[1]:
        return f"{path} has the parts {_listed(names[0])} and not {_listed(names[1])}"
    for (name, a), (_, b) in zip(*pairs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {kind(a)} and not {kind(b)}"
        apart = _apart(a, b, tolerance)
        if apart is not None:
            return f"{name} differs by up to {apart:.1e}"
    return None


def kind(leaf: Tensor) -> str:
    """The type and shape of a tensor in words."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "(none)"


def _apart(a: Tensor, b: Tensor, tolerance: float) -> float | None:
    """The largest difference of two tensors of one form where it is too large."""
    close = torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return None
    gap = (a.double() - b.double()).abs()[~close]
    return float(gap.max())
