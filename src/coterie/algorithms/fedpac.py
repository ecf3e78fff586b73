"""FedPAC: bodies are averaged, heads are combined for each client by their estimated risk.

With n_j the samples of client j, f(x) its features, π_jc its share of class c, μ_jc the mean of
their features and h_jc = π_jc μ_jc:

    head_i ← E_h epochs on the head, body fixed
    body_i ← E epochs of CE + λ mean (f(x) − g_y)²            head fixed
    V_j    = (E_j ‖f‖² − Σ_c ‖h_jc‖²) / n_j
    D_i[j, k] = Σ_c (h_ic − h_jc) · (h_ic − h_kc)
    a_i    = argmin over the simplex of aᵀ (diag(V) + D_i) a
    head_i ← Σ_j a_ij head_j;   body ← body + Σ_i p_i (body_i − body);   g_c = Σ n_jc μ_jc / Σ n_jc

Travels: body, head and the means g down; body, head, V and for each class its share of the client's
samples and the mean of their features up. **Class shares and class-wise means leave the client.**

Notes:
    Statistics are taken at the received body, the same for all, before training; public code takes
    those of g after it. In the first round there is no g and no pull (reading B-16).
    The quadratic problem is solved by accelerated projected gradients in float64.
    In a round heads are combined among the clients that replied; an absent client keeps its own.
    The head is the network's last layer, which must be linear. A regression has one class.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.mixing import gram, last_applied, mix, nobody_yet, noted, shares
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import CountOrZero, NotNegative
from ..core.rows import Rows, updated
from ..core.tree import Tree
from .features import average_of, class_shares, entrance
from .fedavg import Update, Weighting, average
from .lgfedavg import parts
from .pfedgraph import simplex

STEPS = 2000  # of the solver at most


class Server(NamedTuple):
    body: Tensor  # [b]
    heads: Rows  # [K, h] each client's combined head
    means: Tensor  # [C, d] g, zero for a class that nobody had
    known: Tensor  # [C] whether somebody had the class
    applied: Rows  # [K, K] the weights of each client's last combination


class Sent(NamedTuple):
    body: Tensor  # [b]
    head: Tensor  # [h]
    means: Tensor  # [C, d]
    known: Tensor  # [C]


class Up(NamedTuple):
    update: Update  # of the body
    head: Tensor  # [h]
    shares: Tensor  # [C] π
    moments: Tensor  # [C, d] h
    variance: Tensor  # [] V


def risks(moments: Tensor, variances: Tensor) -> Tensor:
    """``diag(V) + D_i`` for all i ``[m, m, m]`` from h ``[m, C, d]`` and V ``[m]``, float64."""
    G = gram(moments.flatten(1))
    own = G.diagonal()[:, None, None]
    D = own - G[:, :, None] - G[:, None, :] + G
    return D + torch.diag(variances.to(torch.float64))


def least_risk(Q: Tensor) -> Tensor:
    """``argmin aᵀ Q_i a`` over the simplex for positive semi-definite Q ``[m, n, n]``: ``[m, n]``.

    >>> least_risk(torch.diag(torch.tensor([1.0, 3.0]).double())[None])
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    rate = 1 / (2 * torch.linalg.matrix_norm(Q)).clamp(min=1e-300)[:, None]
    a = ahead = torch.full_like(Q[:, 0], 1 / Q.shape[-1])
    for step in range(STEPS):
        slope = 2 * (Q @ ahead[..., None]).squeeze(-1)
        new = simplex(ahead - rate * slope)
        turned = ((ahead - new) * (new - a)).sum(-1, keepdim=True) > 0  # restart: it went uphill
        ahead = torch.where(turned, new, new + step / (step + 3) * (new - a))
        done, a = bool((new - a).abs().max() < 1e-12), new
        if done and step:
            break
    return a


@dataclass(frozen=True)
class FedPAC(Algorithm[Server, Sent, Up, tuple[()]]):
    """Feature alignment and classifier collaboration.

    Fields:
        lam: strength λ of the pull of a sample's features towards everybody's mean of its class.
        head_epochs: passes E_h over the client's data for the head.
        weighting: ``samples`` or ``uniform``, for the bodies.
    """

    lam: NotNegative = 1.0
    head_epochs: CountOrZero = 1
    weighting: Weighting = "samples"

    bibtex: ClassVar[str] = """@inproceedings{xu2023fedpac,
  title={Personalized Federated Learning with Feature Alignment and Classifier Collaboration},
  author={Xu, Jian and Tong, Xinyi and Huang, Shao-Lun},
  booktitle={ICLR}, year={2023}}"""
    private = Declaration(refused="class shares and mean features leave the clients")

    @property
    def traits(self) -> Traits:
        """Class shares and class-wise means of features leave the clients."""
        return Traits(discloses="class_features")

    def optimizers(self, problem: Problem) -> int:
        return 2  # of the head and of the body

    def init(self, problem: Problem) -> tuple[Server, tuple[()]]:
        head, body, _ = parts(problem.model, 1)
        start, K, C = problem.start, problem.population, max(1, problem.classes)
        means = start.new_zeros(C, entrance(problem.model, 1, "fedpac").width)
        heads, nobody = rows(start[head], K), nobody_yet(start, K)
        return Server(start[body], heads, means, means[:, 0] > 0, nobody), ()

    def download(self, server: Server, round: Round) -> Sent:
        """The body, the means of classes, and each client's combined head."""
        body, means, known = (
            rows(part, len(round.clients)) for part in (server.body, server.means, server.known)
        )
        return Sent(body, server.heads[round.clients], means, known)

    def local(self, client: Client, received: Sent, state: tuple[()]) -> tuple[Up, tuple[()]]:
        at, door = parts(client.model, 1), entrance(client.model, 1, "fedpac")
        w, C = at.join(received.head, received.body), len(received.means)

        def statistics(batch: Batch) -> Tensor:
            f = door.features(client, w, batch)[1]
            each = class_shares(client, batch, C, w.dtype)
            products = (each[:, :, None] * f[:, None]).flatten(1)
            return torch.cat([each, products, (f * f).sum(1, keepdim=True)], 1)

        found = average_of(client, statistics)
        moments = found[C:-1].view(C, -1)
        variance = (found[-1] - (moments**2).sum()) / client.size.clamp(min=1)

        def aligned(w: Tensor, batch: Batch) -> Tensor:
            output, f = door.features(client, w, batch)
            each = class_shares(client, batch, C, w.dtype) * received.known
            apart = ((f - each @ received.means) ** 2).mean(1) * each.sum(1)
            return mean(client.losses_of(output, batch), batch.mask) + self.lam * mean(
                apart, batch.mask
            )

        w = client.tuned(epochs=self.head_epochs, batches="head").train(w, only=at.is_upper)
        w = client.train(w, loss=aligned, only=~at.is_upper)
        update = Update(w[at.lower], client.size)
        return Up(update, w[at.upper], found[:C], moments, variance), ()

    def aggregate(self, server: Server, uploads: Up, round: Round) -> Server:
        A = least_risk(risks(uploads.moments, uploads.variance))
        p = shares(uploads.update.size).to(uploads.shares.dtype)
        count = p @ uploads.shares
        means = (p @ uploads.moments.flatten(1)).view_as(server.means)
        return Server(
            average(server.body, uploads.update, self.weighting, 1.0),
            updated(server.heads, round.clients, mix(A, uploads.head)),
            means / count.clamp(min=torch.finfo(count.dtype).tiny)[:, None],
            count > 0,
            noted(server.applied, round.clients, A),
        )

    def serve(self, server: Server, round: Round) -> Tree:
        return rows(server.body, len(round.clients)), server.heads[round.clients]

    def predictor(self, client: Client, served: Tree, state: tuple[()]) -> Mixture:
        body, head = served
        return single(parts(client.model, 1).join(head, body))

    def collaboration(self, server: Server, shown: Tree, round: Round) -> Tensor:
        return last_applied(server.applied)

    def check(self, problem: Problem, rounds: int) -> None:
        entrance(problem.model, 1, "fedpac")
