"""What the sites of a federation declare of their data, divided with one seed."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..data.arrays import Scale, normalisation
from ..data.data_schema import Schema
from ..data.federation import Dataset, Seal
from ..data.manifest import ClientRow, listed
from ..data.partitions.base import Natural
from ..data.standard import Moments, apply
from ..runs.run import Roster
from .protocol import DivisionReport


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
