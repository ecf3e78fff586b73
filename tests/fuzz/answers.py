"""Changes messages of a federation so that none of them can be what it says."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sites
from coterie.core import tree
from coterie.deploy.protocol import HEAD, Signed
from coterie.engines.codec import LENGTH, Message, decode, encode, refused_by, vocabulary
from coterie.errors import EngineError
from coterie.runs.config.loading import merge
from fuzz.harness import Finding
from support import METHODS

WORDS: tuple[Any, ...] = (
    *(None, True, -1, 10**400, 0.5, "", "x", "0" * 64, "\ud800", [], {}, [[]], {"()": "x"}),
    *({"()": [0] * 50}, {"coterie.core.tree.Bank": [0, 0, 0]}, {"os.system": []}, 10**19),
)


def mutated(data: bytes, draws: random.Random) -> bytes:
    """The message with its header's structure, its bytes or its length changed."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    how = draws.randrange(6)
    if how == 0:
        return data[: draws.randrange(len(data))]
    if how == 1:
        return draws.randbytes(draws.randrange(1, 60)) + data
    if how == 2:  # a byte of the length, or of the header's punctuation
        at = draws.randrange(LENGTH)
        return data[:at] + bytes([data[at] ^ (1 << draws.randrange(8))]) + data[at + 1 :]
    if how == 3:
        depth = draws.choice([50, 5_000, 300_000])
        text = b'{"head":{},"body":' + b'{"()":[' * depth + b"]}" * depth + b"}"
        return len(text).to_bytes(LENGTH, "little") + text + data[end:]
    header = json.loads(data[LENGTH:end])
    known = [key for key in ("round", "client", "state", "digest") if key in header["head"]]
    if how == 4 or not known:
        header["body"] = draws.choice(WORDS)
    else:
        head = header["head"]
        key = draws.choice(known)
        head[key] = draws.choice([word for word in WORDS if word not in ("0" * 64, head[key])])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(LENGTH, "little") + text + data[end:]


# ---- attacks -------------------------------------------------------------------------------------


class _Sites:
    """A federation of three sites that is made once, and all that was asked and answered in it."""

    def __init__(self) -> None:
        home = Path(tempfile.mkdtemp(prefix="coterie-fuzz-sites-"))
        self.folders = sites.site_folders(home / "fed", sites.write_tables(home / "data"))
        self.handlers = {name: sites.handler_of(one) for name, one in self.folders.items()}
        key = sites.FederationFolder.open(home / "fed" / "fed").operator_key()
        self.signed = Signed(None, key, "fed")  # type: ignore[arg-type]
        self.asked: list[bytes] = []
        self.run("fedavg", lambda name, round, answer: answer)

    def run(self, method: str, spoil: Any) -> Any:
        transport = _Kept(self.handlers, spoil)
        asked = merge(sites.FAST, {"algorithm.name": method, "run.rounds": 2})
        try:
            return sites.executed(sites.setting_of(asked, transport))
        finally:
            self.asked += transport.kept[: 200 - len(self.asked)]


class _Kept(sites.InProcess):
    """Keeps what the site 'ash' was asked."""

    def __init__(self, handlers: Any, spoil: Any) -> None:
        super().__init__(handlers, spoil)
        self.kept: list[bytes] = []

    def ask(self, requests: Any, round: int) -> dict[str, bytes | str]:
        if "ash" in requests:
            self.kept.append(requests["ash"][HEAD:])
        return super().ask(requests, round)


_federation = cache(_Sites)


def requests(draws: random.Random, _inside: Path) -> None:
    """A message that the operator signed and that is none: refused, with a reason."""
    made = _federation()
    message = mutated(draws.choice(made.asked), draws)
    refused = refused_by(made.handlers["ash"].answer(made.signed._signed("ash", message)))
    if refused is None:
        raise Finding("a message that cannot be was answered")
    raise EngineError(refused[0])


def setup_answers(draws: random.Random, _inside: Path) -> None:
    """A site answers a question before the rounds by what cannot be read: one message, no run."""

    def spoil(name: str, round: int, answer: bytes) -> bytes:
        chosen = (name, round) == ("ash", -1) and draws.random() < 0.5
        return mutated(answer, draws) if chosen else answer

    _federation().run("fedavg", spoil)


def round_answers(draws: random.Random, _inside: Path) -> None:
    """A site answers rounds by other arrays than its own; the others' results stay finite."""
    methods = sorted({*METHODS} - {"fedavg_data"})
    method = draws.choice(methods)
    types = vocabulary(METHODS[method]())

    def spoil(name: str, round: int, answer: bytes) -> bytes:
        if name != "ash" or round < 0 or refused_by(answer) is not None:
            return answer
        message = decode(answer, types)
        head = dict(message.head)
        if draws.random() < 0.1:
            head[draws.choice([*head])] = draws.choice(WORDS[:8])
        body = tree.map_leaves(lambda leaf: _other(leaf, draws), message.body)
        return encode(Message(head, body))

    found = _federation().run(method, spoil)
    if not np.isfinite(found.last[1:]).all():
        raise Finding(f"{method}: another site's score is {found.last}")


def _other(leaf: Tensor, draws: random.Random) -> Tensor:
    """An array, or another one in its place."""
    if draws.random() < 0.6:
        return leaf
    how = draws.randrange(6)
    if how == 0:
        return leaf.to(draws.choice([torch.float64, torch.float16, torch.int64, torch.bool]))
    if how == 1:
        return leaf.unsqueeze(0) if leaf.dim() else leaf.repeat(3)
    if how == 2:
        return leaf.flatten()[: draws.randrange(leaf.numel() + 1)]
    if leaf.is_floating_point():
        return leaf * draws.choice([float("nan"), float("inf"), 1e30, -3.0, 0.0])
    if leaf.dtype == torch.bool:
        return ~leaf
    return leaf * 0 + draws.choice([-1, -(10**9), 2, 10**9, 100, 7])


HOSTILE = {f.__name__: f for f in (requests, setup_answers, round_answers)}
