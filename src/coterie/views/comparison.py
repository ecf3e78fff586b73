"""The numbers of a comparison of several methods with Local, computed from their histories.

:class:`Compared` is abstract: ``coterie.Comparison`` adds folders, the verdict and the page.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..core import metrics
from ..core.metrics import Floats
from ..core.site_gain import SiteGain
from ..errors import ConfigError, StoreError, did_you_mean
from ..runs import statistics
from ..runs.alarms import Alarm, raise_alarms
from ..runs.run import LOCAL, History
from ..runs.statistics import OverSeeds, Paired
from ..runs.summary import BY_VALIDATION, last_score, score_field, summarise
from . import judgement
from .judgement import Choice, ClientGain, Judgement
from .reliance import Reliance, reliance


class ComparedRun(ABC):
    """One run of a comparison: what is needed of it is its history."""

    @property
    @abstractmethod
    def history(self) -> History:
        """Every round, the scores of every client, and every collaboration matrix."""

    @property
    def method(self) -> str:
        """The method's name."""
        return self.history.method

    @property
    def seed(self) -> int:
        """The seed that every draw of the run was derived from."""
        return self.history.seed


AnyRun = TypeVar("AnyRun", bound=ComparedRun)


class MethodRow(NamedTuple):
    """The numbers of one method, over its seeds. A number that does not exist is NaN."""

    method: str
    mean: OverSeeds  # last round
    weighted_mean: OverSeeds
    federated_accuracy: OverSeeds  # of the global model on the federated test set
    worst_tenth: OverSeeds
    best_tenth: OverSeeds
    variance: OverSeeds  # over clients; of the metric's unit, squared
    variance_worst_tenth: OverSeeds
    variance_best_tenth: OverSeeds
    best_by_validation: OverSeeds  # the round chosen by validation data
    best_on_test: OverSeeds  # BMTA: the round chosen by test data, as some papers do
    relative_to_local: OverSeeds
    worse_than_local: OverSeeds  # clients per run
    better: int  # pairs of a client and a seed that gained
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
    """The runs of several methods on the same federation; Local is always one of them."""

    runs: tuple[AnyRun, ...]

    @property
    @abstractmethod
    def site_gains(self) -> Mapping[str, Sequence[SiteGain]] | None:
        """Each client's gain by each method beside Local, where sites computed it themselves."""

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
        """The name of the metric."""
        return self.runs[0].history.metric

    def of_method(self, method: str) -> tuple[AnyRun, ...]:
        """The runs of one method, one per seed."""
        return tuple(run for run in self.runs if run.method == method)

    def of_seed(self, seed: int) -> dict[str, History]:
        """The histories of one seed, by method."""
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
        """The method that is recommended; None if there is none beside Local."""
        return judgement.choose(self)

    @cached_property
    def best_on_test(self) -> str:
        """The method with the best mean on test data in the last round; it may be Local.

        Only methods that serve the same clients are compared: those that serve the most clients.
        """
        return judgement.best_on_test(self)

    @cached_property
    def judgements(self) -> dict[str, Judgement] | None:
        """The tests of every method; None if the clients' answers are not known."""
        return judgement.judge(self)

    @cached_property
    def reliances(self) -> dict[str, Reliance]:
        """How much clients relied on each other, by method; only methods that have a matrix."""
        found = {m: reliance([run.history for run in self.of_method(m)]) for m in self.methods}
        return {method: one for method, one in found.items() if one is not None}

    @cached_property
    def gains_by_client(self) -> dict[str, tuple[ClientGain, ...]]:
        """The gain of each client over its own local model, by each method that was tested."""
        found: dict[str, list[ClientGain]] = {c: [] for c in self.runs[0].history.roster.clients}
        for judged in (self.judgements or {}).values():
            for one in judged.clients:
                found[one.client].append(one)
        return {client: tuple(gains) for client, gains in found.items()}

    def client_gains(self, name: str) -> tuple[ClientGain, ...]:
        """The gain of one client over its own local model, by each method."""
        if name not in self.gains_by_client:
            known = did_you_mean(name, self.gains_by_client)
            raise ConfigError(f"there is no client '{name}'; {known}")
        return self.gains_by_client[name]


def _scores(history: History, at: str) -> Floats:
    best = statistics.best_round(history.test, history.metric) if at == "best" else None
    scores: Floats = history.test[-1 if best is None else best]
    return scores


def refuse_unlike(runs: Sequence[ComparedRun]) -> None:
    """Refuse runs that cannot be compared: other clients, another metric, or Local is missing."""
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

    pairs = [(run.history, local) for run, local in zip(runs, locals_, strict=True)]
    alone = [judgement.served_mean(local.last, history.last) for history, local in pairs]
    validation = [judgement.validation_scores(history, history.last) for history, _ in pairs]
    traffic = [(s["bytes_up"] + s["bytes_down"]) / s["clients"] for s in found]
    raised = [a for r in runs for a in raise_alarms(r.history, comparison.of_seed(r.seed))]
    return MethodRow(
        method=method,
        mean=statistics.over_seeds([last_score(s) for s in found]),
        weighted_mean=over("weighted_mean"),
        federated_accuracy=over("federated_accuracy"),
        worst_tenth=over("worst_tenth"),
        best_tenth=over("best_tenth"),
        variance=over("variance"),
        variance_worst_tenth=over("variance_worst_tenth"),
        variance_best_tenth=over("variance_best_tenth"),
        best_by_validation=over(score_field(BY_VALIDATION, comparison.metric)),
        best_on_test=over("bmta"),
        relative_to_local=over("relative_to_local"),
        worse_than_local=over("worse_than_local"),
        better=int((gained > 0).sum()),
        worse=statistics.count_worse(gained),
        compared=int((~np.isnan(gained)).sum()),
        served=len(judgement.served(comparison, method)),
        alone=statistics.over_seeds(alone),
        validation=statistics.over_seeds([float(metrics.mean_known(v)) for v in validation]),
        in_group_weight=over("in_group_weight"),
        bytes_per_client=statistics.over_seeds(traffic),
        seconds=over("seconds"),
        paired=paired("last"),
        paired_on_test=paired("best"),
        alarms=tuple(dict.fromkeys(raised)),
    )
