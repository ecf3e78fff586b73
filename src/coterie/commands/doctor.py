"""Checks an experiment before it is run: data, clients, memory, time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from ..api import Options, Source, configure
from ..core import tree
from ..core.algorithm import round_of
from ..core.buffers import governed
from ..data.duplicates import Duplicates, duplicates, shared_units
from ..data.extremes import extremes
from ..data.federation import Federation
from ..data.simulation import Simulation
from ..engines import auto, ray_tasks
from ..engines.base import Work
from ..engines.candidates import PROBE_STEPS
from ..engines.settings import Asked, Length
from ..engines.vmap import VmapBackend, compiler_version
from ..errors import printable
from ..experiment.assemble import assemble
from ..experiment.config.methods import Method
from ..experiment.simulated import Assembly, simulation_of
from ..results.history import Roster

MANY = 8  # at most so many clients are named in a warning


@dataclass(frozen=True)
class Diagnosis:
    """Facts about an experiment before it is run, and warnings."""

    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        lines = [f"{name:<{width}}  {text}" for name, text in self.facts]
        return "\n".join(map(printable, [*lines, *(f"warning: {w}" for w in self.warnings)]))


def doctor(source: Source = None, **options: Unpack[Options]) -> Diagnosis:
    """Check a config and its data before training; a few steps are timed to estimate the time."""
    config = configure(source, **options)
    methods, assembly = config.methods(), assemble(config)
    seed = config.seeds[0]
    on = simulation_of(assembly, methods[-1].build(), seed)
    roster = Roster.of(on.federation)
    costs, engine = _cost_facts(assembly, on, methods)
    repeated = duplicates(on.federation)
    inside, across = sum(repeated.across_splits.values()), repeated.across_clients
    counts = ("duplicates", f"{inside:,} across splits, {across:,} across clients")
    facts = [*_data_facts(assembly, on, roster), counts, *costs]
    slow = [line for method in methods for line in _slower(assembly, method, engine)]
    made = on.federation
    warnings = (*_warnings(assembly, roster), *_repeated(made, repeated), *_out_of_scale(made))
    return Diagnosis(tuple(facts), (*warnings, *slow))


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
    return [*facts, ("metric", config.run.metric)]


def _range(sizes: NDArray[np.int64]) -> str:
    least, most = sizes.min(), sizes.max()
    return f"{most} per client" if least == most else f"{least} to {most} per client"


def _cost_facts(
    assembly: Assembly, on: Simulation, methods: tuple[Method, ...]
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Facts about the cost of the experiment, and the engine that would run it."""
    run, engine = assembly.config.run, assembly.config.engine
    asked = Asked(engine.chunk, engine.memory_mib, engine.threads, engine.play, engine.compiled)
    runs, work = len(methods) * len(assembly.config.seeds), Work(on.problem, on.shards)
    length = Length(run.rounds, run.participation, runs)
    found = auto.resolve(work, length, asked)
    together = found.get("chunk", 1)
    held = on.problem.population * on.problem.start.nbytes * 4
    mib = (auto.footprint(work) * together + held) / 2**20
    seconds = found["seconds"] / PROBE_STEPS * length.steps(work) * runs
    names = ", ".join(method.label for method in methods)
    facts = [
        ("methods", names),
        (
            "runs",
            f"{len(methods)} methods x {len(assembly.config.seeds)} seeds, {run.rounds} rounds",
        ),
        ("fastest engine", f"{found['engine']}, {together} clients at a time"),
        (
            "C++ compiler",
            compiler_version() or "none: training loops run in torch, which is slower",
        ),
        ("memory", f"about {mib:,.0f} MiB beside the data"),
        ("training time", f"about {_duration(seconds)}, without evaluation"),
    ]
    if "ray" in (engine.name, run.spread):
        facts.append(("Ray", ray_tasks.described()))
    if engine.name == "vmap":  # as it was asked for, fastest or not
        how = auto.repaid(work, run.rounds, play=engine.play, compiled=engine.compiled)
        chunk = auto.fitting(work, engine.chunk, engine.memory_mib)
        return facts, {"engine": "vmap", "chunk": chunk, **how._asdict()}
    return facts, found


def _slower(assembly: Assembly, method: Method, engine: Mapping[str, Any]) -> list[str]:
    """Warnings about client calls of a method that cannot be replayed or compiled, and why."""
    if engine["engine"] != "vmap" or not (engine["play"] or assembly.config.engine.play):
        return []
    algorithm = method.build()
    on = simulation_of(assembly, algorithm, assembly.config.seeds[0])
    algorithm = governed(algorithm, on.problem)
    problem = replace(on.problem, recipe=replace(on.problem.recipe, steps=PROBE_STEPS))
    able = (problem.sizes > 0).nonzero().flatten()[: engine["chunk"]]
    round = round_of(problem, 0, assembly.config.run.rounds, able)
    server, states = algorithm.init(problem)
    made = VmapBackend(problem, on.shards, chunk=len(able), play=True, compiled=engine["compiled"])
    made.local(algorithm, algorithm.download(server, round), tree.take(states, able), round)
    slow = [form for form in made.forms if form.why]
    return [f"{method.label}: {f.stage} is {f.way}, which is slower: {f.why}" for f in slow]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _repeated(federation: Federation, repeated: Duplicates) -> list[str]:
    """Warnings about samples and units that occur twice and would make scores too good."""
    found = []
    if repeated.across_splits:
        number, who = sum(repeated.across_splits.values()), list(repeated.across_splits)
        found.append(
            f"{number} samples are in more than one of train, validation and test data of a "
            f"client: {_some(who)}"
        )
    if repeated.across_clients:
        found.append(
            f"{repeated.across_clients} samples are held by more than one client: "
            f"{_some(list(repeated.holders))}"
        )
    units = shared_units(federation)
    if units:
        found.append(
            f"{len(units)} units are named at more than one client and taken for different ones "
            f"there: {_some(units)}; if they are the same, one client may train on what tests "
            "another"
        )
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:MANY]) + (" …" if len(names) > MANY else "")


def _out_of_scale(federation: Federation) -> list[str]:
    """Warnings about columns in which a client's numbers are far out of the others' scale."""
    found = extremes(federation)
    said = [
        f"client '{one.client}': column '{one.column}' holds {one.value:g}, where all clients "
        f"together are around {one.middle:g} (typically {one.usual:g} away); check its unit and "
        "its digits"
        for one in found[:MANY]
    ]
    more = len(found) - len(said)
    return [*said, f"{more} more columns of clients are out of scale"] if more else said


def _warnings(assembly: Assembly, roster: Roster) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, lack in roster.weak.items():
        kinds.setdefault(lack, []).append(name)
    found = []
    for lack, names in kinds.items():
        found.append(f"{len(names)} of {len(roster)} clients have {lack}: {_some(names)}")
    if assembly.config.run.participation * len(roster) < 1:
        found.append("participation is below one client per round; one client takes part")
    return found
