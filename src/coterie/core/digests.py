"""Digests of predictors: every engine gives the same digest for the same models."""

import hashlib
from collections.abc import Iterable

from .algorithm import Mixture


def client_digest(predictor: Mixture) -> str:
    """The sha256 of one client's predictor: weights ``[r]``, then models ``[r, P]``.

    Models of weight zero have no effect and are left out, so that engines which pad a mixture give
    the same digest. Numbers are hashed in little-endian order.
    """
    used = predictor.weights != 0
    total = hashlib.sha256()
    for part in (predictor.weights[used], predictor.models[used]):
        array = part.detach().cpu().contiguous().numpy()
        total.update(f"{array.dtype.str[1:]}{list(array.shape)}".encode())
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()


def combined_digest(clients: Iterable[str]) -> str:
    """The digest of a run: the sha256 over the digests of its clients, in client order."""
    return hashlib.sha256("\n".join(clients).encode()).hexdigest()


def client_digests(mixture: Mixture) -> tuple[str, ...]:
    """The digest of each client's predictor, of ``weights [K, r]`` and ``models [K, r, P]``."""
    each = zip(mixture.weights.cpu(), mixture.models, strict=True)
    return tuple(client_digest(Mixture(*predictor)) for predictor in each)


def mixture_digest(mixture: Mixture) -> str:
    """The digest of all clients' predictors."""
    return combined_digest(client_digests(mixture))
