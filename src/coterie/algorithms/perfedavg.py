"""Per-FedAvg: a global model trained to be good after one step on a client's data (MAML).

Objective: Σ_i p_i F_i(w − a∇F_i(w)). A local step, on three independent minibatches D, D', D'':

    w̃ = w − a∇F(w; D);   g = ∇F(w̃; D')
    first order:   w ← w − b g
    Hessian-free:  w ← w − b (g − a [∇F(w + δg; D'') − ∇F(w − δg; D'')] / 2δ)

Travels: as FedAvg. A client predicts with w − a∇F_i(w), taken on its training data.

Notes:
    b is the rate of the recipe, whose optimiser takes the outer step; a is ``inner_lr``. The
    authors' ranges are a = 0.005 to 0.03 and b = 0.001 to 0.003. Our ``auto`` a is the rate of the
    round: a client's personal step is then as large as any other step.
    The paper needs a ≤ 1/L, L the largest curvature of F: with a larger a, I − a∇²F reverses the
    gradient in the steepest directions and the outer step raises the loss. At ordinary rates a = η
    exceeds 1/L, so with ``auto`` the term a∇²F g is shortened to at most half the length of g.
    The paper predicts after one step, whose rate it tunes. Our default is five steps at the rate
    of the round (see the measurements on the method's page).
    The personal step at prediction is taken on the whole training split, never on test data: public
    code adapts to the test batch, which leaks its labels (reading B-5).
    D' are the round's ordinary minibatches, so that a = 0 is FedAvg with the same batches.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.batches import Batch
from ..core.client import Client, descend
from ..core.privacy import TRAIN, Declaration, Query
from ..core.problem import Problem
from ..core.ranges import Auto, CountOrZero, NotNegative, Positive
from ..core.tree import Tree
from .fedavg import ServerLr, Update, Weighting, average


def hessian_product(client: Client, w: Tensor, g: Tensor, batch: Batch, delta: float) -> Tensor:
    """``∇²F(w) g`` by a central difference, exact to O(δ²)."""
    behind, ahead = (client.gradient(descend(client, w, g, d), batch) for d in (delta, -delta))
    return (ahead - behind) / (2 * delta)


@dataclass(frozen=True)
class PerFedAvg(Algorithm[Tensor, Tensor, Update, tuple[()]]):
    """Model-agnostic meta-learning across clients.

    Fields:
        form: ``fo`` drops the Hessian, ``hf`` estimates its product with g.
        inner_lr: rate a of the personal step; ``auto`` is the rate of the round.
        delta: half-width δ of the difference in ``hf``.
        predict_steps: personal steps before predicting.
    """

    form: Literal["fo", "hf"] = "fo"
    inner_lr: NotNegative | Auto = "auto"
    delta: Positive = 1e-3
    predict_steps: CountOrZero = 5
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    title: ClassVar[str] = "Per-FedAvg"
    bibtex: ClassVar[str] = """@inproceedings{fallah2020perfedavg,
  title={Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
         Meta-Learning Approach},
  author={Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle={NeurIPS}, year={2020}}"""
    private = Declaration(
        lambda self, when: (*(TRAIN * 2), *((Query(gradients=2),) if self.form == "hf" else ()))
    )

    def init(self, problem: Problem) -> tuple[Tensor, tuple[()]]:
        return problem.start, ()

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def _rate(self, client: Client) -> Tensor | float:
        return client.lr if self.inner_lr == "auto" else self.inner_lr

    def _correction(self, client: Client, g: Tensor, curved: Tensor) -> Tensor:
        """``a ∇²F g``; with ``auto`` shortened to at most half the length of g."""
        if self.inner_lr != "auto":
            return self.inner_lr * curved
        product = client.lr * curved
        length, longest = (client.trainable(v).norm() for v in (product, g / 2))
        share: Tensor = longest / length.clamp(min=torch.finfo(g.dtype).tiny)
        return product * share.clamp(max=1.0)

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        a = self._rate(client)
        first, third = client.tuned(batches="adapt"), client.tuned(batches="hessian")

        def step(carry: tuple[Tensor, Tree], batch: Batch) -> tuple[Tensor, Tree]:
            w, optimizer = carry
            before, beside = (other.alike(batch) for other in (first, third))
            adapted = descend(client, w, client.gradient(w, before), a)
            g = client.gradient(adapted, batch)
            if self.form == "hf":
                curved = hessian_product(client, w, g, beside, self.delta)
                g = g - self._correction(client, g, curved)
            return client.step(w, g, optimizer, batch)

        w, optimizer = client.scan(step, (received, client.begin(received)))
        client.end(optimizer)
        return Update(w, client.size), ()

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, self.server_lr)

    def predictor(self, client: Client, served: Tensor, state: tuple[()]) -> Mixture:
        """The global model after ``predict_steps`` personal steps on the client's training data."""
        w = served
        for _ in range(self.predict_steps):
            w = descend(client, w, client.gradient(w, "train"), self._rate(client))
        return single(w)
