"""The pool of raw samples that a method shares among all sites, where every site consents."""

from dataclasses import replace

import torch

from ..core.algorithm import Sharing
from ..core.problem import SharedPool
from ..data.data_schema import Schema
from ..data.standard import Moments, apply
from ..engines.codec import Message, decode, digest, encode
from ..errors import ConfigError, EngineError

LARGEST_SHARE = 0.5  # of a site's training samples


def checked_share(sharing: Sharing) -> float:
    """The share of its samples that each site gives; refuses a pool that no site can draw alone."""
    if sharing.pool != "from_clients" or not 0 <= sharing.share <= LARGEST_SHARE:
        raise ConfigError(
            f"algorithm.pool: found '{sharing.pool}' with a share of {sharing.share}; the sites of "
            f"a federation can share 'from_clients', and at most {LARGEST_SHARE} of their samples"
        )
    return sharing.share


def pool_of(
    parts: list[tuple[torch.Tensor, ...]],
    counts: list[int],
    share: float,
    schema: Schema,
    moments: Moments | None,
) -> SharedPool:
    """The pool of what the sites sent, in client order; ``counts`` are their training samples."""
    example = schema.example()
    for part, count in zip(parts, counts, strict=True):
        fits = len(part) == 2 and all(
            given.dtype == like.dtype and given.shape[1:] == like.shape[1:] and given.dim()
            for given, like in zip(part, (example.x, example.y), strict=True)
        )
        if not fits or len({len(given) for given in part}) != 1 or len(part[0]) > share * count + 1:
            raise EngineError("a site sent other samples than the method asks for")
    owner = torch.cat([torch.full((len(part[0]),), i) for i, part in enumerate(parts)])
    x, y = (torch.cat(given) for given in zip(*parts, strict=True))
    pooled = replace(example, x=x, y=y)
    if moments is not None:
        pooled = apply(pooled, moments)
    return SharedPool(owner, pooled.x, pooled.y)


def packed(pool: SharedPool) -> bytes:
    """A pool as bytes, as sites store it."""
    return encode(Message({}, tuple(pool)))


def unpacked(data: bytes, sha: str, schema: Schema, population: int) -> SharedPool:
    """The pool that an agreement names by its sha256; refuses any other."""
    if digest(data) != sha:
        raise EngineError("the pool of shared samples is not the one that was agreed to")
    body, example = decode(data, {}).body, schema.example()
    if not isinstance(body, tuple) or len(body) != 3:
        raise EngineError("the pool of shared samples is not made of owners, samples and targets")
    owner, x, y = body
    fits = x.dtype == example.x.dtype and x.shape[1:] == example.x.shape[1:] and len(x) == len(y)
    inside = owner.dtype == torch.int64 and bool(((owner >= 0) & (owner < population)).all())
    if not (fits and inside and len(owner) == len(y)):
        raise EngineError("the pool of shared samples does not fit the agreed schema")
    return SharedPool(owner, x, y)
