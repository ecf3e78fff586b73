"""The datasets by name, and :func:`load`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from . import toys
from .federation import Dataset


class DatasetEntry(NamedTuple):
    """How a dataset is read, and one line about it."""

    loader: Callable[..., Dataset]
    about: str

    def options(self) -> tuple[str, ...]:
        """The names of the options the loader takes."""
        return tuple(inspect.signature(self.loader).parameters)


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(toys.digits, "1,797 grey 8x8 digits, bundled with scikit-learn"),
    "regression_groups": DatasetEntry(
        toys.regression_groups, "two groups of linear-regression clients, opposite coefficients"
    ),
    "sine": DatasetEntry(toys.sine, "P2's Figure 1: clients on intervals of a noisy sine curve"),
}


def load(name: str, **options: Any) -> Dataset:
    """The dataset of that name."""
    if name not in DATASETS:
        raise ConfigError(f"data.name: no dataset '{name}'; {did_you_mean(name, DATASETS)}")
    entry = DATASETS[name]
    for option in options:
        if option not in entry.options():
            raise ConfigError(
                f"data.{option}: {name} has no such option; {did_you_mean(option, entry.options())}"
            )
    return entry.loader(**options)
