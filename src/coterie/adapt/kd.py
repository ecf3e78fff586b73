"""Knowledge distillation: fine-tuning that stays near the outputs of the model before it.

Teacher G (the model before adaptation, frozen), student C, temperature τ:

    KL = Σ_c softmax(G/τ)_c · log( softmax(G/τ)_c / softmax(C/τ)_c )

    hinton    (1 − α) CE + α τ² KL
    paper     α τ² CE + (1 − α) KL                 (P3 Eq. 6)
    yu_code   (1 − α) CE + α τ² KL / classes

Travels: nothing.

Notes:
    The three forms differ by orders of magnitude (reading P3-2). As printed in P3 the cross-entropy
    is multiplied by 34 and the teacher almost ignored; ``hinton`` is the form of the cited
    technique and our default; ``yu_code`` is what public code computes.
    ``hinton`` overshoots at ordinary rates: α τ² KL has a curvature above 100 on ordinary clients,
    and a step of rate η is stable up to 2/η (reading P3-3). ``kd_step = "bounded"``, the default,
    measures the curvature along every step by a second gradient and shortens a step that would pass
    the smallest loss on its line (exact on a quadratic). Other steps are the papers'.
    The teacher answers in evaluation mode, the student in training mode.
    For a regression the outputs are read as normal distributions of standard deviation τ, so that
    τ² KL is half the squared difference of the two outputs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batches import Batch, Loss
from ..core.client import Client, descend, mean
from ..core.losses import over_positions
from ..core.ranges import Positive, Share
from ..core.tree import Tree
from .base import Retraining

Form = Literal["hinton", "paper", "yu_code"]
DistillStep = Literal["bounded", "full"]

PROBE = 1e-2  # how far along the line the second gradient is taken, relative to the length of w


class Terms(NamedTuple):
    """The constants of a distillation."""

    tau: float
    alpha: float
    form: Form


def divergence(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """The KL divergence of the softened outputs ``[B]``, from logits ``[B, ..., C]``."""
    p, q = (teacher / tau).log_softmax(-1), (student / tau).log_softmax(-1)
    return over_positions((p.exp() * (p - q)).sum(-1))


def combine(ce: Tensor, kl: Tensor, classes: int, terms: Terms) -> Tensor:
    """The distillation loss of a form, from cross-entropies and divergences."""
    tau, alpha, form = terms
    if form == "paper":
        return alpha * tau**2 * ce + (1 - alpha) * kl  # P3 Eq. 6
    if form == "yu_code":
        kl = kl / classes
    return (1 - alpha) * ce + alpha * tau**2 * kl


def losses(client: Client, w: Tensor, teacher: Tensor, batch: Batch, terms: Terms) -> Tensor:
    """The loss of a student ``w`` on every sample of a batch."""
    student = client.outputs(w, batch, training=batch.training)
    taught = client.outputs(teacher, batch)
    if batch.y.is_floating_point():
        kl = 0.5 * (student - taught).squeeze(-1) ** 2 / terms.tau**2
    else:
        kl = divergence(taught, student, terms.tau)
    return combine(client.losses_of(student, batch), kl, student.shape[-1], terms)


def distillation(client: Client, w: Tensor, teacher: Tensor, batch: Batch, terms: Terms) -> Tensor:
    """The mean loss of a student ``w`` on a batch."""
    return mean(losses(client, w, teacher, batch, terms), batch.mask)


def step_share(g: Tensor, ahead: Tensor, probe: Tensor | float, rate: Tensor | float) -> Tensor:
    """The share of a step ``rate · g``, at most 1, that ends at the smallest loss on its line.

    ``g`` is the gradient at w and ``ahead`` the gradient at w − probe · g.

    >>> step_share(torch.tensor([1.0, 0.0]), torch.tensor([0.6, 5.0]), 0.1, 1.0)
    tensor(0.2500)
    """
    square = g @ g
    bend = (square - g @ ahead) * rate  # probe · rate · g·Hg
    return torch.where(bend > probe * square, probe * square / bend, 1.0)


def bounded_gradient(client: Client, w: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """The gradient, shortened where the client's step along it would pass the line's minimum.

    On the line w − tg a quadratic loss of curvature κ = g·Hg / g·g is smallest at t = 1/κ. The
    curvature is estimated from a second gradient, a short way along the line. Cross-entropy and
    distillation losses flatten further out, so that the curvature near w limits a step.
    """
    g = client.gradient(w, batch, loss)
    length, reach = (client.trainable(v).norm() for v in (g, PROBE * w))
    probe = reach.clamp(min=PROBE) / length.clamp(min=torch.finfo(w.dtype).tiny)
    ahead = client.gradient(descend(client, w, g, probe), batch, loss)
    return g * step_share(client.trainable(g), client.trainable(ahead), probe, client.lr)


def descent(client: Client, start: Tensor, loss: Loss, step: DistillStep) -> Tensor:
    """Local training from ``start`` with a loss; ``bounded`` steps end before the loss rises."""
    if step == "full":
        return client.train(start, loss=loss)

    def one(carry: tuple[Tensor, Tree], batch: Batch) -> tuple[Tensor, Tree]:
        w, state = carry
        return client.step(w, bounded_gradient(client, w, batch, loss), state, batch)

    w, state = client.scan(one, (start, client.begin(start)))
    client.end(state)
    return w


@dataclass(frozen=True)
class Distill(Retraining):
    """Knowledge distillation (kd): train a copy while staying near the model's outputs.

    Fields:
        tau: temperature τ.
        alpha: the weight α; on the teacher in ``hinton`` and ``yu_code``, on the labels in
            ``paper``.
        kd_form: ``hinton``, ``paper`` (P3 Eq. 6 as printed) or ``yu_code`` (public code).
        kd_step: ``bounded`` shortens a step that would pass the smallest loss on its line;
            ``full`` takes every step at the whole rate, as the papers do.
    """

    tau: Positive = 6.0
    alpha: Share = 0.95
    kd_form: Form = "hinton"
    kd_step: DistillStep = "bounded"

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        terms = Terms(self.tau, self.alpha, self.kd_form)

        def loss(student: Tensor, batch: Batch) -> Tensor:
            return distillation(client, student, w, batch, terms)

        tuned = self.tuned(client)
        return descent(tuned, w, loss, self.kd_step)
