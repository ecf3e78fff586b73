"""The messages before and after an experiment, as JSON in the body of a message.

    who       -> who the site is, and the shape of its data: all that is told without an approval
    ask       -> the owner's approval of a request, or that it waits for it
    describe  -> the schema of the site's own data, and its versions
    divide    -> counts and hashes of its data by the common schema, and its sums
    agree     -> it has agreed to the experiment; the sha256 of its first state
    judge     -> its gains over training alone, computed from answers that stay with it

The messages of a round are ``local`` and ``predict`` (:mod:`coterie.engines.site`), or ``peer``
(:mod:`coterie.deploy.peer_site`). The operator signs every message for one site, which reads
nothing else. Whatever is wrong with a message or an answer is an EngineError.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ..core.metrics import METRICS
from ..core.paired_tests import SiteGain
from ..data.arrays import Scale
from ..data.data_schema import Schema
from ..data.partition import Fold
from ..engines.codec import Message, decode, encode, refused_by
from ..engines.remote import SETUP, SiteState, Transport
from ..errors import EngineError
from ..storage.files import MOST_BYTES, parsed, strict
from . import keys
from .documents import Sha256
from .terms import Count, Plain, SiteCounts

MAGIC, SIGNATURE = b"coterie2", 64  # how a signed message begins; bytes of a signature
SIZE, SHA = 8, 32  # bytes that say how long the message is, and of its sha256
HEAD = len(MAGIC) + SIGNATURE + SIZE + SHA  # what stands before a signed message
Payload = TypeVar("Payload")
Number = Annotated[str, Field(pattern=r"^[0-9a-f]{1,176}$")]


@strict
class Nothing:
    """A message without content."""


@strict
class Introduction:
    """A site's answer to ``who``: how many columns its data has of each kind, and no names."""

    name: str
    kind: str
    target: str
    columns: dict[str, int]  # by kind
    shape: tuple[int, ...]  # of a sample that is no row of a table

    @classmethod
    def of(cls, name: str, schema: Schema) -> "Introduction":
        """What may be told of a schema without an approval."""
        kinds: list[str] = [column.kind for column in schema.columns]
        columns = {kind: kinds.count(kind) for kind in sorted({*kinds})}
        return cls(name, schema.kind, schema.target.kind, columns, schema.shape)


@strict
class Ask:
    """The JSON of a request (``ask``)."""

    request: str


@strict
class Approved:
    """A site's answer to ``ask``, and what it asks of it in ``describe``: the id of a request."""

    request: str


@strict
class Description:
    """A site's answer to ``describe``."""

    schema: str  # JSON of a Schema
    versions: dict[str, Plain]
    scores: bool  # whether it tells those of every round


@strict
class DivisionRequest:
    """The common schema, by which a site tells of its samples; how they are divided is its own."""

    request: str  # the id of the request
    schema: str  # JSON of the common Schema
    scale: Scale
    fold: Fold | None = None  # which tests; no sums and no classes are told of it


@strict
class DivisionReport:
    """A site's answer to ``divide``."""

    counts: SiteCounts
    data: Sha256  # keyed hash of its samples
    partition: Sha256  # keyed hash of how they are divided
    weak: Plain | None
    classes: tuple[Count, ...]
    sums: tuple[Number, ...] | None  # see coterie.deploy.sums
    masked: bool


@strict
class Proposal:
    """The agreement of an experiment (``agree``)."""

    agreement: str  # JSON of an Agreement


@strict
class Consent:
    """A site's answer to ``agree``."""

    experiment: Sha256
    state: Sha256  # of the site's state before round 0


@strict
class JudgeRequest:
    """Which runs to compare: one pair of experiments (of a method, of Local) per seed."""

    metric: str
    pairs: tuple[tuple[str, str], ...]


# ---- written and read ----------------------------------------------------------------------------


def setup_message(kind: str, payload: Any) -> bytes:
    """A message outside of rounds; ``payload`` is one of the dataclasses above, or JSON values."""
    values = payload if isinstance(payload, dict) else asdict(payload)
    body = as_array(json.dumps(values, allow_nan=False, separators=(",", ":")).encode())
    return encode(Message({"kind": kind}, (body,)))


def as_array(data: bytes) -> Tensor:
    """Bytes as an array."""
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def payload_of(data: bytes, kind: type[Payload]) -> Payload:
    """The content of a message outside of rounds; refuses anything else."""
    return parsed(_text(data), kind, "message")


def _text(data: bytes) -> str:
    message = decode(data, {})
    body = message.body[0] if isinstance(message.body, tuple) and message.body else None
    if not isinstance(body, Tensor) or body.dtype != torch.uint8 or body.numel() > MOST_BYTES:
        raise EngineError("a message has no text; expected JSON in its body")
    try:
        return bytes(body.flatten().numpy()).decode()
    except UnicodeDecodeError as error:
        raise EngineError(f"a message is no text ({error})") from error


# ---- signed --------------------------------------------------------------------------------------


class Signed:
    """A transport whose messages are signed by the operator, each for one site."""

    def __init__(self, transport: Transport, key: bytes, federation: str) -> None:
        self._transport, self._key, self._federation = transport, key, federation

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """Each site's answer, or the reason why there is none."""
        told = {name: self._signed(name, data) for name, data in requests.items()}
        return self._transport.ask(told, round)

    def _signed(self, site: str, data: bytes) -> bytes:
        return signed(data, self._key, self._federation, site)

    def sites(self) -> Mapping[str, SiteState]:
        """The sites of the federation."""
        return self._transport.sites()

    def close(self) -> None:
        """Release connections and threads."""
        self._transport.close()


def signed(data: bytes, key: bytes, federation: str, site: str) -> bytes:
    """A message that the operator signs for one site; for any site, if the name is empty.

    The signature is over its length and its sha256, so that a site reads nothing else.
    """
    told = _told(data)
    return MAGIC + keys.sign_message(key, _addressed(federation, site, told)) + told + data


def announced(head: bytes, operator: str, federation: str, site: str) -> int | None:
    """The length of the message behind a head; None if it is not signed for this site."""
    start = len(MAGIC) + SIGNATURE
    told, signature = head[start:], head[len(MAGIC) : start]
    right = head.startswith(MAGIC) and len(head) == HEAD
    fits = right and keys.signed_by(operator, signature, _addressed(federation, site, told))
    return int.from_bytes(told[:SIZE], "big") if fits else None


def unsigned(data: bytes, operator: str, federation: str, site: str) -> bytes | None:
    """The message inside of a signed one; None if the operator did not sign it for this site."""
    head, body = data[:HEAD], data[HEAD:]
    right = head.endswith(_told(body)) and announced(head, operator, federation, site) is not None
    return body if right else None


def _told(data: bytes) -> bytes:
    return len(data).to_bytes(SIZE, "big") + hashlib.sha256(data).digest()


def _addressed(federation: str, site: str, told: bytes) -> bytes:
    return f"coterie operator\n{federation}\n{site}\n".encode() + told


# ---- what all sites are asked --------------------------------------------------------------------


def ask_all(
    transport: Transport, clients: Sequence[str], message: bytes, read: Callable[[bytes], Payload]
) -> dict[str, Payload]:
    """What every site answers before a run, by name; all of them have to do what they are asked."""
    answers = transport.ask(dict.fromkeys(clients, message), SETUP)
    found: dict[str, Payload] = {}
    wrong = []
    for name in clients:
        answer = answers.get(name, "lost")
        if isinstance(answer, str):
            wrong.append(f"'{name}' did not answer ({answer})")
        elif (refused := refused_by(answer)) is not None:
            wrong.append(f"'{name}' refused: {refused[1] or refused[0]}")
        else:
            try:
                found[name] = read(answer)
            except Exception as error:  # whatever a stranger's answer brings about
                wrong.append(f"'{name}' sent what cannot be read: {error}")
    if wrong:
        raise EngineError(
            f"not every site takes part: {'; '.join(wrong)}; expected an answer of each; start the "
            "sites ('coterie site start'), or revoke those that left ('coterie deploy revoke')"
        )
    return found


def gain_answered(answer: bytes | str, seeds: int, metric: str) -> SiteGain:
    """A site's gain; one that says nothing if the site is lost or its answer cannot be one."""
    nothing = SiteGain((None,) * seeds, None)
    try:
        if isinstance(answer, str) or refused_by(answer) is not None:
            return nothing
        found = SiteGain.from_json(json.loads(_text(answer)))
    except Exception:  # whatever a stranger's answer brings about
        return nothing
    gains = [one.gain for one in (*found.each, found.together) if one is not None]
    fits = len(found.each) == seeds and all(map(METRICS[metric].possible_gain, gains))
    return found if fits else nothing
