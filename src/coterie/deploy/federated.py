"""An experiment whose clients are the sites of a federation: what the coordinator's side knows.

Nothing is pooled: schemas are merged, means and deviations come from two rounds of sums, and every
site divides and keeps its own samples. The same config on the same data gives the same digest as a
simulation, unless a site adds noise from its own secret.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import nn

from ..core.algorithm import AnyAlgorithm
from ..core.problem import Problem
from ..core.site_gain import SiteGain
from ..core.tree import Tree
from ..data.arrays import Scale, normalisation
from ..data.data_schema import Schema, client_order
from ..data.federation import Dataset
from ..data.fingerprint import Seal, combined_fingerprint
from ..data.manifest import Identity
from ..data.merging import merged
from ..data.preprocessing import Preprocessing
from ..data.standard import Moments, SiteSums, apply, means_of, moments_of
from ..engines import Engine
from ..engines.remote import SETUP, RemoteEngine, Transport, first_states, held_states
from ..errors import ConfigError, CoterieError, EngineError
from ..experiment.assemble import factory_of, settled
from ..experiment.config.schema import SITES, Config, PartitionTable
from ..experiment.resume import UnfinishedRun
from ..experiment.run_folder import AT_SITES
from ..experiment.setting import Cell, Gains, Prepared, Setting
from ..results.history import Roster
from ..results.judgement import LOCAL
from .agreement import Agreement, Declared, problem_of, shared_config
from .protocol import (
    Consent,
    DivisionReport,
    DivisionRequest,
    Introduction,
    JudgeRequest,
    Nothing,
    Proposal,
    SumsReport,
    gain_of,
    payload_of,
    refused_by,
    setup_message,
    sums_of_report,
)

KEPT = 2  # states at a site beyond those since the coordinator's checkpoint before the last
Payload = TypeVar("Payload")


class SitesIdentity(NamedTuple):
    """Hashes of the sites' data, as the sites computed them."""

    clients: tuple[str, ...]
    seals: tuple[Seal, ...]
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Divided:
    """What the sites told of their data, divided with one seed."""

    identity: SitesIdentity
    reports: tuple[DivisionReport, ...]
    moments: Moments | None


@final
@dataclass(frozen=True, eq=False)
class Federated(Setting):
    """The sites of a federation, behind a transport."""

    config: Config
    transport: Transport
    transport_name: str
    clients: tuple[str, ...]  # in the order in which a folder of one file per client lists them
    schema: Schema
    factory: Callable[[], nn.Module]
    _divided: dict[int, Divided] = field(default_factory=dict)  # by seed

    def prepare(self, algorithm: AnyAlgorithm, seed: int) -> Prepared:
        """The problem of one run, from what the sites declare."""
        if algorithm.traits.sharing is not None:
            raise ConfigError(
                f"algorithm.name: {type(algorithm).__name__} sends raw samples of every site to "
                "all others, which no site of a federation does; choose another method"
            )
        found, run = self._division(seed), self.config.run.model_copy(update={"seed": seed})
        config = self.config.model_copy(update={"run": run})
        declared = Declared(self.clients, tuple(r.counts for r in found.reports), self.schema)
        problem = problem_of(config, algorithm, declared, self.factory)
        return Prepared(problem, self._roster(found), None)

    def identity(self, seed: int) -> Identity:
        """Hashes of the sites' data and of how it is divided."""
        return self._division(seed).identity

    def manifest(self, seed: int) -> dict[str, Any]:
        """The sites with their counts and hashes; which samples they hold is not known here."""
        found = self._division(seed)
        names, seals, fingerprint = found.identity
        clients = [
            {
                "name": name,
                "group": None,
                "histogram": list(report.classes),
                "permutation": None,
                "judged_on": None,
                **{"train": report.counts.train, "val": report.counts.val},
                **{"test": report.counts.test, **seal._asdict()},
            }
            for name, seal, report in zip(names, seals, found.reports, strict=True)
        ]
        return {
            "dataset": self.config.data.name,
            "partition": self.config.partition.name,
            "note": "",
            "fingerprint": fingerprint,
            "emd_p1": None,
            "l1": None,
            "classes": list(self.schema.target.classes),
            "target": None,
            "clients": clients,
        }

    def preprocessing(self, seed: int) -> Preprocessing:
        """How the sites' samples become inputs."""
        scaled = scaled_example(self.schema, self._division(seed).moments, self.config.data.scale)
        return Preprocessing.of(self.schema, scaled)

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """An engine behind the transport, after every site has agreed to the experiment."""
        agreement = self._agreement(self.config.single(cell.method, cell.seed))
        asked = setup_message("agree", Proposal(agreement.to_json()))
        consents = ask_all(self.transport, self.clients, asked, Consent)
        for name, consent in consents.items():
            if consent.experiment != agreement.hash:
                raise EngineError(f"site '{name}' agreed to another experiment; run it again")
        collect = bool(self.config.run.collect)
        label = {
            "engine": "remote",
            "transport": self.transport_name,
            "models": "collected" if collect else AT_SITES,
            "threads": torch.get_num_threads(),
        }
        starts = [consents[name].state for name in self.clients]
        return RemoteEngine(
            self.transport,
            label=label,
            experiment=agreement.hash,
            starts=starts,
            collect=collect,
        )

    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        """The server, and the hashes of states as a checkpoint stores them."""
        server, states = algorithm.init(problem)
        none = ["0" * 64] * problem.population
        return server, held_states(none, first_states(algorithm, states, problem))

    def gains(self, cells: Sequence[Cell]) -> Gains:
        """Each site's own gains by each method; nothing is known of a site that is lost."""
        names = {
            (cell.method.label, cell.seed): self._agreement(
                self.config.single(cell.method, cell.seed)
            ).hash
            for cell in cells
        }
        methods = dict.fromkeys(label for label, _ in names if label != LOCAL)
        seeds = list(dict.fromkeys(seed for _, seed in names))
        found: dict[str, list[SiteGain]] = {}
        for method in methods:
            pairs = tuple((names[method, seed], names[LOCAL, seed]) for seed in seeds)
            asked = setup_message("judge", JudgeRequest(self.config.run.metric, pairs))
            answers = self.transport.ask(dict.fromkeys(self.clients, asked), SETUP)
            found[method] = [_gain(answers.get(name, "lost"), len(seeds)) for name in self.clients]
        return found

    def close(self) -> None:
        """Release the transport."""
        self.transport.close()

    # ---- what the sites declare ------------------------------------------------------------------

    def _division(self, seed: int) -> Divided:
        if seed not in self._divided:
            self._divided[seed] = self._asked_to_divide(seed)
        return self._divided[seed]

    def _asked_to_divide(self, seed: int) -> Divided:
        """Have all sites divide their samples, and compute the common moments from their sums."""
        data, columns = self.config.data, self.schema.example().x.shape[-1]
        request = DivisionRequest(self.schema.to_json(), data.scale, data.val, data.test, seed)
        asked = setup_message("divide", request)
        reports = ask_all(self.transport, self.clients, asked, DivisionReport)
        moments = None
        if self.schema.numeric is not None:
            given = {name: report.sums for name, report in reports.items()}
            means = means_of(self._sums(given, columns))
            target = None if means.targets is None else float(means.targets[0])
            deviations = replace(request, mean=tuple(means.inputs.tolist()), target_mean=target)
            squares = ask_all(
                self.transport, self.clients, setup_message("squares", deviations), SumsReport
            )
            moments = moments_of(means, self._sums(squares, columns))
        seals = tuple(Seal(reports[n].data, reports[n].partition) for n in self.clients)
        scaled = scaled_example(self.schema, moments, data.scale)
        fingerprint = combined_fingerprint(self.clients, seals, scaled)
        identity = SitesIdentity(self.clients, seals, fingerprint)
        return Divided(identity, tuple(reports[name] for name in self.clients), moments)

    def _sums(self, reports: Mapping[str, SumsReport | None], columns: int) -> list[SiteSums]:
        found = []
        for name in self.clients:
            report = reports[name]
            if report is None:
                raise EngineError(f"site '{name}' sent no sums of its columns")
            found.append(sums_of_report(report, columns, regression=self.schema.regression))
        return found

    def _roster(self, found: Divided) -> Roster:
        counts = [report.counts for report in found.reports]
        names = found.identity.clients
        weak = {n: r.weak for n, r in zip(names, found.reports, strict=True) if r.weak}
        train, val, test = (
            np.array([getattr(one, split) for one in counts]) for split in ("train", "val", "test")
        )
        return Roster(names, train, val, test, None, found.identity.fingerprint, weak)

    # ---- the agreement ---------------------------------------------------------------------------

    def _agreement(self, config: Config) -> Agreement:
        found = self._division(config.run.seed)
        return Agreement(
            config=shared_config(config),
            clients=self.clients,
            counts=tuple(report.counts for report in found.reports),
            schema=self.schema,
            moments=found.moments,
            kept=2 * (config.run.checkpoint_every or 1) + KEPT,
        )


def _gain(answer: bytes | str, seeds: int) -> SiteGain:
    """A site's gain; one that says nothing if the site is lost or its answer cannot be read."""
    nothing = SiteGain((None,) * seeds, None)
    if isinstance(answer, str) or refused_by(answer) is not None:
        return nothing
    try:
        found = gain_of(answer)
    except CoterieError:
        return nothing
    return found if len(found.each) == seeds else nothing


def scaled_example(schema: Schema, moments: Moments | None, scale: Scale) -> Dataset:
    """A dataset of one sample that is scaled as the sites' samples are."""
    example = schema.example()
    if moments is not None:
        return apply(example, moments)
    factor, shift = normalisation(schema.pixels, example.x, scale)
    return replace(example, scale=factor, shift=shift)


def ask_all(
    transport: Transport, clients: Sequence[str], message: bytes, kind: type[Payload]
) -> dict[str, Payload]:
    """Ask every site the same before a run; all of them have to answer."""
    answers = transport.ask(dict.fromkeys(clients, message), SETUP)
    found: dict[str, Payload] = {}
    wrong = []
    for name in clients:
        answer = answers.get(name, "lost")
        refused = None if isinstance(answer, str) else refused_by(answer)
        if isinstance(answer, str):
            wrong.append(f"'{name}' did not answer ({answer})")
        elif refused is not None:
            wrong.append(f"'{name}' refused: {refused[1] or refused[0]}")
        else:
            try:
                found[name] = payload_of(answer, kind)
            except CoterieError as error:
                wrong.append(f"'{name}' sent what cannot be read ({error})")
    if wrong:
        raise EngineError(
            f"not every site takes part: {'; '.join(wrong)}; expected an answer of each; start the "
            "sites ('coterie site start'), or revoke those that left ('coterie deploy revoke')"
        )
    return found


def federated(config: Config, transport: Transport, transport_name: str) -> Federated:
    """Ask the sites of a federation who they are, and resolve the config with what they say."""
    _refuse_data(config)
    clients = client_order(transport.sites())
    if not clients:
        raise EngineError("the federation has no sites; admit them with 'coterie deploy add-site'")
    asked = setup_message("who", Nothing())
    introduced = ask_all(transport, clients, asked, Introduction)
    for name, said in introduced.items():
        if said.name != name:
            raise EngineError(f"site '{name}' calls itself '{said.name}'; mend its site.toml")
    schema = merged({name: Schema.from_json(said.schema) for name, said in introduced.items()})
    run = config.run.model_copy(update={"checkpoint_every": config.run.checkpoint_every or 1})
    asked_for = {"run": run, "partition": PartitionTable(name="natural")}
    config = settled(config.model_copy(update=asked_for), schema.example())
    factory = factory_of(config, schema.example())
    return Federated(config, transport, transport_name, clients, schema, factory)


def _refuse_data(config: Config) -> None:
    """Refuse a config that names data or a partition: each site reads its own."""
    data, partition = config.data, config.partition
    if data.name != SITES or data.options or data.aux:
        raise ConfigError(
            "data: the sites of a federation read their own data, as their site.toml says, and the "
            "coordinator has none; expected at most val, test and scale in [data]"
        )
    if partition.name not in ("auto", "natural") or partition.foreign_targets:
        raise ConfigError(
            f"partition.name: found '{partition.name}'; the sites of a federation are its clients; "
            "leave [partition] out"
        )
