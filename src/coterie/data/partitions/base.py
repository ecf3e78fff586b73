"""The base class of partitions."""

from abc import ABC, abstractmethod

from ...core.fields import Checked
from ...errors import ConfigError
from ..assign import Parts, Quota, assigned
from ..federation import Dataset


class Partition(Checked, ABC):
    """A way to divide a dataset among clients. Concrete ones are frozen dataclasses."""

    @abstractmethod
    def plan(self, dataset: Dataset, seed: int) -> Quota:
        """Plan how many samples of each cell every client gets."""

    def split(self, dataset: Dataset, seed: int) -> Parts:
        """Assign samples to clients by the plan."""
        return assigned(dataset, self.plan(dataset, seed), seed)


def one_client_each(clients: int, groups: int, what: str) -> None:
    """Refuse more groups than clients: every group needs at least one client."""
    if clients < groups:
        raise ConfigError(
            f"partition.clients: found {clients} for {groups} {what}; expected at least {groups}, "
            "one each"
        )
