"""Messages between two sites that nobody between them can read or change, and their pinned keys.

The box keys of the sites are pinned by name in a roster file.

Nobody hands out keys: every site gets the roster by any way, prints the fingerprints
(``PeerKeys.fingerprints``) and compares them with the other sites over another way.

A sealed message has two lines that everybody can read (who sends it, to whom) and a PyNaCl ``Box``:
X25519 between the two sites' keys, XSalsa20-Poly1305. Inside of the box are the version, the
experiment, the sender, the receiver, the round, the kind, a counter and the payload, filled up with
zeros to a multiple of :data:`BLOCK` bytes. Whoever carries the message learns the two names, the
size in blocks and the time, and nothing else.

A box between two sites opens at both ends, so the names inside are checked as well: a message that
comes back to its sender is refused. The counter grows with every message of a sender, also after a
restart, so that a message is accepted once and never after a later one.
"""

import base64
import binascii
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError, CoterieError, StoreError
from ...storage import files

if TYPE_CHECKING:
    from nacl.public import Box


MOST_ROSTER = 1 << 16  # bytes of a roster file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True)
class PeerKeys:
    """The pinned public box key of every site, by name; 32 bytes each."""

    keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        for name, key in self.keys.items():
            if not _NAME.fullmatch(name) or len(key) != 32:
                raise ConfigError(
                    f"roster: found {name[:60]!r} with a key of {len(key)} bytes; expected a "
                    "site's name (letters, digits, - and _) and the 32 bytes of its box key"
                )
        if len(set(self.keys.values())) < len(self.keys):
            raise ConfigError(
                "roster: two sites have the same box key; expected one for each: every site makes "
                "its own with 'coterie site init'"
            )

    @classmethod
    def read(cls, path: Path) -> "PeerKeys":
        """Read a roster file: a table ``[peers]`` of ``name = "base64 of the box key"``."""
        files.refuse_links(path.parent, [path.name], depth=0)
        data = files.read_start(path, MOST_ROSTER + 1)
        try:
            if len(data) > MOST_ROSTER:
                raise ValueError(f"it has more than {MOST_ROSTER:,} bytes")
            table = tomllib.loads(data.decode())["peers"]
            return cls({n: base64.b64decode(k, validate=True) for n, k in table.items()})
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise StoreError(
                f'{path}: cannot be read ({error}); expected a table [peers] of name = "box key '
                'in base64"'
            ) from error

    def fingerprints(self) -> dict[str, str]:
        """The sha256 of every key in hex, to be compared over another way, such as a telephone."""
        return {name: hashlib.sha256(key).hexdigest() for name, key in self.keys.items()}


@dataclass(frozen=True)
class PeerIdentity:
    """A site among its peers: its name, its private box key and the pinned keys of all sites."""

    name: str
    private: bytes
    pinned: PeerKeys

    def __post_init__(self) -> None:
        if len(self.private) != 32:
            raise ConfigError(
                f"box.key: found {len(self.private)} bytes; expected the 32 bytes of a private key "
                "as 'coterie site init' makes it; restore it from a backup"
            )
        public = _nacl().PrivateKey(self.private).public_key
        if self.pinned.keys.get(self.name) != bytes(public):
            raise ConfigError(
                f"roster: the box key of '{self.name}' is not the one of this site; expected the "
                "public part of its own box.key: compare the fingerprints with all other sites"
            )

    def box(self, peer: str) -> "Box":
        """The box between this site and a peer."""
        nacl = _nacl()
        theirs = nacl.PublicKey(self.pinned.keys[peer])
        made: Box = nacl.Box(nacl.PrivateKey(self.private), theirs)
        return made


def _nacl() -> Any:
    try:
        from nacl import public
    except ImportError as error:
        raise ConfigError(
            "peers seal their messages with PyNaCl, which is not installed; install it with: "
            "pip install 'coterie[peers]'"
        ) from error
    return public


# ---- messages ------------------------------------------------------------------------------------


VERSION = 1
MAGIC = b"coterie sealed"
BLOCK = 1024  # sizes are multiples of this, so that all small messages look alike
LENGTH = 4  # bytes that store the length of the head
HEAD = {  # what stands before the payload
    "version": int,
    "experiment": str,
    "from": str,
    "to": str,
    "round": int,
    "kind": str,
    "counter": int,
    "bytes": int,
}
A_BOOT = 1 << 32  # counters of one run of a process

REFUSALS = {
    "unreadable": "no message of this protocol",
    "readdressed": "addressed to another site",
    "unknown": "from a site whose key is not pinned",
    "tampered": "does not open with the pinned key: changed on its way, or sealed by another key",
    "version": "of another version of the protocol",
    "reflected": "a message of this site that was sent back to it",
    "forged": "the names inside of the seal are not those outside of it",
    "experiment": "of another experiment",
    "replayed": "its counter is not above the last one: sent again, or out of order",
    "kind": "of a kind that is not expected",
    "wrong_round": "of another round than the one it can be used in",
}


class SealError(CoterieError):
    """A message that is refused, with a reason of :data:`REFUSALS`."""

    def __init__(self, reason: str, sender: str = "") -> None:
        said = f" that says it is from '{sender}'" if sender else ""
        super().__init__(f"a message{said} is refused ({reason}): {REFUSALS[reason]}")
        self.reason, self.sender = reason, sender


class Unsealed(NamedTuple):
    """A message that passed all checks."""

    sender: str
    round: int
    kind: str
    payload: bytes


class Sealer:
    """Seals messages of one site in one experiment.

    ``boot`` is a number that grows with every start of the site, so that no counter occurs twice.
    """

    def __init__(self, identity: PeerIdentity, experiment: str, boot: int) -> None:
        self._identity, self._experiment = identity, experiment
        self._counter = boot * A_BOOT

    def seal(self, to: str, round: int, kind: str, payload: bytes) -> bytes:
        """A message that only the site ``to`` can open."""
        self._counter += 1
        name = self._identity.name
        head = {
            "version": VERSION,
            "experiment": self._experiment,
            "from": name,
            "to": to,
            "round": round,
            "kind": kind,
            "counter": self._counter,
            "bytes": len(payload),
        }
        text = json.dumps(head).encode()
        inside = len(text).to_bytes(LENGTH, "little") + text + payload
        inside += bytes(-len(inside) % BLOCK)
        sealed: bytes = self._identity.box(to).encrypt(inside)
        return b"\n".join([MAGIC, name.encode(), to.encode(), sealed])


class Opener:
    """Opens messages to one site in one experiment, each at most once.

    ``counters`` are the last counters of all senders, as :attr:`counters` gave them before.
    """

    def __init__(
        self, identity: PeerIdentity, experiment: str, counters: Mapping[str, int] | None = None
    ) -> None:
        self._identity, self._experiment = identity, experiment
        self._last = dict(counters or {})

    @property
    def counters(self) -> dict[str, int]:
        """The last counter that was accepted of each sender; keep it with the site's state."""
        return dict(self._last)

    def open(self, data: bytes, rounds: Mapping[str, range]) -> Unsealed:
        """The message inside, if it passes all checks; else a :class:`SealError`.

        ``rounds`` says of which rounds a message of each kind may be now.
        """
        sender, sealed = self._addressed(data)
        head, payload = self._inside(sender, sealed)
        if head["version"] != VERSION:
            raise SealError("version", sender)
        if head["from"] == self._identity.name:
            raise SealError("reflected", sender)
        if (head["from"], head["to"]) != (sender, self._identity.name):
            raise SealError("forged", sender)
        if head["experiment"] != self._experiment:
            raise SealError("experiment", sender)
        if head["counter"] <= self._last.get(sender, -1):
            raise SealError("replayed", sender)
        self._last[sender] = head["counter"]
        if head["kind"] not in rounds:
            raise SealError("kind", sender)
        if head["round"] not in rounds[head["kind"]]:
            raise SealError("wrong_round", sender)
        return Unsealed(sender, head["round"], head["kind"], payload)

    def _addressed(self, data: bytes) -> tuple[str, bytes]:
        """The sender that the open lines name, and the box."""
        magic, *lines = data[: len(MAGIC) + 100].split(b"\n", 3)
        if magic != MAGIC or len(lines) < 3:
            raise SealError("unreadable")
        sender, to = (line.decode("ascii", "replace") for line in lines[:2])
        if to != self._identity.name:
            raise SealError("readdressed", sender)
        if sender not in self._identity.pinned.keys:
            raise SealError("unknown", sender)
        return sender, data[len(magic) + sum(map(len, lines[:2])) + 3 :]

    def _inside(self, sender: str, sealed: bytes) -> tuple[dict[str, Any], bytes]:
        from nacl.exceptions import CryptoError

        try:
            inside = self._identity.box(sender).decrypt(sealed)
        except (CryptoError, ValueError) as error:
            raise SealError("tampered", sender) from error
        try:
            end = LENGTH + int.from_bytes(inside[:LENGTH], "little")
            head = json.loads(inside[LENGTH:end])
            fits = all(type(head[key]) is kind for key, kind in HEAD.items())
            if not fits or not 0 <= head["bytes"] <= len(inside) - end:
                raise ValueError("the head does not fit")
        except (ValueError, KeyError, TypeError) as error:
            raise SealError("unreadable", sender) from error
        return head, inside[end : end + head["bytes"]]
