"""A site's own data: read once, encoded by the agreed schema, divided by its own name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..core.metrics import METRICS
from ..core.shards import Shards
from ..data.arrays import Floats, Scale
from ..data.data_schema import Schema
from ..data.federation import Dataset, Federation, Seal
from ..data.manifest import class_counts
from ..data.simulation import from_each, simulate
from ..data.site_data import local_schema, read_with, site_federation
from ..data.standard import Moments, Sums, site_squares, site_sums
from ..errors import EngineError
from ..runs.run import JudgedRows, lack
from .protocol import DivisionRequest
from .terms import Experiment, SiteCounts


class Division(NamedTuple):
    """How all sites divide their samples in one experiment."""

    schema: Schema
    scale: Scale
    val: float
    test: float
    seed: int


def division_of(asked: DivisionRequest) -> Division:
    """The division that a message asks for, checked."""
    schema = Schema.from_json(asked.schema)
    if not (0 <= asked.val < 1 and 0 <= asked.test < 1):
        raise EngineError("divide: found a share outside of 0 to 1")
    return Division(schema, asked.scale, asked.val, asked.test, asked.seed)


class SiteFacts(NamedTuple):
    """What a site tells of its data before an experiment."""

    counts: SiteCounts
    seal: Seal
    weak: str | None  # what the site lacks to be judged
    classes: tuple[int, ...]  # samples of each class; () without the site's consent


class Holdings:
    """The data of one site, by the site's own options. The last reading is kept in memory."""

    def __init__(self, client: str, name: str, options: Mapping[str, Any]) -> None:
        self._client, self._name, self._options = client, name, dict(options)
        self._schema: Schema | None = None
        self._read: tuple[tuple[str, Scale], Dataset] | None = None

    def schema(self) -> Schema:
        """What the site's data says by itself."""
        if self._schema is None:
            self._schema = local_schema(self._name, self._options)
        return self._schema

    def facts(self, division: Division, *, classes: bool) -> SiteFacts:
        """Counts and hashes of the site's data; the histogram of classes only with ``classes``."""
        held = self._federation(division)
        (train,), (val,), (test,) = held.train, held.val, held.test
        shares: tuple[int, ...] = ()
        if classes and not held.dataset.regression:
            shares = tuple(class_counts(held, held.train, held.val)[0].tolist())
        counts = SiteCounts(len(train), len(val), len(test))
        return SiteFacts(counts, held.seals[0], lack(held, 0), shares)

    def sums(self, division: Division) -> Sums | None:
        """The site's part of the means; None if nothing is standardised."""
        held = self._federation(division)
        if held.dataset.numeric is None:
            return None
        return site_sums(held.dataset, held.train[0])

    def squares(self, division: Division, means: Floats) -> Sums:
        """The site's part of the deviations."""
        held = self._federation(division)
        return site_squares(held.dataset, held.train[0], means)

    def shards(self, experiment: Experiment) -> Shards:
        """The site's samples as one client of the experiment."""
        agreement, config, problem = experiment.agreement, experiment.config, experiment.problem
        data, seed = config.data, config.dealt(config.run.seed)
        division = Division(agreement.schema, data.scale, data.val, data.test, seed)
        made = simulate(
            self._federation(division, agreement.moments),
            problem.factory,
            problem.recipe,
            seed=problem.seed,
            dtype=problem.dtype,
            merge_val=experiment.merged,
            shares=METRICS[config.run.metric].by_share,
        )
        at, pool = problem.clients.index(self._client), problem.pool
        own = made.shards.placed(at, problem.population)
        if pool is None:
            return own
        others = pool.owner != at
        return own.with_training(at, pool.x[others], pool.y[others])

    def judged(self, experiment: Experiment) -> JudgedRows | None:
        """The subgroups of the site's test samples; None if its data names no column for them."""
        if "subgroup" not in self._options:
            return None
        agreement, config = experiment.agreement, experiment.config
        data, seed = config.data, config.dealt(config.run.seed)
        division = Division(agreement.schema, data.scale, data.val, data.test, seed)
        return JudgedRows.of(self._federation(division))

    def shared(self, division: Division, share: float) -> tuple[Tensor, Tensor]:
        """The samples and targets that the site gives to a pool of all sites, as they were read."""
        held = self._federation(division)
        (mask,) = from_each(held, share, division.seed)
        given = held.train[0][mask].sort().values
        return held.dataset.x[given], held.dataset.y[given]

    def _federation(self, division: Division, moments: Moments | None = None) -> Federation:
        return site_federation(
            self._dataset(division.schema, division.scale),
            division.schema,
            self._client,
            val=division.val,
            test=division.test,
            seed=division.seed,
            moments=moments,
        )

    def _dataset(self, schema: Schema, scale: Scale) -> Dataset:
        key = schema.hash, scale
        if self._read is None or self._read[0] != key:
            self._read = key, read_with(self._name, self._options, schema, scale)
        return self._read[1]
