"""Several methods on the same clients, beside Local: everything that their histories tell.

:class:`Compared` is abstract: ``coterie.Comparison`` adds the folders and what people see.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..core import metrics
from ..core.metrics import Floats
from ..errors import ConfigError, StoreError, did_you_mean
from . import judgement, statistics
from .alarms import Alarm, raise_alarms
from .history import History
from .judgement import LOCAL, Choice, ClientGain, Judgement
from .statistics import OverSeeds, Paired
from .summary import BY_VALIDATION, last_score, score_field, summarise


class ComparedRun(ABC):
    """One run, known by its history."""

    @property
    @abstractmethod
    def history(self) -> History:
        """Every round, every client's scores, every matrix."""

    @property
    def method(self) -> str:
        """The method's name."""
        return self.history.method

    @property
    def seed(self) -> int:
        """The seed everything was derived from."""
        return self.history.seed


AnyRun = TypeVar("AnyRun", bound=ComparedRun)


class MethodRow(NamedTuple):
    """One method of a comparison, over its seeds. A field is NaN where it does not exist."""

    method: str
    mean: OverSeeds  # last round
    weighted_mean: OverSeeds
    worst_tenth: OverSeeds
    best_tenth: OverSeeds
    best_by_validation: OverSeeds  # the round chosen by validation data
    best_on_test: OverSeeds  # BMTA: the round chosen by test data, as some papers do
    relative_to_local: OverSeeds
    worse_than_local: OverSeeds  # clients a run
    better: int  # client-runs that gained, over all seeds
    worse: int
    compared: int
    served: int  # clients that have a predictor of this method and test data
    alone: OverSeeds  # Local's mean over these clients
    validation: OverSeeds  # mean over these clients on validation data, last round
    in_group_weight: OverSeeds
    bytes_per_client: OverSeeds  # sent and received for training, whole run
    seconds: OverSeeds
    paired: Paired | None  # against Local, last round; a client's gains are averaged over seeds
    paired_on_test: Paired | None  # the same at each method's best round on test (P5)
    alarms: tuple[Alarm, ...]


class Compared(ABC, Generic[AnyRun]):
    """Several methods on the same federation, always beside Local."""

    runs: tuple[AnyRun, ...]

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order they were asked for."""
        return tuple(dict.fromkeys(run.method for run in self.runs))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds in the order they were asked for."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    @property
    def metric(self) -> str:
        """What is scored."""
        return self.runs[0].history.metric

    def of_method(self, method: str) -> tuple[AnyRun, ...]:
        """The runs of one method, one per seed."""
        return tuple(run for run in self.runs if run.method == method)

    def of_seed(self, seed: int) -> dict[str, History]:
        """One seed's histories by method."""
        return {run.method: run.history for run in self.runs if run.seed == seed}

    def gains(self, method: str, at: str = "last") -> Floats:
        """Each client's gain over its own local model ``[seeds, clients]``; positive is better.

        ``at`` is ``last``, or ``best`` for each method's best round on test data.
        """
        rows = []
        for run in self.of_method(method):
            local = self.of_seed(run.seed)[LOCAL]
            rows.append(metrics.gains(_scores(run.history, at), _scores(local, at), self.metric))
        return np.array(rows)

    @cached_property
    def rows(self) -> tuple[MethodRow, ...]:
        """One row per method."""
        return tuple(_row(self, method) for method in self.methods)

    @cached_property
    def choice(self) -> Choice | None:
        """The method that is recommended; None where there is none beside Local."""
        return judgement.choose(self)

    @cached_property
    def best_on_test(self) -> str:
        """The method with the best mean on test data in the last round; Local is one.

        Only methods that serve the same clients are compared: those that serve the most.
        """
        return judgement.best_on_test(self)

    @cached_property
    def judgements(self) -> dict[str, Judgement] | None:
        """What is shown of every method; None where runs were written without their outcomes."""
        return judgement.judge(self)

    def client(self, name: str) -> tuple[ClientGain, ...]:
        """What one client gains by each method over its own local model."""
        names = self.runs[0].history.roster.clients
        if name not in names:
            raise ConfigError(f"there is no client '{name}'; {did_you_mean(name, names)}")
        return tuple(
            client
            for found in (self.judgements or {}).values()
            for client in found.clients
            if client.client == name
        )


def _scores(history: History, at: str) -> Floats:
    best = statistics.best_round(history.test, history.metric) if at == "best" else None
    scores: Floats = history.test[-1 if best is None else best]
    return scores


def refuse_unlike(runs: Sequence[ComparedRun]) -> None:
    """Refuse runs that cannot be compared: other clients, another metric, or no Local."""
    seen: dict[int, str] = {}
    for run in runs:
        history = run.history
        if history.metric != runs[0].history.metric or len(history.roster) != len(
            runs[0].history.roster
        ):
            raise StoreError(
                f"{run.method} has metric {history.metric} and {len(history.roster)} clients; "
                f"expected {runs[0].history.metric} and {len(runs[0].history.roster)} as the first "
                "run; compare runs of one config"
            )
        if seen.setdefault(run.seed, history.roster.fingerprint) != history.roster.fingerprint:
            raise StoreError(
                f"{run.method}, seed {run.seed}: its clients hold other data than those of the "
                "runs before; expected the same partition; compare runs of one config"
            )
    lacking = set(seen) - {run.seed for run in runs if run.method == LOCAL}
    if lacking or not runs:
        raise StoreError(
            f"no run of 'local' for seed {', '.join(map(str, sorted(lacking))) or 'any'}; expected "
            "one beside every method; add 'local' to the methods"
        )


def _row(comparison: Compared[Any], method: str) -> MethodRow:
    runs = comparison.of_method(method)
    locals_ = [comparison.of_seed(r.seed)[LOCAL] for r in runs]
    found = [summarise(r.history, None, alone) for r, alone in zip(runs, locals_, strict=True)]
    gained = comparison.gains(method)

    def over(name: str) -> OverSeeds:
        return statistics.over_seeds([summary[name] for summary in found])

    def paired(at: str) -> Paired | None:
        if method == LOCAL:
            return None
        return statistics.wilcoxon(metrics.mean_known(comparison.gains(method, at).T))

    traffic = [(s["bytes_up"] + s["bytes_down"]) / s["clients"] for s in found]
    raised = [a for r in runs for a in raise_alarms(r.history, comparison.of_seed(r.seed))]
    return MethodRow(
        method=method,
        mean=statistics.over_seeds([last_score(s) for s in found]),
        weighted_mean=over("weighted_mean"),
        worst_tenth=over("worst_tenth"),
        best_tenth=over("best_tenth"),
        best_by_validation=over(score_field(BY_VALIDATION, comparison.metric)),
        best_on_test=over("bmta"),
        relative_to_local=over("relative_to_local"),
        worse_than_local=over("worse_than_local"),
        better=int((gained > 0).sum()),
        worse=statistics.count_worse(gained),
        compared=int((~np.isnan(gained)).sum()),
        served=len(judgement.served(comparison, method)),
        alone=statistics.over_seeds(
            [
                judgement.served_mean(local.last, run.history.last)
                for run, local in zip(runs, locals_, strict=True)
            ]
        ),
        validation=statistics.over_seeds(
            [
                float(metrics.mean_known(judgement.validation_scores(r.history, r.history.last)))
                for r in runs
            ]
        ),
        in_group_weight=over("in_group_weight"),
        bytes_per_client=statistics.over_seeds(traffic),
        seconds=over("seconds"),
        paired=paired("last"),
        paired_on_test=paired("best"),
        alarms=tuple(dict.fromkeys(raised)),
    )
