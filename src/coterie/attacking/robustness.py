"""``coterie attack``: every method under every attack, as configured and guarded: who is hurt."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Unpack, final

import numpy as np
import torch
from torch import Tensor

from ..algorithms.fedavg import FedAvg, Update
from ..api import Options, Source, configure, listeners_of
from ..core import random
from ..core.algorithm import Round
from ..core.metrics import Floats, gains, higher_is_better, mean_known
from ..core.mixing import squared_distances
from ..core.ranges import Interval
from ..core.shards import Shards
from ..data.federation import Dataset
from ..engines.evaluation import outputs
from ..errors import (
    ConfigError,
    CoterieWarning,
    DataError,
    StoreError,
    did_you_mean,
    printable_lines,
)
from ..runs import collaboration
from ..runs.assemble import Assembly, assemble
from ..runs.config.methods import Method
from ..runs.config.schema import Config
from ..runs.execute import execute
from ..runs.listeners import Watch
from ..runs.plan import Cell, Plan
from ..runs.run import LOCAL, Run
from ..storage import files
from ..views import words
from .attacks import ATTACKS, DOORS, TARGET, attacked, of_method, triggered

GUARD = 3.0  # guard.norm of a guarded run
FOLDER, ROWS = "attack", "attack.json"


class Row(NamedTuple):
    """One run under one attack: what becomes of the honest clients."""

    method: str
    guarded: bool
    attack: str
    share: float  # of attackers
    seed: int
    mean: float  # score of honest clients
    worst_tenth: float
    worse_than_alone: int
    on_attackers: float | None  # the share of honest clients' weight; None without a matrix
    on_other_groups: float | None  # on honest clients of another true group
    backdoor: float | None  # share of honest clients' samples with the trigger taken for its class
    rejected: int  # uploads of attackers
    refused: int  # uploads of honest clients

    @property
    def key(self) -> tuple[str, bool, str, float, int]:
        """What was run."""
        return self[:5]


def attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """Which clients attack: at least one, drawn by the seed; none if the share is 0."""
    count = max(1, round(share * clients)) if share else 0
    luck = random.bits(seed, "attackers", torch.arange(clients))
    return frozenset(luck.argsort()[:count].tolist())


@final
@dataclass(frozen=True, repr=False)
class Robustness:
    """The rows of every method, attack and seed."""

    rows: tuple[Row, ...]
    metric: str
    clients: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "metric": self.metric,
            "clients": self.clients,
            "rows": [row._asdict() for row in self.rows],
        }

    def mean(self, name: str, **which: Any) -> float:
        """The mean of a field over the rows of these values; NaN without any."""
        found = [
            getattr(row, name)
            for row in self.rows
            if all(getattr(row, field) == value for field, value in which.items())
        ]
        known = [value for value in found if value is not None]
        return float(mean_known(np.array(known, dtype=np.float64))) if known else math.nan

    @property
    def subjects(self) -> list[tuple[str, bool]]:
        """The methods, as configured and guarded."""
        return list(dict.fromkeys((row.method, row.guarded) for row in self.rows))

    def table(self, name: str, share: float) -> str:
        """A Markdown table of one field: a row per method, a column per attack."""
        attacks = [a for a in ATTACKS if any(row.attack == a for row in self.rows)]
        rows = []
        for method, guarded in self.subjects:
            which: dict[str, Any] = {"method": method, "guarded": guarded}
            values = [
                self.mean(name, **which, attack=attack, share=share if attack != "A0" else 0.0)
                for attack in attacks
            ]
            shown = (words.plain(value, 1) for value in values)
            rows.append((f"{words.label(method)}{', guarded' * guarded}", *shown))
        return "\n".join(words.markdown(("method", *attacks), rows, "lr"))

    def __repr__(self) -> str:
        return printable_lines(self.markdown())

    def markdown(self) -> str:
        """All tables."""
        parts = []
        for share in dict.fromkeys(row.share for row in self.rows if row.share):
            bad = len(attackers(self.clients, share, 0))
            parts.append(f"### {bad} of {self.clients} clients attack")
            for name, told in TOLD.items():
                if any(getattr(row, name) is not None for row in self.rows):
                    parts += [f"{told}:", self.table(name, share)]
        return "\n\n".join(parts)


TOLD = {
    "mean": "Mean score of honest clients",
    "worst_tenth": "Mean score of the worst tenth of them",
    "worse_than_alone": "How many of them are worse off than alone",
    "on_attackers": "Share of their weight on attackers, in percent",
    "on_other_groups": "Share of their weight on honest clients of another group, in percent",
    "backdoor": "Share of their samples with a trigger taken for its class, in percent",
}


# ---- two robust averages to compare with: they know nothing of who helps whom -------------------

Fewer = Annotated[float, Interval(ge=0, lt=0.5)]


@dataclass(frozen=True)
class TrimmedMean(FedAvg):
    """FedAvg with the coordinate-wise trimmed mean.

    Fields:
        trim: the share of clients whose values are left out at each end.
    """

    trim: Fewer = 0.2

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """Leave out the largest and the smallest values of each coordinate."""
        m = len(uploads.w)
        out = min(int(self.trim * m), (m - 1) // 2)
        return uploads.w.sort(0).values[out : m - out].mean(0)


@dataclass(frozen=True)
class MultiKrum(FedAvg):
    """FedAvg over the clients whose models are nearest to others.

    Fields:
        trim: the share of clients that may attack, and are left out.
    """

    trim: Fewer = 0.2

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """Average the m - f models with the smallest sums of m - f - 2 squared distances."""
        m = len(uploads.w)
        out = int(self.trim * m)
        near = max(1, m - out - 2)
        D = squared_distances(uploads.w).fill_diagonal_(torch.inf)
        score = D.sort(1).values[:, :near].sum(1)
        return uploads.w[score.argsort()[: m - out]].mean(0)


REFERENCES = tuple(
    Method(f"fedavg@{name}", f"fedavg@{name}", kind, {}, None, {}, {})
    for name, kind in (("trimmed_mean", TrimmedMean), ("multi_krum", MultiKrum))
)


# ---- running it ----------------------------------------------------------------------------------


def attack(
    source: Source = None,
    attacks: Sequence[str] = tuple(ATTACKS),
    shares: Sequence[float] = (0.2,),
    *,
    progress: Watch | None = None,
    **options: Unpack[Options],
) -> Robustness:
    """Attack every method of a config, as configured and with a guard of norm 3.

    ``attacks`` are names, A1 to A10, and ``shares`` the shares of clients that attack. With ``out``
    attacks that were interrupted are continued.
    """
    return attack_config(configure(source, **options), attacks, shares, listeners_of(progress))


def attack_config(
    config: Config,
    attacks: Sequence[str] = tuple(ATTACKS),
    shares: Sequence[float] = (0.2,),
    listeners: Sequence[Watch] = (),
) -> Robustness:
    """The rows of all runs; with a folder, those that are there are not run again."""
    _check(config, attacks, shares)
    inner = assemble(config)
    with contextlib.closing(inner):
        attacks = _suited(inner.federations[config.seeds[0]].dataset, attacks)
        clients = len(inner.federations[config.seeds[0]].clients)
        done = _Rows(config)
        for plan in cases(config, attacks, shares):
            done.add(_rows(inner, plan, done, listeners))
        return Robustness(tuple(done.rows.values()), inner.config.run.metric, clients)


def _suited(data: Dataset, attacks: Sequence[str]) -> Sequence[str]:
    """The attacks that this data allows; refuses one that was asked for and is not among them."""
    why: dict[str, str] = {}
    if data.x.dim() < 4:
        why |= dict.fromkeys(("A7", "A10"), "a backdoor shows its trigger in images")
    if data.regression:
        why["A1"] = "it flips the labels of classes"
    lacking = {name: why[name] for name in attacks if name in why}
    if not lacking:
        return attacks
    told = "; ".join(f"{name}: {reason}" for name, reason in lacking.items())
    if set(attacks) != set(ATTACKS):
        raise DataError(f"--attacks: found {told}; leave {', '.join(lacking)} out")
    warnings.warn(CoterieWarning(f"left out for this data: {told}"), stacklevel=2)
    return [name for name in attacks if name not in lacking]


class Threat(NamedTuple):
    """An attack, by a share of the clients, on guarded or unguarded methods."""

    attack: str
    share: float
    guarded: bool


def cases(config: Config, attacks: Sequence[str], shares: Sequence[float]) -> Iterator[Threat]:
    """Every case once, without attackers first."""
    for guarded in (False, True):
        yield Threat("A0", 0.0, guarded)
        for share in shares:
            yield from (Threat(name, share, guarded) for name in attacks if name != "A0")


class _Rows:
    """The rows so far, in a file of the config's folder if it has one."""

    def __init__(self, config: Config) -> None:
        self.path = None if config.run.out is None else Path(config.run.out) / ROWS
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.alone: dict[int, Floats] = {}  # Local's scores without attackers, by seed
        if self.path is not None and self.path.exists():
            self._read(files.read_json(self.path))

    def _read(self, found: Any) -> None:
        try:
            rows = [Row(**row) for row in found["rows"]]
            self.rows = {row.key: row for row in rows}
            self.alone = {int(s): np.array(v, dtype=np.float64) for s, v in found["alone"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.path}: holds no rows of 'coterie attack' ({error}); remove it, or name "
                "another folder with --out"
            ) from error

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows as they come, and write them."""
        for row in rows:
            self.rows[row.key] = row
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                told = {seed: scores.tolist() for seed, scores in self.alone.items()}
                kept = [each._asdict() for each in self.rows.values()]
                files.write_json(self.path, {"rows": kept, "alone": told})


def _rows(inner: Assembly, case: Threat, done: _Rows, listeners: Sequence[Watch]) -> Iterator[Row]:
    config = inner.config
    if case.guarded:
        guard = config.guard.model_copy(update={"norm": GUARD})
        config = config.model_copy(update={"guard": guard})
    wanted = [
        Cell(config, method, seed, None)
        for method in methods_of(config)
        for seed in config.seeds
        if _makes_sense(method.label, case)
        and (method.label, case.guarded, case.attack, case.share, seed) not in done.rows
    ]
    for seed in config.seeds:
        cells = tuple(cell for cell in wanted if cell.seed == seed)
        bad = attackers(len(inner.federations[seed].clients), case.share, seed)
        at = attacked(inner, bad, case.attack)
        for cell, run in execute(Plan(cells), lambda _: contextlib.nullcontext(at), listeners):  # noqa: B023
            if cell.method.label == LOCAL and not bad:
                done.alone[seed] = run.last
            yield _row(inner, cell, run, case, bad, done.alone[seed])


def _makes_sense(method: str, case: Threat) -> bool:
    """Local listens to nobody, and the references guard themselves."""
    if method == LOCAL:
        return case.attack == "A0" and not case.guarded
    return not (case.guarded and method in {reference.label for reference in REFERENCES})


def methods_of(config: Config) -> tuple[Method, ...]:
    """The methods of a config, and the robust averages."""
    return (*config.methods(), *REFERENCES)


def _row(
    inner: Assembly, cell: Cell, run: Run, case: Threat, bad: frozenset[int], alone: Floats
) -> Row:
    honest = np.array([i not in bad for i in range(len(run.roster))])
    scores = run.last[honest]
    ordered = np.sort(scores[~np.isnan(scores)])
    ordered = ordered if higher_is_better(run.metric) else ordered[::-1]
    lost = gains(run.last, alone, run.metric)[honest]
    weight = _weights(run, honest)
    names = {run.roster.clients[i] for i in bad}
    told = [r["client"] in names for line in run.lines for r in line["rejected"]]
    on = inner.simulated(cell.method.build(), cell.config.single(cell.method, cell.seed))
    door = of_method(case.attack, cell.method.label) in DOORS and bool(bad)
    return Row(
        cell.method.label,
        case.guarded,
        case.attack,
        case.share,
        cell.seed,
        float(mean_known(scores)),
        float(ordered[: -(-len(ordered) // 10)].mean()) if len(ordered) else math.nan,
        int((lost < 0).sum()),
        *weight,
        100 * _opened(run, on.shards, on.problem.model, np.flatnonzero(honest)) if door else None,
        sum(told),
        len(told) - sum(told),
    )


def _weights(run: Run, honest: Any) -> tuple[float | None, float | None]:
    """The percentage of honest clients' weight on attackers, and on honest ones of other groups."""
    total = collaboration.add_up(run.matrices, run.swaps)
    if total is None:
        return None, None
    A = total if isinstance(total, np.ndarray) else total.toarray()
    A = A[honest] / np.maximum(A[honest].sum(1, keepdims=True), 1e-30)
    groups, wanted = run.roster.truth(run.swaps)
    on_bad = 100 * float(A[:, ~honest].sum(1).mean())
    if groups is None or wanted is None:
        return on_bad, None
    other = (wanted[honest][:, None] != groups) & honest
    return on_bad, 100 * float((A * other).sum(1).mean())


def _opened(run: Run, shards: Shards, model: Any, honest: Iterable[int]) -> float:
    """How often honest clients' models take a sample with the trigger for its class."""
    shares = []
    for i in honest:
        index = shards.splits["test"].of(int(i))
        read = shards.relabel[int(i)] if shards.relabel.shape[1] else None
        y = shards.y[index] if read is None else read[shards.y[index]]
        index = index[y != TARGET]
        if len(index):
            x = replace(shards, x=triggered(shards, index)).inputs(torch.arange(len(index)))
            found = outputs(model, run.predictor(int(i)), x, regression=False).argmax(-1)
            shares.append(float((found == TARGET).double().mean()))
    return float(np.mean(shares)) if shares else math.nan


def _check(config: Config, attacks: Sequence[str], shares: Sequence[float]) -> None:
    for name in attacks:
        if name not in ATTACKS:
            raise ConfigError(f"--attacks: there is no '{name}'; {did_you_mean(name, ATTACKS)}")
    for share in shares:
        if not 0 < share < 1:
            raise ConfigError(f"--shares: found {share}; expected shares between 0 and 1")
    if config.run.federation is not None or config.engine.name == "wire":
        raise ConfigError("attack: found clients in other processes; expected a simulation")
