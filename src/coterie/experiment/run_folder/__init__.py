"""The folder of one run: everything needed to read, draw, repeat and verify the run.

    config.json           the resolved config and the folder's format; written before round 0
    partition.json        which client holds which samples, with hashes; written before round 0
    preprocessing.json    how samples become inputs: columns, means, classes; written before round 0
    environment.json      the environment: versions, device, threads, command
    rounds.jsonl          one line per round
    clients.csv           one line per client and evaluated round
    collaboration.npz     the matrices A [R, K, K], for methods that have them
    models.safetensors    every client's predictor; identical models are stored once
    predictions.npz       the predictions for every test sample: the verdict is computed from them
    summary.json          the numbers of the table
    report.html           the run on one page
    MANIFEST.json         sha256 and size of each file; written last, so a run without it is
                          unfinished

During a run, its matrices are in ``collaboration.parts/``, one file per round, and ``checkpoint/``
holds the state from which a killed run can be continued (:meth:`RunFolder.reopen`).

``names`` has the file names and the format, ``stored_*`` one writer and one reader for each file.
``writing`` writes the folder during a run, ``reading`` and ``verifying`` read and check that of a
finished run, and ``finished_run`` holds its data.
"""

from .finished_run import RAN, Predictors, RunData, collect, ran
from .names import (
    AT_SITES,
    CLIENTS,
    CONFIG,
    ENVIRONMENT,
    FORMAT,
    FORMAT_KEY,
    MODELS,
    PARTITION,
    REPORT,
    ROUNDS,
    finished,
    refuse_links,
    refuse_newer,
    refuse_used,
    tidy,
    untidy,
)
from .reading import read, read_preprocessing
from .verifying import manifest_faults, refuse_other_data, verify
from .writing import Render, RunFolder

__all__ = [
    "AT_SITES",
    "CLIENTS",
    "CONFIG",
    "ENVIRONMENT",
    "FORMAT",
    "FORMAT_KEY",
    "MODELS",
    "PARTITION",
    "RAN",
    "REPORT",
    "ROUNDS",
    "Predictors",
    "Render",
    "RunData",
    "RunFolder",
    "collect",
    "finished",
    "manifest_faults",
    "ran",
    "read",
    "read_preprocessing",
    "refuse_links",
    "refuse_newer",
    "refuse_other_data",
    "refuse_used",
    "tidy",
    "untidy",
    "verify",
]
