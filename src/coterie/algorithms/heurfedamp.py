"""HeurFedAMP: FedAMP with attention from the angles between models.

    ξ_ii fixed;   ξ_ij = (1 − ξ_ii) exp(σ cos(w_i, w_j)) / Σ_{h≠i} exp(σ cos(w_i, w_h))    (Eq. 8)

The rest is FedAMP's; α_k enters only through the proximal coefficient.

Notes:
    ``cos_on = "delta"`` takes cosines of w_i − w⁰ from the common start (ours, spec 9.3): models
    that share a start have cosines so close to one that the printed rule (``weights``) stays
    uniform on label skew at any published σ.
    ``self_weight = "auto"`` is 1/N of the round's exchange.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..algorithm import OwnModel, Round, check_pull
from ..client import Client
from ..mixing import cosines
from ..ranges import NotNegative, Share
from ..task import Task
from .fedamp import (
    Auto,
    Cloud,
    FedAMP,
    Own,
    Uploads,
    among_seen,
    exchange,
    start_together,
    store,
    train_near,
)


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
class HeurFedAMP(OwnModel[Uploads, Cloud, Tensor, Own]):
    """Heuristic federated attentive message passing.

    Fields:
        sigma: sharpness σ of the attention.
        self_weight: ξ_ii, the weight on a client's own model; ``auto`` is 1/N.
        cos_on: cosines of ``delta`` (w_i − w⁰) or of the ``weights`` themselves, as printed.
        prox: the proximal coefficient λ/α_k.
        start: local training starts from the ``cloud`` model u_i or the client's own (``self``).
    """

    sigma: NotNegative = 50.0
    self_weight: Share | Auto = "auto"
    cos_on: Literal["delta", "weights"] = "delta"
    prox: NotNegative = 1e-4
    start: Literal["cloud", "self"] = "cloud"

    paper: ClassVar[str] = FedAMP.paper
    bibtex: ClassVar[str] = FedAMP.bibtex

    def init(self, task: Task) -> tuple[Uploads, Own]:
        """The common start."""
        return start_together(task)

    def _weigh(self, server: Uploads, W: Tensor) -> Tensor:
        own = 1 / len(W) if self.self_weight == "auto" else self.self_weight
        seen_as = W - server.start[: W.shape[1]] if self.cos_on == "delta" else W
        return heuristic_attention(seen_as, self.sigma, own)

    def download(self, server: Uploads, round: Round) -> Cloud:
        """u_i, and how strongly to stay near it."""
        u = exchange(server, round, lambda W: self._weigh(server, W))
        return Cloud(u, u.new_full((len(u),), self.prox))

    def local(self, client: Client, received: Cloud, state: Own) -> tuple[Tensor, Own]:
        """Train near u_i."""
        w = train_near(client, received, state, self.start)
        return w, Own(w)

    def aggregate(self, server: Uploads, uploads: Tensor, round: Round) -> Uploads:
        """Store."""
        return store(server, uploads, round)

    def model(self, state: Own) -> Tensor:
        """The client's own model."""
        return state.w

    def collaboration(self, server: Uploads, states: Own, round: Round) -> Tensor:
        """The attention of an exchange between all who have uploaded."""
        return among_seen(server, round, lambda W: self._weigh(server, W))

    def check(self, task: Task, rounds: int) -> None:
        """Refuse a pull that overshoots."""
        check_pull(task, rounds, "heurfedamp.prox", self.prox)
