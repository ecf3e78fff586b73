"""PaFL with knowledge distillation (H_KD): from T/2 on the received model teaches the clients.

    t < T/2:    CE(C)                                        as FedAvg
    t ≥ T/2:    (1 − α) CE(C) + α τ² KL(G, C)                G the received model, frozen

Travels: as FedAvg, from T/2 on also the loss before and after training. From T/2 on each minibatch
costs a forward pass of the teacher, in ``pafl_kd_bounded`` two and a second gradient.

Notes:
    The loss is that of ``adapt = "kd"``, with its three forms; the line above is ``hinton``, our
    default. ``paper`` (P3 Eq. 6 as printed) multiplies the rate by 34 (reading P3-2).
    α τ² KL has a curvature above 100 on ordinary clients, and a step of rate η overshoots beyond
    2/η (P3-3). ``pafl_kd_bounded``, which is ours, measures the curvature along every step by a
    second gradient and shortens a step that would pass the smallest loss on its line (exact on a
    quadratic). Steps that do not overshoot are the paper's.
    At C = G the divergence has no gradient, so ``hinton`` at first moves as FedAvg at (1 − α) of
    the rate: compare H_KD also with FedAvg at a twentieth of the rate from T/2 on (P3-7).
"""

from dataclasses import dataclass
from typing import ClassVar

from ..adapt.kd import Form, Terms
from ..core.ranges import Positive, Share
from .pafl import BIBTEX, Options, Personalising, Phase, halved


@dataclass(frozen=True)
class PaFLKD(Personalising):
    """PaFL with distillation from the received model in the second half (H_KD).

    Fields:
        tau: temperature τ.
        alpha: the weight α; on the teacher in ``hinton`` and ``yu_code``, on the labels in
            ``paper``.
        kd_form: ``hinton``, ``paper`` (P3 Eq. 6 as printed) or ``yu_code`` (public code).
    """

    tau: Positive = 6.0
    alpha: Share = 0.95
    kd_form: Form = "hinton"

    title: ClassVar[str] = "PaFL-KD"
    bibtex: ClassVar[str] = BIBTEX

    def phase(self, t: int, horizon: int) -> Phase:
        return halved(t, horizon, "kd")

    @property
    def options(self) -> Options:
        return Options(Terms(self.tau, self.alpha, self.kd_form))


@dataclass(frozen=True)
class PaFLKDBounded(PaFLKD):
    """H_KD whose steps end before the loss rises.

    Fields are those of PaFL-KD.
    """

    title: ClassVar[str] = "PaFL-KD, bounded"

    @property
    def options(self) -> Options:
        return super().options._replace(kd_step="bounded")
