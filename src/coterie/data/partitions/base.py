"""What a partition is."""

from abc import ABC, abstractmethod

from ...core.fields import Checked
from ...errors import ConfigError
from ..assign import Parts, Plan, assigned
from ..federation import Dataset


class Partition(Checked, ABC):
    """A way to divide a dataset among clients. Concrete ones are frozen dataclasses."""

    @abstractmethod
    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Who shall get how many of what."""

    def split(self, dataset: Dataset, seed: int) -> Parts:
        """Who gets what."""
        return assigned(dataset, self.plan(dataset, seed), seed)


def one_client_each(clients: int, groups: int, what: str) -> None:
    """Refuse groups that some client is lacking for."""
    if clients < groups:
        raise ConfigError(
            f"partition.clients: found {clients} for {groups} {what}; expected at least {groups}, "
            "one each"
        )
