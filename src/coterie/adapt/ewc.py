"""Elastic weight consolidation: fine-tuning that holds the parameters important for predictions.

    loss(C) = CE(C) + (λ/2) Σ_k M_k (C_k − G_k)²

G is the model before adaptation and M its diagonal Fisher information, both frozen.

Travels: with ``fisher_data = "server_aux"`` the diagonal to every client; with ``aggregate`` every
participant's diagonal up, their average down; otherwise nothing.

Notes:
    ``fisher_data = "auto"`` is ``server_aux`` where the server holds samples (``data.aux``) and
    there is one model for all, ``client_train`` elsewhere. ``aggregate`` averages the diagonals
    that the participants of the last round computed on the model they would have predicted with
    before that round: they are one round old, because clients are not asked a second time.
    λ = 5000, the papers' value, is a pull thousands of times the curvature of the loss itself,
    which is about M: no important parameter moves any more. ``lam = "auto"`` is 1 / (η max_k M_k):
    the parameter with the largest M_k is pulled back by its whole distance in every step, the
    others in proportion to their M_k. It means the same for every estimator of M, although their
    scales differ.
    The explicit step (λM_k(C_k − G_k) added to the gradient) overshoots wherever ηλM_k > 2: at
    λ = 5000 and η = 0.1 that is M_k > 4e-3, and models of ordinary size diverge (reading P3-5). The
    implicit one follows the optimiser's step by ``C_k ← (C_k + ηλM_k G_k) / (1 + ηλM_k)``: stable
    for any λ and the same to first order in η. ``ewc_step = "auto"`` is explicit, as in the papers,
    for every parameter with ηλM_k ≤ 1 and implicit for the others.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from ..core.algorithm import AnyAlgorithm, GlobalModel, Round, rows
from ..core.batches import EVALUATION_BLOCK, Batch
from ..core.client import Client
from ..core.problem import Problem
from ..core.ranges import Auto, NotNegative
from ..core.tree import Tree
from ..errors import ConfigError
from .base import Retraining

Kind = Literal["empirical", "true", "batch_mean"]
Source = Literal["auto", "server_aux", "client_train", "aggregate"]

# Entries of per-sample gradients held in memory at once: of one of many clients, which may be
# computed together, and of the server's own samples, which are computed alone.
_OF_MANY, _ALONE = 1 << 22, 1 << 28


def fisher(client: Client, w: Tensor, kind: Kind, *, alone: bool = False) -> Tensor:
    """The Fisher diagonal on a client's training data: how much predictions depend on a parameter.

        M_k = (1/n) Σ_s (∂ log p(y_s | x_s) / ∂w_k)²

    ``alone`` says that nothing else is computed meanwhile, so that a GPU may use more memory.

    Notes:
        ``empirical`` uses the labels of the data, ``true`` draws labels from the model,
        ``batch_mean`` squares the mean gradient of minibatches, as public code does: near a
        stationary point that is about 1/B of the others, so λ is not comparable between them
        (reading P3-4). All are computed in evaluation mode.
        For a regression p is a normal distribution of variance one, whose −log p is half the
        squared error up to a constant.
    """
    total, count = client.trainable(torch.zeros_like(w)), w.new_zeros(())
    entries = _ALONE if alone and w.is_cuda else _OF_MANY
    each = _batches(client, w) if kind == "batch_mean" else _samples(client, w, kind, entries)
    for squares, samples in each:
        total, count = total + squares, count + samples
    return total / count.clamp(min=1)


def _batches(client: Client, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each minibatch, the squared mean gradient times the number of samples; that number."""
    for batch in client.blocks("train", client.recipe.batch):
        count = w.new_full((), len(batch.y)) if batch.mask is None else batch.mask.sum()
        yield count * client.trainable(client.gradient(w, batch)) ** 2, count


def _samples(
    client: Client, w: Tensor, kind: Kind, entries: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block, the sum of the squared per-sample gradients, and the number of samples."""
    size = max(1, min(EVALUATION_BLOCK, entries // len(w)))
    for number, block in enumerate(client.blocks("train", size)):
        y = drawn(client, w, block, number) if kind == "true" else block.y

        def square(x: Tensor, y: Tensor) -> Tensor:
            one = Batch(x[None], y[None], None, torch.zeros(1, dtype=torch.int64), None)
            return client.trainable(grad(client.loss)(w, one)) ** 2

        squares = client.map(square, block.x, y)
        mask = torch.ones_like(squares[:, 0]) if block.mask is None else block.mask
        yield mask.to(squares.dtype) @ squares, mask.sum()


def drawn(client: Client, w: Tensor, batch: Batch, number: int) -> Tensor:
    """Labels of a batch drawn from the model's own predictions."""
    output = client.outputs(w, batch)
    if batch.y.is_floating_point():
        noise = client.noise("fisher", (len(batch.y),), at=number)
        return output.squeeze(-1) + noise.to(output.dtype)
    luck = client.draw("fisher", (*batch.y.shape, 1), at=number)
    below = output.to(torch.float64).softmax(-1).cumsum(-1)
    return (luck >= below).sum(-1).clamp(max=output.shape[-1] - 1)


Step = Literal["auto", "explicit", "implicit"]

# The largest ηλM_k at which the pull on a parameter is added to the gradient. "auto" is 1 plus a
# margin for rounding, because lam = "auto" makes the largest ηλM_k exactly 1.
_EXPLICIT_UP_TO = {"explicit": math.inf, "auto": 1.001, "implicit": 0.0}


def strength(client: Client, M: Tensor, lam: float | Auto) -> Tensor | float:
    """The given λ, or for ``auto`` ``1 / (η max_k M_k)``, which is 0 where M is zero."""
    if lam != "auto":
        return lam
    largest = M.max()
    return torch.where(largest > 0, 1 / (client.lr * largest), 0.0)


def consolidate(
    client: Client, start: Tensor, anchor: Tensor, M: Tensor, lam: Tensor | float, step: Step
) -> Tensor:
    """Local training from ``start``, held near ``anchor`` where the Fisher diagonal M is large."""
    G, pull = client.trainable(anchor), client.lr * lam * M
    explicit = pull <= _EXPLICIT_UP_TO[step]
    soft, hard = torch.where(explicit, lam * M, 0.0), torch.where(explicit, 0.0, pull)

    def one(carry: tuple[Tensor, Tree], batch: Batch) -> tuple[Tensor, Tree]:
        w, state = carry
        g = client.trainable(client.gradient(w, batch)) + soft * (client.trainable(w) - G)
        w, state = client.step(w, g, state, batch)
        near = (client.trainable(w) + hard * G) / (1 + hard)
        return torch.cat([near, w[len(near) :]]), state

    w, state = client.scan(one, (start, client.begin(start)))
    client.end(state)
    return w


def require_aux(problem: Problem, where: str) -> None:
    """Refuse a run whose server holds no samples."""
    if problem.aux is None:
        raise ConfigError(
            f"{where}: fisher_data = 'server_aux' needs samples that the server holds, and it has "
            "none; set data.aux to a share of the test data (0.1 in the paper), or use "
            "fisher_data = 'client_train'"
        )


@dataclass(frozen=True)
class ElasticWeights(Retraining):
    """Multi-task adaptation by elastic weight consolidation (ewc).

    Fields:
        lam: strength λ of the pull; 0 is fine-tuning, 5000 the papers'; ``auto`` is 1 / (η max M).
        fisher_kind: ``empirical``, ``true`` (labels drawn from the model) or ``batch_mean``.
        fisher_data: where the Fisher diagonal comes from: ``server_aux`` (samples that the server
            holds), ``client_train``, ``aggregate`` (the participants' average) or ``auto``.
        ewc_step: ``explicit``, as in the papers, ``implicit``, which is stable for any λ, or
            ``auto``: explicit wherever that is stable.
    """

    lam: NotNegative | Auto = "auto"
    fisher_kind: Kind = "empirical"
    fisher_data: Source = "auto"
    ewc_step: Step = "auto"

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        """Fine-tune, with a pull of each parameter in proportion to the Fisher diagonal."""
        M = given if isinstance(given, Tensor) else fisher(client, w, self.fisher_kind)
        tuned = self.tuned(client)
        return consolidate(tuned, w, w, M, strength(tuned, M, self.lam), self.ewc_step)

    @property
    def surveys(self) -> bool:
        return self.fisher_data == "aggregate"

    def survey(self, client: Client, w: Tensor) -> Tensor:
        return fisher(client, w, self.fisher_kind)

    def check(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Refuse ``server_aux`` unless the server holds samples and one model for all clients."""
        if self.fisher_data != "server_aux":
            return
        require_aux(problem, "adapt")
        if not isinstance(algorithm, GlobalModel):
            raise ConfigError(
                f"adapt: fisher_data = 'server_aux' needs one model for all clients, and "
                f"{type(algorithm).__name__} has none; use fisher_data = 'client_train'"
            )

    def given(self, algorithm: AnyAlgorithm, server: Tree, surveyed: Tree, round: Round) -> Tree:
        """The diagonal, where it does not come from the client itself."""
        count = len(round.clients)
        if self.fisher_data == "aggregate":
            return rows(surveyed, count)
        if self.fisher_data == "client_train" or round.aux is None:
            return ()
        if not isinstance(algorithm, GlobalModel):
            return ()
        return rows(fisher(round.aux, algorithm.model(server), self.fisher_kind, alone=True), count)
