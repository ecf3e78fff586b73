"""What a run spends of its clients' privacy: one accountant a client, over all of its rounds.

ε is a function of what a run's folder tells: who took part in which round, and how many gradients
the method says that a client takes there. So it is never reset, and a resumed run has the same one.
Opacus computes it: PRV (Gopi, Lee, Wutschitz 2021), or Rényi DP where PRV overflows.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..core.algorithm import AnyAlgorithm
from ..core.optim import Recipe
from ..core.policies import declared
from ..core.privacy import Query, When
from ..core.problem import Problem
from ..errors import ConfigError
from .run import Line

QUERIES = "queries"  # in a line of rounds.jsonl: what each participant's gradients were
Spent = tuple[tuple[float, float, int], ...]  # (σ, q, minibatches)
LEAST_NOISE, MOST_NOISE = 0.2, 1e4
LARGEST = 300.0  # an ε that PRV computes; above, which protects nobody, it takes minutes
SEVERAL = 32  # different clients; with more, Rényi DP alone is quick enough


def solved(problem: Problem, algorithm: AnyAlgorithm, rounds: int) -> Problem:
    """The problem with the noise that ``privacy.epsilon`` asks for, for clients in all rounds."""
    privacy = problem.privacy
    if privacy is None or privacy.noise is not None or algorithm.traits.alone:
        return problem
    method, found = declared(algorithm)
    if found.refusal(method):
        return replace(problem, privacy=replace(privacy, noise=0.0))  # is refused for that
    plan = tuple(_planned(problem, algorithm, rounds).items())
    most = privacy.epsilon or math.inf
    noise = _solved(plan, _sizes(problem), problem.recipe, privacy.delta, most)
    return replace(problem, privacy=replace(privacy, noise=noise))


def foreseen(problem: Problem, algorithm: AnyAlgorithm, rounds: int) -> float:
    """The largest ε of a client that takes part in all rounds; infinite without privacy."""
    privacy = problem.privacy
    if privacy is None:
        return math.inf
    plan, noise = _planned(problem, algorithm, rounds), privacy.noise or 0.0
    worst = _worst(plan, _sizes(problem), problem.recipe, noise, privacy.delta)
    return epsilon(worst, privacy.delta)[0]


def _planned(problem: Problem, algorithm: AnyAlgorithm, rounds: int) -> Counter[Query]:
    """The gradients that a client takes in all rounds."""
    method, found = declared(algorithm)
    return Counter(
        query
        for index in range(rounds)
        for query in found.of(method, When(index, rounds, problem.population))
    )


def _sizes(problem: Problem) -> frozenset[int]:
    return frozenset(size for size in problem.counts.train if size)


@cache
def _solved(
    plan: tuple[tuple[Query, int], ...],
    sizes: frozenset[int],
    recipe: Recipe,
    delta: float,
    most: float,
) -> float:
    """The smallest noise, to a thousandth of itself, with which no client's ε exceeds ``most``."""

    def worst(noise: float) -> Spent:
        return _worst(dict(plan), sizes, recipe, noise, delta)

    low, high = LEAST_NOISE, MOST_NOISE
    if epsilon(worst(high), delta)[0] > most:
        raise ConfigError(
            f"privacy.epsilon: found {most:g}, which no noise up to {high:g} reaches in this run; "
            "expected a larger ε, fewer rounds, or a smaller batch"
        )
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(worst(middle), delta)[0] <= most else (middle, high)
    return float(f"{high:.4g}") * (1 + 1e-3)


def _worst(
    plan: Mapping[Query, int], sizes: frozenset[int], recipe: Recipe, noise: float, delta: float
) -> Spent:
    """What the client that spends most spends, among clients of these sizes."""
    each = {_events(plan, recipe, size, noise) for size in sizes}
    return max(each, key=lambda spent: _renyi(spent, delta), default=())


def _events(plan: Mapping[Query, int], recipe: Recipe, size: int, noise: float) -> Spent:
    """What a client with ``size`` samples spends; k gradients of a minibatch are one of σ / √k."""
    total: Counter[tuple[float, float]] = Counter()
    for query, count in plan.items():
        q, steps = query.steps(recipe, size)
        total[noise / math.sqrt(query.gradients), q] += count * steps
    return tuple((sigma, q, steps) for (sigma, q), steps in sorted(total.items()) if steps)


@cache
def epsilon(spent: Spent, delta: float) -> tuple[float, str]:
    """ε at δ, and the accountant that computed it."""
    if not spent:
        return 0.0, "none"
    if min(sigma for sigma, _, _ in spent) == 0:
        return math.inf, "none"
    rough = _renyi(spent, delta)
    if rough > LARGEST:
        return rough, "RDP"
    accountant = _opacus().PRVAccountant()
    accountant.history = list(spent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = float(accountant.get_epsilon(delta))
        except (ValueError, RuntimeError, ArithmeticError, MemoryError):
            found = math.nan
    return (found, "PRV") if 0 <= found < math.inf else (rough, "RDP")


def _renyi(spent: Spent, delta: float) -> float:
    if not spent or min(sigma for sigma, _, _ in spent) == 0:
        return math.inf if spent else 0.0
    accountant = _opacus().RDPAccountant()
    accountant.history = list(spent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def _opacus() -> Any:
    try:
        from opacus import accountants  # slow to import
    except ImportError as error:
        raise ConfigError(
            "privacy: ε is computed by Opacus, which is not installed; install it with: "
            "pip install 'coterie[dp]'"
        ) from error
    return accountants


# ---- what a run tells ----------------------------------------------------------------------------


def accounted(problem: Problem, algorithm: AnyAlgorithm) -> dict[str, Any] | None:
    """What ``config.json`` tells about a run's privacy; None where nothing of it is private."""
    if problem.privacy is None or algorithm.traits.alone:
        return None
    if problem.privacy.noise:
        _opacus()  # before training
    leaves = declared(algorithm)[1].leaves
    return {"noise": problem.privacy.noise, "samples": list(problem.counts.train), "leaves": leaves}


def told(
    config: Mapping[str, Any], lines: Iterable[Line], clients: Iterable[str]
) -> dict[str, Any] | None:
    """``privacy`` of ``summary.json``: every client's ε; None where nothing is private."""
    known = config.get("accounted")
    if known is None:
        return None
    agreed, table = config["privacy"], config["train"]
    recipe = Recipe(**{name: table[name] for name in ("batch", "epochs", "steps") if name in table})
    plans: dict[int, Counter[Query]] = {}
    for line in lines:
        for client in line["clients"]:
            plans.setdefault(client, Counter()).update(Query(*query) for query in line[QUERIES])
    spent = {
        name: _events(plans.get(at, {}), recipe, known["samples"][at], known["noise"])
        for at, name in enumerate(clients)
    }
    many = len({*spent.values()}) > SEVERAL
    found = {
        name: (_renyi(events, agreed["delta"]), "RDP") if many else epsilon(events, agreed["delta"])
        for name, events in spent.items()
    }
    ways = sorted({way for _, way in found.values() if way != "none"})
    return {
        "noise": known["noise"],
        "clip": agreed["clip"],
        "delta": agreed["delta"],
        "epsilon": {name: value for name, (value, _) in found.items()},
        "accountant": " and ".join(ways),
        "simulated": config["data"]["name"] != "sites",
        "leaves": known["leaves"],
    }
