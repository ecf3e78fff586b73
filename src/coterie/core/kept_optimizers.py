"""Optimiser states that live on between rounds (``train.optimizer_state = "kept"``).

A wrapper around any method keeps Adam's moments and step count, or the momentum of sgd, with the
client's state: they are in snapshots and checkpoints, an absent or rejected client keeps its old
ones, and they never leave the client.

    round r:    state s_i of the last round in which client i took part
                w, s_i ← LocalTrain(w, s_i)          w is whatever model the method trains there

Notes:
    The state belongs to the client, not to the model: a client that receives another model in the
    next round (FedAvg's mean, CFL's cluster, FedFomo's mixture, IFCA's choice) goes on with its own
    moments. A method that trains several models which it knows again keeps one state for each:
    FedEM one per component, APFL and Ditto for the shared and the personal model, FedRep for head
    and base, WAFFLE and Weight Erosion one per requester. FedeRiCo's visiting models change from
    round to round: its docstring says what is kept.
    Training that is no round's begins anew: an adaptation and a predictor's own steps (FedAvg-FT,
    Per-FedAvg), and a model trained only to measure something, which begins with the client's
    state and whose own state is not kept (``Client.half``).
    A decaying learning rate is that of the round; Adam's bias correction counts all steps since the
    client's first round.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .algorithm import AnyAlgorithm, Mixture, Round, rows
from .client import Client
from .problem import Problem
from .training_state import OptimizerStates
from .tree import Tree, map_leaves, stack
from .wrapper import Wrapper


class Continued(NamedTuple):
    """A client's state: the method's, and the optimiser states."""

    method: Tree
    optimizers: Tree  # [n, ...] one per model that the client trains in a round


@dataclass(frozen=True)
class KeptOptimizers(Wrapper[Any, Any, Any, Continued]):
    """Wraps a method so that a client's optimiser states live on between rounds."""

    def init(self, problem: Problem) -> tuple[Any, Continued]:
        """As the method; all optimisers are before their first step."""
        server, states = self.algorithm.init(problem)
        first = problem.recipe.rule().init(problem.start[: problem.model.parameters])
        own = stack([first] * self.optimizers(problem))
        return server, Continued(states, map_leaves(lambda x: rows(x, problem.population), own))

    def download(self, server: Any, round: Round) -> Any:
        """As the method."""
        return self.algorithm.download(server, round)

    def local(self, client: Client, received: Any, state: Continued) -> tuple[Any, Continued]:
        """As the method; its training goes on with the optimiser states of the last round."""
        mine = OptimizerStates(state.optimizers)
        upload, kept = self.algorithm.local(client.continuing(mine), received, state.method)
        return upload, Continued(kept, mine.after())

    def aggregate(self, server: Any, uploads: Any, round: Round) -> Any:
        """As the method."""
        return self.algorithm.aggregate(server, uploads, round)

    def serve(self, server: Any, round: Round) -> Tree:
        """As the method."""
        return self.algorithm.serve(server, round)

    def predictor(self, client: Client, served: Tree, state: Continued) -> Mixture:
        """As the method; an adaptation begins with a new optimiser state."""
        return self.algorithm.predictor(client, served, state.method)

    def shown(self, state: Continued) -> Tree:
        """As the method."""
        return self.algorithm.shown(state.method)

    def collaboration(self, server: Any, shown: Tree, round: Round) -> Tensor | None:
        """As the method."""
        return self.algorithm.collaboration(server, shown, round)

    def observed(self, server: Any) -> dict[str, Any]:
        """As the method."""
        return self.algorithm.observed(server)

    def global_model(self, server: Any) -> Tensor | None:
        """As the method."""
        return self.algorithm.global_model(server)


def continued(algorithm: AnyAlgorithm, problem: Problem) -> AnyAlgorithm:
    """Wrap the method for ``train.optimizer_state``; unchanged where no state lives on."""
    if not problem.recipe.continues or not algorithm.optimizers(problem):
        return algorithm
    return KeptOptimizers(algorithm)
