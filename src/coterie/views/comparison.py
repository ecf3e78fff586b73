"""A comparison of several methods with Local: its numbers, its verdict and its answers."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ..core import metrics
from ..core.metrics import Floats
from ..core.paired_tests import SiteGain
from ..errors import ConfigError, StoreError, did_you_mean, printable_lines
from ..runs import statistics
from ..runs.alarms import Alarm, raise_alarms
from ..runs.run import LOCAL, Run
from ..runs.statistics import OverSeeds, Paired
from ..runs.summary import BY_VALIDATION, last_score, score_field, summarise
from . import judgement
from .judgement import Choice, ClientGain, Judgement
from .reliance import Reliance, coalitions, reliance

if TYPE_CHECKING:
    from .verdict import SiteAnswer


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
    alarms: tuple[Alarm, ...]


# Fields of summary.json that a row has over the seeds.
SUMMARISED = (
    *("weighted_mean", "federated_accuracy", "worst_tenth", "best_tenth", "variance"),
    *("variance_worst_tenth", "variance_best_tenth", "relative_to_local", "worse_than_local"),
    *("in_group_weight", "seconds"),
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The runs of several methods on the same federation; Local is always one of them."""

    runs: tuple[Run, ...]
    path: Path | None = None
    site_gains: Mapping[str, Sequence[SiteGain]] | None = None  # if the clients computed them

    @classmethod
    def of(
        cls,
        runs: Iterable[Run],
        path: Path | None = None,
        gains: Mapping[str, Sequence[SiteGain]] | None = None,
    ) -> "Comparison":
        """A comparison of these runs; refused unless they can be compared.

        They need the same clients and the same metric, and each seed a run of Local. ``gains`` are
        the clients' gains by each method, if the clients computed them themselves.
        """
        runs = tuple(runs)
        refuse_unlike(runs)
        return cls(runs, path, gains)

    @property
    def folds(self) -> int | None:
        """How many folds test in turn, each in the run of its seed; None without folds."""
        found: int | None = self.runs[0].config.get("run", {}).get("folds")
        return found

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
        return self.runs[0].metric

    @property
    def trainings(self) -> str:
        """What the runs of one method are called: seeds or folds."""
        return "folds" if self.folds is not None else "seed" if len(self.seeds) == 1 else "seeds"

    def of_method(self, method: str) -> tuple[Run, ...]:
        """The runs of one method, one per seed."""
        return tuple(run for run in self.runs if run.method == method)

    def of_seed(self, seed: int) -> dict[str, Run]:
        """The histories of one seed, by method."""
        return {run.method: run for run in self.runs if run.seed == seed}

    def told(self, method: str) -> tuple[Run, ...]:
        """The runs that answers to one client are about: the first seed's, or all folds'."""
        return self.of_method(method)[: None if self.folds is not None else 1]

    def test_rows(self, client: int) -> int:
        """How many rows test a client's model: with folds, all of its rows."""
        return sum(int(run.roster.n_test[client]) for run in self.told(LOCAL))

    def gains(self, method: str) -> dict[str, float]:
        """What each client gained over its own local model, by name; NaN where it has no score.

        Of the first seed, or the mean over folds, as the page has it; positive is better.
        """
        if method not in self.methods:
            raise ConfigError(
                f"no method is called '{method}'; {did_you_mean(method, self.methods)}"
            )
        found = self.site_gain(method).tolist()
        return dict(zip(self.runs[0].roster.clients, found, strict=True))

    def gains_by_seed(self, method: str) -> Floats:
        """Each client's gain over its own local model ``[seeds, clients]``; positive is better."""
        pairs = [(run, self.of_seed(run.seed)[LOCAL]) for run in self.of_method(method)]
        return np.array([metrics.gains(run.last, local.last, self.metric) for run, local in pairs])

    def site_scores(self, method: str) -> Floats:
        """Each client's score ``[clients]`` by the models that its own answer is about.

        They are those of the first seed, or of all folds: then a client's score is of all its rows.
        """
        runs = self.told(method)
        scores = np.array([run.last for run in runs])
        sizes = np.array([run.roster.n_test for run in runs], dtype=np.float64)
        if metrics.METRICS[self.metric].test != "counts":
            sizes = np.ones_like(scores)
        sizes[np.isnan(scores)] = 0.0
        with np.errstate(invalid="ignore"):
            found: Floats = np.where(sizes > 0, scores * sizes, 0.0).sum(0) / sizes.sum(0)
        return found

    def site_gain(self, method: str) -> Floats:
        """Each client's gain ``[clients]`` over its own local model, by the same models."""
        return metrics.gains(self.site_scores(method), self.site_scores(LOCAL), self.metric)

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
        found = {m: reliance(list(self.of_method(m))) for m in self.methods}
        return {method: one for method, one in found.items() if one is not None}

    @cached_property
    def gains_by_client(self) -> dict[str, tuple[ClientGain, ...]]:
        """The gain of each client over its own local model, by each method that was tested."""
        found: dict[str, list[ClientGain]] = {c: [] for c in self.runs[0].roster.clients}
        for judged in (self.judgements or {}).values():
            for one in judged.clients:
                found[one.client].append(one)
        return {client: tuple(gains) for client, gains in found.items()}

    @cached_property
    def verdict(self) -> str:
        """Whether joining is worth it, in a sentence or two."""
        from .verdict import verdict

        return printable_lines(verdict(self))

    def client(self, name: str) -> "SiteAnswer":
        """What the comparison says to one client, in a sentence and in numbers."""
        from .verdict import site_answer

        return site_answer(self, name)

    @cached_property
    def answers(self) -> tuple["SiteAnswer", ...]:
        """The answers to all clients; none if there is no method beside Local."""
        from .verdict import site_answer

        names = () if self.choice is None else self.runs[0].roster.clients
        return tuple(site_answer(self, name) for name in names)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per method, seed, evaluated round and client."""
        from .frame import frame

        return frame(self.runs)

    def to_dict(self) -> dict[str, Any]:
        """The contents of ``comparison.json``."""
        from .reliance import seen_by
        from .table import notes

        found = self.judgements or {}
        seen: dict[str, dict[str, int]] = {}
        for method in found:
            runs = self.of_method(method)
            most = np.max([seen_by(run) for run in runs], axis=0).tolist()
            seen[method] = dict(zip(runs[0].roster.clients, most, strict=True))
        return {
            "verdict": self.verdict,
            "notes": notes(self),
            "recommended": self.choice,
            "metric": self.metric,
            "seeds": list(self.seeds),
            "methods": [{**row._asdict(), **_answers(found.get(row.method))} for row in self.rows],
            "coalitions": {m: c for m in self.methods if (c := coalitions(self.of_method(m)[0]))},
            "sites": [answer.to_dict() for answer in self.answers],
            "clients": [
                {
                    **{"client": one.client, "method": one.method},
                    **{**one.gain._asdict(), "shown": one.claim, "with_others": one.with_others},
                    "own_model_seen_by": seen[judged.method][one.client],
                }
                for judged in found.values()
                for one in judged.clients
            ],
            "runs": [
                {
                    "method": run.method,
                    "seed": run.seed,
                    "digest": run.summary["digest"],
                    "path": self._place(run),
                }
                for run in self.runs
            ],
        }

    def _place(self, run: Run) -> str | None:
        """The path of a run relative to the comparison's folder; None if it was not written."""
        if run.path is None or self.path is None:
            return None
        return Path(os.path.relpath(run.path, self.path)).as_posix()

    def text(self, columns: Sequence[str] = ()) -> str:
        """The table and the verdict as text, with the further columns of these names."""
        from .table import checked_columns, comparison_text

        return printable_lines(comparison_text(self, checked_columns(columns)))

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from .table import comparison_html

        return comparison_html(self)


def _answers(found: Judgement | None) -> dict[str, Any]:
    """The answers to questions B, C and D about one method, as values of JSON."""
    said: dict[str, Any] = {name: getattr(found, name, None) for name in judgement.QUESTIONS}
    said = {name: None if mean is None else mean._asdict() for name, mean in said.items()}
    left_out = [] if found is None else list(found.left_out)
    return {"shown": None if found is None else found.claim, **said, "left_out": left_out}


def refuse_unlike(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot be compared: other clients, another metric, or Local is missing."""
    seen: dict[int, str] = {}
    for run in runs:
        first = runs[0]
        if run.metric != first.metric or len(run.roster) != len(first.roster):
            raise StoreError(
                f"{run.method} has metric {run.metric} and {len(run.roster)} clients; expected "
                f"{first.metric} and {len(first.roster)} as the first run; compare runs of one "
                "config"
            )
        if seen.setdefault(run.seed, run.roster.fingerprint) != run.roster.fingerprint:
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


def _row(comparison: Comparison, method: str) -> MethodRow:
    runs = comparison.of_method(method)
    locals_ = [comparison.of_seed(r.seed)[LOCAL] for r in runs]
    found = [summarise(r, None, alone) for r, alone in zip(runs, locals_, strict=True)]
    gained = comparison.gains_by_seed(method)

    def over(name: str) -> OverSeeds:
        return statistics.over_seeds([summary[name] for summary in found])

    alone = [  # of the clients that the method serves
        float(metrics.mean_known(np.where(np.isnan(run.last), np.nan, local.last)))
        for run, local in zip(runs, locals_, strict=True)
    ]
    validation = [judgement.validation_scores(run, run.last) for run in runs]
    traffic = [(s["bytes_up"] + s["bytes_down"]) / s["clients"] for s in found]
    raised = [a for r in runs for a in raise_alarms(r, comparison.of_seed(r.seed))]
    return MethodRow(
        **{name: over(name) for name in SUMMARISED},
        method=method,
        mean=statistics.over_seeds([last_score(s) for s in found]),
        best_by_validation=over(score_field(BY_VALIDATION, comparison.metric)),
        best_on_test=over("bmta"),
        better=int((gained > 0).sum()),
        worse=statistics.count_worse(gained),
        compared=int((~np.isnan(gained)).sum()),
        served=len(judgement.served(comparison, method)),
        alone=statistics.over_seeds(alone),
        validation=statistics.over_seeds([float(metrics.mean_known(v)) for v in validation]),
        bytes_per_client=statistics.over_seeds(traffic),
        paired=None if method == LOCAL else statistics.wilcoxon(metrics.mean_known(gained.T)),
        alarms=tuple(dict.fromkeys(raised)),
    )
