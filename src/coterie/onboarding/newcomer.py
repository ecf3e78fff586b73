"""A client that was not in the federation joins a finished run with its own labelled samples.

Some of the samples test; the others are drawn repeatedly in several numbers, as if the newcomer had
labelled only so many. Each draw gives a model by the method's own rule
(:mod:`coterie.algorithms.newcomers`) and local training, and a model trained alone from the run's
start on the same samples. Nobody else trains.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms.local import Local
from ..algorithms.newcomers import Finals, Joined, Rule, join_rule
from ..core import random, tree
from ..core.algorithm import AnyAlgorithm, Mixture, round_of, single
from ..core.answers import Answers
from ..core.batches import shape_of, views
from ..core.calls import Clock
from ..core.client import Client
from ..core.flat import FlatModel
from ..core.imports import Code
from ..core.metrics import gains, score
from ..core.shards import Ragged
from ..data.data_schema import Schema
from ..data.federation import Dataset, Federation, sample_hashes
from ..data.simulation import Simulation, simulate
from ..data.site_data import site_federation
from ..data.standard import Preprocessing
from ..engines import EngineSettings, make_engine
from ..engines.evaluation import outputs
from ..engines.loop import LoopBackend
from ..errors import ConfigError, CoterieWarning, DataError, StoreError
from ..exporting.calibration import federation_of
from ..exporting.model_card import NetworkFacts, network_factory
from ..exporting.writing import Trained, facts_of_run, network_facts, verified_run, without
from ..networks import registry
from ..runs import run_folder
from ..runs.comparison_folder import COMPARE
from ..runs.config.loading import load
from ..runs.config.schema import Config
from ..runs.run import LOCAL, Run
from ..training.rounds import Record, train
from ..views.reliance import collaborators_of_mixture

AVERAGE = "fedavg"  # the method whose model is the plain average
SIZES = (5, 10, 20, 50, 100)  # numbers of labelled samples, and all of them
DRAWS = 5  # draws of each number
LEAST = 0.005  # weight from which on a client counts as a collaborator
MOST_COLLABORATORS = 20  # that the table's collaborators name
ALONE = "Joining was tried and was not better on the test samples: this model was trained alone."
FEWEST = 4  # labelled samples of a newcomer: some to join with, some to test on
TEST = 0.2  # share of the newcomer's samples that test, where the run's config says nothing


# ---- the run that is joined ----------------------------------------------------------------------


class JoinableRun(NamedTuple):
    """A finished run that a newcomer joins."""

    run: Run
    config: Config
    algorithm: AnyAlgorithm
    rule: Rule
    preprocessing: Preprocessing
    network: NetworkFacts
    code: Code
    average: Tensor | None  # [P] the run's plain average, if there is one

    @property
    def schema(self) -> Schema:
        """How its samples are encoded."""
        return self.preprocessing.schema


def open_joinable(path: Path, code: Code) -> JoinableRun:
    """Read a finished run; refuses one that a newcomer cannot join, with the reason."""
    run = verified_run(path)
    config = load(path / run_folder.CONFIG, code=code)
    algorithm = config.method().build()
    rule = join_rule(algorithm)  # before anything else: most refusals are about the method
    preprocessing = run_folder.read_preprocessing(path)
    network = network_facts(run.config, preprocessing)
    average = _plain_average(path, run)
    return JoinableRun(run, config, algorithm, rule, preprocessing, network, code, average)


def _plain_average(path: Path, run: Run) -> Tensor | None:
    """FedAvg's model: the run's own, or that of the run of FedAvg in the same comparison."""
    if run.method == AVERAGE:
        return run.predictor(0).models[0]
    home = path.resolve().parent.parent
    beside = home / AVERAGE / path.resolve().name
    if not (home / COMPARE).is_file() or not run_folder.is_finished(beside):
        return None
    other = run_folder.read(beside)
    same = other.roster.fingerprint == run.roster.fingerprint
    return other.predictor(0).models[0] if same else None


# ---- the newcomer's samples, and draws of them ------------------------------------------------


class Newcomer(NamedTuple):
    """The newcomer's samples: scaled, with those that test."""

    name: str
    dataset: Dataset
    pool: Tensor  # [n] indices of the samples to join with
    test: Tensor


def newcomer(host: JoinableRun, dataset: Dataset, name: str) -> Newcomer:
    """The newcomer's samples, scaled as the run's were, of which some test."""
    if name in host.run.roster.clients:
        raise ConfigError(f"--name: the run has a client '{name}' already; choose another name")
    if len(dataset.y) < FEWEST:
        raise DataError(
            f"{dataset.name}: found {len(dataset.y)} labelled samples; expected {FEWEST} or more, "
            "some to join with and some to test on"
        )
    share = host.config.data.test or TEST
    seed = host.run.seed
    made = site_federation(dataset, host.schema, name, val=0.0, test=share, seed=seed)
    pool, test = torch.cat([made.train[0], made.val[0]]), made.test[0]
    if not len(pool) or not len(test):
        raise DataError(
            f"{dataset.name}: found {len(pool)} samples to join with and {len(test)} to test on; "
            "expected some of both: add samples of more units or times"
        )
    return Newcomer(name, host.preprocessing.scaled(dataset), pool, test)


class Tried(NamedTuple):
    """What one draw gave: the answers to the test samples, and who helped."""

    samples: Tensor  # indices of the newcomer's samples that were drawn
    alone: Answers
    joined: Answers
    score: float  # of the joined model
    weights: Tensor | None  # [K] of the run's clients
    parts: Tensor | None  # [K] of the joined model, where they are not the weights
    predictor: Mixture
    own: Mixture  # trained alone


class JoinOutcome(NamedTuple):
    """What all draws gave; the last draw has all samples."""

    tries: tuple[Tried, ...]
    average: float | None  # score of the run's plain average on the newcomer's test samples
    model: FlatModel  # the network of all predictors

    @property
    def personal(self) -> Tried:
        """The draw of all samples, which gives the newcomer's model."""
        return self.tries[-1]

    def joins(self, metric: str) -> bool:
        """Whether joining gives a better model than training alone, on the test samples."""
        alone, joined = (score(metric, *part[:2]) for part in self.personal[1:3])
        return bool(gains(np.array(joined), np.array(alone), metric) > 0)


def draws_of(pool: Tensor, sizes: Sequence[int], count: int, seed: int) -> list[Tensor]:
    """Random draws of each size, the smaller ones within the larger; last, all samples once."""
    found = []
    for number in range(count):
        luck = random.uniform(seed, "onboard", number, torch.arange(len(pool)))
        order = pool[luck.argsort(stable=True)]
        found += [order[:size] for size in sizes if size < len(pool)]
    return [*sorted(found, key=len), pool]


# ---- joining -------------------------------------------------------------------------------------


def join(
    host: JoinableRun, new: Newcomer, plan: Sequence[Tensor], epochs: int | None
) -> JoinOutcome:
    """Join with each draw, and train alone on it.

    ``epochs`` of local training follow; None trains for one round's where a check on the draw's own
    halves shows that training helps (:func:`training_helps`).
    """
    on = _simulation(host, new, plan)
    judge, metric = LoopBackend(on.problem, on.shards), host.run.metric
    finals, usable = _finals(host, on)
    (alone, own), found = _alone(host, on), []

    def rule(client: Client) -> Joined:
        return host.rule(host.algorithm, client, finals)

    for i, draw in enumerate(plan):
        client = client_of(on, i, finals.round.index)
        made = rule(client)
        if epochs is not None or training_helps(on, draw, rule, finals.round.index):
            made = made._replace(predictor=trained(client, made.predictor, epochs))
        said: dict[int, Answers] = {}
        scored = judge.judged(made.predictor, i, metric, said)[0]
        weights, parts = _spread(made.weights, usable), _spread(made.parts, usable)
        mine = Mixture(own.weights[i], own.models[i])
        found.append(Tried(draw, alone[i], said[i], scored, weights, parts, made.predictor, mine))
    average = None
    if host.average is not None:
        average = judge.judged(single(host.average), 0, metric, None)[0]
    return JoinOutcome(tuple(found), average, on.problem.model)


def _simulation(host: JoinableRun, new: Newcomer, plan: Sequence[Tensor]) -> Simulation:
    """One client per draw, all with the same test samples; models are whole, with buffers."""
    none = new.pool[:0]
    federation = Federation(
        dataset=new.dataset,
        partition="draws of a newcomer",
        clients=tuple(f"{new.name} {len(draw)} {at}" for at, draw in enumerate(plan)),
        train=tuple(plan),
        val=(none,) * len(plan),
        test=(new.test,) * len(plan),
    )
    factory = host.config.changes.made(network_factory(host.network, host.schema, host.code))
    if host.network.precision == "bf16":
        factory = registry.in_bfloat16(factory, "cpu")
    table = host.config.train.model_copy(update={"buffers": "average"})
    seed, dtype = host.run.seed, host.network.dtype
    return simulate(federation, factory, table.recipe(), seed=seed, dtype=dtype)


def _finals(host: JoinableRun, on: Simulation) -> tuple[Finals, Tensor]:
    """What the run keeps, of the clients whose models are finite, and which these are ``[K]``."""
    weights, models = host.run.mixture()
    if models.shape[-1] != on.problem.model.whole:
        raise StoreError(
            f"the run's models have {models.shape[-1]:,} parameters; expected "
            f"{on.problem.model.whole:,}, those of the network '{host.network.name}' of its "
            "config; check the folder with 'coterie verify'"
        )
    usable = models.flatten(1).isfinite().all(1) & (weights.sum(1) > 0)
    if not bool(usable.any()):
        raise StoreError("every model of the run diverged; train again with a smaller train.lr")
    rounds = len(host.run.lines)
    sizes = torch.from_numpy(host.run.roster.n_train)[usable]
    after = round_of(on.problem, rounds, rounds + 1, torch.arange(1))
    start = on.problem.start
    return Finals(weights[usable], models[usable], sizes, start, after), usable


def _alone(host: JoinableRun, on: Simulation) -> tuple[list[Answers], Mixture]:
    """Models trained alone, as long as the run was and from its start, and their answers."""
    last = trained_here(Local(), on, len(host.run.lines), host.run.metric)
    assert last.outcomes is not None
    assert last.mixture is not None
    return list(last.outcomes.clients()), last.mixture


def trained_here(method: AnyAlgorithm, on: Simulation, rounds: int, metric: str) -> Record:
    """The last round of a method that is trained in this process, with nothing written."""
    with contextlib.closing(make_engine(EngineSettings("loop"), on.problem, on.shards)) as engine:
        *_, last = train(method, on.problem, engine, rounds, evaluate_every=rounds, metric=metric)
    return last


def _spread(values: Tensor | None, usable: Tensor) -> Tensor | None:
    """The values of all clients of the run ``[K]``; 0 for those that were left out."""
    if values is None:
        return None
    spread = torch.zeros(len(usable), dtype=torch.float64)
    spread[usable] = values.to(torch.float64)
    return spread


# ---- whether local training helps a newcomer: a check on the halves of its own labelled samples -

# For each half, the newcomer joins with that half and trains on it; the other half judges the model
# before and after training. Local training helps if there are fewer errors after it, or as many and
# a lower loss; in a regression, if the loss is lower.

CHECKED_FROM = 4  # samples of a draw that is checked; with fewer there is no local training


def training_helps(
    on: Simulation, samples: Tensor, rule: Callable[[Client], Joined], index: int
) -> bool:
    """Whether one round of local training after joining pays on samples that were left out."""
    if len(samples) < CHECKED_FROM:
        return False
    before, after = [], []
    for half, other in ((samples[0::2], samples[1::2]), (samples[1::2], samples[0::2])):
        client, judge = (_with(on, half, val, index) for val in (half, other))
        joined = rule(client).predictor
        before.append(_cost(judge, joined, on.problem.regression))
        after.append(_cost(judge, trained(client, joined, None), on.problem.regression))
    return _sums(after) < _sums(before)


def trained(client: Client, predictor: Mixture, epochs: int | None) -> Mixture:
    """The predictor, each of its models trained on the client's samples; None: for one round."""
    tuned = client if epochs is None else client.tuned(epochs=epochs)
    return Mixture(predictor.weights, torch.stack([tuned.train(w) for w in predictor.models]))


def client_of(on: Simulation, at: int, index: int) -> Client:
    """One client of a simulation as a method sees it in round ``index``."""
    view = tree.row(views(on.problem, on.shards, [at], index), 0)
    shape = shape_of(on.shards, [at], batched=False)
    return Client(on.problem, on.shards, view, shape, Clock(index, index + 1))


def _with(on: Simulation, train: Tensor, val: Tensor, index: int) -> Client:
    """A client that trains on some samples and validates on others."""
    lists = {"train": train, "val": val, "test": val}
    splits = {name: Ragged([part], on.shards.device) for name, part in lists.items()}
    return client_of(on._replace(shards=replace(on.shards, splits=splits)), 0, index)


def _cost(client: Client, predictor: Mixture, regression: bool) -> tuple[float, float]:
    """The errors, none in a regression, and the loss on the client's validation samples."""
    errors, loss = 0.0, 0.0
    with torch.no_grad():
        for block in client.blocks("val"):
            loss += float(client.mixture_losses(*predictor, block).sum())
            said = outputs(client.model, predictor, block.x, regression)
            if not regression:
                errors += float((said.argmax(-1) != block.y).sum())
    return errors, loss


def _sums(costs: list[tuple[float, float]]) -> tuple[float, float]:
    errors, losses = zip(*costs, strict=True)
    return sum(errors), sum(losses)


# ---- the personal model --------------------------------------------------------------------------


def personal_model(host: JoinableRun, new: Newcomer, outcome: JoinOutcome) -> Trained:
    """The newcomer's better model from all of its samples, ready for ``write_export``."""
    made, joins = outcome.personal, outcome.joins(host.run.metric)
    weights, parts = (None if x is None else x.numpy() for x in (made.weights, made.parts))
    facts = facts_of_run(
        host.run,
        client=new.name,
        data=host.run.roster.fingerprint,
        train=len(made.samples),
        val=0,
        test=len(new.test),
        score=made.score if joins else score(host.run.metric, *made.alone[:2]),
        collaborators=collaborators_of_mixture(host.run, weights, parts) if joins else (),
        notes=() if joins else (ALONE,),
        onboarded=True,
    )
    plain = network_factory(host.network, host.schema, host.code)
    predictor = made.predictor if joins else made.own
    found = without(host.config.changes, outcome.model, predictor, plain)
    facts = facts if joins else replace(facts, method=LOCAL)
    return Trained(facts, host.network, host.preprocessing, *found)


def warn_of_copies(host: JoinableRun, dataset: Dataset) -> None:
    """Warn of samples that clients of the run hold, if the run's data is still at its place."""
    made = federation_of(host.config, host.run.seed, host.run.roster.fingerprint)
    if made is None:
        return
    data, own = made.source or made.dataset, sample_hashes(dataset.x, dataset.y)
    for client, *parts in zip(made.clients, made.train, made.own_val, made.own_test, strict=True):
        rows = torch.cat(parts)
        theirs = {*sample_hashes(data.x[rows], data.y[rows])}
        if count := sum(one in theirs for one in own):
            warnings.warn(
                CoterieWarning(
                    f"{count} of the {len(own)} samples are also samples of {client}: a model that "
                    "was trained on them looks better here than it is on new ones"
                ),
                stacklevel=3,
            )


def collaborators(run: Run, weights: Tensor | None) -> dict[str, float | None]:
    """The clients of the run with the most weight; weights are None if all have one model."""
    names = run.roster.clients
    if weights is None:
        return dict.fromkeys(names[:MOST_COLLABORATORS])
    best = weights.argsort(descending=True, stable=True)[:MOST_COLLABORATORS].tolist()
    return {names[k]: round(float(weights[k]), 4) for k in best if weights[k] >= LEAST}
