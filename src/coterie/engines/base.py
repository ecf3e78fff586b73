"""The seam between the round loop and whoever runs the clients.

The round loop holds the server half. An :class:`Engine` owns the clients: their data and their
states, in this process or on other machines. A :class:`Backend` is how a simulator computes the
client half for many clients of one process.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.calls import Form
from ..core.messages import Rejection
from ..core.paired import Outcomes
from ..core.problem import Counts, Problem
from ..core.shards import Shards
from ..core.tree import Tree

Scores = NDArray[np.float64]
DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"
MOST_THREADS = 1024  # OpenMP ends the process where it cannot have all that it is asked for


class Evaluation(NamedTuple):
    """How good every client's predictor is; NaN where a client has no such data."""

    test: Scores  # [K] the run's metric on test data
    val: Scores  # [K] the same on validation data
    test_loss: Scores  # [K]
    val_loss: Scores  # [K]


class Predicted(NamedTuple):
    """What the predictors of a round's clients are and how they fare."""

    evaluation: Evaluation
    mixture: Mixture  # on the CPU; without models where they were not asked for
    outcomes: Outcomes | None  # every answer to a test sample, where the predictors are kept


class Replies(NamedTuple):
    """What came back in a round: one row for each of ``clients``, who need not be all."""

    uploads: Tree
    clients: Tensor  # [n] those who answered in the expected layout
    rejected: tuple[Rejection, ...] = ()


class Enrolment(NamedTuple):
    """What the clients say of themselves when a run begins, one entry per client."""

    clients: tuple[str, ...]
    counts: Counts


class Engine(Protocol):
    """Owns the clients of a run: their data and their states, wherever they are."""

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved: enough to get the same numbers again."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of calls that came so far; none where all calls are done as written."""

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Start a run, or continue one with the clients' ``states``, one row per client.

        Without states the clients begin as ``algorithm.init`` says.
        """

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """Send each client of the round its row; the replies of whoever answers as expected.

        No state changes before :meth:`commit`.
        """

    def commit(self, accepted: Tensor) -> None:
        """The clients whose replies were accepted take their new states; the others keep theirs."""

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        """What every client's state shows of its collaboration, one row per client."""

    def evaluate(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = False,
    ) -> Predicted:
        """How good the predictors of the round's clients are.

        Models and answers to test samples come back only where they are asked for by ``keep``.
        """

    def snapshot(self) -> Tree:
        """The clients' states, one row per client, to be read before the next round begins."""

    def restore(self, states: Tree) -> None:
        """Put back states of a snapshot."""

    def close(self) -> None:
        """Let go of processes, files and memory."""


class Work(NamedTuple):
    """What a backend computes: a problem on the shards of all clients."""

    problem: Problem
    shards: Shards


class Computed(NamedTuple):
    """What a backend computed for the clients that answered in the expected layout."""

    uploads: Tree
    states: Tree
    clients: Tensor  # [n]
    rejected: tuple[Rejection, ...] = ()


class Backend(Protocol):
    """Computes the client half of a method for many clients of this process."""

    problem: Problem
    shards: Shards

    @property
    def choice(self) -> dict[str, Any]:
        """What was resolved: enough to get the same numbers again."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of calls so far; none where every call is executed as it is written."""

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, one row for every one of them."""

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """The same for whoever answers in the layout of most."""

    def predict(
        self,
        algorithm: AnyAlgorithm,
        served: Tree,
        states: Tree,
        round: Round,
        metric: str,
        *,
        keep: bool = True,
    ) -> Predicted:
        """How good the predictors of the round's clients are, and the predictors (on the CPU)."""


def state_device(state: str, device: torch.device) -> torch.device:
    """Where the clients' state is kept between rounds; files are read and written by the host."""
    return device if state == "device" else torch.device("cpu")
