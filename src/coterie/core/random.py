"""Stateless random numbers: every draw is a hash of the words that say what it is for.

The words are, for example, (seed, purpose, round, client, position). There is no generator state,
so the order of clients, their chunks, a second evaluation, a stop and a resume change no draw. The
hash is integer arithmetic on tensors, so it gives the same numbers on every device, inside ``vmap``
and inside a captured graph.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) folded over the words.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

Word = int | str | Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """A logical right shift: torch's int64 shift copies the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def name_key(name: str) -> int:
    """A 63-bit number for a name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def derive(*words: int | str) -> int:
    """A 63-bit seed derived from words, for generators that are not ours (model initialisation)."""
    key = 0
    for word in words:
        number = name_key(word) if isinstance(word, str) else word & _MASK
        key = _mix_int(((key + _GOLDEN) & _MASK) ^ _mix_int(number))
    return key >> 1


def bits(*words: Word) -> Tensor:
    """64 random bits as int64 for every entry of the broadcast tensor words."""
    key: int | Tensor = 0
    for word in words:
        if isinstance(word, str):
            word = name_key(word)
        if isinstance(word, int) and isinstance(key, int):
            key = _mix_int(((key + _GOLDEN) & _MASK) ^ _mix_int(word & _MASK))
            continue
        mixed = _mix(word) if isinstance(word, Tensor) else _signed(_mix_int(word & _MASK))
        start = _signed((key + _GOLDEN) & _MASK) if isinstance(key, int) else key + _signed(_GOLDEN)
        key = _mix(torch.as_tensor(start ^ mixed))
    return torch.tensor(_signed(key)) if isinstance(key, int) else key


def uniform(*words: Word) -> Tensor:
    """Uniform on [0, 1), float64."""
    return _shifted(bits(*words), 11).to(torch.float64) * 2.0**-53


def normal(*words: Word) -> Tensor:
    """Standard normal, float64, by inversion (one hash per draw)."""
    centred = 2.0 * (uniform(*words) + 2.0**-54) - 1.0
    return torch.erfinv(centred.clamp(max=1 - 2.0**-53)) * math.sqrt(2.0)  # 1 has no finite one


def normal_pairs(*words: Word) -> Tensor:
    """Two standard normals, float32, for every entry of words: all first ones, then all second.

    Box and Muller's: a hash is half as long as two, and erfinv is slow in float64.
    """
    drawn = bits(*words)
    radius = ((drawn & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    angle = _shifted(drawn, 32).to(torch.float32) * (math.pi * 2.0**-31)
    radius = (-2.0 * radius.log()).sqrt()
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)


# ---- draws from a secret -------------------------------------------------------------------------

# All draws above are no cipher: who sees some of them finds the seed. These are AES-256 in counter
# mode, with a key of their own for each list of words; they are for sites, and are never traced.


def secret_uniform(secret: bytes, count: int, *words: int | str) -> Tensor:
    """Uniform draws ``[count]`` on (0, 1), float64, that nobody computes without the secret."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # slow to import

    key = hashlib.blake2b(repr(words).encode(), key=secret, digest_size=32).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    drawn = torch.from_numpy((np.frombuffer(stream, "<u8") >> 12).astype(np.float64))
    return (drawn + 0.5) * 2.0**-52  # exact: never 0 and never 1


def secret_normal(secret: bytes, count: int, *words: int | str) -> Tensor:
    """Standard normal draws ``[count]``, float64, that nobody computes without the secret."""
    return torch.erfinv(2.0 * secret_uniform(secret, count, *words) - 1.0) * math.sqrt(2.0)


def permutation(count: int, *words: Word) -> Tensor:
    """A random permutation of ``count`` indices; with tensor words, one row per entry."""
    device = next((w.device for w in words if isinstance(w, Tensor)), None)
    rows = (w.unsqueeze(-1) if isinstance(w, Tensor) else w for w in words)
    return bits(*rows, torch.arange(count, device=device)).argsort(dim=-1, stable=True)
