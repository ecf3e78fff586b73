"""A worker's side of the line protocol: it gets a job, says it is ready, answers with seconds.

In: "round" for one round, "quit" or the end of the input to stop. Out: one JSON object a line,
first ``{"version", "setting"}``, then ``{"seconds"}`` a round. Standard library only: this runs in
the environment of every peer.
"""

import json
import os
import sys
from typing import Any

WARM_UP = 2  # rounds before a worker says that it is ready


class Wire:
    """The job in ``spec`` and the two pipes to the driver."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # frameworks print; only answers may reach the driver

    def ready(self, version: str, setting: str, parameters: int) -> None:
        """Say that the workload is built and warm, and is the one that was asked for."""
        self._same("parameters", parameters)
        self._say({"version": version, "setting": setting})

    def wanted(self) -> bool:
        """Wait for a word; False where it is not "round"."""
        return sys.stdin.readline().strip() == "round"

    def answer(self, seconds: float, steps: int) -> None:
        """Report a round, having checked that all of its SGD steps were taken."""
        self.took(steps)
        self._say({"seconds": seconds})

    def took(self, steps: int) -> None:
        """Refuse a round of another length than the workload's."""
        self._same("steps", steps)

    def _same(self, what: str, found: int) -> None:
        if found != self.spec[what]:
            raise AssertionError(f"{what}: found {found}, expected {self.spec[what]}")

    def _say(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
