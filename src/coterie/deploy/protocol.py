"""The messages before and after an experiment, as JSON in the body of a message.

    who      -> who the site is, its versions, and the schema of its own data
    divide   -> counts and hashes of its data by the common schema, and its sums
    squares  -> its sums of squared deviations from the common means
    agree    -> it has agreed to the experiment; the sha256 of its first state
    samples  -> raw training samples, for a method that shares them, with the site's consent
    judge    -> its gains over training alone, computed from answers that stay with it

The messages of a round are ``local`` and ``predict`` (:mod:`coterie.engines.site`). Both sides
check the types, names and sizes of everything they read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.messages import REASONS
from ..core.paired_tests import SiteGain
from ..data.arrays import Scale
from ..data.standard import Sums
from ..engines.codec import Message, decode, encode, read_head
from ..errors import EngineError
from ..storage.files import MOST_BYTES, STRICT, parsed
from .terms import SiteCounts

MOST_WHY = 500  # characters of the sentence with which a site refuses
Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Nothing:
    """A message without content."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True)
class Introduction:
    """A site's answer to ``who``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    schema: str  # JSON of a Schema
    versions: dict[str, str]


@dataclass(frozen=True)
class DivisionRequest:
    """How a site has to divide its samples."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    schema: str  # JSON of the common Schema
    scale: Scale
    val: float
    test: float
    seed: int
    means: tuple[float, ...] = ()  # of all sites, in ``squares``


@dataclass(frozen=True)
class PoolRequest:
    """Which share of a site's training samples a method sends to all sites (``samples``)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    division: DivisionRequest
    share: float


@dataclass(frozen=True)
class SumsReport:
    """A site's sums of each input and, in a regression, of the target."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    known: tuple[float, ...]
    total: tuple[float, ...]


@dataclass(frozen=True)
class DivisionReport:
    """A site's answer to ``divide``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    counts: SiteCounts
    data: str  # sha256 of its samples
    partition: str  # sha256 of how they are divided
    weak: str | None
    classes: tuple[int, ...]
    sums: SumsReport | None


@dataclass(frozen=True)
class Proposal:
    """The agreement of an experiment (``agree``)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    agreement: str  # JSON of an Agreement


@dataclass(frozen=True)
class Consent:
    """A site's answer to ``agree``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    experiment: str
    state: str  # sha256 of the site's state before round 0


@dataclass(frozen=True)
class JudgeRequest:
    """Which runs to compare: one pair of experiments (of a method, of Local) per seed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    metric: str
    pairs: tuple[tuple[str, str], ...]


def setup_message(kind: str, payload: Any, *arrays: Tensor) -> bytes:
    """A message outside of rounds; ``payload`` is one of the dataclasses above, or JSON values."""
    values = payload if isinstance(payload, dict) else asdict(payload)
    body = as_array(json.dumps(values, allow_nan=False, separators=(",", ":")).encode())
    return encode(Message({"kind": kind}, (body, *arrays)))


def as_array(data: bytes) -> Tensor:
    """Bytes as an array."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def payload_of(data: bytes, kind: type[Payload]) -> Payload:
    """The content of a message outside of rounds; refuses anything else."""
    return parsed(_text(data), kind, "message")


def arrays_of(data: bytes) -> tuple[Tensor, ...]:
    """The arrays that follow the content of a message outside of rounds."""
    body = decode(data, {}).body
    found = body[1:] if isinstance(body, tuple) else ()
    if not all(isinstance(part, Tensor) for part in found):
        raise EngineError("a message holds something else than arrays after its text")
    return found


def gain_of(data: bytes) -> SiteGain:
    """The gain in the answer to ``judge``."""
    try:
        return SiteGain.from_json(json.loads(_text(data)))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"a site's answer is no gain ({error})") from error


def _text(data: bytes) -> str:
    message = decode(data, {})
    body = message.body[0] if isinstance(message.body, tuple) and message.body else None
    if not isinstance(body, Tensor) or body.dtype != torch.uint8 or body.numel() > MOST_BYTES:
        raise EngineError("a message has no text; expected JSON in its body")
    try:
        return bytes(body.flatten().numpy()).decode()
    except UnicodeDecodeError as error:
        raise EngineError(f"a message is no text ({error})") from error


def refusal(reason: str, why: str = "") -> bytes:
    """A site's answer that it does not do what it was asked, with a sentence for the operator."""
    return encode(Message({"refused": reason, "why": why[:MOST_WHY]}))


def refused_by(data: bytes) -> tuple[str, str] | None:
    """The reason and the sentence of a refusal; None if the answer is none."""
    head: Mapping[str, Any] = read_head(data)
    if "refused" not in head:
        return None
    reason, why = str(head["refused"]), str(head.get("why", ""))
    return reason if reason in REASONS else "refused", why[:MOST_WHY]


def sums_report(sums: Sums | None) -> SumsReport | None:
    """A site's sums as they are sent."""
    return None if sums is None else SumsReport(*(tuple(part.tolist()) for part in sums))


def sums_of_report(report: SumsReport) -> Sums:
    """A site's sums as they were sent."""
    return Sums(np.array(report.known), np.array(report.total))
