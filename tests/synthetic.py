"""Made-up runs with known properties, for the tests of stores and reports."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from coterie.core.algorithm import Mixture
from coterie.core.answers import Answers, Outcomes, outcomes_of
from coterie.engines.base import Evaluation
from coterie.runs.run import Log, Roster, Run
from coterie.runs.summary import Predictors, finished
from coterie.training.rounds import Record, Rejection, Traffic
from coterie.views.comparison import Comparison

CLIENTS = 12
GROUPS = np.arange(CLIENTS) % 3


def roster(
    clients: int = CLIENTS, seed: int = 0, names: tuple[str, ...] = (), **facts: Any
) -> Roster:
    n = np.full(clients, 40)
    known: dict[str, Any] = {
        "groups": np.arange(clients) % 3,
        "fingerprint": f"made-up-{seed}",
        "weak": {},
        **facts,
    }
    return Roster(names or tuple(f"site-{i}" for i in range(clients)), n, n // 4, n // 2, **known)


def grouped(inside: float, clients: int = CLIENTS) -> np.ndarray:
    """Rows of 0.4 on oneself, ``inside`` of the rest on one's own group."""
    groups = np.arange(clients) % 3
    same = (groups[:, None] == groups) & ~np.eye(clients, dtype=bool)
    other = groups[:, None] != groups
    rest = inside * same / np.maximum(1, same.sum(1)) + (1 - inside) * other / other.sum(1)
    return 0.4 * np.eye(clients) + 0.6 * rest


def record(index: int, test: np.ndarray, A: np.ndarray | None = None, size: int = 1000) -> Record:
    loss = (100 - test) / 50
    rejected = (Rejection(1, "not_finite"),) if index == 2 else ()
    traffic = Traffic(size * len(test), size * len(test), 0)
    everybody = tuple(range(len(test)))
    evaluation = Evaluation(test, test - 1, loss, loss + 0.1)
    none = torch.zeros(len(everybody), dtype=torch.float64)
    return Record(
        index, everybody, traffic, rejected, 0.25, evaluation, A, None, (), none, lambda: ()
    )


def answered(accuracies: np.ndarray, samples: int) -> Outcomes:
    """Clients that answer their first samples rightly, as many as their accuracy says.

    Of two such predictors the better one is right wherever the other is.
    """
    clients = []
    for accuracy in np.nan_to_num(accuracies):
        right = np.arange(samples) < round(accuracy * samples / 100)
        clients.append(Answers(right.astype(int), np.ones(samples, dtype=int), np.arange(samples)))
    return outcomes_of(clients)


def mixture(clients: int = CLIENTS, models: int = 2, size: int = 5) -> Mixture:
    """Two models shared by everybody, so that identical ones occur."""
    kept = torch.arange(2 * size, dtype=torch.float32).view(2, size)
    index = torch.arange(clients * models).view(clients, models) % 2
    weights = torch.linspace(0.1, 0.9, clients)[:, None].expand(clients, models).contiguous()
    return Mixture(weights, kept[index])


def predictors(clients: int = CLIENTS) -> Predictors:
    """The predictors of a finished run."""
    return Predictors.of(mixture(clients), None)


def scores(method: str, seed: int, rounds: int, clients: int = CLIENTS) -> np.ndarray:
    """Learning curves ``[rounds, clients]``: how high and how fast each method gets."""
    ends = {
        "local": 78,
        "fedavg": 41,
        "fedavg_ft": 80,
        "fedfomo": 91,
        "fedamp": 88,
        "heurfedamp": 89,
    }
    rng = np.random.default_rng([seed, len(method), ord(method[-1])])
    own = np.random.default_rng(seed).normal(0, 4, clients)
    end = ends[method] + own + rng.normal(0, 1.5, clients)
    rise = 1 - 0.75 * np.exp(-np.arange(rounds) / (3 + rng.random()))[:, None]
    return np.clip(end * rise + rng.normal(0, 0.6, (rounds, clients)), 0, 100)


def run_of(
    method: str,
    seed: int = 0,
    rounds: int = 20,
    references: Mapping[str, Run] | None = None,
    who: Roster | None = None,
    test: np.ndarray | None = None,
    samples: int | None = 200,
    val: np.ndarray | None = None,
    merge_val: bool = False,
) -> Run:
    """A run; without ``samples`` it is one of a version that kept no answers to test samples."""
    inside = {"fedfomo": 0.97, "fedamp": 0.86, "heurfedamp": 0.82}.get(method)
    who = roster(seed=seed) if who is None else who
    test = scores(method, seed, rounds, len(who)) if test is None else test
    log = Log(method, seed, "accuracy", who, merge_val=merge_val)
    for index, row in enumerate(test):
        A = None if inside is None else grouped(inside * (index + 5) / (rounds + 4), len(who))
        size = 0 if method == "local" else 5000 if method == "fedfomo" else 1000
        made = record(index, row, A, size)
        if samples is not None and index == len(test) - 1:
            made = made._replace(outcomes=answered(row, samples))
        if val is not None:
            made = made._replace(evaluation=made.evaluation._replace(val=val[index]))
        log.append(made)
    config = {"algorithm": {"name": method}, "run": {"seed": seed, "rounds": rounds}}
    return finished(log, predictors(len(who)), config, {"python": "3.11"}, references)


def comparison_of(
    methods: tuple[str, ...] = ("local", "fedavg", "fedavg_ft", "fedfomo", "fedamp", "heurfedamp"),
    seeds: tuple[int, ...] = (0,),
    **facts: Any,
) -> Comparison:
    who = {seed: roster(seed=seed, **facts) for seed in seeds}
    return Comparison.of(run_of(m, seed, who=who[seed]) for m in methods for seed in seeds)
