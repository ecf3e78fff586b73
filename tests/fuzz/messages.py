"""Mutated messages of every kind for Hypothesis, and a federation whose answers are replayed."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load as load_arrays
from safetensors.torch import save
from torch import Tensor

import sites
from coterie.deploy.folders import FederationFolder
from coterie.deploy.protocol import HEAD, Consent, Proposal, Signed, as_array, payload_of
from coterie.deploy.protocol import setup_message as message_of
from coterie.deploy.site_folder import SiteFolder
from coterie.deploy.terms import Agreement
from coterie.engines.codec import LENGTH, Message, decode, encode, read_head
from coterie.runs.config.loading import load, merge

HOSTILE = "ash"  # the site whose messages are changed
METHOD = "fedfomo"
ASKED = merge(sites.FAST, {"algorithm.name": METHOD, "run.rounds": 2})
PEERS = merge(sites.FAST, {"algorithm": {"name": "federico", "downloads": 2}, "run.rounds": 2})
SETUP = ("who", "ask", "describe", "divide", "agree", "judge")
ROUNDS = ("local", "predict")
STEPS = ("want", "model", "train", "close", "end")

# ---- changes -------------------------------------------------------------------------------------

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "0" * 64, "../x", "\x1b[2J", "\ud800", "x" * 10**5, 10**400, "1e999"]),
)
NAMES = st.one_of(st.text(max_size=10), st.sampled_from(["()", "coterie.core.tree.Bank", "head"]))
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
VALUES = (float("nan"), float("inf"), 1e30, -3.0, 0.0, 1e-45)


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """The message with its bytes, its header, its text or its arrays changed."""
    return st.one_of(_bytes(data), _headers(data), _texts(data), _arrays(data))


@st.composite
def _bytes(draw: Any, data: bytes) -> bytes:
    at, how = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 3))
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + draw(st.binary(min_size=1, max_size=60)) + data[at:]
    if how == 2:  # within the header, for most of a message is numbers
        at = draw(st.integers(0, LENGTH + int.from_bytes(data[:LENGTH], "little") - 1))
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    depth = draw(st.sampled_from([50, 990, 5_000, 300_000]))
    text = b'{"head":{},"body":' + b'{"()":[' * depth + b"]}" * depth + b"}"
    return _with_header(data, text)


def _with_header(data: bytes, text: bytes) -> bytes:
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    return len(text).to_bytes(LENGTH, "little") + text + data[end:]


@st.composite
def _headers(draw: Any, data: bytes) -> bytes:
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    return _with_header(data, draw(_edited(data[LENGTH:end])))


@st.composite
def _texts(draw: Any, data: bytes) -> bytes:
    """Another text in the body of a message before the rounds; another header of one in them."""
    head, body = read_head(data), None
    if head.get("kind") in (None, *ROUNDS, "peer"):
        return draw(_headers(data))
    body = decode(data, {}).body
    text = draw(_edited(bytes(body[0].numpy())))
    return encode(Message(head, (as_array(text), *body[1:])))


@st.composite
def _edited(draw: Any, text: bytes) -> bytes:
    """A JSON text in which one to three parts are others, or gone."""
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        places = [*_places({"": value})]
        holder, key = draw(st.sampled_from(places))
        if draw(st.integers(0, 5)) or (holder, key) == places[0]:
            holder[key] = draw(JSON)
        else:
            del holder[key]
        value = places[0][0][""]
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON document, the whole of it first."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


@st.composite
def _arrays(draw: Any, data: bytes) -> bytes:
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    others = {name: _other(draw, leaf) for name, leaf in sorted(load_arrays(data[end:]).items())}
    return data[:end] + save(others)


def _other(draw: Any, leaf: Tensor) -> Tensor:
    how = draw(st.integers(0, 9))
    if how == 0:
        return leaf.to(draw(st.sampled_from(TYPES)))
    if how == 1:
        return leaf.unsqueeze(0) if leaf.dim() else leaf.repeat(3)
    if how == 2:
        return leaf.flatten()[: draw(st.integers(0, leaf.numel()))]
    if how == 3 and leaf.is_floating_point():
        return leaf * draw(st.sampled_from(VALUES))
    if how == 3:
        return torch.full_like(leaf, draw(st.integers(0, 1))) if leaf.dtype == torch.bool else -leaf
    return leaf


# ---- a federation that is made once --------------------------------------------------------------


class Recorded(sites.InProcess):
    """Keeps each site's answers by their kind and round, and what the hostile one was asked."""

    def __init__(self, handlers: Any) -> None:
        super().__init__(handlers)
        self.questions: dict[str, list[bytes]] = {}
        self.answers: dict[tuple[str, str, int], bytes] = {}

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        found = super().ask(requests, round)
        for name, data in requests.items():
            kind = kind_of(data[HEAD:])
            self.answers[name, kind, round] = found[name]  # type: ignore[assignment]
            if name == HOSTILE:
                self.questions.setdefault(kind, []).append(data[HEAD:])
        return found

    def close(self) -> None:
        """Sites stay when an operator ends."""


def kind_of(message: bytes) -> str:
    head = read_head(message)
    step = "end" if head.get("step") == "predict" else head.get("step")
    return str(step if head["kind"] == "peer" else head["kind"])


class Federation:
    """Three sites, a run of them, and what was said in it."""

    def __init__(self, asked: Any) -> None:
        home = Path(tempfile.mkdtemp(prefix="coterie-fuzz-"))
        self.folders = sites.site_folders(
            home / "fed", sites.write_tables(home / "data"), ("shown", "scores")
        )
        self.fed = FederationFolder.open(home / "fed" / "fed")
        if asked is PEERS:
            boxes = {name: folder.public_part().box for name, folder in self.folders.items()}
            for name, folder in self.folders.items():
                lines = "".join(f'{n} = "{box}"\n' for n, box in boxes.items() if n != name)
                path = folder.path / "site.toml"
                text = path.read_text().replace("\n[partners]\n", f"\n[partners]\n{lines}")
                path.write_text(text)
            self.folders = {n: SiteFolder.open(one.path) for n, one in self.folders.items()}
        self.said = Recorded({name: sites.handler_of(one) for name, one in self.folders.items()})
        self.signed = Signed(self.said, self.fed.operator_key(), "fed")

    def answer(self, message: bytes) -> bytes:
        """What the hostile operator hears from a site."""
        return self.said.handlers[HOSTILE].answer(self.signed._signed(HOSTILE, message))


@cache
def federation() -> Federation:
    made = Federation(ASKED)
    setting = sites.setting_of(ASKED, made.said)
    sites.executed(setting)
    (name,) = {path.name for path in made.folders[HOSTILE].experiments.iterdir()}
    judge = message_of("judge", {"metric": "accuracy", "pairs": [[name, name]]})
    made.signed.ask(dict.fromkeys(made.folders, judge), -1)
    return made


@cache
def peers() -> Federation:
    from coterie.deploy.peers import run_among_peers

    made = Federation(PEERS)
    config = load(PEERS, {"run.federation": str(made.fed.path)})
    run_among_peers(config, made.fed.path / "run", lambda line: None, made.said)
    return made


class Replay(sites.InProcess):
    """Answers as the sites did, but for the hostile one's answers of one kind."""

    def __init__(self, made: Federation, kind: str, spoiled: bytes | str) -> None:
        super().__init__(made.said.handlers)
        self._made, self._kind, self._spoiled = made, kind, spoiled

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        return {name: self._answer(name, data[HEAD:], round) for name, data in requests.items()}

    def _answer(self, name: str, data: bytes, round: int) -> bytes | str:
        kind = kind_of(data)
        if (name, kind) == (HOSTILE, self._kind):
            return self._spoiled
        if kind == "agree":
            agreement = Agreement.from_json(payload_of(data, Proposal).agreement)
            return message_of("agree", Consent(agreement.hash, "0" * 64))
        return self._made.said.answers[name, kind, round]
