"""A method whose rounds after the first last a minute, for tests that stop it."""

import time
from dataclasses import dataclass
from typing import Any

from coterie.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Sleepy(FedAvg):
    """FedAvg that dozes off on the server."""

    def aggregate(self, server: Any, uploads: Any, round: Any) -> Any:
        if round.index:
            for _ in range(600):
                time.sleep(0.1)
        return super().aggregate(server, uploads, round)
