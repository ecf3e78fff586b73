"""The transport of a run inside of Flower: its messages travel to nodes and back.

Only public names of Flower are used, and one kind of
message: the bytes of coterie's own messages.
Flower says which nodes there are. Which site is behind a node, and who wrote an answer, follows
from the site's signature; so Flower's node keys keep strangers out, but nothing depends on them.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ..engines.remote import SETUP, SiteState
from ..errors import CoterieError, printable
from .flower_client import BODY, RECORD, SOCKETS
from .folders import FederationFolder
from .site_socket import checked_answer, hello

SHORTEST, LONGEST = 0.02, 0.5  # seconds between two looks at the link, which cost it some calls
MEET = 2.0  # seconds between two looks at which nodes there are
SILENCE = 180.0  # seconds without a node of a site, which then is lost; a killed node needs 120
AGAIN = 3.0  # seconds before a node that failed is asked again
HELLO = 600.0  # seconds that a node has to say whose it is
TRIES = 3  # answers that are not the site's own, after which it is not asked again
_LOG = logging.getLogger(__name__)


@dataclass
class _Errand:
    """A message to a site, and what has become of it."""

    site: str
    body: bytes
    node: int | None = None  # where it was sent last
    key: str | None = None  # by which Flower knows it; None if it is to be sent
    due: float = 0.0  # when
    wrong: int = 0  # answers that were not the site's own
    answer: bytes | str | None = None


class GridTransport:
    """Asks the sites of a folder, each behind a node of Flower's.

    A site is asked again when its node failed, or when it comes back behind another node; it is
    lost after ``deadline`` seconds, or when it has had no node for ``SILENCE`` seconds.
    """

    def __init__(
        self,
        grid: Grid,
        folder: FederationFolder,
        sockets: str = "",
        deadline: float | None = None,
    ) -> None:
        self._grid, self._folder, self._sockets = grid, folder, sockets
        self._deadline, self._begun = deadline or folder.limits.seconds, time.monotonic()
        self._nodes: dict[str, int] = {}  # by site
        self._seen: dict[str, float] = {}  # when each site last had a node
        self._unknown: dict[int, float] = {}  # nodes without a site, and when to ask them again
        self._hello = hello(folder.operator_key(), folder.name)
        self._greeted: dict[str, int] = {}  # the nodes that were asked who they are, by message

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        """Each named site's answer, or "lost" or "unreadable"."""
        errands = [_Errand(site, body) for site, body in requests.items()]
        end, pause = time.monotonic() + self._deadline, SHORTEST
        while any(e.answer is None for e in errands) and (now := time.monotonic()) < end:
            try:
                admitted = self._met()
                for errand in errands:
                    if errand.answer is None:
                        self._send(errand, round, end - now)
                self._collect([e for e in errands if e.answer is None], admitted)
            except Exception as error:  # the link is gone, or a call of Flower's failed
                _LOG.warning("the SuperLink does not answer: %s; trying again", printable(error))
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
        return {errand.site: errand.answer or "lost" for errand in errands}

    def sites(self) -> dict[str, SiteState]:
        """Every admitted site: whether it has a node, and seconds since it had one."""
        admitted, now = self._met(), time.monotonic()
        return {
            name: SiteState(name in self._nodes, now - at if (at := self._seen.get(name)) else None)
            for name in admitted
        }

    def close(self) -> None:
        """Do nothing: the grid is Flower's."""

    # ---- one message -----------------------------------------------------------------------------

    def _send(self, errand: _Errand, round: int, seconds: float) -> None:
        """Send what is due: not sent yet, failed a while ago, or sent to a node that is gone."""
        node, now = self._nodes.get(errand.site), time.monotonic()
        if node is None:
            quiet = now - self._seen.get(errand.site, self._begun)
            errand.answer = "lost" if quiet > SILENCE else None
        elif errand.node != node or (errand.key is None and now >= errand.due):
            errand.node, errand.key = node, self._push(node, errand.body, round, seconds)

    def _collect(self, errands: Iterable[_Errand], admitted: Mapping[str, bytes]) -> None:
        """Take the answers that are there; one that is not the site's own is asked for again."""
        waiting = {errand.key: errand for errand in errands if errand.key is not None}
        for key, data in self._pulled(waiting):
            errand = waiting[key]
            try:
                errand.answer = checked_answer(admitted[errand.site], errand.body, data)
            except (CoterieError, KeyError):
                errand.key, errand.due = None, time.monotonic() + AGAIN
                errand.wrong += bool(data)
                errand.answer = "unreadable" if errand.wrong == TRIES else None

    def _push(self, node: int, body: bytes, round: int, seconds: float) -> str | None:
        record = ConfigRecord({BODY: body, SOCKETS: self._sockets})
        content, kind = RecordDict({RECORD: record}), MessageType.QUERY
        message = Message(content, node, kind, group_id=str(round), ttl=seconds)
        return next(iter(self._grid.push_messages([message])), None)

    def _pulled(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The answers that are there, by the message they answer; empty where a node failed."""
        for reply in self._grid.pull_messages([*keys]):
            body: object = b""
            with contextlib.suppress(Exception):  # whatever a stranger's app answers
                body = b"" if reply.has_error() else reply.content.config_records[RECORD][BODY]
            yield reply.metadata.reply_to_message_id, body if isinstance(body, bytes) else b""

    # ---- who is there ----------------------------------------------------------------------------

    def _met(self) -> dict[str, bytes]:
        """The certificates of the admitted sites, after a look at which of them have a node."""
        admitted = {
            site.name: site.certificate.encode()
            for site in self._folder.sites()
            if site.revoked is None
        }
        there, now = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {s: n for s, n in self._nodes.items() if n in there and s in admitted}
        known = {*self._nodes.values()}
        self._unknown = {n: self._unknown.get(n, 0.0) for n in there - known}
        for node in [node for node, due in self._unknown.items() if due <= now]:
            if key := self._push(node, self._hello, SETUP, HELLO):
                self._greeted[key] = node
            self._unknown[node] = now + HELLO
        for key, data in self._pulled(self._greeted) if self._greeted else ():
            node = self._greeted.pop(key)
            name = self._introduced(data, admitted)
            if name is None:
                self._unknown[node] = now + AGAIN
            else:
                self._nodes[name] = node
        self._seen |= dict.fromkeys(self._nodes, now)
        return admitted

    def _introduced(self, data: bytes, admitted: Mapping[str, bytes]) -> str | None:
        """The admitted site that signed the answer of a node; None if none did."""
        try:
            name = data.partition(b"\n")[2].decode()
            checked_answer(admitted[name], self._hello, data)
        except (CoterieError, KeyError, UnicodeDecodeError):
            return None
        return name
