"""Weighted averages, distances and selections over rows of models, shared by many servers."""

import torch
from torch import Tensor

from .rows import Rows, RowTable, dense, updated

_COLUMNS = 1 << 16  # columns converted to float64 at once
_CACHED = 1 << 18  # numbers that fit in a CPU's cache


def shares(sizes: Tensor, weighting: str = "samples") -> Tensor:
    """Aggregation weights p of the clients that replied, float64, summing to one.

    ``samples`` weighs clients by their training samples, ``uniform`` weighs all alike.
    """
    if weighting == "uniform":
        sizes = torch.ones_like(sizes)
    sizes = sizes.to(torch.float64)
    return sizes / sizes.sum()


def shares_within(groups: Tensor, sizes: Tensor, weighting: str = "samples") -> Tensor:
    """The weights ``[m, m]`` with which the members of each group are averaged.

    >>> shares_within(torch.tensor([0, 1, 0]), torch.tensor([30, 5, 10]))
    tensor([[0.7500, 0.0000, 0.2500],
            [0.0000, 1.0000, 0.0000],
            [0.7500, 0.0000, 0.2500]], dtype=torch.float64)
    """
    together = (groups[:, None] == groups) * shares(sizes, weighting)
    return together / together.sum(1, keepdim=True)


def nobody_yet(like: Tensor, population: int) -> Tensor:
    """The weights ``[K, K]`` applied before the first round: all zero."""
    return like.new_zeros(1).expand(population, population)


def noted(applied: Rows, clients: Tensor, weights: Tensor) -> RowTable:
    """Replace the applied weights of a round's clients by ``weights [m, m]`` between them."""
    rows = torch.zeros(len(clients), len(applied), dtype=applied[:0].dtype, device=clients.device)
    return updated(applied, clients, rows.index_copy(1, clients, weights.to(rows.dtype)))


def last_applied(applied: Rows) -> Tensor:
    """The weights ``[K, K]`` that each client's last round applied; before it, the identity."""
    A = dense(applied)
    return A + torch.diag((A.sum(1) == 0).to(A.dtype))


def mix(weights: Tensor, models: Tensor) -> Tensor:
    """``A @ W`` in the models' precision; a vector of weights gives one model."""
    return weights.to(models.dtype) @ models


def sums_by(owner: Tensor, vectors: Tensor, count: int) -> Tensor:
    """The sum of each owner's vectors ``[count, P]``; vectors of nobody among them are left out.

    On a CPU vectors are added in the order of the rows, so that an owner that holds only its own
    rows gets the same bits. On a GPU only a matrix product has a fixed order.

    >>> sums_by(torch.tensor([1, 0, 1, -1]), torch.tensor([[1.0], [2.0], [4.0], [8.0]]), 2)
    tensor([[2.],
            [5.]])
    """
    if vectors.is_cuda:
        return mix(owner == torch.arange(count, device=owner.device)[:, None], vectors)
    place = torch.where((owner >= 0) & (owner < count), owner, count)
    return vectors.new_zeros(count + 1, vectors.shape[1]).index_add_(0, place, vectors)[:count]


def mean_move(weights: Tensor, models: Tensor, w: Tensor) -> Tensor:
    """``Σ p_i (w_i − w)``, exactly zero where no model moved, without a copy of all models."""
    columns = len(w) if models.is_cuda else max(1, _CACHED // max(1, len(models)))
    room = models.new_empty(len(models), min(columns, len(w)))
    parts = zip(models.split(columns, 1), w.split(columns), strict=True)
    moves = (torch.sub(block, start, out=room[:, : len(start)]) for block, start in parts)
    return torch.cat([mix(weights, move) for move in moves])


def gram(W: Tensor) -> Tensor:
    """All dot products between rows ``[m, m]``, in float64, without an m² × P intermediate."""
    total = W.new_zeros(len(W), len(W), dtype=torch.float64)
    for block in W.split(_COLUMNS, dim=1):
        wide = block.to(torch.float64)
        total += wide @ wide.T
    return total


def squared_distances(W: Tensor) -> Tensor:
    """``‖w_i − w_j‖²`` for all pairs, float64, zero on the diagonal.

    Rows are centred first: models are close to each other and far from zero.
    """
    products = gram(W - W.mean(0, keepdim=True))
    square = products.diagonal()
    distances = (square[:, None] + square[None, :] - 2 * products).clamp(min=0)
    return distances.fill_diagonal_(0)


def cosines(W: Tensor) -> Tensor:
    """``cos(w_i, w_j)`` for all pairs, float64; 0 where a row is zero."""
    products = gram(W)
    norm = products.diagonal().clamp(min=0).sqrt()
    scale = norm[:, None] * norm[None, :]
    return torch.where(scale > 0, products / scale.clamp(min=1e-300), 0.0).clamp(-1, 1)


def off_diagonal(A: Tensor) -> Tensor:
    """All entries but the diagonal, as one vector."""
    return A[~torch.eye(len(A), dtype=torch.bool, device=A.device)]


def count_larger(scores: Tensor) -> Tensor:
    """For each score ``[n]``, how many scores are larger: int32, without comparing all pairs.

    >>> count_larger(torch.tensor([0.5, 2.0, 0.5, 1.0]))
    tensor([2, 0, 2, 1], dtype=torch.int32)
    """
    ordered, order = scores.sort(descending=True)
    place = torch.arange(len(scores), dtype=torch.int32, device=scores.device)
    smaller = torch.cat([place[:1] > 0, ordered[1:] != ordered[:-1]])  # than the score before
    first = torch.where(smaller, place, 0).cummax(0).values  # the first place of equal scores
    return torch.zeros_like(first).scatter(0, order, first)


def epsilon_greedy(scores: Tensor, explore: Tensor, ties: Tensor, count: int) -> Tensor:
    """Indices ``[m, count]`` of the candidates chosen in every row, -1 where none is left.

    The slots are filled one by one. Where ``explore[m, count]`` is true, the slot gets the
    candidate not yet chosen with the largest random number in ``ties[m, n]``; otherwise the one
    with the largest score, equal scores in random order. A score of ``-inf`` marks an entry that is
    no candidate.
    """
    open_, chosen = scores > -torch.inf, []
    by_chance = ties.masked_fill(~open_, -1)
    order = ties.argsort(1)  # sorting a shuffled row stably breaks ties at random
    ranks = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape).contiguous()
    ranked = torch.empty_like(order).scatter_(
        1, order.gather(1, scores.gather(1, order).argsort(dim=1, stable=True)), ranks
    )
    by_score = ranked.masked_fill(~open_, -1).to(ties.dtype)
    for slot in range(count):
        left = open_.any(1)
        value = torch.where(explore[:, slot, None], by_chance, by_score)
        pick = value.masked_fill(~open_, -1).argmax(1)
        chosen.append(torch.where(left, pick, -1))
        open_ = open_.scatter(1, pick[:, None], False)
    return torch.stack(chosen, 1) if chosen else scores.new_zeros(len(scores), 0, dtype=torch.int64)
