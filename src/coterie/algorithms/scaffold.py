"""SCAFFOLD: FedAvg with control variates that correct the drift of each client.

    y ← x;   τ steps:  y ← y − η_l (g_i(y) − c_i + c)
    c_i⁺ = (1/τ) Σ_k g_i(y_k)                       [mean_gradient]
    x ← x + (η_g/N) Σ (y_i − x);   c ← c + (1/K) Σ (c_i⁺ − c_i)

Travels: (x, c) down, (y_i − x, c_i⁺ − c_i) up: twice FedAvg.

Notes:
    ``mean_gradient`` equals the paper's Option II under plain SGD and stays right with momentum,
    weight decay and Adam, where the displacement does not measure the gradient (reading P4-7). The
    correction is added to the gradient before weight decay and momentum; weight decay stays out of
    the control variates.
    ``displacement`` is Option II with the divisor corrected for heavy-ball momentum;
    ``full_gradient`` is Option I.
    ``predict_with = "local"`` evaluates the client's y_i, as P5 seems to have done.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.batches import Batch
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.tree import Tree
from ..errors import ConfigError
from .fedavg import ServerLr

Control = Literal["mean_gradient", "displacement", "full_gradient"]


class Shared(NamedTuple):
    """The server, and what it sends."""

    x: Tensor  # [P]
    c: Tensor  # [P]


class Change(NamedTuple):
    """What a client sends."""

    dy: Tensor  # [P]
    dc: Tensor  # [P]


class Kept(NamedTuple):
    c: Tensor  # [P]
    y: Tensor  # [P]


def controlled_steps(client: Client, x: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    """Local training with ``correction`` added to every gradient.

    Returns the trained model and the mean of the raw minibatch gradients.
    """

    def step(carry: tuple[Tensor, Tree, Tensor], batch: Batch) -> tuple[Tensor, Tree, Tensor]:
        y, state, total = carry
        g = client.gradient(y, batch)
        y, state = client.step(y, g + correction, state, batch)
        return y, state, total + g

    y, state, total = client.scan(step, (x, client.begin(x), torch.zeros_like(x)))
    client.end(state)
    return y, total / client.steps.to(x.dtype)


def displacement_divisor(steps: Tensor, momentum: float) -> Tensor:
    """``Σ_k a_k``: the number of gradients in a displacement of τ heavy-ball steps."""
    if momentum == 0:
        return steps
    fade = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - fade) / (1 - momentum)


@dataclass(frozen=True)
class Scaffold(Algorithm[Shared, Shared, Change, Kept]):
    """Stochastic controlled averaging.

    Fields:
        control: how a client's control variate is updated: ``mean_gradient``, ``displacement``
            (Option II as printed) or ``full_gradient`` (Option I).
        predict_with: ``global`` (x) or ``local`` (the client's y_i).
    """

    control: Control = "mean_gradient"
    server_lr: ServerLr = 1.0
    predict_with: Literal["global", "local"] = "global"

    title: ClassVar[str] = "SCAFFOLD"
    bibtex: ClassVar[str] = """@inproceedings{karimireddy2020scaffold,
  title={{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author={Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and
          Stich, Sebastian and Suresh, Ananda Theertha},
  booktitle={ICML}, year={2020}}"""
    private = Declaration(
        leaves="nothing else",
        refused=lambda self: (
            "control = 'full_gradient' sends an exact gradient"
            if self.control == "full_gradient"
            else ""
        ),
    )

    def init(self, problem: Problem) -> tuple[Shared, Kept]:
        if self.control == "displacement" and problem.recipe.optimizer != "sgd":
            raise ConfigError(
                f"scaffold: control = 'displacement' reads gradients off sgd's steps, and the "
                f"optimizer is '{problem.recipe.optimizer}'; use control = 'mean_gradient'"
            )
        zero = problem.start.new_zeros(problem.start.shape)
        kept = Kept(rows(zero, problem.population), rows(problem.start, problem.population))
        return Shared(problem.start, zero), kept

    def download(self, server: Shared, round: Round) -> Shared:
        count = len(round.clients)
        return Shared(rows(server.x, count), rows(server.c, count))

    def local(self, client: Client, received: Shared, state: Kept) -> tuple[Change, Kept]:
        x, c = received
        y, mean_gradient = controlled_steps(client, x, c - state.c)
        if self.control == "mean_gradient":
            control = mean_gradient
        elif self.control == "full_gradient":
            control = client.gradient(x, "train")  # Option I
        else:
            divisor = displacement_divisor(client.steps.to(x.dtype), client.recipe.momentum)
            control = state.c - c + (x - y) / (divisor * client.lr)  # Option II
        return Change(y - x, control - state.c), Kept(control, y)

    def aggregate(self, server: Shared, uploads: Change, round: Round) -> Shared:
        """Uniform means; controls are divided by the whole population."""
        x = server.x + self.server_lr * uploads.dy.mean(0)
        return Shared(x, server.c + uploads.dc.sum(0) / round.population)

    def serve(self, server: Shared, round: Round) -> Tree:
        return rows(server.x, len(round.clients)) if self.predict_with == "global" else ()

    def predictor(self, client: Client, served: Tree, state: Kept) -> Mixture:
        return single(served if self.predict_with == "global" else state.y)

    def global_model(self, server: Shared) -> Tensor | None:
        return server.x

    def check(self, problem: Problem, rounds: int) -> None:
        self.init(problem)
