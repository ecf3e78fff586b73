"""Which clients agree: clusters of moves that differ by no more than their noise explains.

A client's move D_i has the noise v_i: the part of ‖D_i‖² that its samples explain. Moves are
rescaled to unit signal, ℓ_i² = max(‖D_i‖² − v_i, ‖D_i‖²/4), x_i = D_i/ℓ_i with the noise
min(v_i, ‖D_i‖²)/ℓ_i²: a false v_i counts no more than a move that is all noise, and a long move no
more than a short one. Clusters S, T of s, t members with means M and noise V merge, from single
clients on:

    δ² = max(0, ‖M_S − M_T‖² − V_S − V_T);   V = (s² V_S + t² V_T)/(s + t)²
    gain = s V_S + t V_T − (s + t) V − st/(s + t) δ²         noise that is saved, less bias

The gain is the squared error that all members together save by having one mean. Of the pairs with
positive gain the one of the highest cosine is merged, until none is left. More clients than
``BLOCK`` are merged within blocks of so many first.
"""

import torch
from torch import Tensor

OUTSIZED = 5.0  # honest ones reached 2.4 where clients have most unequal sizes
BLOCK = 1000  # clients that are compared at once; more are merged in blocks first
TINY = 1e-300


def agreement(B: Tensor, V: Tensor, s: Tensor, at: Tensor) -> Tensor:
    """The cosines of clusters ``at`` with all, −∞ without gain; from ``⟨M, M⟩``, noise, members."""
    norm, n = B.diagonal(), s[at, None]
    apart = (norm[at, None] + norm - 2 * B[at] - V[at, None] - V).clamp(min=0)
    both = (n**2 * V[at, None] + s**2 * V) / (n + s)
    gain = n * V[at, None] + s * V - both - n * s / (n + s) * apart
    cosine = B[at] / (norm[at, None] * norm).clamp(min=TINY).sqrt()
    none = (gain <= 0) | (s == 0) | (at[:, None] == torch.arange(len(B), device=B.device))
    return cosine.masked_fill(none, -torch.inf)


def circles(products: Tensor, noise: Tensor, *, pairwise: bool = False) -> Tensor:
    """Who is in each client's circle ``[n, n]``, from ``⟨D_i, D_j⟩`` and v.

    >>> D = torch.tensor([[3.0, 0.0], [0.0, 2.0], [3.0, 0.2]])
    >>> circles(D @ D.T, torch.full((3,), 0.5)).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    B, everyone = products.to(torch.float64), torch.arange(len(products), device=products.device)
    v = torch.minimum(noise.to(torch.float64).clamp(min=0), B.diagonal())
    signal = torch.maximum(B.diagonal() - v, B.diagonal() / 4).clamp(min=TINY)
    B, V, s = B / signal.sqrt() / signal.sqrt()[:, None], v / signal, torch.ones_like(v)
    if pairwise:
        alone = everyone == everyone[:, None]
        return (agreement(B, V, s, everyone) > -torch.inf) | alone
    group = everyone.clone()
    for block in everyone.split(BLOCK) if len(B) > BLOCK else ():
        group[block] = block[grown(B[block][:, block], V[block], s[block])]
    first, group = group.unique(return_inverse=True)
    inside = (group == everyone[: len(first), None]).to(B)
    s = inside.sum(1)
    mean = inside / s[:, None]
    group = grown(mean @ B @ mean.T, mean**2 @ V, s)[group]
    return group == group[:, None]


def grown(B: Tensor, V: Tensor, s: Tensor) -> Tensor:
    """The first cluster of each cluster's circle ``[n]``, after all merges that have a gain."""
    B, V, s = B.clone(), V.clone(), s.clone()
    group = torch.arange(len(B), device=B.device)
    C = agreement(B, V, s, group).float()
    while len(C):
        i, j = sorted(divmod(int(C.argmax()), len(C)))
        if C[i, j] == -torch.inf:
            break
        n, t, m = float(s[i]), float(s[j]), float(s[i] + s[j])
        square = (n**2 * B[i, i] + t**2 * B[j, j] + 2 * n * t * B[i, j]) / m**2
        B[i] = B[:, i] = (n * B[i] + t * B[j]) / m
        B[i, i], V[i] = square, (n**2 * V[i] + t**2 * V[j]) / m**2
        s[i], s[j], group[group == j] = m, 0, i
        C[j] = C[:, j] = -torch.inf
        C[i] = C[:, i] = agreement(B, V, s, torch.tensor([i], device=B.device))[0].float()
    return group


def plausible(vectors: Tensor) -> Tensor:
    """Whether vectors are finite and at most ``OUTSIZED`` times as long as the median ``[m]``."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    moved = length[length.isfinite() & (length > 0)]
    most = OUTSIZED * moved.median() if len(moved) else length.new_zeros(())
    return length <= most
