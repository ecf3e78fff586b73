"""A method with a client that ends its process, for tests of engines with several processes."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.algorithms.fedavg import FedAvg
from coterie.core.algorithm import Mixture
from coterie.core.client import Client

CLIENT = 2  # who ends its process


@dataclass(frozen=True)
class Mortal(FedAvg):
    """FedAvg; with ``once``, a process ends only where the folder has no file of that stage yet."""

    folder: str = ""
    once: bool = True
    aggregating: bool = False  # on the server, and not at a client

    def local(self, client: Client, received: Any, state: Any) -> Any:
        self._end("local", int(client.id) == CLIENT and not self.aggregating)
        return super().local(client, received, state)

    def predictor(self, client: Client, served: Any, state: Any) -> Mixture:
        self._end("predictor", int(client.id) == CLIENT and not self.aggregating and self.once)
        return super().predictor(client, served, state)

    def aggregate(self, server: Any, uploads: Any, round: Any) -> Any:
        self._end("aggregate", self.aggregating and round.index == 1)
        return super().aggregate(server, uploads, round)

    def _end(self, stage: str, now: bool) -> None:
        if not now or not self.folder:
            return
        mark = Path(self.folder) / stage
        if not (self.once and mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
