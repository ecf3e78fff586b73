"""What ``coterie doctor`` found: facts, one row per site, what leaves a site, and warnings."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from ..algorithms.exposure import ANY_METHOD, EXPOSURES, leaves
from ..api import Options, Source, configure
from ..commands.live import duration
from ..core.fields import AUTO
from ..core.metrics import automatic
from ..core.policies import declared
from ..data.federation import Dataset, Federation
from ..data.simulation import Simulation
from ..engines import auto, process
from ..engines.auto import Candidate
from ..engines.base import Work
from ..engines.settings import Length
from ..engines.vmap import compiler_version
from ..errors import few, printable
from ..runs.accounting import foreseen
from ..runs.assemble import Assembly, assemble, prevalence
from ..runs.config.methods import Method
from ..runs.estimate import peak_mib, timings
from ..runs.run import Roster
from . import findings
from .findings import (
    SitePart,
    data_warnings,
    duplicates,
    leakage_warnings,
    repeated_warnings,
    score_warnings,
    weak_warnings,
)

MOST = 30  # sites that are printed; JSON has all of them
FEW = 4  # classes whose shares are printed
COLUMNS = ("site", "rows", "train", "val", "test", "missing", "commonest", "shows from", "classes")


@dataclass(frozen=True)
class Diagnosis:
    """Facts about an experiment before it is run, its sites, what leaves them, and warnings."""

    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    sites: tuple[SitePart, ...] = ()
    leaves: tuple[tuple[str, str], ...] = ()  # method, and what leaves a site under it
    estimate: tuple[tuple[str, float | None], ...] = ()  # seconds and mib

    def __repr__(self) -> str:
        blocks = [
            _aligned(self.facts),
            _site_lines([COLUMNS, *(row.cells() for row in self.sites[:MOST])], len(self.sites)),
            ["what leaves a site:", *(f"  {line}" for line in _aligned(self.leaves))],
            [f"warning: {warning}" for warning in self.warnings],
        ]
        return "\n\n".join("\n".join(map(printable, block)) for block in blocks if block)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md and stay."""
        return {
            "facts": dict(self.facts),
            "estimate": dict(self.estimate),
            "sites": [row.to_dict() for row in self.sites],
            "leaves": dict(self.leaves),
            "warnings": list(self.warnings),
        }


def _aligned(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}" for name, text in pairs]


def _site_lines(rows: list[tuple[str, ...]], sites: int) -> list[str]:
    """Lines of aligned cells; numbers to the right, the first and the last column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        middle = (f"{c:>{w}}" for c, w in zip(row[1:-1], widths[1:-1], strict=True))
        lines.append("  ".join((f"{row[0]:<{widths[0]}}", *middle, row[-1])))
    return [*lines, f"… and {sites - MOST} more"] if sites > MOST else lines


# ---- checks an experiment before it is run: data, clients, what leaves a site, memory, time -----


def doctor(source: Source = None, **options: Unpack[Options]) -> Diagnosis:
    """Check a config and its data before training.

    The first rounds of each method are trained in memory to estimate time and memory.
    """
    config = configure(source, **options)
    methods = config.methods()
    with contextlib.closing(assemble(config)) as assembly:
        seed = config.seeds[0]
        asked = assembly.config.single(methods[-1], seed)
        on = assembly.simulated(methods[-1].build(), asked)
        costs, estimate = _cost_facts(assembly, on, methods)
    made, roster, metric = on.federation, Roster.of(on.federation), assembly.config.run.metric
    sites = tuple(findings.parts(made))
    repeated = duplicates(made)
    inside, across = sum(repeated.across_splits.values()), repeated.across_clients
    counts = ("duplicates", f"{inside:,} across splits, {across:,} across clients")
    measured = (
        "metric",
        f"{metric}{_why(metric, made.dataset) if config.run.metric == AUTO else ''}",
    )
    facts = (
        *_data_facts(assembly, on, roster),
        measured,
        *_vocabulary(made),
        *_commonest(sites),
        counts,
    )
    warnings = (
        *weak_warnings(roster, config.run.participation),
        *score_warnings(sites, metric),
        *leakage_warnings(made),
        *data_warnings(made),
        *repeated_warnings(made, repeated),
    )
    told = (ANY_METHOD, *(_leaving(assembly, method) for method in methods))
    return Diagnosis((*facts, *costs), warnings, sites, told, estimate)


def _vocabulary(federation: Federation) -> list[tuple[str, str]]:
    """The names of categories, which leave a site as part of the common schema."""
    columns = [column for column in federation.dataset.columns if column.levels]
    if not columns:
        return []
    names = [f"{column.name} ({', '.join(column.levels[:FEW])}, …)" for column in columns]
    return [
        (
            "categories",
            f"every site, and every exported card, sees the names in {few(names)}; "
            "[levels] in site.toml hashes a column's names or keeps those of a list",
        )
    ]


def _leaving(assembly: Assembly, method: Method) -> tuple[str, str]:
    """A method's label, what leaves a site under it, and the ε of the whole run."""
    known = method.label if method.label in EXPOSURES else method.name
    made, config = method.build(), assembly.config
    named = {field.name: field.default for field in fields(method.algorithm)} | method.fields
    said = leaves(known, type(made)).replace("to M raw", f"to {named.get('downloads')} raw")
    if config.privacy is not None and not made.traits.alone:
        problem = assembly.simulated(made, config.single(method, config.seeds[0])).problem
        spent = foreseen(problem, made, config.run.rounds)
        said += f"; ε at most {spent:.1f} at δ = {config.privacy.delta:g}"
        said += f"; [privacy] does not cover: {declared(made)[1].leaves}"
    return method.label, said


def _commonest(sites: Sequence[SitePart]) -> list[tuple[str, str]]:
    known, said = findings.mean_commonest(sites), "accuracy of always answering it"
    return (
        [] if known is None else [("commonest class", f"{known:.1f} % {said}, mean over clients")]
    )


def _data_facts(assembly: Assembly, on: Simulation, roster: Roster) -> list[tuple[str, str]]:
    config, federation, network = assembly.config, on.federation, on.problem.model
    data = federation.dataset
    kind = f"{data.classes} classes" if data.classes else "regression"
    shape = "x".join(map(str, data.x.shape[1:]))
    shape += " (tokens)" if data.x.dtype == torch.int64 else ""
    splits = (("train", roster.n_train), ("val", roster.n_val), ("test", roster.n_test))
    facts = [
        ("data", f"{data.name}: {len(data.x):,} samples of shape {shape}, {kind}"),
        ("partition", f"{federation.partition}, fingerprint {roster.fingerprint}"),
        ("clients", str(len(roster))),
        *((f"{name} samples", f"{_range(n)}, {n.sum():,} in all") for name, n in splits),
    ]
    if data.classes:
        counts = [len(data.y[own].unique()) for own in federation.train]
        facts.append(("classes", _range(np.array(counts))))
    if federation.units is not None:
        units = [len(federation.units[own].unique()) for own in federation.train]
        facts.append(("training units", _range(np.array(units))))
    if data.times is not None:
        facts.append(("splits", "by time: train, then validation, then test"))
    if roster.groups is not None:
        facts.append(("hidden groups", str(len(np.unique(roster.groups)))))
    model = f"{config.model.name}, {network.parameters:,} parameters"
    facts.append(("model", model))
    if network.whole > network.parameters:
        facts.append(("batch-norm buffers", config.train.buffers))
    return facts


def _why(metric: str, dataset: Dataset) -> str:
    """Why the metric "auto" is AUC; empty for others."""
    share, names = prevalence(dataset), dataset.class_names or ("0", "1")
    if share is None or metric == automatic(None):
        return ""
    scarce = int(share < 0.5)
    return (
        f": chosen because {100 * min(share, 1 - share):.0f} % of the samples have the class "
        f"'{names[scarce]}', less than a third, so that accuracy says little"
    )


def _range(sizes: NDArray[np.int64]) -> str:
    least, most = sizes.min(), sizes.max()
    return f"{most} per client" if least == most else f"{least} to {most} per client"


Cost = tuple[tuple[str, float | None], ...]


def _cost_facts(
    assembly: Assembly, on: Simulation, methods: tuple[Method, ...]
) -> tuple[list[tuple[str, str]], Cost]:
    """Facts about the cost of the experiment, and both estimates."""
    run, engine = assembly.config.run, assembly.config.engine
    seeds, work = len(assembly.config.seeds), Work(on.problem, on.shards)
    length = Length(run.rounds, run.participation, len(methods) * seeds)
    fastest = auto.resolve(engine, work, length)
    found = fastest.chosen
    said, estimate = _estimates(assembly, on, methods, fastest, length)
    compiler = compiler_version() or "none: training loops run in torch, which is slower"
    facts = [
        ("methods", ", ".join(method.label for method in methods)),
        ("runs", f"{len(methods)} methods x {seeds} seeds, {run.rounds} rounds"),
        ("fastest engine", f"{found.name}, {found.chunk or 1} clients at a time"),
        ("C++ compiler", compiler),
        *said,
    ]
    if run.spread is not None:
        from ..runs.spread import described

        facts.append(("Ray", described()))
    return facts, estimate


def _estimates(
    assembly: Assembly,
    on: Simulation,
    methods: tuple[Method, ...],
    fastest: Candidate,
    length: Length,
) -> tuple[list[tuple[str, str]], Cost]:
    """Time and memory of all runs: from timed rounds, or else from timed steps."""
    work, seeds = Work(on.problem, on.shards), len(assembly.config.seeds)
    stepped = fastest.step * length.steps(work)  # of one run, training alone
    timed = timings(assembly, methods, stepped / length.rounds)
    mean = sum(timed) / len(timed) if timed else stepped
    seconds = seeds * (sum(timed) + mean * (len(methods) - len(timed)))
    used, on_gpu = peak_mib(on.problem.device)
    held = on.problem.population * on.problem.start.nbytes * 4
    mib = (process.footprint(work) * (fastest.chosen.chunk or 1) + held) / 2**20
    mib = used if timed else used + mib
    how = f"from the first rounds of {len(timed)} of {len(methods)} methods"
    rough = "from a few steps of training; evaluation and larger methods take longer"
    gpu = "" if on_gpu is None else f", and {on_gpu:,.0f} MiB on the GPU"
    facts = [
        ("memory", f"about {mib:,.0f} MiB in this process{gpu}"),
        ("training time", f"about {duration(seconds)}, {how if timed else rough}"),
    ]
    return facts, (("seconds", seconds), ("mib", mib), ("gpu_mib", on_gpu))
