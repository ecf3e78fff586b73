"""The sealed messages by which peers agree on an experiment, before its first round.

    ask     from the convener: a setup message (:mod:`coterie.deploy.protocol`), sealed for one site
    answer  to the convener: what the site's own handler answered

The convener asks through a :class:`SealedTransport`. Every other site has a :class:`SetupDoor` in
front of its link, which answers the convener and nobody else, at any time: a convener that was
killed asks again while others are in a round already.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.tree import Tree
from ..data.data_schema import client_order
from ..engines.codec import read_head
from ..engines.remote import Answering, SiteState
from ..errors import CoterieError, EngineError
from .peer_folder import PeerFolder
from .peer_keys import PeerIdentity, PeerKeys
from .peer_link import Link
from .peer_talk import Correspondence, Letter
from .protocol import Consent, as_array, payload_of, refusal, refused_by
from .sealing import SealError

SETUP_KINDS = ("who", "ask", "describe", "divide", "agree")  # what a peer answers, and nothing else
SLOWEST_RETRY = 60.0  # seconds after which the convener asks again, at most
SEALED = dict.fromkeys(("ask", "answer"), range(1))  # the kinds of sealed messages

Note = Callable[[str], None]


class AgreedError(Exception):
    """The site has agreed to another experiment than the one it works on."""

    def __init__(self, experiment: str) -> None:
        super().__init__(experiment)
        self.experiment = experiment


def roster_hash(pinned: PeerKeys) -> str:
    """A hash of all names and keys: setup messages of another roster are refused."""
    said = json.dumps(sorted(pinned.fingerprints().items()))
    return hashlib.sha256(said.encode()).hexdigest()


class SetupTalk:
    """One site's sealed setup messages. The folder holds the counters, so that none is replayed."""

    def __init__(self, identity: PeerIdentity, path: Path, link: Link, note: Note) -> None:
        self.names = client_order(identity.pinned.keys)
        self.me, self.convener = identity.name, self.names[0]
        self._folder = PeerFolder(path, roster_hash(identity.pinned), {})
        kept = self._folder.open()
        new: dict[str, Any] = {"boot": 0, "counters": {}}
        head = new if kept is None else kept.head
        self.boot = max(int(head["boot"]) + 1, time.time_ns())
        counters = head["counters"]
        self._talk = Correspondence(identity, self._folder, link, self.boot, counters, note)
        self._save()

    def send(self, to: str, kind: str, number: int, data: bytes) -> None:
        """Seal and send a message; ``number`` is that of the question."""
        self._talk.send(to, 0, kind, {"number": number}, as_array(data))

    def read(self, data: bytes) -> Letter:
        """A setup message; a SealError or an EngineError if it is none, or is refused."""
        letter = self._talk.read(data, SEALED)
        self._save()
        return letter

    def _save(self) -> None:
        self._folder.save(0, self.boot, self._talk.counters, ())


class SealedTransport:
    """Carries the convener's setup messages to its peers, sealed for each of them.

    It waits for every site, however long that takes: sites are started by people. The convener's
    own handler is asked last, when all others have answered.
    """

    def __init__(
        self, talk: SetupTalk, link: Link, own: Answering, note: Note, nudge: float
    ) -> None:
        self._talk, self._link, self._own, self._note = talk, link, own, note
        self._nudge, self._number = nudge, talk.boot

    def ask(self, requests: Mapping[str, bytes], round: int) -> Mapping[str, bytes | str]:
        """Each site's answer."""
        me, pause = self._talk.me, self._nudge
        self._number += 1
        missing = [name for name in requests if name != me]
        answers: dict[str, bytes | str] = {}
        while missing:
            for name in missing:
                self._talk.send(name, "ask", self._number, requests[name])
            self._listen({*missing}, answers, pause)
            missing = [name for name in missing if name not in answers]
            if missing:
                self._note(f"waiting for an answer of {', '.join(missing)}")
            pause = min(2 * pause, max(SLOWEST_RETRY, self._nudge))
        return answers | ({me: self._own.answer(requests[me])} if me in requests else {})

    def _listen(self, names: set[str], answers: dict[str, bytes | str], seconds: float) -> None:
        """Add the answers that come in this time."""
        end = time.monotonic() + seconds
        while names - answers.keys() and (left := end - time.monotonic()) > 0:
            data = self._link.fetch(left)
            letter = None if data is None else _setup_letter(self._talk, data, self._note)
            if letter is None or letter.kind != "answer" or letter.sender not in names:
                continue
            if letter.head.get("number") == self._number:
                answers[letter.sender] = _bytes(letter.body)

    def sites(self) -> Mapping[str, SiteState]:
        """The sites of the roster; nothing is known of them before they answer."""
        return dict.fromkeys(self._talk.names, SiteState(online=False, seen=None))

    def close(self) -> None:
        """Do nothing: the link belongs to the caller."""


class SetupDoor:
    """A link that answers the convener's setup messages, and passes all other messages on.

    ``keep`` stores the hash of an experiment that the site has just agreed to. If it is another
    one than ``running``, :meth:`fetch` raises an AgreedError.
    """

    def __init__(
        self,
        talk: SetupTalk,
        link: Link,
        handler: Answering,
        keep: Callable[[str], None],
        note: Note,
        running: str = "",
    ) -> None:
        self._talk, self._link, self._handler = talk, link, handler
        self._keep, self._note, self._running = keep, note, running
        self._last: tuple[int, bytes] = (-1, b"")  # the number of a question, and its answer

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        return self._link.send(to, blob)

    def fetch(self, seconds: float) -> bytes | None:
        """The next message that is no setup message."""
        end = time.monotonic() + seconds
        while (data := self._link.fetch(max(0.0, end - time.monotonic()))) is not None:
            try:
                letter = self._talk.read(data)
            except SealError as error:
                if error.reason == "experiment":
                    return data
                self._note(str(error))
            except EngineError as error:
                self._note(str(error))
            else:
                self._handle(letter)
        return None

    def _handle(self, letter: Letter) -> None:
        """Answer a question of the convener; a question that comes again is answered as before."""
        number = letter.head.get("number")
        if letter.kind != "ask" or type(number) is not int:
            return
        if letter.sender != self._talk.convener:
            said = f"a setup message of '{letter.sender}' is refused: the convener is"
            self._note(f"{said} '{self._talk.convener}', the first site of the roster")
            return
        agreed = ""
        if number != self._last[0]:
            reply = self._answer(_bytes(letter.body))
            self._last, agreed = (number, reply), _agreed(reply)
        if agreed:
            self._keep(agreed)
        self._talk.send(letter.sender, "answer", *self._last)
        if agreed not in ("", self._running):
            raise AgreedError(agreed)

    def _answer(self, data: bytes) -> bytes:
        try:
            kind = read_head(data).get("kind")
            if kind not in SETUP_KINDS:
                known = ", ".join(SETUP_KINDS)
                return refusal("refused", f"a peer answers {known}; found '{str(kind)[:40]}'")
            return self._handler.answer(data)
        except CoterieError as error:
            self._note(f"a setup message cannot be read: {error}")
            return refusal("unreadable")


def _setup_letter(talk: SetupTalk, data: bytes, note: Note) -> Letter | None:
    """A setup message; None for one that is refused, which is noted, or of an experiment."""
    try:
        return talk.read(data)
    except SealError as error:
        if error.reason != "experiment":
            note(str(error))
    except EngineError as error:
        note(str(error))
    return None


def _agreed(reply: bytes) -> str:
    """The experiment that a site's answer agrees to; "" if the answer is another one."""
    if refused_by(reply) is not None or read_head(reply).get("kind") != "agree":
        return ""
    return payload_of(reply, Consent).experiment


def _bytes(body: Tree) -> bytes:
    """The bytes of a sealed setup message; empty, which no reader accepts, if it holds none."""
    whole = isinstance(body, Tensor) and body.dtype == torch.uint8
    return bytes(body.numpy()) if whole else b""
