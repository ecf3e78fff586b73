"""Fault injection: the points at which a test can kill a run, to test that it can be resumed.

``COTERIE_FAULT=checkpoint.states`` makes the process kill itself (SIGKILL: nothing is cleaned up,
no handler runs) when it first reaches that point; ``checkpoint.states:3``, when it reaches it for
the third time. Only tests set this variable.
"""

import os
import signal
from collections import Counter

from ..errors import ConfigError, did_you_mean

VARIABLE = "COTERIE_FAULT"

POINTS = {
    "run.created": "the folder exists, no round has begun",
    "round.local": "the clients have worked, nothing is aggregated",
    "round.aggregated": "the server has changed, the clients' states have not",
    "round.done": "the round is over, nothing of it is written",
    "log.line": "rounds.jsonl has the round, clients.csv has not",
    "log.done": "the round is in all logs",
    "checkpoint.synced": "the logs are on the disk",
    "checkpoint.server": "a temporary folder holds the server",
    "checkpoint.states": "it holds the clients' states as well",
    "checkpoint.manifest": "it is complete",
    "checkpoint.renamed": "it has its name",
    "checkpoint.pointed": "LATEST names it",
    "checkpoint.pruned": "older checkpoints are gone",
    "finish.models": "the predictors are written",
    "finish.summary": "the page and the manifest are missing",
    "finish.page": "only the manifest is missing",
    "finish.manifest": "the run is finished, its checkpoints are still there",
    "compare.cell": "one run of a comparison is finished",
    "compare.report": "all runs are finished, the report is not written",
    "compare.manifest": "the report is written, the comparison's manifest is not",
}

_passed: Counter[str] = Counter()


def at(point: str) -> None:
    """Kill this process if ``COTERIE_FAULT`` names this point."""
    told = os.environ.get(VARIABLE)
    if told is None:
        return
    name, _, turn = told.partition(":")
    if name not in POINTS:
        raise ConfigError(f"{VARIABLE}: no point is called '{name}'; {did_you_mean(name, POINTS)}")
    _passed[point] += 1
    if point == name and _passed[point] == int(turn or 1):
        os.kill(os.getpid(), signal.SIGKILL)
