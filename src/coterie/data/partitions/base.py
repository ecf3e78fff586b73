"""What a partition is."""

from abc import ABC, abstractmethod

from ...errors import ConfigError
from ..deal import Parts, Plan, deal
from ..federation import Dataset


class Partition(ABC):
    """A way to divide a dataset among clients. Concrete ones are frozen dataclasses."""

    @abstractmethod
    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Who shall get how many of what."""

    def split(self, dataset: Dataset, seed: int) -> Parts:
        """Who gets what."""
        return deal(dataset, self.plan(dataset, seed), seed)


def at_least(minimum: float, **fields: float) -> None:
    """Refuse a parameter below its minimum."""
    for name, value in fields.items():
        if not value >= minimum:
            raise ConfigError(f"partition.{name}: found {value}, expected at least {minimum}")
