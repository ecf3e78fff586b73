"""Elastic weight consolidation: fine-tuning that keeps what the model's predictions depend on.

    loss(C) = CE(C) + (λ/2) Σ_k M_k (C_k − G_k)²

G is the model before adaptation and M its diagonal Fisher information, both frozen.

Travels: with ``fisher_data = "server_aux"`` the diagonal to every client; with ``aggregate`` every
participant's diagonal up, their average down; otherwise nothing.

Notes:
    ``fisher_data = "auto"`` is ``server_aux`` where the server holds samples (``data.aux``) and
    there is one model for all, ``client_train`` elsewhere. ``aggregate`` averages the diagonals
    that the participants of the last round computed of the model they would have predicted with
    before that round: a round old, as nobody is asked twice.
    The explicit step overshoots wherever ηλM_k > 2: at λ = 5000 and η = 0.1 that is M_k > 4e-3
    (spec 3.3). ``ewc_step = "implicit"`` follows every optimiser step by
    ``C_k ← (C_k + ηλM_k G_k) / (1 + ηλM_k)``, which is stable for any λ and the same to first
    order in η.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..algorithm import AnyAlgorithm, GlobalModel, Round, rows
from ..client import Batch, Client
from ..errors import ConfigError
from ..task import Task
from ..tree import Tree
from .base import Adaptation
from .fisher import Kind, Source, fisher

Step = Literal["explicit", "implicit"]


def elastic(w: Tensor, anchor: Tensor, M: Tensor, lam: float) -> Tensor:
    """``(λ/2) Σ_k M_k (w_k − anchor_k)²``; its gradient in ``w`` is ``λM(w − anchor)``."""
    return 0.5 * lam * (M * (w - anchor) ** 2).sum()


def consolidate(
    client: Client, start: Tensor, anchor: Tensor, M: Tensor, lam: float, step: Step
) -> Tensor:
    """Local training from ``start``, held near ``anchor`` where the Fisher diagonal M is large."""
    G = client.trainable(anchor)
    if step == "explicit":
        return client.train(start, penalty=lambda w: elastic(client.trainable(w), G, M, lam))
    pull = client.lr * lam * M

    def one(carry: tuple[Tensor, Tree], batch: Batch) -> tuple[Tensor, Tree]:
        w, state = carry
        w, state = client.step(w, client.gradient(w, batch), state, batch)
        near = (client.trainable(w) + pull * G) / (1 + pull)
        return torch.cat([near, w[len(near) :]]), state

    return client.scan(one, (start, client.begin(start)))[0]


def require_aux(task: Task, where: str) -> None:
    """Refuse a run whose server holds no samples."""
    if task.aux is None:
        raise ConfigError(
            f"{where}: fisher_data = 'server_aux' needs samples that the server holds, and it has "
            "none; set data.aux to a share of the test data (0.1 in the paper), or use "
            "fisher_data = 'client_train'"
        )


@dataclass(frozen=True)
class ElasticWeights(Adaptation):
    """Multi-task adaptation by elastic weight consolidation (ewc).

    Fields:
        epochs: passes over the client's data; None takes the training recipe's.
        lr: learning rate; None takes the rate of the round.
        lam: strength λ of the pull; 0 is fine-tuning.
        fisher_kind: ``empirical``, ``true`` (labels drawn from the model) or ``batch_mean``.
        fisher_data: where the Fisher diagonal comes from: ``server_aux`` (samples that the server
            holds), ``client_train``, ``aggregate`` (the participants' average) or ``auto``.
        ewc_step: ``explicit``, as in the papers, or ``implicit``, which is stable for any λ.
    """

    epochs: int | None = None
    lr: float | None = None
    lam: float = 5000.0
    fisher_kind: Kind = "empirical"
    fisher_data: Source = "auto"
    ewc_step: Step = "explicit"

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        """Train on, held near where it matters."""
        M = given if isinstance(given, Tensor) else fisher(client, w, self.fisher_kind)
        tuned = client.tuned(epochs=self.epochs, lr=self.lr)
        return consolidate(tuned, w, w, M, self.lam, self.ewc_step)

    @property
    def surveys(self) -> bool:
        """Whether the participants' diagonals are averaged."""
        return self.fisher_data == "aggregate"

    def survey(self, client: Client, w: Tensor) -> Tensor:
        """The diagonal on the client's own data."""
        return fisher(client, w, self.fisher_kind)

    def check(self, algorithm: AnyAlgorithm, task: Task) -> None:
        """The server can only look at a model that it has."""
        if self.fisher_data != "server_aux":
            return
        require_aux(task, "adapt")
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
        return rows(fisher(round.aux, algorithm.model(server), self.fisher_kind), count)
