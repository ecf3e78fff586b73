"""An experiment whose clients are the sites of a federation: what the coordinator's side knows.

Nothing is pooled: schemas are merged, means and deviations come from sums, and every site divides
and keeps its own samples. The same config on the same data, divided in the same way, gives the same
digest as a simulation, unless a site adds noise from its own secret.
"""

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__
from ..core.algorithm import AnyAlgorithm
from ..core.fields import AUTO
from ..core.metrics import METRICS, automatic
from ..core.paired_tests import SiteGain
from ..core.problem import Problem
from ..core.tree import Tree
from ..data.arrays import Scale, normalisation
from ..data.data_schema import Schema, client_order, merged
from ..data.federation import Dataset, Seal, combined_fingerprint
from ..data.manifest import ClientRow, Identity, listed
from ..data.partition import Fold
from ..data.partitions.base import Natural
from ..data.standard import Moments, Preprocessing, apply
from ..engines import Engine
from ..engines.remote import SETUP, RemoteEngine, Transport, first_states, held_states
from ..errors import ConfigError, CoterieWarning, EngineError
from ..runs import environment
from ..runs.assemble import factory_of, settled
from ..runs.config.schema import SITES, Config, DataTable, PartitionTable
from ..runs.plan import Cell
from ..runs.resume import UnfinishedRun
from ..runs.run import LOCAL, Roster
from ..runs.run_folder import AT_SITES, CONFIG
from ..runs.setting import Gains, Prepared, Setting
from ..storage import files
from .folders import FederationFolder
from .protocol import (
    Approved,
    Ask,
    Consent,
    Description,
    DivisionReport,
    DivisionRequest,
    Introduction,
    JudgeRequest,
    Nothing,
    Proposal,
    Signed,
    ask_all,
    gain_answered,
    payload_of,
    setup_message,
)
from .sums import moments_of, total_of
from .terms import Agreement, Declared, Request, problem_of, request_of, shared_config

# Of numbers, the metric whose scores may leave a site without a consent.
NUMBERS = next(name for name, row in METRICS.items() if row.one_row == "errors")
KEPT = 2  # states at a site beyond those since the coordinator's checkpoint before the last


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

    def manifest(self, dataset: str, schema: Schema) -> dict[str, Any]:
        """The contents of a run's ``partition.json``."""
        rows = []
        for name, report in zip(self.identity.clients, self.reports, strict=True):
            own = report.counts
            rows.append(ClientRow(name, None, own.train, own.val, own.test, report.classes))
        moments = self.moments or Moments((), ())
        target = (moments.target_std, moments.target_mean) if schema.regression else None
        names = schema.target.classes
        return listed(self.identity, rows, dataset, names, target, repr(Natural()))

    def roster(self) -> Roster:
        """The sites with the counts that they declare."""
        counts = [report.counts for report in self.reports]
        names = self.identity.clients
        weak = {n: r.weak for n, r in zip(names, self.reports, strict=True) if r.weak}
        train, val, test = (
            np.array([getattr(one, split) for one in counts]) for split in ("train", "val", "test")
        )
        return Roster(names, train, val, test, None, self.identity.fingerprint, weak)


def scaled_example(schema: Schema, moments: Moments | None, scale: Scale) -> Dataset:
    """A dataset of one sample that is scaled as the sites' samples are."""
    example = schema.example()
    if moments is not None:
        return apply(example, moments)
    factor, shift = normalisation(schema.pixels, example.x, scale)
    return replace(example, scale=factor, shift=shift)


@final
@dataclass(frozen=True, eq=False)
class Federated(Setting):
    """The sites of a federation, behind a transport."""

    config: Config
    transport: Transport
    transport_name: str
    clients: tuple[str, ...]  # in the order in which a folder of one file per client lists them
    request: Request
    schema: Schema
    factory: Callable[[], nn.Module]
    _divided: dict[Fold | None, Divided] = field(default_factory=dict)  # once the sites were asked
    _nonces: dict[tuple[str, int], str] = field(default_factory=dict)  # by method and seed

    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        """The problem of one run, from what the sites declare."""
        found = self._division(asked.fold(asked.run.seed))
        declared = Declared(self.clients, tuple(r.counts for r in found.reports), self.schema)
        problem = problem_of(asked, algorithm, declared, self.factory)
        return Prepared(problem, found.roster(), None)

    def identity(self, seed: int) -> Identity:
        """Hashes of the sites' data and of how it is divided."""
        return self._division(self.config.fold(seed)).identity

    def manifest(self, seed: int) -> dict[str, Any]:
        """The sites with their counts and hashes; which samples they hold is not known here."""
        found = self._division(self.config.fold(seed))
        return found.manifest(self.config.data.name, self.schema)

    def preprocessing(self, seed: int) -> Preprocessing:
        """How the sites' samples become inputs."""
        moments = self._division(self.config.fold(seed)).moments
        scaled = scaled_example(self.schema, moments, self.config.data.scale)
        return Preprocessing.of(self.schema, scaled)

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """An engine behind the transport, after every site has agreed to the experiment."""
        before = _nonce(None if left is None else left.config)
        experiment, nonce, consents = self.agreed(cell, before)
        collect = bool(self.config.run.collect)
        label = {
            "engine": "remote",
            "transport": self.transport_name,
            "models": "collected" if collect else AT_SITES,
            "threads": torch.get_num_threads(),
            "nonce": nonce,
        }
        starts = [consents[name].state for name in self.clients]
        return RemoteEngine(
            self.transport,
            label=label,
            experiment=experiment,
            starts=starts,
            collect=collect,
        )

    def agreed(self, cell: Cell, nonce: str | None = None) -> tuple[str, str, dict[str, Consent]]:
        """Have every site agree to an experiment; its hash, its nonce, what the sites answered."""
        self._nonces[cell.name] = nonce or secrets.token_hex(16)
        agreement = self._agreement(cell)
        asked = setup_message("agree", Proposal(agreement.to_json()))
        consents = ask_all(self.transport, self.clients, asked, partial(payload_of, kind=Consent))
        for name, consent in consents.items():
            if consent.experiment != agreement.hash:
                raise EngineError(f"site '{name}' agreed to another experiment; run it again")
        return agreement.hash, agreement.nonce, consents

    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        """The server, and the hashes of states as a checkpoint stores them."""
        server, states = algorithm.init(problem)
        none = ["0" * 64] * problem.population
        return server, held_states(none, first_states(algorithm, states, problem))

    def gains(self, cells: Sequence[Cell]) -> Gains:
        """Each site's own gains by each method; nothing is known of a site that is lost."""
        names, metric = {c.name: self._agreement(c).hash for c in cells}, self.config.run.metric
        methods = dict.fromkeys(label for label, _ in names if label != LOCAL)
        seeds = list(dict.fromkeys(seed for _, seed in names))
        found: dict[str, list[SiteGain]] = {}
        for method in methods:
            pairs = tuple((names[method, seed], names[LOCAL, seed]) for seed in seeds)
            asked = setup_message("judge", JudgeRequest(metric, pairs))
            answers = self.transport.ask(dict.fromkeys(self.clients, asked), SETUP)
            found[method] = [
                gain_answered(answers.get(name, "lost"), len(seeds), metric)
                for name in self.clients
            ]
        return found

    def with_metric(self) -> "Federated":
        """With the automatic metric of two classes, by the counts that sites let be known."""
        reports = self._division().reports
        none, one = np.sum([r.classes for r in reports if len(r.classes) == 2] or [(0, 0)], axis=0)
        prevalence = float(one / (none + one)) if none + one > 0 else None
        run = self.config.run.model_copy(update={"metric": automatic(prevalence)})
        return replace(self, config=self.config.model_copy(update={"run": run}))

    def close(self) -> None:
        """Release the transport."""
        self.transport.close()

    # ---- what the sites declare ------------------------------------------------------------------

    def _division(self, fold: Fold | None = None) -> Divided:
        if fold not in self._divided:
            self._divided[fold] = self._asked_to_divide(fold)
        return self._divided[fold]

    def _asked_to_divide(self, fold: Fold | None) -> Divided:
        """Ask all sites for counts and sums, and compute the common moments.

        The moments are those of the training rows without folds, so that no other sums leave.
        """
        asked = setup_message("divide", self._request(fold))
        read = partial(self._report, whole=fold is None)
        reports = ask_all(self.transport, self.clients, asked, read)
        moments = self._moments(reports) if fold is None else self._division().moments
        seals = tuple(Seal(reports[n].data, reports[n].partition) for n in self.clients)
        scaled = scaled_example(self.schema, moments, self.config.data.scale)
        fingerprint = combined_fingerprint(self.clients, seals, scaled)
        identity = SitesIdentity(self.clients, seals, fingerprint)
        return Divided(identity, tuple(reports[name] for name in self.clients), moments)

    def _report(self, answer: bytes, *, whole: bool) -> DivisionReport:
        """A site's answer to ``divide``; what cannot be is an error of that site alone."""
        found, numeric = payload_of(answer, DivisionReport), self.schema.numeric
        if len(found.classes) not in (0, len(self.schema.target.classes)):
            raise EngineError(f"found samples of {len(found.classes)} classes")
        if whole and numeric is not None and found.sums is None:
            raise EngineError("found no sums of its columns")
        if numeric is not None and found.sums is not None and not found.masked:
            total_of([found.sums], self._columns(numeric), found.counts.train)
        return found

    def _columns(self, numeric: Tensor) -> int:
        return int(numeric.sum()) + self.schema.regression

    def _request(self, fold: Fold | None) -> DivisionRequest:
        return DivisionRequest(self.request.id, self.schema.to_json(), self.config.data.scale, fold)

    def _moments(self, reports: Mapping[str, DivisionReport]) -> Moments | None:
        """The common means and deviations; None if nothing is standardised."""
        numeric = self.schema.numeric
        if numeric is None:
            return None
        if len({one.masked for one in reports.values()}) > 1:
            masked = [name for name, one in reports.items() if one.masked]
            raise EngineError(
                f"{', '.join(masked)} send masked sums, and other sites not; expected all or "
                "none; have [statistics] masked set alike at all sites"
            )
        sent = [report.sums or () for report in reports.values()]
        rows = sum(report.counts.train for report in reports.values())
        total = total_of(sent, self._columns(numeric), rows)
        return moments_of(total, numeric, self.schema.regression)

    # ---- the agreement ---------------------------------------------------------------------------

    def _agreement(self, cell: Cell) -> Agreement:
        config = self.config.single(cell.method, cell.seed)
        found = self._division(self.config.fold(cell.seed))
        if cell.name not in self._nonces:  # a run that finished before
            stored = None if cell.out is None else files.read_json(cell.out / CONFIG)
            self._nonces[cell.name] = _nonce(stored) or secrets.token_hex(16)
        return Agreement(
            request=self.request.id,
            nonce=self._nonces[cell.name],
            config=shared_config(config),
            clients=self.clients,
            counts=tuple(report.counts for report in found.reports),
            schema=self.schema,
            moments=found.moments,
            kept=2 * (config.run.checkpoint_every or 1) + KEPT,
            sealed=self.request.sealed,
        )


def _nonce(config: Mapping[str, Any] | None) -> str:
    """The nonce of a run that has begun; "" if it has none."""
    resolved = {} if config is None else config.get("resolved", {})
    return str(resolved.get("nonce", ""))


def _described(answer: bytes) -> tuple[Schema, Description]:
    found = payload_of(answer, Description)
    return Schema.from_json(found.schema), found


def federation_of(
    config: Config, transport: Transport | None = None, *, sealed: bool = False
) -> Federated:
    """The sites of the federation that a config names, by a transport or by its coordinator."""
    folder = FederationFolder.open(Path(str(config.run.federation)))
    if transport is None and folder.transport != "direct":
        raise ConfigError(
            f"run.federation: the sites of '{folder.name}' are reached through Flower; start the "
            f"run there: flwr run {folder.app} FEDERATION (its RUNBOOK.md says how)"
        )
    if transport is None:
        from .direct import DirectTransport  # needs an extra that Flower's side does not

        transport = DirectTransport(folder)
    try:
        signed = Signed(transport, folder.operator_key(), folder.name)
        return federated(config, signed, folder.transport, folder.name, sealed=sealed)
    except BaseException:
        transport.close()
        raise


def federated(
    config: Config,
    transport: Transport,
    transport_name: str,
    federation: str,
    *,
    sealed: bool = False,
) -> Federated:
    """Ask the sites of a federation to take part, and resolve the config with what they say."""
    _refuse_data(config)
    clients = client_order(transport.sites())
    if not clients:
        raise EngineError("the federation has no sites; admit them with 'coterie deploy add-site'")
    who = partial(payload_of, kind=Introduction)
    for name, said in ask_all(transport, clients, setup_message("who", Nothing()), who).items():
        if said.name != name:
            raise EngineError(f"site '{name}' calls itself '{said.name}'; mend its site.toml")
    request = request_of(config, federation, clients, sealed=sealed)
    ask_all(
        transport,
        clients,
        setup_message("ask", Ask(request.to_json())),
        partial(payload_of, kind=Approved),
    )
    asked = setup_message("describe", Approved(request.id))
    described = ask_all(transport, clients, asked, _described)
    for name, (_, of) in described.items():
        versions = of.versions
        if versions.get("source") != environment.fingerprint():
            warnings.warn(
                f"site '{name}' runs coterie {versions.get('coterie', '?')[:20]} with other "
                f"code than this coordinator ({__version__}): results may differ, or messages may "
                "be refused; install the same version everywhere",
                CoterieWarning,
                stacklevel=2,
            )
    schema = merged({name: schema for name, (schema, _) in described.items()})
    named = config.run.metric != AUTO
    changes: dict[str, Any] = {"checkpoint_every": config.run.checkpoint_every or 1}
    if not named and schema.regression:
        changes["metric"] = NUMBERS
    if not any(of.scores for _, of in described.values()):
        changes["evaluate_every"] = config.run.rounds  # nobody tells of another round
    run = config.run.model_copy(update=changes)
    asked_for = {"run": run, "partition": PartitionTable(name="natural")}
    config = settled(config.model_copy(update=asked_for), schema.example())
    factory = factory_of(config, schema.example())
    made = Federated(config, transport, transport_name, clients, request, schema, factory)
    return made if named or len(schema.target.classes) != 2 else made.with_metric()


def _refuse_data(config: Config) -> None:
    """Refuse a config that names data or a partition, or that spreads runs over a cluster."""
    data, partition = config.data, config.partition
    if data.name != SITES or data.options or data.aux or data.federated:
        raise ConfigError(
            "data: the sites of a federation read their own data, as their site.toml says, and the "
            "coordinator has none; expected at most scale in [data]"
        )
    plain_data = DataTable()
    if (data.val, data.test) != (plain_data.val, plain_data.test):
        raise ConfigError(
            f"data.val, data.test: found {data.val} and {data.test}; the sites of a federation "
            "divide their own rows, as [statistics] in their site.toml says; leave both out"
        )
    if config.run.spread is not None:
        raise ConfigError(
            f"run.spread: found '{config.run.spread}'; the runs of a federation are executed one "
            "after another, at its sites; leave it out"
        )
    plain = PartitionTable(name=partition.name, options=partition.options)
    if partition.name not in ("auto", "natural") or partition != plain:
        raise ConfigError(
            f"partition.name: found '{partition.name}'; the sites of a federation are its clients; "
            "leave [partition] out"
        )
