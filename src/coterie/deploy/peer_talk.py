"""A site's sealed correspondence with its peers: sealing, opening, and the log of what left."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core.tree import Tree
from ..engines.codec import Message, Types, decode, encode
from ..errors import EngineError
from .peer_folder import PeerFolder
from .peer_keys import PeerIdentity
from .peer_link import Link
from .sealing import Opener, Sealer, SealError


class Letter(NamedTuple):
    """A message from a peer that passed the checks of its seal and can be read."""

    sender: str
    round: int
    kind: str
    head: Mapping[str, Any]
    body: Tree


class Correspondence:
    """Sends and receives the messages of one site in one experiment."""

    def __init__(
        self,
        identity: PeerIdentity,
        folder: PeerFolder,
        link: Link,
        boot: int,
        counters: Mapping[str, int],
        note: Callable[[str], None],
    ) -> None:
        self._folder, self._link, self._note = folder, link, note
        self._sealer = Sealer(identity, folder.experiment, boot)
        self._opener = Opener(identity, folder.experiment, counters)
        self._types: Types = {}  # no named tuples: messages are plain tuples of arrays

    @property
    def counters(self) -> dict[str, int]:
        """The last counter heard of each peer."""
        return self._opener.counters

    def send(
        self, to: str, round: int, kind: str, head: Mapping[str, Any], body: Tree = ()
    ) -> None:
        """Send a message; one that is lost on its way is asked for again by its receiver.

        All messages but signs of life are in the log of what left.
        """
        payload = encode(Message(head, body))
        if kind != "stage":
            self._folder.sent(round, kind, to, payload)
        if not self._link.send(to, self._sealer.seal(to, round, kind, payload)):
            self._note(f"the relay did not take a message for '{to}' ({kind} of round {round})")

    def receive(self, seconds: float, rounds: Mapping[str, range]) -> Letter | None:
        """The next message; None if none comes in time. Those that are refused are noted."""
        end = time.monotonic() + seconds
        while (data := self._link.fetch(max(0.0, end - time.monotonic()))) is not None:
            try:
                return self.read(data, rounds)
            except (SealError, EngineError) as error:
                self._note(str(error))
        return None

    def read(self, data: bytes, rounds: Mapping[str, range]) -> Letter:
        """A message that was fetched; a SealError or an EngineError if it is refused."""
        found = self._opener.open(data, rounds)
        message = decode(found.payload, self._types)
        return Letter(found.sender, found.round, found.kind, message.head, message.body)
