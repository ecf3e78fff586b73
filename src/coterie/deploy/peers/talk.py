"""How a site talks to its peers: who takes part in a round, what is kept, sent and fetched.

One site, the convener, decides who takes part in a round, and all others follow.

A site reports where it is: ``here`` at the start of a round, ``working``, and ``done`` when it has
stored its result. The convener begins an attempt of the round with the sites that are here, and
closes the round when all of them are done. A site that gives no sign for ``patience`` seconds is
left out: the round is repeated without it, as if it had not been drawn to take part. So a closed
round is always the simulator's round with the sites of its last attempt.

The convener learns who is there and nothing else. It waits while at most half of a round's sites
are there, so that two halves of a network never go on apart; round 0 waits for all its sites. If
the convener is gone, all others wait for it.

A site keeps on disk, for one experiment:

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
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ...core.tree import Tree
from ...engines.codec import Message, Types, decode, encode
from ...errors import EngineError, StoppedError, StoreError
from ...storage import files
from ..site_folder import SiteFolder
from .relay import ANSWERS, POLL, Relay
from .sealing import Opener, PeerIdentity, Sealer, SealError

if TYPE_CHECKING:
    import httpx


Stage = Literal["here", "working", "done"]
STAGES: tuple[Stage, ...] = ("here", "working", "done")


class Decision(NamedTuple):
    """The convener's word on a round: who takes part in its newest attempt, and if it ended."""

    round: int
    attempt: int
    names: tuple[str, ...]  # in the order of client numbers
    closed: bool = False

    @property
    def roll(self) -> str:
        """A hash of the attempt, which all its messages carry: all of them have the same roll."""
        told = json.dumps([self.round, self.attempt, self.names])
        return hashlib.sha256(told.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The decision in types of JSON."""
        return {**self._asdict(), "names": list(self.names)}

    @classmethod
    def from_json(cls, value: Any) -> "Decision":
        """The decision that :meth:`to_json` wrote; ValueError, TypeError or KeyError otherwise."""
        round, attempt, closed = value["round"], value["attempt"], value["closed"]
        names = tuple(value["names"])
        types = (type(round), type(attempt), type(closed))
        if types != (int, int, bool) or not all(isinstance(name, str) for name in names):
            raise ValueError("the fields of a decision have other types")
        return cls(round, attempt, names, closed)


class RollCall:
    """The convener's part. ``decisions`` are those made so far, the newest of each round."""

    def __init__(
        self,
        sites_of: Callable[[int], Sequence[str]],
        last: int,
        patience: float,
        decisions: Sequence[Decision],
        now: float,
    ) -> None:
        self.sites_of, self._last, self._patience = sites_of, last, patience
        self._decisions = {decision.round: decision for decision in decisions}
        self._at: dict[str, int] = {}  # the round that each site is in
        self._signs: dict[str, float] = {}  # when each site was last heard of
        self._done: set[str] = set()  # sites that are done with the newest attempt
        self._absent: set[str] = set()  # sites that were left out and not heard of since
        self._began = now

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest decision of each round, to be kept before it is told."""
        return tuple(self._decisions.values())

    @property
    def round(self) -> int:
        """The first round that is not closed."""
        newest = max(self._decisions, default=0)
        return newest + 1 if newest in self._decisions and self._open is None else newest

    @property
    def all_left(self) -> bool:
        """Whether all sites of the last round have said that they are finished."""
        return all(self._at.get(name, 0) > self._last for name in self.sites_of(self._last))

    @property
    def _open(self) -> Decision | None:
        newest = self._decisions[max(self._decisions)] if self._decisions else None
        return None if newest is None or newest.closed else newest

    def heard(self, name: str, round: int, stage: Stage, attempt: int, now: float) -> None:
        """Note what a site reported."""
        self._at[name], self._signs[name] = round, now
        self._absent.discard(name)
        current = self._open
        if current is not None and (round, attempt, stage) == (*current[:2], "done"):
            self._done.add(name)

    def about(self, round: int) -> Decision | None:
        """The newest decision on a round."""
        return self._decisions.get(round)

    def decide(self, now: float) -> Decision | None:
        """The next decision, if one is due."""
        if self.round > self._last:
            return None
        current = self._open
        decision = self._first(now) if current is None else self._next(current, now)
        if decision is not None:
            self._decisions[decision.round] = decision
            self._began, self._done = now, set()
        return decision

    def _first(self, now: float) -> Decision | None:
        """The first attempt of a round, when all are here or enough of them for long enough."""
        round = self.round
        sites = self.sites_of(round)
        here = tuple(name for name in sites if self._at.get(name) == round)
        everybody = set(sites) - self._absent <= set(here)
        late = round > 0 and now - self._began > self._patience
        if len(here) == len(sites) or ((everybody or late) and self._enough(here, round)):
            self._absent |= set(sites) - set(here)
            return Decision(round, 0, here)
        return None

    def _next(self, current: Decision, now: float) -> Decision | None:
        """Close the round, or repeat it without sites that gave no sign for too long."""
        if self._done >= set(current.names):
            return current._replace(closed=True)
        silent = {
            name
            for name in current.names
            if now - max(self._signs.get(name, 0.0), self._began) > self._patience
        }
        left = tuple(name for name in current.names if name not in silent)
        if not silent or not self._enough(left, current.round):
            return None
        self._absent |= silent
        return Decision(current.round, current.attempt + 1, left)

    def _enough(self, names: Sequence[str], round: int) -> bool:
        return 2 * len(names) > len(self.sites_of(round))


# ---- on disk -------------------------------------------------------------------------------------


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


# ---- the relay, near and far ---------------------------------------------------------------------


SLOWEST = 5.0  # seconds between two attempts to reach the relay, at most


class Link(Protocol):
    """Carries sealed messages to other sites and back, through a relay."""

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site; False if the relay does not take it."""

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site; None if none comes in that time."""


@dataclass(frozen=True)
class InProcessLink:
    """A site that shares a process with its relay."""

    relay: Relay
    name: str

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        return self.relay.put(self.name, to, blob) is None

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site."""
        return self.relay.take(self.name, seconds)


class HttpLink:
    """A site that reaches its relay over HTTPS, with its certificate.

    While the relay cannot be reached, :meth:`send` tries again for ever, at least every 5 seconds.
    Once ``stop`` is set, both methods raise a StoppedError.
    """

    def __init__(
        self,
        client: "httpx.Client",
        note: Callable[[str], None],
        stop: threading.Event | None = None,
    ) -> None:
        import httpx

        self._client, self._note, self._stop = client, note, stop or threading.Event()
        self._faults = (httpx.TransportError,)

    @classmethod
    def dial(
        cls, folder: SiteFolder, note: Callable[[str], None], stop: threading.Event | None = None
    ) -> "HttpLink":
        """A link to the relay at the coordinator that the site's folder names."""
        import httpx

        from ..direct import trust

        client = httpx.Client(base_url=f"https://{folder.address}", verify=trust(folder))
        return cls(client, note, stop)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, to: str, blob: bytes) -> bool:
        """Leave a message for a site."""
        pause = 0.1
        while True:
            self._refuse_stopped()
            try:
                status = self._client.post(f"/v1/mail/{to}", content=blob).status_code
            except self._faults as error:
                self._note(f"the relay cannot be reached ({type(error).__name__}); trying again")
                status = 503
            if status < 500:
                if status not in (202, *ANSWERS.values()):
                    self._note(f"the relay refused a message to '{to}' with status {status}")
                return status == 202
            self._stop.wait(pause)
            pause = min(2 * pause, SLOWEST)

    def fetch(self, seconds: float) -> bytes | None:
        """The next message for this site."""
        self._refuse_stopped()
        began, wait = time.monotonic(), min(seconds, POLL)
        try:
            answer = self._client.post(f"/v1/mail?wait={wait}", timeout=wait + SLOWEST)
        except self._faults as error:
            self._note(f"the relay cannot be reached ({type(error).__name__}); trying again")
            self._stop.wait(max(0.0, min(seconds, 1.0) - (time.monotonic() - began)))
            return None
        return answer.content if answer.status_code == 200 else None

    def _refuse_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError(
                "stopped, as asked; nothing is lost: the same command continues", signal.SIGTERM
            )


# ---- letters -------------------------------------------------------------------------------------


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
