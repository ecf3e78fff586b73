"""Encodes messages and states as bytes: a JSON header with the tree's structure, then safetensors.

Decoding runs no code: a named tuple is built only if it is one of the method's own types
(:func:`vocabulary`), with as many fields as that type has. Whatever is wrong with the bytes is one
EngineError. Of a Bank only the filled slots are sent.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..core import optim, policies
from ..core import tree as core_tree
from ..core.algorithm import AnyAlgorithm, Mixture
from ..core.fields import Checked
from ..core.messages import REASONS
from ..core.tree import Bank, Tree
from ..errors import EngineError

Types = Mapping[str, type[Any]]
LENGTH = 8  # bytes that store the header's length
MOST_HEADER = 1 << 20
PLAIN = "()"
DEEPEST = 20
MOST_WHY = 500  # characters of the sentence with which a site refuses
MOST_SAID = 300  # characters of the reason why a message cannot be read


class Message(NamedTuple):
    """A message between the server and one client."""

    head: Mapping[str, Any]  # plain JSON values: the kind of message, the round, the client
    body: Tree = ()  # one client's row


def vocabulary(algorithm: AnyAlgorithm) -> Types:
    """The named tuple types that a method's messages and states may contain, by name."""
    modules = {core_tree.__name__, policies.__name__, optim.__name__, *_modules(algorithm)}
    found: dict[str, type[Any]] = {_name(Mixture): Mixture}
    for module in modules:
        for value in vars(sys.modules[module]).values():
            if isinstance(value, type) and issubclass(value, tuple) and "_fields" in vars(value):
                found[_name(value)] = value
    return found


def _modules(owner: Checked) -> Iterator[str]:
    """The modules of a method, of its bases, and of the methods and adaptations that it runs."""
    for kind in type(owner).__mro__:
        if issubclass(kind, Checked):
            yield kind.__module__
    for value in owner.within:
        yield from _modules(value)


def encode(message: Message) -> bytes:
    tensors: list[Tensor] = []
    structure = _structure(message.body, tensors)
    head = json.dumps({"head": dict(message.head), "body": structure}, allow_nan=False).encode()
    named = {str(i): leaf.detach().cpu().clone().contiguous() for i, leaf in enumerate(tensors)}
    return len(head).to_bytes(LENGTH, "little") + head + save(named)


def decode(data: bytes, types: Types) -> Message:
    """Decode a message from bytes; refuse one that contains other types than these."""
    try:
        head, end = _header(data)
        named = load(data[end:])
        leaves = iter([named[str(i)] for i in range(len(named))])
        body = _rebuilt(head["body"], leaves, types, DEEPEST)
        if next(leaves, None) is not None or not isinstance(head["head"], dict):
            raise ValueError("it holds more arrays than its structure names")
    except Exception as error:  # whatever a stranger's bytes bring about
        raise EngineError(
            f"a message cannot be read ({type(error).__name__}: {str(error)[:MOST_SAID]}); "
            f"expected one made of the method's own types: {', '.join(sorted(types))}"
        ) from error
    return Message(head["head"], body)


def _header(data: bytes) -> tuple[Any, int]:
    """The JSON header of a message, and where it ends."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    if end > min(len(data), LENGTH + MOST_HEADER):
        raise ValueError("its header is longer than the message or than a mebibyte")
    return json.loads(data[LENGTH:end], parse_constant=_no_number), end


def _no_number(name: str) -> float:
    raise ValueError(f"its header holds {name}, which is no number")


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


def read_head(data: bytes) -> Mapping[str, Any]:
    """The head of a message, without building its body; {} if the bytes are no message."""
    try:
        found = _header(data)[0]["head"]
    except Exception:  # whatever a stranger's bytes bring about
        return {}
    return found if isinstance(found, dict) else {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether this can be a sha256; what cannot is no part of a file's name."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _structure(part: Tree, tensors: list[Tensor]) -> Any:
    """The structure of a tree as JSON; its arrays are appended to ``tensors``."""
    if isinstance(part, Tensor):
        tensors.append(part)
        return 0
    if isinstance(part, Bank):
        tensors += [part.models[part.slot[part.slot >= 0]], part.slot, part.owner]
        return {_name(Bank): [0, 0, 0]}
    if not isinstance(part, tuple):
        raise EngineError(
            f"a message is made of tensors and tuples; found {type(part).__name__}; return tensors "
            "and NamedTuples of them from the method's functions"
        )
    name = PLAIN if type(part) is tuple else _name(type(part))
    return {name: [_structure(each, tensors) for each in part]}


def _rebuilt(shape: Any, leaves: Iterator[Tensor], types: Types, depth: int) -> Tree:
    if shape == 0:
        return next(leaves)
    if depth == 0:
        raise ValueError("it is nested too deeply")
    ((name, parts),) = shape.items()
    if name == _name(Bank):
        return _bank(*(next(leaves) for _ in parts))
    children = [_rebuilt(part, leaves, types, depth - 1) for part in parts]
    return tuple(children) if name == PLAIN else types[name](*children)


def _bank(models: Tensor, slot: Tensor, owner: Tensor) -> Bank:
    """A Bank with renumbered slots, because only the models of filled slots were sent."""
    filled = slot >= 0
    if int(filled.sum()) != len(models):
        raise ValueError("a bank has other models than its slots name")
    models = models if len(models) else models.new_zeros(1, 1).expand(1, models.shape[1])
    return Bank(models, torch.where(filled, filled.cumsum(-1) - 1, -1), owner)
