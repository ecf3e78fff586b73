"""APFL: every client mixes its own model with the global one, with a learned mixing weight.

With v̄ = α v + (1 − α) w, on every minibatch ξ of a local round:

    w_i ← w_i − η ∇F(w_i; ξ)
    v   ← v − η α ∇F(v̄; ξ)
    α   ← clip(α − η ⟨v − w_i, ∇F(v̄; ξ)⟩, 0, 1)         in the first step of a round, if adaptive

w is averaged as in FedAvg. v and α stay with the client, which predicts with v̄ of the newest w.

Travels: w down, w_i and the sample count up, as FedAvg.

Notes:
    All right-hand sides use the values before the step; w and v have optimisers of their own.
    ``mix = "outputs"`` mixes the outputs of the two models instead of their parameters, as the
    authors' code does. That code mixes logits; we mix probabilities, α softmax(h_v) + (1 − α)
    softmax(h_w), in the loss and in the prediction, as in every other mixture here. Regression
    outputs are mixed directly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Share
from ..core.tree import Tree
from .fedavg import ServerLr, Update, Weighting, average


class Own(NamedTuple):
    v: Tensor  # [P]
    alpha: Tensor  # []


class Working(NamedTuple):
    w: Tensor  # [P]
    v: Tensor  # [P]
    alpha: Tensor  # []
    of_w: Tree  # optimiser states
    of_v: Tree


def blend(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """``v̄ = α v + (1 − α) w``."""
    return alpha * v + (1 - alpha) * w


def slopes(
    gradient: Callable[[Tensor], Tensor], alpha: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a loss of v̄ with respect to v and to α, from its own ``gradient``."""
    g = gradient(blend(alpha, v, w))
    return alpha * g, ((v - w) * g).sum()


@dataclass(frozen=True)
class APFL(Algorithm[Tensor, Tensor, Update, Own]):
    """Adaptive personalised federated learning.

    Fields:
        alpha: the initial weight α on the client's own model; without ``adaptive``, 0 is FedAvg and
            1 is Local.
        adaptive: learn α, with one step per round.
        mix: mix the two models' ``parameters`` or their ``outputs``.
    """

    alpha: Share = 0.5
    adaptive: bool = True
    mix: Literal["parameters", "outputs"] = "parameters"
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    bibtex: ClassVar[str] = """@article{deng2020apfl,
  title={Adaptive Personalized Federated Learning},
  author={Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
  journal={arXiv:2003.13461}, year={2020}}"""
    private = Declaration(
        (Query(gradients=2),),
        refused=lambda self: (
            "mix = 'outputs' has gradients of two models at once" if self.mix == "outputs" else ""
        ),
    )

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        alpha = problem.start.new_tensor(self.alpha)
        return problem.start, Own(
            rows(problem.start, problem.population), rows(alpha, problem.population)
        )

    def optimizers(self, problem: Problem) -> int:
        return 2  # of w and of v

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Update, Own]:
        def step(at: Working, batch: Batch) -> Working:
            w, v, alpha = at.w, at.v, at.alpha
            of_v, of_alpha = self._slopes(client, batch, alpha, v, w)
            new_w, state_w = client.step(w, client.gradient(w, batch), at.of_w, batch)
            new_v, state_v = client.step(v, of_v, at.of_v, batch)
            if self.adaptive:  # one step per round
                alpha = (alpha - client.lr * of_alpha * (batch.step == 0)).clamp(0, 1)
            return Working(new_w, new_v, alpha, state_w, state_v)

        begin = Working(received, *state, client.begin(received), client.begin(received))
        end = client.scan(step, begin)
        client.end(end.of_w)
        client.end(end.of_v)
        return Update(end.w, client.size), Own(end.v, end.alpha)

    def _slopes(self, client: Client, batch: Batch, alpha: Tensor, v: Tensor, w: Tensor) -> Tree:
        """The gradients of the personal loss with respect to v and to α."""
        if self.mix == "parameters":
            return slopes(lambda mixed: client.gradient(mixed, batch), alpha, v, w)

        def loss(v: Tensor, alpha: Tensor) -> Tensor:
            weights, models = torch.stack([alpha, 1 - alpha]), torch.stack([v, w])
            return mean(client.mixture_losses(weights, models, batch), batch.mask)

        return grad(loss, argnums=(0, 1))(v, alpha)

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, self.server_lr)

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        if self.mix == "parameters":
            return single(blend(state.alpha, state.v, served))
        return Mixture(torch.stack([state.alpha, 1 - state.alpha]), torch.stack([state.v, served]))
