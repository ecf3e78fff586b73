"""What ``coterie.run`` and ``coterie.compare`` return: one run, and methods × seeds beside Local.

Both are made from data in memory or read from a folder; every number is computed by the same code.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import metrics
from ..core.metrics import Floats
from ..errors import ConfigError, StoreError, did_you_mean, printable_lines
from ..experiment import run_folder
from ..experiment.comparison_folder import COMPARISON, REPORT
from ..experiment.run_folder import RunData
from ..results import judgement, statistics
from ..results.alarms import Alarm, raise_alarms
from ..results.history import History, last_score, summarise
from ..results.judgement import LOCAL, Choice, ClientGain, Judgement
from ..results.statistics import OverSeeds, Paired
from ..storage import files


@dataclass(frozen=True, eq=False, repr=False)
class RunResult:
    """One run: its summary, its history, every client's model."""

    data: RunData

    @classmethod
    def read(cls, path: str | Path) -> "RunResult":
        """A finished run from its folder."""
        return cls(run_folder.read(Path(path)))

    @property
    def method(self) -> str:
        """The method's name."""
        return self.data.history.method

    @property
    def seed(self) -> int:
        """The seed everything was derived from."""
        return self.data.history.seed

    @property
    def history(self) -> History:
        """Every round, every client's scores, every matrix."""
        return self.data.history

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        return dict(self.data.summary)

    @property
    def path(self) -> Path | None:
        """The run's folder; None for a run that was not written down."""
        return self.data.path

    def __repr__(self) -> str:
        from .table import run_text

        return printable_lines(run_text(self))

    def _repr_html_(self) -> str:
        from .table import run_html

        return run_html(self)


class Row(NamedTuple):
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


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Several methods on the same federation, always beside Local."""

    runs: tuple[RunResult, ...]
    path: Path | None = None

    @classmethod
    def of(cls, runs: Iterable[RunResult], path: Path | None = None) -> "Comparison":
        """A comparison of runs that can be compared: same clients, same metric, Local for each."""
        runs = tuple(runs)
        _check(runs)
        return cls(runs, path)

    @classmethod
    def read(cls, path: str | Path) -> "Comparison":
        """A comparison from the folder ``coterie compare`` wrote."""
        path = Path(path)
        try:
            places = [path / run["path"] for run in files.read_json(path / COMPARISON)["runs"]]
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"{path / COMPARISON}: is not as a comparison writes it ({error!r}); expected a "
                "list of runs; check the folder with 'coterie verify'"
            ) from error
        return cls.of(map(RunResult.read, places), path)

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

    def of_method(self, method: str) -> tuple[RunResult, ...]:
        """One method's runs, a seed each."""
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
    def rows(self) -> tuple[Row, ...]:
        """A row a method."""
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

    @cached_property
    def verdict(self) -> str:
        """Whether joining is worth it, in a sentence or two."""
        from .verdict import verdict

        return printable_lines(verdict(self))

    def to_dict(self) -> dict[str, Any]:
        """What ``comparison.json`` holds."""
        from .table import notes
        from .verdict import client_sentence

        found = list((self.judgements or {}).values())
        overall = {j.method: {**j.overall._asdict(), "p": j.p, "shown": j.claim} for j in found}
        return {
            "verdict": self.verdict,
            "notes": notes(self),
            "recommended": self.choice,
            "metric": self.metric,
            "seeds": list(self.seeds),
            "methods": [{**row._asdict(), "gain": overall.get(row.method)} for row in self.rows],
            "clients": [
                {
                    **{"client": one.client, "method": one.method},
                    **{**one.gain._asdict(), "p": one.p, "shown": one.claim},
                    "sentence": client_sentence(self, one),
                }
                for judged in found
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

    def _place(self, run: RunResult) -> str | None:
        """Where a run lies, seen from the comparison's folder; None where it was not written."""
        if run.path is None or self.path is None:
            return None
        return Path(os.path.relpath(run.path, self.path)).as_posix()

    def write(self, path: str | Path) -> Path:
        """Write ``comparison.json`` and ``report.html`` into a folder; the page's path."""
        from .page import page

        path = Path(path)
        files.write_json(path / COMPARISON, self.to_dict())
        files.write_text(path / REPORT, page(self))
        return path / REPORT

    def __repr__(self) -> str:
        from .table import comparison_text

        return printable_lines(comparison_text(self))

    def _repr_html_(self) -> str:
        from .table import comparison_html

        return comparison_html(self)


def _scores(history: History, at: str) -> Floats:
    best = statistics.best_round(history.test, history.metric) if at == "best" else None
    scores: Floats = history.test[-1 if best is None else best]
    return scores


def _check(runs: tuple[RunResult, ...]) -> None:
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


def _row(comparison: Comparison, method: str) -> Row:
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

    prefix = "accuracy" if comparison.metric == "accuracy" else "score"
    traffic = [(s["bytes_up"] + s["bytes_down"]) / s["clients"] for s in found]
    raised = [a for r in runs for a in raise_alarms(r.history, comparison.of_seed(r.seed))]
    return Row(
        method=method,
        mean=statistics.over_seeds([last_score(s) for s in found]),
        weighted_mean=over("weighted_mean"),
        worst_tenth=over("worst_tenth"),
        best_tenth=over("best_tenth"),
        best_by_validation=over(f"{prefix}_best_by_validation"),
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
