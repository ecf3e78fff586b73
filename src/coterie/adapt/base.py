"""The base class of adaptations, and the wrapper that adds an adaptation to a method.

Most adaptations need only the client's own data. An adaptation that needs something from the server
or from other clients (the Fisher diagonal of EWC) defines ``given`` and ``surveys``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..core.algorithm import AnyAlgorithm, Mixture, Predictor, Recalling, Round, Traits
from ..core.client import Client
from ..core.fields import Checked
from ..core.mixing import mix, shares
from ..core.policies import Wrapper
from ..core.problem import Problem
from ..core.ranges import CountOrZero, Positive
from ..core.tree import Tree
from ..errors import ConfigError


class Adaptation(Checked, ABC):
    """Personalises one client's model on its own data."""

    @abstractmethod
    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        """The adapted model; ``given`` is what the server sent for the adaptation."""

    @property
    def remembers(self) -> bool:
        """Whether a predictor needs more than models: what :meth:`memory` gives."""
        return False

    def memory(self, client: Client, w: Tensor) -> Tree:
        """What the client looks up beside an adapted model."""
        raise NotImplementedError

    @property
    def surveys(self) -> bool:
        """Whether every participant of a round uploads a report on the model it would adapt."""
        return False

    def survey(self, client: Client, w: Tensor) -> Tensor:
        """The report: one number per parameter; the server averages the reports."""
        raise NotImplementedError

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Refuse a method or problem that this adaptation does not support; by default none."""

    def given(self, algorithm: AnyAlgorithm, server: Tree, surveyed: Tree, round: Round) -> Tree:
        """What clients receive for the adaptation, one row per client."""
        return ()


@dataclass(frozen=True)
class Retraining(Adaptation):
    """Base class of adaptations that train a copy of the model.

    Fields:
        epochs: passes over the client's data; None takes the training recipe's.
        lr: learning rate; None takes the rate of the round.
    """

    epochs: CountOrZero | None = None
    lr: Positive | None = None

    def tuned(self, client: Client) -> Client:
        """The client with these epochs and this rate."""
        return client.tuned(epochs=self.epochs, lr=self.lr)


class With(NamedTuple):
    """A message or state of the method, and what the adaptation adds to it."""

    method: Tree
    extra: Tree


class Survey(NamedTuple):
    """A participant's report, and its number of samples."""

    values: Tensor  # [parameters]
    size: Tensor  # []


@dataclass(frozen=True)
class Adapted(Wrapper[With, With, With, Any]):
    """Wraps a method so that every model of its predictor is adapted."""

    adaptation: Adaptation

    def server_of(self, server: With) -> Tree:
        return server.method

    @property
    def traits(self) -> Traits:
        """As the method; what clients remember is weighed on validation data."""
        found = super().traits
        return replace(found, uses_validation=True) if self.adaptation.remembers else found

    def check(self, problem: Problem, rounds: int) -> None:
        self.algorithm.check(problem, rounds)
        self.adaptation.check(self.algorithm, problem)
        if problem.privacy is not None and self.adaptation.surveys:
            raise ConfigError(
                f"privacy: the adaptation {type(self.adaptation).__name__} sends a Fisher diagonal "
                "of the clients' samples without noise; use ft or kd"
            )

    def init(self, problem: Problem) -> tuple[With, Tree]:
        server, states = self.algorithm.init(problem)
        none = problem.start.new_zeros(problem.model.parameters)
        return With(server, none if self.adaptation.surveys else ()), states

    def download(self, server: With, round: Round) -> With:
        """As the method; for a report, also what the client would predict with."""
        asked = self.algorithm.serve(server.method, round) if self.adaptation.surveys else ()
        return With(self.algorithm.download(server.method, round), asked)

    def local(self, client: Client, received: With, state: Tree) -> tuple[With, Tree]:
        """As the method; a report, where needed, is on the model before the round."""
        report: Tree = ()
        if self.adaptation.surveys:
            weights, models = self.algorithm.predictor(client, received.extra, state)
            values = client.map(lambda w: self.adaptation.survey(client, w), models)
            report = Survey(weights.to(values.dtype) @ values, client.size)
        upload, state = self.algorithm.local(client, received.method, state)
        return With(upload, report), state

    def aggregate(self, server: With, uploads: With, round: Round) -> With:
        extra = server.extra
        if self.adaptation.surveys:
            extra = mix(shares(uploads.extra.size), uploads.extra.values)
        return With(self.algorithm.aggregate(server.method, uploads.method, round), extra)

    def serve(self, server: With, round: Round) -> With:
        given = self.adaptation.given(self.algorithm, server.method, server.extra, round)
        return With(self.algorithm.serve(server.method, round), given)

    def predictor(self, client: Client, served: With, state: Tree) -> Predictor:  # type: ignore[override]
        weights, models = self.algorithm.predictor(client, served.method, state)

        def adapted(w: Tensor) -> Tensor:
            return self.adaptation.adapt(client, w, served.extra)

        models = client.map(adapted, models)
        if not self.adaptation.remembers:
            return Mixture(weights, models)
        memory = client.map(lambda w: self.adaptation.memory(client, w), models)
        return Recalling(weights, models, memory)
