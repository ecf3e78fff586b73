"""The diagonal Fisher information of a model: how much predictions depend on each parameter.

    M_k = (1/n) Σ_s (∂ log p(y_s | x_s) / ∂w_k)²

Notes:
    ``empirical`` uses the labels of the data, ``true`` draws labels from the model, ``batch_mean``
    squares the mean gradient of minibatches, as public code does: near a stationary point that is
    about 1/B of the others, so λ is not comparable between them (spec 3.3). All are computed in
    evaluation mode.
    For a regression p is a normal distribution of variance one, whose −log p is half the squared
    error up to a constant.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from ..core.batches import EVALUATION_BLOCK, Batch
from ..core.client import Client

Kind = Literal["empirical", "true", "batch_mean"]
Source = Literal["auto", "server_aux", "client_train", "aggregate"]

# Entries of per-sample gradients held in memory at once: of one of many clients, which may be
# computed together, and of the server's own samples, which are computed alone.
_OF_MANY, _ALONE = 1 << 22, 1 << 28


def fisher(client: Client, w: Tensor, kind: Kind, *, alone: bool = False) -> Tensor:
    """The diagonal on a client's training data, one entry per trainable parameter.

    ``alone`` says that nothing else is computed meanwhile, so that a GPU may use more memory.
    """
    total, count = client.trainable(torch.zeros_like(w)), w.new_zeros(())
    entries = _ALONE if alone and w.is_cuda else _OF_MANY
    each = _batches(client, w) if kind == "batch_mean" else _samples(client, w, kind, entries)
    for squares, samples in each:
        total, count = total + squares, count + samples
    return total / count.clamp(min=1)


def _batches(client: Client, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each minibatch, the squared mean gradient times the number of samples; that number."""
    for batch in client.blocks("train", client.recipe.batch):
        count = w.new_full((), len(batch.y)) if batch.mask is None else batch.mask.sum()
        yield count * client.trainable(client.gradient(w, batch)) ** 2, count


def _samples(
    client: Client, w: Tensor, kind: Kind, entries: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block, the sum of the squared per-sample gradients, and the number of samples."""
    size = max(1, min(EVALUATION_BLOCK, entries // len(w)))
    for number, block in enumerate(client.blocks("train", size)):
        y = drawn(client, w, block, number) if kind == "true" else block.y

        def square(x: Tensor, y: Tensor) -> Tensor:
            one = Batch(x[None], y[None], None, torch.zeros(1, dtype=torch.int64), None)
            return client.trainable(grad(client.loss)(w, one)) ** 2

        squares = client.map(square, block.x, y)
        mask = torch.ones_like(squares[:, 0]) if block.mask is None else block.mask
        yield mask.to(squares.dtype) @ squares, mask.sum()


def drawn(client: Client, w: Tensor, batch: Batch, number: int) -> Tensor:
    """Labels of a batch drawn from the model's own predictions."""
    output = client.outputs(w, batch)
    if batch.y.is_floating_point():
        noise = client.noise("fisher", (len(batch.y),), at=number)
        return output.squeeze(-1) + noise.to(output.dtype)
    luck = client.draw("fisher", (*batch.y.shape, 1), at=number)
    below = output.to(torch.float64).softmax(-1).cumsum(-1)
    return (luck >= below).sum(-1).clamp(max=output.shape[-1] - 1)
