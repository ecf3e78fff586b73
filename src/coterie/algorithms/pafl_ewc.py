"""PaFL with elastic weight consolidation (H_EWC): from T/2 on G's important parameters are held.

    t < T/2:    CE(C)                                        as FedAvg
    t ≥ T/2:    CE(C) + (λ/2) Σ_k M_k (C_k − G_k)²           G the received model, frozen

M is the diagonal Fisher information of G.

Travels: as FedAvg; from T/2 on also M, as ``fisher_data`` says.

Notes:
    The paper does not say where M comes from (reading P3-4). ``server_aux`` computes it at G on
    samples that the server holds (``data.aux``): one model more down. ``client_train`` uses the
    client's own samples, and nothing more travels. ``aggregate`` averages the diagonals that the
    participants of the round before computed at the model they then received (zero where there was
    no such round): one model more each way. ``auto`` is ``server_aux`` where the server holds
    samples, and ``client_train`` elsewhere.
    λ = 5000 is the paper's, and with it no important parameter moves after T/2. ``lam = "auto"`` is
    1 / (η max_k M_k), which means the same for every estimator of M although their scales differ:
    the parameter with the largest M_k is pulled back by its whole distance in every step.
    The step, λM_k(C_k − G_k) added to the gradient, overshoots wherever ηλM_k > 2, as it does at
    λ = 5000 for M_k > 0.004 at η = 0.1 (P3-5); with ``auto`` it never does.
    ``ewc_step = "implicit"`` is ours: stable for any λ, and the same to first order in η.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..adapt.ewc import Kind, Source, Step
from ..adapt.kd import Terms
from ..core.ranges import Auto, NotNegative
from .pafl import BIBTEX, Options, Personalising, Phase, halved


@dataclass(frozen=True)
class PaFLEWC(Personalising):
    """PaFL with elastic weight consolidation in the second half (H_EWC).

    Fields:
        lam: strength λ of the pull towards the received model, 5000 in the paper; ``auto`` is
            1 / (η max M): the parameter of the largest M is held in place, others in proportion.
        fisher_kind: ``empirical``, ``true`` (labels drawn from the model) or ``batch_mean``.
        fisher_data: where the Fisher diagonal comes from: ``server_aux`` (samples that the server
            holds), ``client_train``, ``aggregate`` (the participants' average) or ``auto``.
        ewc_step: ``explicit``, as in the paper; ours are ``implicit``, stable for any λ, and
            ``auto``: explicit wherever that is stable.
    """

    lam: NotNegative | Auto = "auto"
    fisher_kind: Kind = "empirical"
    fisher_data: Source = "auto"
    ewc_step: Step = "explicit"

    title: ClassVar[str] = "PaFL-EWC"
    bibtex: ClassVar[str] = BIBTEX

    def phase(self, t: int, horizon: int) -> Phase:
        return halved(t, horizon, "ewc")

    @property
    def options(self) -> Options:
        terms = Terms(1.0, 0.0, "hinton")
        return Options(terms, self.lam, self.fisher_kind, self.fisher_data, self.ewc_step)
