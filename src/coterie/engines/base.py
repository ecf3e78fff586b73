"""The interface between the round loop and the engine that runs the clients.

The round loop computes the server half of a method. An :class:`Engine` owns the clients: their data
and their states, in this process or on other machines. A :class:`Backend` computes the client half
for many clients of one process; the simulator engine uses one.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.algorithm import AnyAlgorithm, Mixture, Round
from ..core.answers import Outcomes
from ..core.calls import Form
from ..core.messages import Rejection
from ..core.problem import Counts, Problem
from ..core.shards import Shards
from ..core.tree import Tree

Scores = NDArray[np.float64]
JUDGED = ("test", "val")  # the splits on which a predictor is evaluated


class Evaluation(NamedTuple):
    """The scores and losses of every client's predictor; NaN for a client without such data."""

    test: Scores  # [K] the run's metric on test data
    val: Scores  # [K] the run's metric on validation data
    test_loss: Scores  # [K]
    val_loss: Scores  # [K]

    @classmethod
    def of(cls, table: NDArray[np.float64]) -> "Evaluation":
        """From the score and the loss on each split of :data:`JUDGED`, ``table [K, 4]``."""
        test, test_loss, val, val_loss = table.T
        return cls(test, val, test_loss, val_loss)


class Predicted(NamedTuple):
    """The predictors of a round's clients and their scores."""

    evaluation: Evaluation
    mixture: Mixture  # on the CPU; without models unless they were asked for
    outcomes: Outcomes | None  # the answer to every test sample, if the engine holds the samples
    digests: tuple[str, ...] | None = None  # of each predictor, where models stay at their clients
    lost: tuple[Rejection, ...] = ()  # clients that did not answer: their scores are NaN


class Replies(NamedTuple):
    """The uploads of a round: one row for each of ``clients``; other clients may be missing."""

    uploads: Tree
    clients: Tensor  # [n] the clients that answered in the expected layout
    rejected: tuple[Rejection, ...] = ()


class Enrolment(NamedTuple):
    """What the clients declare when a run begins: their names and counts, one entry per client."""

    clients: tuple[str, ...]
    counts: Counts


class Engine(Protocol):
    """Owns the clients of a run: their data and their states, wherever they are."""

    @property
    def choice(self) -> dict[str, Any]:
        """The resolved settings: enough to reproduce the same numbers."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of all calls so far; empty if every call is executed as it is written."""

    def begin(
        self, problem: Problem, algorithm: AnyAlgorithm, states: Tree | None = None
    ) -> Enrolment:
        """Start a run, or continue one with the clients' ``states``, one row per client.

        Without ``states`` the clients begin with the states of ``algorithm.init``.
        """

    def exchange(self, algorithm: AnyAlgorithm, received: Tree, round: Round) -> Replies:
        """Send each client of the round its row; return the replies in the expected layout.

        No state changes before :meth:`commit`.
        """

    def commit(self, accepted: Tensor) -> None:
        """Give the accepted clients their new states; the other clients keep their old ones."""

    def shown(self, algorithm: AnyAlgorithm) -> Tree:
        """What every client's state shows of its collaboration, one row per client."""

    def evaluate(
        self, algorithm: AnyAlgorithm, served: Tree, round: Round, metric: str, keep: bool = False
    ) -> Predicted:
        """Evaluate the predictors of the round's clients.

        Models and answers to test samples are returned only with ``keep``.
        """

    def snapshot(self) -> Tree:
        """The clients' states, one row per client; read them before the next round begins."""

    def close(self) -> None:
        """Release processes, files and memory."""


class Work(NamedTuple):
    """The work of a backend: a problem and the shards of all clients."""

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
        """The resolved settings: enough to reproduce the same numbers."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of all calls so far; empty if every call is executed as it is written."""

    def local(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> tuple[Tree, Tree]:
        """Uploads and new states of the round's clients, one row for every client."""

    def compute(
        self, algorithm: AnyAlgorithm, received: Tree, states: Tree, round: Round
    ) -> Computed:
        """Like :meth:`local`, for the clients whose replies have the most common layout."""

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
        """The scores of the predictors of the round's clients, and the predictors (on the CPU)."""
