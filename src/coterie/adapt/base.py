"""What an adaptation is, and any method followed by one.

Most adaptations are a client's own affair. One whose server or peers must tell a client something
first (the Fisher diagonal of EWC) says so by ``given`` and ``surveys``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..core.algorithm import AnyAlgorithm, Mixture, Round, Wrapper
from ..core.client import Client
from ..core.fields import Checked
from ..core.mixing import mix, shares
from ..core.problem import Problem
from ..core.tree import Tree


class Adaptation(Checked, ABC):
    """One client's model, made its own."""

    @abstractmethod
    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        """The adapted model; ``given`` is what the server sent along."""

    @property
    def surveys(self) -> bool:
        """Whether every participant reports on the model it would adapt, in every round."""
        return False

    def survey(self, client: Client, w: Tensor) -> Tensor:
        """That report, a vector as long as the parameters; the server averages them."""
        raise NotImplementedError

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Refuse what cannot be adapted like this; most can."""

    def given(self, algorithm: AnyAlgorithm, server: Tree, surveyed: Tree, round: Round) -> Tree:
        """What clients receive to adapt with, a row a client."""
        return ()


class With(NamedTuple):
    """Something of the method, and what the adaptation adds to it."""

    method: Tree
    extra: Tree


class Survey(NamedTuple):
    """What a participant of a survey sends."""

    values: Tensor  # [parameters]
    size: Tensor  # []


@dataclass(frozen=True)
class Adapted(Wrapper[With, With, With, Any]):
    """Any method, followed by an adaptation of every model that predicts."""

    adaptation: Adaptation

    paper: ClassVar[str] = ""

    def check(self, problem: Problem, rounds: int) -> None:
        """As the method, and what the adaptation refuses."""
        self.algorithm.check(problem, rounds)
        self.adaptation.check(self.algorithm, problem)

    def init(self, problem: Problem) -> tuple[With, Tree]:
        """As the method; nothing is surveyed yet."""
        server, states = self.algorithm.init(problem)
        none = problem.start.new_zeros(problem.model.parameters)
        return With(server, none if self.adaptation.surveys else ()), states

    def download(self, server: With, round: Round) -> With:
        """As the method; who is surveyed also needs what it would predict with."""
        asked = self.algorithm.serve(server.method, round) if self.adaptation.surveys else ()
        return With(self.algorithm.download(server.method, round), asked)

    def local(self, client: Client, received: With, state: Tree) -> tuple[With, Tree]:
        """As the method, after a report on the model before the round where one is asked for."""
        report: Tree = ()
        if self.adaptation.surveys:
            weights, models = self.algorithm.predictor(client, received.extra, state)
            values = client.map(lambda w: self.adaptation.survey(client, w), models)
            report = Survey(weights.to(values.dtype) @ values, client.size)
        upload, state = self.algorithm.local(client, received.method, state)
        return With(upload, report), state

    def aggregate(self, server: With, uploads: With, round: Round) -> With:
        """As the method; reports are averaged by sample counts."""
        extra = server.extra
        if self.adaptation.surveys:
            extra = mix(shares(uploads.extra.size), uploads.extra.values)
        return With(self.algorithm.aggregate(server.method, uploads.method, round), extra)

    def serve(self, server: With, round: Round) -> With:
        """As the method, and what the clients adapt with."""
        given = self.adaptation.given(self.algorithm, server.method, server.extra, round)
        return With(self.algorithm.serve(server.method, round), given)

    def predictor(self, client: Client, served: With, state: Tree) -> Mixture:
        """The method's predictor, each of its models adapted."""
        weights, models = self.algorithm.predictor(client, served.method, state)

        def adapted(w: Tensor) -> Tensor:
            return self.adaptation.adapt(client, w, served.extra)

        return Mixture(weights, client.map(adapted, models))

    def shown(self, state: Tree) -> Tree:
        """As the method."""
        return self.algorithm.shown(state)

    def collaboration(self, server: With, shown: Tree, round: Round) -> Tensor | None:
        """As the method."""
        return self.algorithm.collaboration(server.method, shown, round)

    def observed(self, server: With) -> dict[str, Any]:
        """As the method."""
        return self.algorithm.observed(server.method)
