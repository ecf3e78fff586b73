"""``coterie attack --exposure``: what models tell of the rows they were trained on, by noise.

*Membership.* Of every client's rows a random half is used; FedAvg and FedFomo are trained SHADOWS
times beside the attacked run, with other halves, minibatches and noise. An attacker sees FedAvg's
global model, or the model that a client of FedFomo sends to its peers. For a row with the margin
m = log p_y − log(1 − p_y) it compares

    log N(m; μ_in, σ_in) − log N(m; μ_out, σ_out)

whose means are those of the row's margins in the shadow runs with and without it, and whose
deviations are pooled over rows: LiRA (Carlini et al., IEEE S&P 2022). Each run is attacked with all
others as its shadows. All start from the same model, which an attacker knows.

*Rows.* See :mod:`coterie.attacking.inversion`.

*Groups.* How well FedFomo's weights tell whose data is of one hidden group, as the area under the
curve.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ..core import random
from ..core.flat import FlatModel
from ..core.metrics import mean_known
from ..core.policies import governed
from ..core.privacy import Privacy
from ..core.rows import dense
from ..core.shards import Ragged, Shards
from ..data.simulation import Simulation
from ..engines import Length, make_engine
from ..errors import ConfigError, printable_lines
from ..runs import collaboration
from ..runs.accounting import foreseen
from ..runs.assemble import Assembly, assemble
from ..runs.config.schema import Config
from ..runs.listeners import Progress, Watch
from ..runs.run import Roster
from ..storage import files
from ..training.guard import Guard
from ..training.rounds import Record, train
from ..views import words
from .inversion import Step, imprinted, inverted

NOISES = (0.0, 0.5, 1.0, 2.0)
SHADOWS = 32
LOW = 0.01  # the rate of false positives at which the rate of true ones is told
BATCHES = (1, 4)
STEPS: tuple[Step, ...] = ("gradient", "local_epochs")
SEEN: dict[str, tuple[str, Callable[[Any, int], Tensor]]] = {  # and the models [K, P], by client
    "fedavg": ("FedAvg's global model", lambda server, clients: server.expand(clients, -1)),
    "fedfomo": ("a model that FedFomo sends to peers", lambda server, _: dense(server.models)),
}


@final
@dataclass(frozen=True, repr=False)
class ExposedRows:
    """What was found, by what it is and the noise: means over seeds, None if it is not defined."""

    rows: dict[str, dict[float, float | None]]
    seeds: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = [
            {"what": what, "noise": noise, "value": value}
            for what, found in self.rows.items()
            for noise, value in found.items()
        ]
        return {"seeds": list(self.seeds), "shadows": SHADOWS, "rows": rows}

    def __repr__(self) -> str:
        return printable_lines(self.markdown())

    def markdown(self) -> str:
        """A table with a column per noise."""
        noises = next(iter(self.rows.values()))
        rows = (
            (
                what,
                *(
                    words.NONE if v is None else f"{v:.1f}".replace("inf", "∞")
                    for v in row.values()
                ),
            )
            for what, row in self.rows.items()
        )
        return "\n".join(words.markdown(("", *(f"σ = {n:g}" for n in noises)), rows, "lr"))


def shadow_runs(config: Config) -> int:
    """How many runs :func:`exposed_rows` trains."""
    return len(config.seeds) * len(NOISES) * len(SEEN) * (SHADOWS + 1)


def exposed_rows(config: Config, listeners: Sequence[Watch] = ()) -> ExposedRows:
    """Attack the models of a config; with ``run.out`` the numbers are in its ``exposure.json``."""
    if config.run.federation is not None or config.engine.name == "wire":
        raise ConfigError("attack: found clients in other processes; expected a simulation")
    inner = assemble(config)
    found: dict[str, dict[float, list[float | None]]] = {}
    with contextlib.closing(inner):
        _check(inner)
        for seed in config.seeds:
            for noise in NOISES:
                for what, value in _told(inner, seed, noise, listeners):
                    found.setdefault(what, {}).setdefault(noise, []).append(value)
    means = {w: {noise: _mean(v) for noise, v in each.items()} for w, each in found.items()}
    made = ExposedRows(means, tuple(config.seeds))
    if config.run.out is not None:
        path = Path(config.run.out) / "exposure.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, made.to_dict())
    return made


def _check(inner: Assembly) -> None:
    """Refuse, before anything is trained, what could not be attacked at every noise."""
    for name in SEEN:
        problem = _simulated(inner, name, inner.config.seeds[0], NOISES[-1]).problem
        if not problem.classes:
            raise ConfigError("attack --exposure: found a regression; expected classes")
        governed(inner.config.method(name).build(), problem)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(mean_known(np.array(known, dtype=np.float64))) if known else None


def _told(
    inner: Assembly, seed: int, noise: float, listeners: Sequence[Watch]
) -> Iterator[tuple[str, float | None]]:
    """The numbers of one seed and noise."""
    on, rounds = _simulated(inner, "fedavg", seed, noise), inner.config.run.rounds
    half, _ = halved(on, 0)
    yield "ε of a client", foreseen(half.problem, inner.config.method("fedavg").build(), rounds)
    for name, (seen, _) in SEEN.items():
        runs = []
        for number in range(SHADOWS + 1):
            runs.append(shadow_run(inner, name, _simulated(inner, name, seed, noise), number))
            for watch in listeners:
                watch(Progress(name, seed, rounds, rounds, None, more=rounds))
        margin = torch.stack([run.margin for run in runs])
        member = torch.stack([run.member for run in runs])
        scores = likelihood_ratios(margin, member)
        yield f"{words.label(name)}: accuracy", _mean([run.score for run in runs])
        yield f"rows recognised in {seen}, %", _percent(true_positives(scores, member))
    yield "groups in FedFomo's weights: area under the curve", _mean([run.groups for run in runs])
    clients = on.problem, on.shards, inner.config.engine
    for batch in BATCHES:
        yield f"rows recovered from a step on {batch}, %", _percent(inverted(*clients, batch))
    for step in STEPS:
        refused = bool(noise) and step == "gradient"
        share = None if refused else imprinted(*clients, step)
        yield f"rows recovered by a crafted model of FedeRiCo ({step}), %", _percent(share)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _simulated(inner: Assembly, name: str, seed: int, noise: float) -> Simulation:
    """The clients of a method at this noise; without noise nothing is clipped either."""
    method = inner.config.method(name)
    on = inner.simulated(method.build(), inner.config.single(method, seed))
    agreed = inner.config.agreed_privacy or Privacy()
    privacy = replace(agreed, noise=noise, epsilon=None) if noise else None
    return on._replace(problem=replace(on.problem, privacy=privacy))


# ---- shadow runs ---------------------------------------------------------------------------------


class Shadow(NamedTuple):
    """What a run shows an attacker: of all clients' rows, in or out."""

    margin: Tensor  # [N] of each row, in the model that is seen of its client
    member: Tensor  # [N] whether the run was trained on it
    score: float  # the mean of the clients
    groups: float | None  # how well the weights of all rounds tell who is of one group


def halved(on: Simulation, number: int) -> tuple[Simulation, Tensor]:
    """The clients with a random half of their training rows, and which rows these are ``[N]``.

    Their names hold the number of the run, so that minibatches and noise are other ones too.
    """
    split, kept, member = on.shards.splits["train"], [], []
    for client, size in enumerate(split.sizes):
        luck = random.bits(on.problem.seed, "half", number, client, torch.arange(size))
        mine = luck.argsort().argsort() < size // 2
        kept.append(split.of(client).cpu()[mine])
        member.append(mine)
    shards = replace(
        on.shards, splits={**on.shards.splits, "train": Ragged(kept, on.shards.device)}
    )
    names = tuple(f"{name}, run {number}" for name in on.problem.clients)
    counts = on.problem.counts._replace(train=tuple(map(len, kept)))
    problem = replace(on.problem, clients=names, counts=counts)
    return Simulation(problem, shards, on.federation), torch.cat(member)


def shadow_run(inner: Assembly, name: str, on: Simulation, number: int) -> Shadow:
    """Train on a random half of every client's rows, and look at the models that others see."""
    half, member = halved(on, number)
    method = inner.config.method(name)
    asked = inner.config.single(method, on.problem.seed)
    length = Length(asked.run.rounds, asked.run.participation, shadow_runs(inner.config))
    with contextlib.closing(make_engine(asked.engine, half.problem, half.shards, length)) as engine:
        records = list(
            train(
                *(method.build(), half.problem, engine, asked.run.rounds),
                participation=asked.run.participation,
                evaluate_every=asked.run.rounds,
                metric=asked.run.metric,
                guard=Guard(**asked.guard.model_dump()),
            )
        )
    models = SEEN[name][1](records[-1].server, on.problem.population)
    parts = [margins(on.problem.model, models[i], on.shards, i) for i in range(len(models))]
    scores = [r.evaluation.test for r in records if r.evaluation is not None]
    return Shadow(torch.cat(parts), member, float(mean_known(scores[-1])), _groups(records, on))


def _groups(records: Sequence[Record], on: Simulation) -> float | None:
    known = [r.collaboration for r in records if r.collaboration is not None]
    total = collaboration.add_up(known, False)
    truth = Roster.of(on.federation).truth(False)
    return None if total is None else collaboration.weight_recovery(total, *truth)


def margins(model: FlatModel, w: Tensor, shards: Shards, client: int) -> Tensor:
    """log p_y − log(1 − p_y) of every training row of a client."""
    index = shards.splits["train"].of(client)
    y = shards.y[index]
    y = shards.relabel[client][y] if shards.relabel.shape[1] else y
    with torch.no_grad():
        output = model(w, shards.inputs(index)).double()
    own = output.gather(1, y[:, None]).squeeze(1)
    others = output.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return own - others


# ---- the attack ----------------------------------------------------------------------------------


def likelihood_ratios(margin: Tensor, member: Tensor) -> Tensor:
    """How much likelier each row's margin is with the row than without it ``[runs, N]``."""
    ratios = []
    for run in range(len(margin)):
        others = torch.arange(len(margin)) != run
        densities = [_density(margin[run], margin[others], member[others] == s) for s in (1, 0)]
        ratios.append(densities[0] - densities[1])
    return torch.stack(ratios)


def _density(margin: Tensor, shown: Tensor, which: Tensor) -> Tensor:
    """The logarithm of the normal density of margins ``[N]``, from those of ``which`` runs."""
    count = which.sum(0)
    mean = (shown * which).sum(0) / count.clamp(min=1)
    spread = ((shown - mean) * which).square().sum() / (count - 1).clamp(min=0).sum()
    return -((margin - mean) ** 2) / (2 * spread) - spread.log() / 2


def true_positives(scores: Tensor, member: Tensor) -> float:
    """The share of members that score above all but the share ``LOW`` of the others."""
    limit = scores[~member].quantile(1 - LOW)
    return float((scores[member] > limit).double().mean())
