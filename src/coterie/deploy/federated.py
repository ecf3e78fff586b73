"""An experiment whose clients are the sites of a federation: what the coordinator's side knows.

Nothing is pooled: schemas are merged, means and deviations come from two rounds of sums, and every
site divides and keeps its own samples. The same config on the same data gives the same digest as a
simulation, unless a site adds noise from its own secret.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn

from ..core.algorithm import AnyAlgorithm, Sharing
from ..core.paired_tests import SiteGain
from ..core.problem import Problem, SharedPool
from ..core.tree import Tree
from ..data.data_schema import Schema
from ..data.federation import Seal, combined_fingerprint
from ..data.manifest import Identity
from ..data.standard import Preprocessing, Sums, checked_sums, means_of, moments_of
from ..engines import Engine
from ..engines.codec import digest
from ..engines.remote import SETUP, RemoteEngine, Transport, first_states, held_states
from ..errors import EngineError
from ..runs.config.schema import Config
from ..runs.plan import Cell
from ..runs.resume import UnfinishedRun
from ..runs.run import LOCAL
from ..runs.run_folder import AT_SITES
from ..runs.setting import Gains, Prepared, Setting
from .asking import answers_of_all, ask_all, gain_answered
from .declarations import Divided, SitesIdentity, scaled_example
from .protocol import (
    Consent,
    DivisionReport,
    DivisionRequest,
    JudgeRequest,
    PoolRequest,
    Proposal,
    SumsReport,
    arrays_of,
    as_array,
    setup_message,
    sums_of_report,
)
from .sharing import checked_share, packed, pool_of
from .terms import Agreement, Declared, problem_of, shared_config

KEPT = 2  # states at a site beyond those since the coordinator's checkpoint before the last


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
    _pools: dict[tuple[int, Sharing], SharedPool] = field(default_factory=dict)

    def prepare(self, algorithm: AnyAlgorithm, asked: Config) -> Prepared:
        """The problem of one run, from what the sites declare."""
        seed = asked.dealt(asked.run.seed)
        found = self._division(seed)
        declared = Declared(self.clients, tuple(r.counts for r in found.reports), self.schema)
        pool = self._pool(algorithm, seed)
        problem = problem_of(asked, algorithm, declared, self.factory, pool=pool)
        return Prepared(problem, found.roster(), None)

    def identity(self, seed: int) -> Identity:
        """Hashes of the sites' data and of how it is divided."""
        return self._division(self.config.dealt(seed)).identity

    def manifest(self, seed: int) -> dict[str, Any]:
        """The sites with their counts and hashes; which samples they hold is not known here."""
        return self._division(self.config.dealt(seed)).manifest(self.config.data.name, self.schema)

    def preprocessing(self, seed: int) -> Preprocessing:
        """How the sites' samples become inputs."""
        scaled = scaled_example(
            self.schema, self._division(self.config.dealt(seed)).moments, self.config.data.scale
        )
        return Preprocessing.of(self.schema, scaled)

    def engine(self, cell: Cell, on: Prepared, left: UnfinishedRun | None) -> Engine:
        """An engine behind the transport, after every site has agreed to the experiment."""
        experiment, consents = self.agreed(cell)
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
            experiment=experiment,
            starts=starts,
            collect=collect,
        )

    def agreed(self, cell: Cell) -> tuple[str, dict[str, Consent]]:
        """Have every site agree to an experiment; its hash, and what the sites answered."""
        agreement = self._agreement(cell)
        pool = self._pool(cell.method.build(), self.config.dealt(cell.seed))
        arrays = () if pool is None else (as_array(packed(pool)),)
        asked = setup_message("agree", Proposal(agreement.to_json()), *arrays)
        consents = ask_all(self.transport, self.clients, asked, Consent)
        for name, consent in consents.items():
            if consent.experiment != agreement.hash:
                raise EngineError(f"site '{name}' agreed to another experiment; run it again")
        return agreement.hash, consents

    def start(self, algorithm: AnyAlgorithm, problem: Problem) -> tuple[Tree, Tree]:
        """The server, and the hashes of states as a checkpoint stores them."""
        server, states = algorithm.init(problem)
        none = ["0" * 64] * problem.population
        return server, held_states(none, first_states(algorithm, states, problem))

    def gains(self, cells: Sequence[Cell]) -> Gains:
        """Each site's own gains by each method; nothing is known of a site that is lost."""
        names = {(cell.method.label, cell.seed): self._agreement(cell).hash for cell in cells}
        methods = dict.fromkeys(label for label, _ in names if label != LOCAL)
        seeds = list(dict.fromkeys(seed for _, seed in names))
        found: dict[str, list[SiteGain]] = {}
        for method in methods:
            pairs = tuple((names[method, seed], names[LOCAL, seed]) for seed in seeds)
            asked = setup_message("judge", JudgeRequest(self.config.run.metric, pairs))
            answers = self.transport.ask(dict.fromkeys(self.clients, asked), SETUP)
            found[method] = [
                gain_answered(answers.get(name, "lost"), len(seeds)) for name in self.clients
            ]
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
        request, data = self._request(seed), self.config.data
        asked = setup_message("divide", request)
        reports = ask_all(self.transport, self.clients, asked, DivisionReport)
        moments = None
        if self.schema.numeric is not None:
            means = means_of(self._sums({n: r.sums for n, r in reports.items()}, reports))
            asked = setup_message("squares", replace(request, means=tuple(means.tolist())))
            squares = ask_all(self.transport, self.clients, asked, SumsReport)
            moments = moments_of(means, self._sums(squares, reports), self.schema.regression)
        seals = tuple(Seal(reports[n].data, reports[n].partition) for n in self.clients)
        scaled = scaled_example(self.schema, moments, data.scale)
        fingerprint = combined_fingerprint(self.clients, seals, scaled)
        identity = SitesIdentity(self.clients, seals, fingerprint)
        return Divided(identity, tuple(reports[name] for name in self.clients), moments)

    def _request(self, seed: int) -> DivisionRequest:
        data = self.config.data
        return DivisionRequest(self.schema.to_json(), data.scale, data.val, data.test, seed)

    def _sums(
        self, sent: Mapping[str, SumsReport | None], reports: Mapping[str, DivisionReport]
    ) -> list[Sums]:
        """The sums that the sites sent, in client order, checked against their counts."""
        columns = self.schema.example().x.shape[-1] + self.schema.regression
        found = []
        for name in self.clients:
            report = sent[name]
            if report is None:
                raise EngineError(f"site '{name}' sent no sums of its columns")
            rows = reports[name].counts.train
            found.append(checked_sums(sums_of_report(report), columns, rows, name))
        return found

    # ---- the agreement ---------------------------------------------------------------------------

    def _pool(self, algorithm: AnyAlgorithm, seed: int) -> SharedPool | None:
        """The samples that a method shares among all sites; every site has to consent."""
        sharing = algorithm.traits.sharing
        if sharing is None:
            return None
        key = seed, sharing
        if key not in self._pools:
            self._pools[key] = self._asked_for_samples(checked_share(sharing), seed)
        return self._pools[key]

    def _asked_for_samples(self, share: float, seed: int) -> SharedPool:
        found = self._division(seed)
        asked = setup_message("samples", PoolRequest(self._request(seed), share))
        parts = [arrays_of(one) for one in answers_of_all(self.transport, self.clients, asked)]
        counts = [report.counts.train for report in found.reports]
        return pool_of(parts, counts, share, self.schema, found.moments)

    def _agreement(self, cell: Cell) -> Agreement:
        config = self.config.single(cell.method, cell.seed)
        found = self._division(self.config.dealt(cell.seed))
        pool = self._pool(cell.method.build(), self.config.dealt(cell.seed))
        return Agreement(
            config=shared_config(config),
            clients=self.clients,
            counts=tuple(report.counts for report in found.reports),
            schema=self.schema,
            moments=found.moments,
            kept=2 * (config.run.checkpoint_every or 1) + KEPT,
            pool="" if pool is None else digest(packed(pool)),
        )
