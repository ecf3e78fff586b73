"""What a partition is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from ...errors import ConfigError, did_you_mean
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


def share(**fields: float) -> None:
    """Refuse a share of nothing, or of more than all."""
    for name, value in fields.items():
        if not 0 < value <= 1:
            raise ConfigError(f"partition.{name}: found {value}, expected above 0 and at most 1")


def one_of(known: Iterable[str], **fields: str) -> None:
    """Refuse a choice that does not exist."""
    for name, value in fields.items():
        if value not in known:
            raise ConfigError(f"partition.{name}: found '{value}'; {did_you_mean(value, known)}")
