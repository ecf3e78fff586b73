"""pFedMe: each client keeps a personal model near the shared one, which moves towards it.

Objective: Σ_i p_i min_θ { F_i(θ) + (λ/2)‖θ − w‖² }, a smoothed (Moreau) version of FedAvg's.
Each of the round's local iterations, on one minibatch ξ:

    θ_i ← K steps of rate a on F_i(θ; ξ) + (λ/2)‖θ − w_i‖²
    w_i ← w_i − ηλ (w_i − θ_i)                       a gradient step on the smoothed loss
    w   ← (1 − β) w + β Σ_i p_i w_i                  on the server

Travels: w down, w_i up. θ_i never leaves the client and predicts.

Notes:
    The number R of iterations is the recipe's number of minibatch steps. The recipe's optimiser
    takes the inner steps, with a new state for every minibatch; ``optimizer_state = "kept"`` is
    refused. Its weight decay corresponds to the 0.001 of the authors' code. θ_i starts each round
    at the received w (``start = "download"``) or where it ended the client's last round (``kept``).
    The authors' η = 0.005 and a = 0.09 belong to their λ = 15: ηλ ≤ 1 and aλ < 2 must hold, and
    numbers that break this are refused. Our ``auto`` is r/(1 + rλ) for both, r the rate of the
    round: it respects both limits for every λ and tends to r as λ → 0 (reading B-6).
    The authors' code trains all clients in every round; here only participants train.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from ..core.algorithm import OwnModel, Round, rows
from ..core.batches import Batch
from ..core.client import Client
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Auto, Count, Positive
from ..errors import ConfigError
from .fedavg import Update, Weighting, average
from .fedprox import proximal


class Own(NamedTuple):
    theta: Tensor  # [P]


def envelope_step(w: Tensor, theta: Tensor, lr: Tensor | float, lam: float) -> Tensor:
    """``w − ηλ(w − θ)``: a gradient step on the Moreau envelope, whose gradient is λ(w − θ)."""
    return w - lr * lam * (w - theta)


def _too_fast(name: str, found: float, limit: str) -> str:
    return (
        f"pfedme: {name} * lam is {found:g} and {limit}; lower one of them, or take {name} = 'auto'"
    )


@dataclass(frozen=True)
class PFedMe(OwnModel[Tensor, Tensor, Update, Own]):
    """Personalisation with Moreau envelopes.

    Fields:
        lam: strength λ of the tie between θ_i and w_i.
        inner_steps: gradient steps K on θ_i per minibatch.
        inner_lr: rate a of the inner steps; ``auto`` follows the rate of the round.
        lr: rate η of w_i; ``auto`` follows the rate of the round.
        beta: the server's step β; 1 is the average itself.
        start: θ_i starts a round at the ``download`` or where it ended the last one (``kept``).
    """

    lam: Positive = 15.0
    inner_steps: Count = 5
    inner_lr: Positive | Auto = "auto"
    lr: Positive | Auto = "auto"
    beta: Positive = 1.0
    start: Literal["download", "kept"] = "download"
    weighting: Weighting = "samples"

    title: ClassVar[str] = "pFedMe"
    bibtex: ClassVar[str] = """@inproceedings{dinh2020pfedme,
  title={Personalized Federated Learning with {M}oreau Envelopes},
  author={Dinh, Canh T. and Tran, Nguyen H. and Nguyen, Tuan Dung},
  booktitle={NeurIPS}, year={2020}}"""
    private = Declaration(lambda self, when: (Query(gradients=self.inner_steps),))

    def check_together(self) -> None:
        """Refuse rates at which w_i or θ_i overshoots the other: ηλ > 1 or aλ ≥ 2."""
        w, theta = (0.0 if rate == "auto" else rate * self.lam for rate in (self.lr, self.inner_lr))
        if w > 1:
            raise ConfigError(_too_fast("lr", w, "must not exceed 1"))
        if theta >= 2:
            raise ConfigError(_too_fast("inner_lr", theta, "must be below 2"))

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse an optimiser that would live on: every minibatch is a problem of its own."""
        if problem.recipe.continues:
            raise ConfigError(
                "train.optimizer_state: found 'kept', but pfedme solves a new problem with a new "
                "optimiser for every minibatch; use optimizer_state = 'round', or the optimizer "
                "'sgd' without momentum"
            )

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        return problem.start, Own(rows(problem.start, problem.population))

    def _rate(self, given: float | Auto, of_round: Tensor) -> Tensor | float:
        return of_round / (1 + of_round * self.lam) if given == "auto" else given

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Update, Own]:
        inner = client.tuned(lr=self._rate(self.inner_lr, client.lr))
        lr = self._rate(self.lr, client.lr)

        def iterate(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
            w, theta = carry
            theta = self._personal(inner, w, theta, batch)
            return envelope_step(w, theta, lr, self.lam), theta

        first = received if self.start == "download" else state.theta
        w, theta = client.scan(iterate, (received, first))
        return Update(w, client.size), Own(theta)

    def _personal(self, client: Client, w: Tensor, theta: Tensor, batch: Batch) -> Tensor:
        """K steps on ``F_i(θ; ξ) + (λ/2)‖θ − w‖²``."""
        anchor, optimizer = client.trainable(w), client.begin(theta)

        def near(theta: Tensor) -> Tensor:
            return proximal(client.trainable(theta), anchor, self.lam)

        for _ in range(self.inner_steps):
            g = client.gradient(theta, batch, penalty=near)
            theta, optimizer = client.step(theta, g, optimizer, batch)
        return theta

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """``(1 − β) w + β Σ p_i w_i``."""
        return average(server, uploads, self.weighting, self.beta)

    def model(self, state: Own) -> Tensor:
        return state.theta
