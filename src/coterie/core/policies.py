"""Wrappers of methods, and two that the recipe asks for: where statistics and states are kept."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from .algorithm import (
    Algorithm,
    AnyAlgorithm,
    Down,
    Mixture,
    Round,
    Server,
    State,
    Traits,
    Up,
    rows,
)
from .client import Client
from .mixing import mix, shares
from .optim import OptimizerStates, Statistics
from .per_sample import find_taps
from .privacy import Declaration
from .problem import Problem
from .tree import Tree, map_leaves, stack


@dataclass(frozen=True)
class Wrapper(Algorithm[Server, Down, Up, State]):
    """Base class of wrappers around a method: what a wrapper does not define is the method's.

    A wrapper whose server or states hold more than the method's says by ``server_of`` and
    ``state_of`` which part is the method's.
    """

    algorithm: AnyAlgorithm

    def __post_init__(self) -> None:
        """Check nothing: the wrapped method was checked when it was made."""

    def check(self, problem: Problem, rounds: int) -> None:
        self.algorithm.check(problem, rounds)

    @property
    def traits(self) -> Traits:
        return self.algorithm.traits

    def optimizers(self, problem: Problem) -> int:
        return self.algorithm.optimizers(problem)

    def trace_key(self, index: int, horizon: int) -> Hashable | None:
        return self.algorithm.trace_key(index, horizon)

    def server_of(self, server: Server) -> Any:
        return server

    def state_of(self, state: State) -> Any:
        return state

    def init(self, problem: Problem) -> tuple[Any, Any]:
        return self.algorithm.init(problem)

    def download(self, server: Server, round: Round) -> Any:
        return self.algorithm.download(self.server_of(server), round)

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Any:
        """As the method, for a wrapper that adds nothing to the server."""
        return self.algorithm.aggregate(server, uploads, round)

    def serve(self, server: Server, round: Round) -> Tree:
        return self.algorithm.serve(self.server_of(server), round)

    def predictor(self, client: Client, served: Tree, state: State) -> Mixture:
        return self.algorithm.predictor(client, served, self.state_of(state))

    def global_model(self, server: Server) -> Tensor | None:
        return self.algorithm.global_model(self.server_of(server))

    def shown(self, state: State) -> Tree:
        return self.algorithm.shown(self.state_of(state))

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor | None:
        return self.algorithm.collaboration(self.server_of(server), shown, round)

    def observed(self, server: Server) -> dict[str, Any]:
        return self.algorithm.observed(self.server_of(server))


# ---- batch-norm statistics: averaged, local, or the server's (``train.buffers``) -----------------

Policy = Literal["local", "server"]


class Beside(NamedTuple):
    """A message or state of the method, with the statistics; () where there are none."""

    method: Tree
    buffers: Tree


class Report(NamedTuple):
    """The statistics after a participant's training, and its number of samples."""

    buffers: Tensor  # [b]
    size: Tensor  # []


@dataclass(frozen=True)
class Apart(Wrapper[Beside, Beside, Beside, Beside]):
    """Wraps a method so that batch-norm statistics are kept apart from its models (reading G-3).

    The method sees vectors of parameters only:

        local     client i keeps s_i; its training updates s_i; it uses every model with s_i
        server    the server sends s to all; training updates a copy to s_i; s ← Σ_i p_i s_i by
                  samples

    ``average`` needs no wrapper: buffers follow the parameters in a model's vector and are mixed
    with them.

    Notes:
        A client has one set of statistics for all models that it trains: where it trains two models
        in turn, both update the same set. A method that trains several side by side is refused.
        A client also evaluates other clients' models with its own statistics: the statistics of a
        model's owner are not sent.
        Local trains alone, so that its statistics are each client's own under every policy.
    """

    policy: Policy

    def server_of(self, server: Beside) -> Tree:
        return server.method

    def state_of(self, state: Beside) -> Tree:
        return state.method

    def init(self, problem: Problem) -> tuple[Beside, Beside]:
        server, states = self.algorithm.init(problem)
        if self.policy == "server":
            return Beside(server, problem.statistics), Beside(states, ())
        return Beside(server, ()), Beside(states, rows(problem.statistics, problem.population))

    def download(self, server: Beside, round: Round) -> Beside:
        return Beside(self.algorithm.download(server.method, round), self._sent(server, round))

    def local(self, client: Client, received: Beside, state: Beside) -> tuple[Beside, Beside]:
        mine = self._held(received, state)
        upload, kept = self.algorithm.local(client.holding(mine), received.method, state.method)
        if self.policy == "server":
            return Beside(upload, Report(mine.buffers, client.size)), Beside(kept, ())
        return Beside(upload, ()), Beside(kept, mine.buffers)

    def aggregate(self, server: Beside, uploads: Beside, round: Round) -> Beside:
        buffers: Tree = ()
        if self.policy == "server":
            buffers = mix(shares(uploads.buffers.size), uploads.buffers.buffers)
        return Beside(self.algorithm.aggregate(server.method, uploads.method, round), buffers)

    def serve(self, server: Beside, round: Round) -> Beside:
        return Beside(self.algorithm.serve(server.method, round), self._sent(server, round))

    def predictor(self, client: Client, served: Beside, state: Beside) -> Mixture:
        """The method's models with the statistics appended; an adaptation updates a copy."""
        mine = self._held(served, state)
        holding = client.holding(mine)
        found = self.algorithm.predictor(holding, served.method, state.method)
        own = rows(mine.buffers, len(found.models))
        return found._replace(models=client.model.joined(found.models, own))

    def global_model(self, server: Beside) -> Tensor | None:
        """The method's with the server's statistics; None where each client has its own."""
        model = self.algorithm.global_model(server.method)
        if model is None or self.policy == "local":
            return None
        return torch.cat([model, server.buffers])

    def _held(self, message: Beside, state: Beside) -> Statistics:
        return Statistics(message.buffers if self.policy == "server" else state.buffers)

    def _sent(self, server: Beside, round: Round) -> Any:
        return rows(server.buffers, len(round.clients)) if self.policy == "server" else ()


def apart(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``train.buffers``; unchanged where buffers are averaged or absent."""
    policy = problem.recipe.buffers
    if policy == "average" or not problem.model.apart:
        return algorithm
    if algorithm.traits.several_models:
        plain = algorithm.algorithm if isinstance(algorithm, Wrapper) else algorithm
        raise ConfigError(
            f"train.buffers: {type(plain).__name__} trains several models on each client, and one "
            f"set of batch-norm statistics cannot serve them all; found '{policy}', use 'average', "
            "or a network with another norm (norm = 'group')"
        )
    stays = policy != "server" or algorithm.traits.alone
    return Apart(algorithm, "local" if stays else "server")


# ---- optimiser states that live on between rounds (``train.optimizer_state = "kept"``) ----------


class Continued(NamedTuple):
    """A client's state: the method's, and the optimiser states."""

    method: Tree
    optimizers: Tree  # [n, ...] one per model that the client trains in a round


@dataclass(frozen=True)
class KeptOptimizers(Wrapper[Any, Any, Any, Continued]):
    """Wraps a method so that a client's optimiser states live on between rounds.

    They are kept with the client's state: they are in snapshots and checkpoints, an absent or
    rejected client keeps its old ones, and they never leave the client.

        round r:    state s_i of the last round in which client i took part
                    w, s_i ← LocalTrain(w, s_i)       w is whatever model the method trains there

    Notes:
        The state belongs to the client, not to the model: a client that receives another model in
        the next round (FedAvg's mean, CFL's cluster, FedFomo's mixture, IFCA's choice) goes on with
        its own moments. A method that trains several models which it knows again keeps one state
        for each: FedEM one per component, APFL and Ditto for the shared and the personal model,
        FedRep for head and base, WAFFLE and Weight Erosion one per requester. FedeRiCo's visiting
        models change from round to round: its docstring says what is kept.
        Training that is no round's begins anew: an adaptation and a predictor's own steps
        (FedAvg-FT, Per-FedAvg), and a model trained only to measure something, which begins with
        the client's state and whose own state is not kept (``Client.half``).
        A decaying learning rate is that of the round; Adam's bias correction counts all steps since
        the client's first round.
    """

    def state_of(self, state: Continued) -> Tree:
        return state.method

    def init(self, problem: Problem) -> tuple[Any, Continued]:
        server, states = self.algorithm.init(problem)
        first = problem.recipe.rule().init(problem.start[: problem.model.parameters])
        own = stack([first] * self.optimizers(problem))
        return server, Continued(states, map_leaves(lambda x: rows(x, problem.population), own))

    def local(self, client: Client, received: Any, state: Continued) -> tuple[Any, Continued]:
        mine = OptimizerStates(state.optimizers)
        upload, kept = self.algorithm.local(client.continuing(mine), received, state.method)
        return upload, Continued(kept, mine.after())


def continued(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``train.optimizer_state``; unchanged where no state lives on."""
    if not problem.recipe.continues or not algorithm.optimizers(problem):
        return algorithm
    return KeptOptimizers(algorithm)


# ---- gradients that are private (``[privacy]``) -------------------------------------------------


@dataclass(frozen=True)
class Private(Wrapper[Any, Any, Any, Any]):
    """Wraps a method so that every gradient of a round is private (module ``core.privacy``).

    A predictor that trains, as an adaptation does, is exact: it stays with its client.
    """

    def local(self, client: Client, received: Any, state: Any) -> tuple[Any, Any]:
        return self.algorithm.local(client.private(received, state), received, state)


def declared(algorithm: AnyAlgorithm) -> tuple[AnyAlgorithm, Declaration]:
    """A method without its wrappers, and what it declares; ConfigError if it declares nothing."""
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.algorithm
    if algorithm.private is None:
        raise ConfigError(
            f"privacy: {type(algorithm).__name__} does not declare which gradients it takes in a "
            "round, so that no ε could be told; expected 'private = Declaration(...)' in the class "
            "(docs/privacy.md): add it, or leave [privacy] out"
        )
    return algorithm, algorithm.private


def is_private(algorithm: AnyAlgorithm) -> bool:
    while isinstance(algorithm, Wrapper) and not isinstance(algorithm, Private):
        algorithm = algorithm.algorithm
    return isinstance(algorithm, Private)


def privately(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``[privacy]``; what would leave a client uncovered is refused.

    Local stays as it is: nothing of it leaves a client.
    """
    if problem.privacy is None or algorithm.traits.alone or is_private(algorithm):
        return algorithm
    method, found = declared(algorithm)
    recipe, model = problem.recipe, problem.model
    if problem.privacy.noise is None:
        raise ConfigError("privacy.noise: found none; expected one that every client can check")
    why = found.refusal(method)
    if algorithm.traits.uses_validation and not all(problem.counts.validated):
        why = "clients without validation data would choose by training data, without noise"
    if recipe.class_weights != "none":
        why = "train.class_weights tells how many samples of each class a client has; use 'none'"
    if model.whole != model.parameters:
        why = "the network keeps statistics of samples without noise; use norm = 'group', no fedbn"
    if why:
        raise ConfigError(f"privacy: {type(method).__name__} cannot be made private: {why}")
    if model.taps is None and problem.loss is None:  # a loss of one's own may couple samples
        model.taps = find_taps(model, problem.blank(1))
    return Private(algorithm)


def governed(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``[privacy]``, ``train.buffers`` and ``train.optimizer_state``.

    A method that needs none, or that is wrapped already, is returned unchanged.
    """
    if isinstance(algorithm, Apart | KeptOptimizers | Private):
        return algorithm
    return continued(apart(privately(algorithm, problem), problem), problem)
