"""Keeps a site's node online on Flower's Fleet interface."""

import contextlib
import logging
import threading

from .flower_api import (
    HEARTBEAT_MIN_INTERVAL,
    HEARTBEAT_PATIENCE,
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    Node,
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
)
from .flower_calls import Calls, LinkLostError, LinkRefusedError

BEAT = 4.0  # seconds between heartbeats
EXPIRY = HEARTBEAT_PATIENCE * HEARTBEAT_MIN_INTERVAL  # seconds until a silent node is offline
_LOG = logging.getLogger(__name__)


class Presence:
    """Keeps a site's node online, in a thread of its own, also while a message is worked on."""

    def __init__(self, calls: Calls, public: bytes, stop: threading.Event) -> None:
        self._calls, self._public, self._stop = calls, public, stop
        self._told = ""
        self.node: int | None = None  # None: not online

    def run(self) -> None:
        """Activate the node, send its heartbeats, and activate it again if the link forgot it."""
        while not self._stop.is_set():
            node = self.node
            try:
                if node is None:
                    self.node = self._activated()
                    self._tell("connected")
                elif not self._beat(node):
                    self.forget(node)
            except LinkRefusedError as error:
                self.forget(node)
                self._tell(
                    f"not accepted ({error}); either this site is not admitted, or its last "
                    f"connection has not expired, which takes {EXPIRY} seconds; trying again"
                )
            except LinkLostError as error:
                self._tell(f"no connection to the coordinator ({error}); trying again")
            self._stop.wait(1.0 if self.node is None else BEAT)
        self._leave()

    def forget(self, node: int | None) -> None:
        """Note that the link does not know this node any more."""
        if self.node == node:
            self.node = None

    def _activated(self) -> int:
        request = ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL
        )
        return int(self._calls("/v1/fleet/activate-node", request, ActivateNodeResponse).node_id)

    def _beat(self, node: int) -> bool:
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=node), heartbeat_interval=HEARTBEAT_MIN_INTERVAL
        )
        path = "/v1/fleet/send-node-heartbeat"
        return bool(self._calls(path, request, SendNodeHeartbeatResponse, 5.0).success)

    def _leave(self) -> None:
        if self.node is not None:
            request = DeactivateNodeRequest(node_id=self.node)
            with contextlib.suppress(LinkLostError, LinkRefusedError):  # else it expires
                path = "/v1/fleet/deactivate-node"
                self._calls(path, request, DeactivateNodeResponse, 2.0)

    def _tell(self, text: str) -> None:
        if text != self._told:
            _LOG.info(text)
            self._told = text
