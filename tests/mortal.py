"""A method whose server ends its process, for tests of runs in several processes."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Mortal(FedAvg):
    """FedAvg that is killed once, in the second round: a file in the folder says that it was."""

    folder: str = ""

    def aggregate(self, server: Any, uploads: Any, round: Any) -> Any:
        mark = Path(self.folder) / "aggregate"
        if round.index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(server, uploads, round)
