"""The box keys of the sites that exchange sealed messages, pinned by name in a roster file.

Nobody hands out keys: every site gets the roster by any way, prints the fingerprints
(``PeerKeys.fingerprints``) and compares them with the other sites over another way.
"""

import base64
import binascii
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, StoreError
from ..storage import files

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
