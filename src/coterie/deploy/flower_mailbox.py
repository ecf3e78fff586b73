"""The mailbox of the Flower transport: has a site asked over the SuperLink, as often as it takes.

It answers the same questions as the direct transport's mailbox, so that the operator's side is the
same for both. A request whose node was started anew, or whose run ended with a killed link, is
sent again: a site answers the same request the same way. Bodies are in memory only; the run is
ended, and the link deletes what it still has, whenever a request was given up.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import StoreError
from .flower_calls import LinkLostError, LinkRefusedError
from .flower_message import UnreadableError
from .flower_run import Arrived, FlowerRun, NodeState
from .mailbox import MOST_WAITING, Body, Reason

WATCH = 2.0  # seconds between looks at the nodes, and for answers that nobody announced
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sent:
    """A request that the link has."""

    token: str
    site: str
    node: NodeState
    answer: "asyncio.Future[Body | Reason | None]"  # None: it has to be sent again

    @property
    def answered(self) -> bool:
        return (
            self.answer.done() and not self.answer.cancelled() and self.answer.result() is not None
        )

    def settle(self, answer: Body | Reason | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class FlowerMailbox:
    """Messages for sites, carried by a run on the link. All methods belong to one event loop."""

    def __init__(self, silence: float, limit: int) -> None:
        self.silence, self._limit = silence, limit
        self._made = time.monotonic()
        self._signs: dict[str, float] = {}
        self._asked: Counter[str] = Counter()
        self._run: FlowerRun | None = None
        self._nodes: dict[str, NodeState] = {}
        self._sent: dict[str, _Sent] = {}  # by the message's id
        self._mail: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self._answers = asyncio.Event()  # a site has sent an answer
        self._given_up = False  # whether the link may still have a request that nobody waits for

    # ---- what the operator's side asks ---------------------------------------------------------

    async def ask(self, site: str, body: Body, seconds: float) -> Body | Reason:
        """Have a site answer a message, or say why it did not."""
        end = time.monotonic() + seconds
        self._asked[site] += 1
        try:
            while (left := end - time.monotonic()) > 0:
                run, node = self._run, self._nodes.get(site)
                if run is None or node is None or not node.online:
                    if self._quiet(site) > self.silence:
                        return "lost"
                    await asyncio.sleep(min(left, 0.1))
                elif (
                    answer := await self._exchange(run, node, site, bytes(body), left)
                ) is not None:
                    return answer
            return "lost"
        finally:
            self._asked[site] -= 1

    def full(self, site: str) -> bool:
        """Whether as many messages wait for the site as may."""
        return self._asked[site] >= MOST_WAITING

    def sign(self, site: str) -> None:
        """Note a sign of life of a site."""
        self._signs[site] = time.monotonic()

    def seen(self, site: str) -> float | None:
        """Seconds since the site's last sign of life; None if there was none."""
        return self._quiet(site) if site in self._signs else None

    def online(self, site: str) -> bool:
        """Whether the site gave a sign of life within the last ``silence`` seconds."""
        return site in self._signs and self._quiet(site) < self.silence

    def _quiet(self, site: str) -> float:
        return time.monotonic() - self._signs.get(site, self._made)

    async def _exchange(
        self, run: FlowerRun, node: NodeState, site: str, body: bytes, seconds: float
    ) -> Body | Reason | None:
        """Send once and wait; None if it has to be sent again."""
        token, answer = secrets.token_hex(16), asyncio.get_running_loop().create_future()
        sent = _Sent(token, site, node, answer)
        try:
            key = await asyncio.to_thread(run.send, node.id, body, token, seconds)
        except (LinkLostError, LinkRefusedError) as error:
            _LOG.info("site %s: a message is sent again: %s", site, error)
            self._given_up = True
            await asyncio.sleep(min(seconds, 0.5))
            return None
        self._sent[key] = sent
        self._mail[site].release()
        try:
            async with asyncio.timeout(seconds):
                return await sent.answer if self._run is run else None
        except TimeoutError:
            return "lost"
        finally:
            self._given_up |= not sent.answered
            del self._sent[key]

    # ---- what the door asks and tells ----------------------------------------------------------

    async def mail(self, site: str, seconds: float) -> None:
        """Wait until a message was sent to the site, or until this time has passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._mail[site].acquire(), seconds)

    def answered(self) -> None:
        """Note that a site sends an answer."""
        self._answers.set()

    # ---- the run on the link -------------------------------------------------------------------

    async def serve(
        self, begin: Callable[[], FlowerRun], admitted: Callable[[], Mapping[str, bytes]]
    ) -> None:
        """Have a run on the link for ever; begins another when the link was started anew."""
        while True:
            try:
                run = await asyncio.to_thread(begin)
            except (LinkLostError, LinkRefusedError) as error:
                _LOG.debug("no run on the link yet: %s", error)
                await asyncio.sleep(0.3)
                continue
            try:
                await self._keep(run, admitted)
            finally:
                self._forget()

    def _forget(self) -> None:
        self._run, self._nodes, self._given_up = None, {}, False
        for sent in self._sent.values():
            sent.settle(None)

    async def _keep(self, run: FlowerRun, admitted: Callable[[], Mapping[str, bytes]]) -> None:
        """Look after a run until the link does not know it, or it has to be cleaned."""
        collecting = asyncio.create_task(self._collect(run))
        try:
            while not collecting.done():
                try:
                    await asyncio.to_thread(run.beat)
                    self._look(await asyncio.to_thread(run.nodes, admitted()))
                    self._run = run
                    if self._given_up and not any(self._asked.values()):
                        return await asyncio.to_thread(run.end)
                except LinkLostError as error:
                    _LOG.debug("the link does not answer: %s", error)
                except StoreError as error:
                    _LOG.error("the sites' keys cannot be read: %s", error)
                except LinkRefusedError as error:
                    return _LOG.info("the link was started anew: %s", error)
                await asyncio.wait([collecting], timeout=WATCH)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    def _look(self, nodes: dict[str, NodeState]) -> None:
        """Take the nodes' states; what was sent to a node's former process is sent again."""
        self._nodes = nodes
        for sent in self._sent.values():
            node = nodes.get(sent.site)
            if node is not None and node.online and node.activated != sent.node.activated:
                _LOG.info("site %s was started anew: its message is sent again", sent.site)
                sent.settle(None)

    async def _collect(self, run: FlowerRun) -> None:
        """Fetch answers as they arrive; returns when the link does not know the run any more."""
        fetching: dict[str, asyncio.Task[None]] = {}
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answers.wait(), WATCH)
            self._answers.clear()
            fetching = {key: task for key, task in fetching.items() if key in self._sent}
            waiting = self._sent.keys() - fetching.keys()
            if not waiting:
                continue
            try:
                found = await asyncio.to_thread(run.arrived, list(waiting))
            except LinkLostError:
                continue
            except LinkRefusedError:
                return
            for answer in found:  # which the link has only once
                if (sent := self._sent.get(answer.asked)) is not None:
                    task = asyncio.create_task(self._fetch(run, answer, sent))
                    fetching[answer.asked] = task

    async def _fetch(self, run: FlowerRun, answer: Arrived, sent: _Sent) -> None:
        try:
            sent.settle(await asyncio.to_thread(run.fetched, answer, sent.token, self._limit))
        except UnreadableError as error:
            _LOG.warning("site %s: %s", sent.site, error)
            sent.settle("unreadable")
        except (LinkLostError, LinkRefusedError) as error:
            _LOG.info("site %s: an answer is asked for again: %s", sent.site, error)
            sent.settle(None)
