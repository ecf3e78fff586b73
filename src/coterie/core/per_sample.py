"""The sum of clipped per-sample gradients, without the per-sample gradients: ghost clipping.

For a layer with inputs a and outputs s, δ = ∂ℓ/∂s is the gradient with respect to zeros that are
added to its outputs. The gradient of a linear layer's weight for one sample is δ aᵀ, so that

    ‖g‖² = ‖δ‖² (‖a‖² + 1)                 with a bias, and
    ‖g‖² = Σ_tu (a_t·a_u)(δ_t·δ_u) + ‖Σ_t δ_t‖²    where it is applied at positions t

A convolution is a linear layer of its unfolded patches (Goodfellow 2015; Li, Tramèr, Liang,
Hashimoto, ICLR 2022; Bu, Mao, Xu, NeurIPS 2022). The weighted sum Σ_i c_i δ_i a_iᵀ needs no second
backward pass. Where a weight has fewer entries than a_t·a_u and δ_t·δ_u, and in any other layer,
every sample's own gradient costs less, and is computed by vmap.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from .flat import FlatModel

if TYPE_CHECKING:
    from .batches import Batch
    from .client import Client

Parts = dict[str, Tensor]  # by the names of a layer's own parameters


class Ghost(NamedTuple):
    """One layer's part of every sample's gradient."""

    square: Tensor  # [B] its squared length
    weighed: Callable[[Tensor], Parts]  # the sum over samples, weighed by [B]


def clipped_sum(client: "Client", w: Tensor, batch: "Batch", clip: float) -> Tensor:
    """``Σ_i m_i g_i min(1, C / ‖g_i‖)`` of the loss, for a model whose layers are all known."""
    model, layers = client.model, client.model.taps or {}

    def total(taps: Parts) -> tuple[Tensor, Parts]:
        output, inputs = client.tapped(w, batch, taps)
        return client.losses_of(output, batch).sum(), inputs

    zeros = {name: w.new_zeros(len(batch.x), *shape) for name, shape in layers.items()}
    deltas, inputs = grad(total, has_aux=True)(zeros)
    own = model.own(w)
    ghosts = {n: _ghost(model.layer(n), inputs[n], deltas[n], own[n]) for n in layers}
    length = sum((ghost.square for ghost in ghosts.values()), w.new_zeros(())).sqrt()
    share = clip / length.clamp(min=clip)
    share = share if batch.mask is None else share * batch.mask
    found = {name: ghost.weighed(share) for name, ghost in ghosts.items()}
    return model.gathered(found)


def _ghost(layer: nn.Module, a: Tensor, d: Tensor, own: Parts) -> Ghost:
    if isinstance(layer, nn.Linear):
        a, d = a.reshape(len(a), -1, a.shape[-1]), d.reshape(len(d), -1, d.shape[-1])
        if d.shape[1] == 1 or _wide(layer, d.shape[1]):
            return _linear(a, d, own)
    if isinstance(layer, nn.Conv2d) and _plain(layer) and _wide(layer, d[0, 0].numel()):
        return _linear(_patches(layer, a).mT, d.flatten(2).mT, own)
    return _explicit(layer, a, d, own)


def _plain(layer: nn.Conv2d) -> bool:
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return zeros and layer.groups == 1


def _wide(layer: nn.Linear | nn.Conv2d, positions: int) -> bool:
    """Whether a weight has more entries than the Gram matrices of a layer's inputs and outputs."""
    return layer.weight.numel() > 2 * positions**2


def _patches(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """What ``torch.nn.functional.unfold`` gives ``[B, C k k, T]``, by an index, which compiles."""
    places, inside = [], []
    for n, side in enumerate(a.shape[2:]):
        size, stride, dilation = layer.kernel_size[n], layer.stride[n], layer.dilation[n]
        padding = int(layer.padding[n])
        count = (side + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        taps = torch.arange(size, device=a.device)[:, None] * dilation
        place = taps + torch.arange(count, device=a.device) * stride - padding
        places.append(place)
        inside.append((place >= 0) & (place < side))
    flat = places[0][:, None, :, None] * a.shape[3] + places[1][None, :, None, :]
    there = inside[0][:, None, :, None] & inside[1][None, :, None, :]
    flat = torch.where(there, flat, a.shape[2] * a.shape[3]).flatten()  # beyond: the zero behind
    wide = torch.cat([a.flatten(2), a.new_zeros(*a.shape[:2], 1)], 2)
    return wide[:, :, flat].reshape(len(a), -1, places[0].shape[1] * places[1].shape[1])


def _linear(a: Tensor, d: Tensor, own: Parts) -> Ghost:
    """Of inputs ``[B, T, i]`` and gradients ``[B, T, o]`` of the outputs."""
    square, bias = a.new_zeros(len(a)), d.sum(1)
    if "weight" in own and a.shape[1] == 1:
        square = a.square().sum((1, 2)) * d.square().sum((1, 2))
    elif "weight" in own:
        square = ((a @ a.mT) * (d @ d.mT)).sum((1, 2)).clamp(min=0)
    if "bias" in own:
        square = square + bias.square().sum(1)

    def weighed(share: Tensor) -> Parts:
        heavy = (d * share[:, None, None]).flatten(0, 1)
        found = {"weight": heavy.mT @ a.flatten(0, 1), "bias": share[None] @ bias}
        return {name: found[name].view(part.shape) for name, part in own.items()}

    return Ghost(square, weighed)


def _explicit(layer: nn.Module, a: Tensor, d: Tensor, own: Parts) -> Ghost:
    """Of any layer: its parameters' gradient for every sample."""

    def one(a: Tensor, d: Tensor) -> Parts:
        pull = vjp(lambda parts: functional_call(layer, parts, (a[None],)), own)[1]
        return pull(d[None])[0]  # type: ignore[no-any-return]

    each: Parts = vmap(one)(a, d)
    square = torch.cat([part.flatten(1) for part in each.values()], 1).square().sum(1)

    def weighed(share: Tensor) -> Parts:
        return {n: (share[None] @ part.flatten(1)).view(part.shape[1:]) for n, part in each.items()}

    return Ghost(square, weighed)


def find_taps(model: FlatModel, x: Tensor) -> dict[str, torch.Size] | None:
    """The layers with parameters and the shape of their outputs for one sample.

    None where a pass calls one of them more than once or not at all, where parameters are shared or
    belong to a layer that has parts, or where its outputs are no tensor: samples are then computed
    one by one.
    """
    found: dict[str, list[torch.Size | None]] = {name: [] for name in model.owners()}
    if model.tied or any(list(model.layer(name).children()) for name in found):
        return None

    def seen(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            single = isinstance(output, Tensor) and len(inputs) == 1
            found[name].append(output.shape[1:] if single else None)

        return note

    hooks = [model.layer(name).register_forward_hook(seen(name)) for name in found]
    with torch.no_grad():
        model.module(x)
    for hook in hooks:
        hook.remove()
    if any(len(shapes) != 1 or shapes[0] is None for shapes in found.values()):
        return None
    return {name: shape for name, (shape,) in found.items() if shape is not None}
