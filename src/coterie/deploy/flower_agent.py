"""A site's agent on Flower's Fleet interface: takes messages, has them answered, sends the answers.

The agent is resident and runs no app: it never asks for a bundle, and a message of another kind is
dropped. It has one site's key, answers one message at a time, and goes on for ever: a link that is
away or was started anew, a node that is still thought to be online, a message that was given up by
its sender are all waited out.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from ..engines.remote import Answering
from ..errors import EngineError
from .direct_agent import trust
from .flower_api import (
    SUPERLINK_NODE_ID,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    Error,
    FlowerMessage,
    MessageProto,
    Node,
    ObjectTree,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    RecordDict,
    message_from_proto,
)
from .flower_calls import Calls, LinkLostError, LinkRefusedError, as_node, over_tls
from .flower_message import KIND, FlowerParts, UnreadableError, packed, parts, unpacked
from .flower_presence import Presence
from .site_folder import SiteFolder
from .small_files import read_private

SOON, SELDOM = 0.05, 5.0  # seconds between polls, which wait at the door; without a connection
GRACE = 20.0  # seconds that a computation may still take when the agent is asked to stop
UNREADABLE = 900  # the error code of an answer to a message that could not be read
_LOG = logging.getLogger(__name__)
_Found = TypeVar("_Found")


def serve(folder: SiteFolder, handler: Answering, stop: threading.Event) -> None:
    """Answer the coordinator's messages by the handler until ``stop`` is set."""
    sign, public = as_node(read_private(folder.key))
    limit = folder.limits.message_mib * 2**20
    with over_tls(folder.address, trust(folder), proxies=True) as http:
        FlowerAgent(Calls(http, sign), public, handler, limit, stop).run()


class FlowerAgent:
    """Answers the messages of one site until it is stopped."""

    def __init__(
        self, calls: Calls, public: bytes, handler: Answering, limit: int, stop: threading.Event
    ) -> None:
        self._calls, self._handler, self._limit, self._stop = calls, handler, limit, stop
        self._presence = Presence(calls, public, stop)
        self._busy = False  # whether a message is at hand

    def run(self) -> None:
        """Take one message after another; when stopped, a short computation is finished."""
        threads = [
            threading.Thread(target=work, name=f"coterie-{name}", daemon=True)
            for name, work in (("heartbeats", self._presence.run), ("site", self._work))
        ]
        for thread in threads:
            thread.start()
        while all(thread.is_alive() for thread in threads) and not self._stop.wait(0.1):
            pass
        if not self._stop.is_set():
            raise EngineError("the agent failed; its log says why; start it again")
        threads[0].join(timeout=5.0)
        threads[1].join(timeout=GRACE if self._busy else 0.0)

    def _work(self) -> None:
        wait = SOON
        while not self._stop.wait(wait):
            wait = SOON if self._once() else min(2 * wait, SELDOM)

    def _once(self) -> bool:
        """Take and answer a message if there is one; False if there is no connection."""
        node = self._presence.node
        if node is None:
            return True  # look again soon
        try:
            request = PullMessagesRequest(node=Node(node_id=node))
            found = self._calls("/v1/fleet/pull-messages", request, PullMessagesResponse)
            if found.messages_list and found.message_object_trees:
                self._busy = True
                self._handle(node, found.messages_list[0], found.message_object_trees[0])
        except LinkRefusedError as error:
            if error.unknown:
                self._presence.forget(node)
            else:
                _LOG.info("an answer is not wanted any more: %s", error)
        except LinkLostError:
            return False
        finally:
            self._busy = False
        return True

    def _handle(self, node: int, proto: MessageProto, tree: ObjectTree) -> None:
        if not is_request(proto, node):
            _LOG.warning("dropped a message of type %.40r: not from coterie", _kind(proto))
            self._confirm(node, proto)
            return
        content: RecordDict | Error
        token = proto.metadata.group_id
        try:
            pull = self._pull(node, proto)
            body = self._insist(lambda: unpacked(tree, token, pull, self._limit))
        except UnreadableError as error:
            _LOG.warning("refused a message: %s", error)
            content = Error(UNREADABLE, "unreadable")
        else:
            self._insist(lambda: self._confirm(node, proto))
            content = packed(self._computed(body), token)
        answer = parts(FlowerMessage(content, reply_to=message_from_proto(proto)))
        self._insist(lambda: self._push(node, proto.metadata.run_id, answer))

    def _computed(self, body: bytes) -> bytes:
        """The handler's answer; empty if the handler failed, which the operator sees."""
        try:
            return self._handler.answer(body)
        except Exception:
            _LOG.exception("a message could not be answered")
            return b""

    def _insist(self, call: Callable[[], _Found]) -> _Found:
        """Call until there is a connection; a message that was fetched is not fetched again."""
        wait = SOON
        while True:
            try:
                return call()
            except LinkLostError:
                if self._stop.wait(wait):
                    raise
                wait = min(2 * wait, SELDOM)

    def _pull(self, node: int, proto: MessageProto) -> Callable[[str], PullObjectResponse]:
        run = proto.metadata.run_id

        def pull(key: str) -> PullObjectResponse:
            request = PullObjectRequest(node=Node(node_id=node), run_id=run, object_id=key)
            return self._calls("/v1/fleet/pull-object", request, PullObjectResponse)

        return pull

    def _confirm(self, node: int, proto: MessageProto) -> None:
        """Have the link delete a message's objects."""
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=node),
            run_id=proto.metadata.run_id,
            message_object_id=proto.metadata.message_id,
        )
        path = "/v1/fleet/confirm-message-received"
        self._calls(path, request, ConfirmMessageReceivedResponse)

    def _push(self, node: int, run: int, answer: FlowerParts) -> None:
        sender = Node(node_id=node)
        request = PushMessagesRequest(
            node=sender, messages_list=[answer.proto], message_object_trees=[answer.tree]
        )
        told = self._calls("/v1/fleet/push-messages", request, PushMessagesResponse)
        for key in answer.order(told.objects_to_push):
            piece = PushObjectRequest(
                node=sender,
                run_id=run,
                object_id=key,
                object_content=answer.objects[key],
                session_id=told.session_id,
            )
            self._calls("/v1/fleet/push-object", piece, PushObjectResponse)


def is_request(proto: MessageProto, node: int) -> bool:
    """Whether a message is a request of coterie's for this node."""
    found = proto.metadata
    return (
        found.message_type == KIND
        and found.src_node_id == SUPERLINK_NODE_ID
        and found.dst_node_id == node
        and 0 < len(found.group_id) <= 64
        and not found.reply_to_message_id
    )


def _kind(proto: MessageProto) -> str:
    return str(proto.metadata.message_type)
