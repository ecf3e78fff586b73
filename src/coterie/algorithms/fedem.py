"""FedEM: every client's data is a mixture of a few distributions that all clients share.

M shared components h_m and, on every client, their shares π_i. For each training sample s:

    E:  q_im(s) ∝ π_im exp(−ℓ(h_m(x_s), y_s)),   π_im = mean_s q_im(s)
    M:  train component m with the loss (1/|batch|) Σ_s q_im(s) ℓ(h_m(x_s), y_s)
        h_m ← h_m + Σ_i p_i (h_im − h_m)                                    on the server

Travels: M models each way. π_i and q never leave the client.

A client predicts Σ_m π_im softmax(h_m(x)): probabilities are mixed, not logits.

Notes:
    Components must start different: the first is the common start, the others are drawn anew.
    q is computed at the received models, in evaluation mode and without augmentation. The loss of
    a minibatch is divided by its size, not by Σ q (reading B-7). As Σ_m q_im(s) = 1, the components
    split one learning rate: as long as their shares are equal, each learns at η/M.
    ``rate = "scaled"`` multiplies the loss by M, which under plain SGD is the rate η M: a component
    with responsibility 1/M for a sample learns at η as in FedAvg, one with responsibility 1 at η M.
    Adam's steps do not change with this factor, and weight decay is not multiplied.
    Before a prediction, ``new_client_steps`` E-steps at the newest components update π_i; a client
    that never took part gets its shares in this way, starting from equal ones.
    The collaboration matrix is Σ_m π_im π_jm / Σ_l π_lm: how much i uses the components that j has
    trained, without regard to sizes.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.mixing import mix, shares
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import CountOrZero, Few
from .fedavg import Weighting


class Components(NamedTuple):
    """What a client sends."""

    models: Tensor  # [M, P]
    size: Tensor  # []


class Own(NamedTuple):
    pi: Tensor  # [M]


def responsibilities(pi: Tensor, losses: Tensor) -> Tensor:
    """``q_m(s) ∝ π_m exp(−ℓ_m(s))`` over the components: ``losses [M, n]`` gives ``[M, n]``.

    >>> responsibilities(torch.tensor([0.5, 0.5]), torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    tensor([[0.5000, 0.8808],
            [0.5000, 0.1192]])
    """
    tiny = torch.finfo(losses.dtype).tiny  # a share of 0 must be able to grow again
    return (pi.clamp(min=tiny).log()[:, None] - losses).softmax(0)


def fitted_shares(losses: Tensor, mask: Tensor, steps: int = 20) -> Tensor:
    """The shares ``[M]`` of models by EM, from their losses ``[M, n]``; the first leads by one."""
    ahead = torch.arange(len(losses), device=losses.device) == 0
    pi = losses.new_full((len(losses),), 1 / len(losses))
    for _ in range(steps):
        pi = (responsibilities(pi, losses) * mask).sum(1) + ahead
        pi = pi / pi.sum().clamp(min=torch.finfo(pi.dtype).tiny)
    return pi


@dataclass(frozen=True)
class FedEM(Algorithm[Tensor, Tensor, Components, Own]):
    """Federated expectation-maximisation.

    Fields:
        components: number M of shared models; the paper takes 3, P2 takes 4.
        new_client_steps: E-steps before predicting, at the newest components.
        rate: ``split`` divides the learning rate among the components; ``scaled`` multiplies the
            loss by M.
    """

    components: Few = 3
    new_client_steps: CountOrZero = 1
    weighting: Weighting = "samples"
    rate: Literal["split", "scaled"] = "scaled"

    bibtex: ClassVar[str] = """@inproceedings{marfoq2021fedem,
  title={Federated Multi-Task Learning under a Mixture of Distributions},
  author={Marfoq, Othmane and Neglia, Giovanni and Bellet, Aur{\\'e}lien and Kameni, Laetitia and
          Vidal, Richard},
  booktitle={NeurIPS}, year={2021}}"""
    private = Declaration(
        lambda self, when: (Query(times=self.components),),
        "the number of samples, and responsibilities that weigh the samples",
    )

    @property
    def traits(self) -> Traits:
        return Traits(several_models=True)

    def optimizers(self, problem: Problem) -> int:
        return self.components  # of every component

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        M = self.components
        pi = torch.full((M,), 1 / M, dtype=problem.dtype, device=problem.device)
        return problem.starts(M), Own(rows(pi, problem.population))

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def expect(self, client: Client, models: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
        """The E-step: responsibilities ``[M, n]`` for the training samples, and new shares."""
        blocks = list(client.blocks("train"))
        parts = [
            responsibilities(pi, client.map(lambda w, b=block: client.losses(w, b), models))
            for block in blocks
        ]
        masks = [block.mask for block in blocks if block.mask is not None]
        mask = torch.cat(masks) if masks else None
        q = torch.cat(parts, 1)
        new = torch.stack([mean(row, mask) for row in q])
        return q, torch.where(client.size > 0, new, pi)  # without data, shares stay

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Components, Own]:
        """E-step at the received components, then training of each on its share of the data."""
        q, pi = self.expect(client, received, state.pi)
        factor = self.components if self.rate == "scaled" else 1

        def trained(m: int) -> Tensor:
            def weighted(w: Tensor, batch: Batch) -> Tensor:
                return factor * mean(q[m][batch.position] * client.losses(w, batch), batch.mask)

            return client.train(received[m], loss=weighted)

        models = torch.stack([trained(m) for m in range(self.components)])
        return Components(models, client.size), Own(pi)

    def aggregate(self, server: Tensor, uploads: Components, round: Round) -> Tensor:
        p = shares(uploads.size, self.weighting)
        return server + mix(p, (uploads.models - server).flatten(1)).view_as(server)

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        pi = state.pi
        for _ in range(self.new_client_steps):
            pi = self.expect(client, served, pi)[1]
        return Mixture(pi, served)

    def shown(self, state: Own) -> Tensor:
        return state.pi

    def collaboration(self, server: Tensor, shown: Tensor, round: Round) -> Tensor:
        """How much of each other's components clients use; rows sum to one."""
        pi = shown.to(torch.float64)
        return pi @ (pi / pi.sum(0).clamp(min=1e-300)).T
