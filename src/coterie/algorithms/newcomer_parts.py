"""What a finished run keeps for a newcomer, and what a newcomer gets from it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..core.algorithm import Mixture, Round
from ..core.client import Client


class Finals(NamedTuple):
    """What a finished run keeps, one row per client."""

    weights: Tensor  # [K, r] of each client's mixture
    models: Tensor  # [K, r, P]; a client's own model is the first
    sizes: Tensor  # [K] training samples
    start: Tensor  # [P] the common initial model
    round: Round  # the round after the run's last

    @property
    def own(self) -> Tensor:
        """Each client's own final model ``[K, P]``."""
        return self.models[:, 0]


class Joined(NamedTuple):
    """What a newcomer gets before its local training."""

    weights: Tensor | None  # [K] of the clients' models; None where all clients have one model
    predictor: Mixture


Rule = Callable[[Any, Client, Finals], Joined]
