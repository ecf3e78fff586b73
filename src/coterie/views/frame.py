"""Runs as a pandas DataFrame: one row per method, seed, evaluated round and client."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import metrics
from ..errors import ConfigError
from ..runs.run import LOCAL, SCORES, Run


def frame(runs: Sequence[Run]) -> Any:
    """The scores of runs; ``gain`` is over the client's own local model, positive is better."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "to_pandas: pandas is not installed; install it with 'pip install coterie[pandas]'"
        ) from error
    local = {run.seed: run for run in runs if run.method == LOCAL}
    return pandas.concat(
        [pandas.DataFrame(_columns(run, local.get(run.seed))) for run in runs], ignore_index=True
    )


def _columns(run: Run, local: Run | None) -> dict[str, Any]:
    rounds, clients = run.test.shape
    gain = np.full(run.test.shape, np.nan)
    if local is not None and np.array_equal(local.rounds, run.rounds):
        gain = metrics.gains(run.test, local.test, run.metric)
    return {
        "method": [run.method] * run.test.size,
        "seed": [run.seed] * run.test.size,
        "round": np.repeat(run.rounds + 1, clients),
        "client": list(run.roster.clients) * rounds,
        **{name: getattr(run, name).ravel() for name in SCORES},
        "gain": gain.ravel(),
    }
