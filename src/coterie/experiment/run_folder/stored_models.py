"""``models.safetensors``: every client's predictor, and the digest of all of them."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from ...core.algorithm import Mixture
from ...core.digests import client_digest, combined_digest
from ...storage import packing
from .names import unreadable


def write_models(path: Path, mixture: Mixture) -> None:
    """Write all predictors: distinct ``models [U, P]``, ``index [K, r]`` and ``weights [K, r]``."""
    weights, models = mixture.weights.detach().cpu(), mixture.models.detach().cpu()
    # a stride of 0: all clients share the same models
    flat = (models[:1] if models.stride(0) == 0 else models).flatten(0, 1)
    places: dict[bytes, int] = {}
    kept: list[int] = []
    index = torch.zeros(len(flat), dtype=torch.int64)
    for at, model in enumerate(flat):
        key = hashlib.sha256(model.contiguous().numpy().tobytes()).digest()
        if key not in places:
            places[key] = len(kept)
            kept.append(at)
        index[at] = places[key]
    whose = index.view(-1, weights.shape[1]).expand(weights.shape)
    once = packing.Some.of(flat, torch.tensor(kept))
    packing.write_arrays(path, {"models": once, "index": whose, "weights": weights})


def read_models(path: Path) -> Mixture:
    """Read all predictors: ``weights [K, r]``, ``models [K, r, P]``."""
    weights, models, index = _stored_models(path)
    return Mixture(weights, models[index])


def read_predictor(path: Path, client: int) -> Mixture:
    """Read one client's predictor: ``weights [r]``, ``models [r, P]``."""
    weights, models, index = _stored_models(path)
    return Mixture(weights[client], models[index[client]])


def stored_digest(path: Path) -> str:
    """The digest of stored predictors, with one client's models in memory at a time."""
    weights, models, index = _stored_models(path)
    each = zip(weights, index, strict=True)
    return combined_digest(client_digest(Mixture(w, models[at])) for w, at in each)


def _stored_models(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """``weights [K, r]``, ``models [U, P]`` and ``index [K, r]`` into them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        weights, models, index = tensors["weights"], tensors["models"], tensors["index"]
        fits = weights.shape == index.shape and models.dim() == 2 and index.dtype == torch.int64
        if not fits or bool(((index < 0) | (index >= len(models))).any()):
            raise ValueError("its arrays do not fit together")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise unreadable(path, error, "the models of a run") from error
    return weights, models, index
