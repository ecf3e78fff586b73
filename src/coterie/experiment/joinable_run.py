"""A finished run that a new client joins: its models, its method's rule, its preprocessing."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..algorithms.newcomer_parts import Rule
from ..algorithms.newcomers import join_rule
from ..core.algorithm import AnyAlgorithm
from ..core.imports import Code
from ..data.data_schema import Schema
from ..data.preprocessing import Preprocessing
from . import run_folder
from .comparison_folder import COMPARE
from .config.loading import load
from .config.schema import Config
from .export import network_facts, verified_run
from .export_format import NetworkFacts
from .run_folder import RunData

AVERAGE = "fedavg"  # the method whose model is the plain average


class JoinableRun(NamedTuple):
    """A finished run that a newcomer joins."""

    data: RunData
    config: Config
    algorithm: AnyAlgorithm
    rule: Rule
    preprocessing: Preprocessing
    network: NetworkFacts
    code: Code
    average: Tensor | None  # [P] the run's plain average, if there is one

    @property
    def schema(self) -> Schema:
        """How its samples are encoded."""
        return self.preprocessing.schema


def open_joinable(path: Path, code: Code) -> JoinableRun:
    """Read a finished run; refuses one that a newcomer cannot join, with the reason."""
    data = verified_run(path)
    config = load(path / run_folder.CONFIG, code=code)
    algorithm = config.method().build()
    rule = join_rule(algorithm)  # before anything else: most refusals are about the method
    preprocessing = run_folder.read_preprocessing(path)
    network = network_facts(data.config, preprocessing)
    average = _plain_average(path, data)
    return JoinableRun(data, config, algorithm, rule, preprocessing, network, code, average)


def _plain_average(path: Path, data: RunData) -> Tensor | None:
    """FedAvg's model: the run's own, or that of the run of FedAvg in the same comparison."""
    if data.history.method == AVERAGE:
        return data.predictor(0).models[0]
    home = path.resolve().parent.parent
    beside = home / AVERAGE / path.resolve().name
    if not (home / COMPARE).is_file() or not run_folder.finished(beside):
        return None
    other = run_folder.read(beside)
    same = other.history.roster.fingerprint == data.history.roster.fingerprint
    return other.predictor(0).models[0] if same else None
