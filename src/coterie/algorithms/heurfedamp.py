"""HeurFedAMP: FedAMP with attention from the angles between models.

    ξ_ii fixed;   ξ_ij = (1 − ξ_ii) exp(σ cos(w_i, w_j)) / Σ_{h≠i} exp(σ cos(w_i, w_h))    (Eq. 8)

The rest is as in FedAMP; α_k enters only through the proximal coefficient.

Notes:
    ``sigma = "auto"`` is ours: the printed rule gives weight 1 − ξ_ii to others even if all their
    models point in other directions. ``auto`` compares angles with the clients' own sampling noise
    (module ``attention``) on models scaled to length 1: clients whose difference noise explains get
    equal weights, strangers get zero.
    ``cos_on = "delta"`` takes cosines of w_i − w⁰ from the common start (ours, reading P5-8):
    models that share a start have cosines so close to one that the printed rule (``weights``) stays
    uniform on label skew at any published σ.
    ``self_weight = "auto"`` is, with a numeric σ, 1/N for the N clients of the round's exchange;
    with σ ``auto``, the weight that a model at angle 0 would get. With σ ``auto`` a numeric
    ``self_weight`` is the least ξ_ii: a client that has only strangers keeps all of its weight.
    Prediction with w_i or u_i, starts and first exchange are as in FedAMP. FedAMP's α_k = λ/√T of T
    rounds is ``prox`` = √T here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Round, check_pull
from ..core.mixing import cosines
from ..core.problem import Problem
from ..core.ranges import Auto, NotNegative, Share
from .attention import (
    Attentive,
    Cloud,
    Initial,
    PredictWith,
    Seen,
    Upload,
    Uploads,
    Weigh,
    alike,
    compared,
    mixed,
    refuse_unrelated,
    remembered,
    safe,
    shared,
    stored,
)
from .fedamp import FedAMP


def heuristic_attention(W: Tensor, sigma: float, self_weight: float) -> Tensor:
    """Eq. 8: rows sum to one, ``self_weight`` on the diagonal, float64.

    >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> heuristic_attention(W, sigma=1.0, self_weight=1 / 3)[0]
    tensor([0.3333, 0.2202, 0.4465], dtype=torch.float64)
    """
    if len(W) == 1:
        return torch.ones(1, 1, dtype=torch.float64, device=W.device)
    alike = (sigma * cosines(W)).fill_diagonal_(-torch.inf)
    A = (1 - self_weight) * alike.softmax(1)  # Eq. 8
    return A.fill_diagonal_(self_weight)


@dataclass(frozen=True)
class HeurFedAMP(Attentive):
    """Heuristic federated attentive message passing.

    Fields:
        sigma: sharpness σ of the attention; ``auto`` separates similar clients from strangers by
            the clients' own sampling noise.
        self_weight: ξ_ii, the weight on a client's own model (with sigma ``auto``, the least one);
            ``auto`` is 1/N, N the number of clients (with sigma ``auto``, of similar clients).
        cos_on: cosines of ``delta`` (w_i − w⁰) or of the ``weights`` themselves, as printed.
        prox: the proximal coefficient λ/α_k.
        start: local training starts from the ``cloud`` model u_i or the client's own (``self``).
        predict_with: the client's ``own`` model w_i, the newest ``cloud`` model u_i, ``both`` with
            equal weight, or the better of them on ``validation`` data.
        initial: the clients' models are one ``common`` model before round 0, or ``independent``.
    """

    sigma: NotNegative | Auto = "auto"
    self_weight: Share | Auto = "auto"
    cos_on: Literal["delta", "weights"] = "delta"
    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"
    predict_with: PredictWith = "validation"
    initial: Initial = "common"

    paper: ClassVar[str] = FedAMP.paper
    bibtex: ClassVar[str] = FedAMP.bibtex

    def check_together(self) -> None:
        """Refuse independent starts where models are compared with the common one."""
        refuse_unrelated("heurfedamp", "sigma", self.sigma, self.initial)
        refuse_unrelated("heurfedamp", "cos_on", self.cos_on, self.initial)

    def _weigh(self, server: Uploads, round: Round) -> Weigh:
        """A function that computes ξ between some clients in this round."""

        def weigh(members: Tensor) -> Tensor:
            if self.sigma == "auto":
                A = shared(alike(server, members), 1.0, rows=True)
                return A if self.self_weight == "auto" else safe(A, 1 - self.self_weight)
            own = 1 / len(members) if self.self_weight == "auto" else self.self_weight
            W = self._directions(round.trainable(server.models[members]), server.start)
            return heuristic_attention(W, self.sigma, own)

        return weigh

    def _directions(self, W: Tensor, start: Tensor) -> Tensor:
        """The vectors whose angles are compared."""
        return W - start[: W.shape[1]] if self.cos_on == "delta" else W

    def seen(self, W: Tensor, start: Tensor, noise: Tensor) -> Seen:
        """Models are compared by their angle: as vectors of length 1."""
        W = self._directions(W, start)
        length = torch.linalg.vector_norm(W, dim=1, keepdim=True).clamp(min=1e-30)
        return Seen(W / length, noise.to(torch.float64) / length.squeeze(1).to(torch.float64) ** 2)

    def download(self, server: Uploads, round: Round) -> Cloud:
        """u_i, and how strongly to stay near it."""
        u = mixed(server, round.clients, round.clients, self._weigh(server, round))
        return Cloud(u, u.new_full((len(u),), self.prox))

    def aggregate(self, server: Uploads, uploads: Upload, round: Round) -> Uploads:
        """Store and compare the uploads, and record the weights that the round applied."""
        new = server._replace(applied=remembered(server, round, self._weigh(server, round)))
        if self.sigma == "auto":
            seen = self.seen(round.trainable(uploads.w), server.start, uploads.noise)
            new = compared(new, seen, round)
        return stored(new, uploads, round)

    def check(self, problem: Problem, rounds: int) -> None:
        """Refuse a pull that overshoots."""
        check_pull(problem, rounds, "heurfedamp.prox", self.prox)
