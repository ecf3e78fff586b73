"""What a site among peers keeps on disk for one experiment: a state per round, and what left it.

    state.bin     the state at the beginning of the round it is in, the counters heard so far, and
                  a number that grows with every start: the site's own counters continue above it
    prepared.bin  the result of an attempt, kept before the site says that it is done
    roll.json     the convener's decisions
    sent.jsonl    one line for every message that left, but for signs of life: round, kind,
                  receiver, bytes, sha256

Files are written atomically and carry their sha256, so that a changed one is found. A site whose
state is missing is refused: it never begins anew silently.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.tree import Tree
from ..engines.codec import Message, Types, decode, encode
from ..errors import EngineError, StoreError
from ..storage import files
from .roll_call import Decision

STATE, PREPARED, ROLL, SENT = "state.bin", "prepared.bin", "roll.json", "sent.jsonl"
PEERS = "peers"  # the folder of these files in that of an experiment
SUM = 32  # bytes of a sha256


@dataclass(frozen=True)
class PeerFolder:
    """The files of one site in one experiment."""

    path: Path
    experiment: str
    types: Types  # the types of the method's states

    def open(self) -> Message | None:
        """The state that was kept last; None if this site begins the experiment."""
        self.path.mkdir(parents=True, exist_ok=True)
        files.refuse_links(self.path, [STATE, PREPARED, ROLL, SENT], depth=0)
        found = self._read(STATE)
        if found is None and (self.path / SENT).exists():
            raise StoreError(
                f"{self.path / STATE}: missing, but this site has sent messages in this "
                "experiment; expected its state; restore the newest backup of the folder, or "
                "withdraw from this experiment"
            )
        return found

    # ---- states ----------------------------------------------------------------------------

    def save(self, round: int, boot: int, counters: Mapping[str, int], state: Tree) -> None:
        """Keep the state at the beginning of a round."""
        self._write(STATE, {"round": round, "boot": boot, "counters": dict(counters)}, state)

    def prepare(self, round: int, attempt: int, result: Tree) -> None:
        """Keep the result of an attempt, before saying that the site is done."""
        self._write(PREPARED, {"round": round, "attempt": attempt}, result)

    def prepared(self, round: int, attempt: int) -> Tree | None:
        """The result of this attempt, if it was kept."""
        found = self._read(PREPARED)
        if found is None or (found.head["round"], found.head["attempt"]) != (round, attempt):
            return None
        return found.body

    def _write(self, name: str, head: dict[str, Any], body: Tree) -> None:
        data = encode(Message({**head, "experiment": self.experiment}, body))
        with files.whole(self.path / name) as temporary:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)

    def _read(self, name: str) -> Message | None:
        path = self.path / name
        if not path.exists():
            return None
        data = files.read_start(path, None)
        try:
            if hashlib.sha256(data[SUM:]).digest() != data[:SUM]:
                raise ValueError("its sha256 is another")
            message = decode(data[SUM:], self.types)
            if message.head["experiment"] != self.experiment:
                raise ValueError("it is of another experiment")
        except (ValueError, KeyError, EngineError) as error:
            raise StoreError(
                f"{path}: cannot be used ({error}); expected the file as this site wrote it; "
                "restore the newest backup of the folder, or withdraw from this experiment"
            ) from error
        return message

    # ---- decisions and the log -------------------------------------------------------------

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions that were kept, where this site is the convener."""
        path = self.path / ROLL
        if not path.exists():
            return ()
        try:
            return tuple(map(Decision.from_json, files.read_json(path)))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: cannot be read ({error}); expected decisions") from error

    def keep_decisions(self, decisions: Sequence[Decision]) -> None:
        """Keep the convener's decisions, before they are told."""
        files.write_json(self.path / ROLL, [decision.to_json() for decision in decisions])

    def sent(self, round: int, kind: str, to: str, payload: bytes) -> None:
        """Note a message that leaves the site."""
        line = {
            "experiment": self.experiment,
            "round": round,
            "kind": kind,
            "to": to,
            "bytes": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        with files.writing(self.path / SENT):
            handle = os.open(self.path / SENT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "w") as log:
                log.write(files.to_json(line) + "\n")
