"""The coordinator of the Flower transport: a SuperLink on loopback, a door for the sites in front.

One process serves the door, the operator's unix socket and the mailbox; the SuperLink is its child.
What sites dial, how they are known and what the operator asks are as with the direct transport.
"""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Mapping

from . import keys
from .flower_door import Door
from .flower_link import FlowerLink
from .flower_mailbox import FlowerMailbox
from .flower_run import FlowerRun
from .folders import FederationFolder
from .mailbox_registry import Registry
from .mailbox_routes import Limits
from .mailbox_server import Served, serve_sites

SILENCE = 60.0  # a killed agent's node is offline, and can come back, only after 20 seconds


def coordinate_flower(
    folder: FederationFolder, stop: threading.Event, silence: float = SILENCE
) -> None:
    """Carry messages between the operator and the sites of a folder until ``stop`` is set.

    A site without a sign of life for ``silence`` seconds is offline, and what waits for it is lost.
    """
    limits = Limits(folder.limits.message_mib * 2**20, silence)
    asyncio.run(serve_link(folder, limits, stop))


async def serve_link(folder: FederationFolder, limits: Limits, stop: threading.Event) -> None:
    """As :func:`coordinate_flower`, with all limits."""
    link, registry = FlowerLink.create(folder.path / "link"), Registry(folder)
    trust, admitted = link.trust(), PublicKeys(registry)
    mailbox = FlowerMailbox(limits.silence, limits.message)
    door = Door(link.address, trust, admitted)

    def begin() -> FlowerRun:
        return FlowerRun.begin(link.address, trust, link.secret)

    beside = [
        asyncio.create_task(link.keep()),
        asyncio.create_task(mailbox.serve(begin, admitted)),
    ]
    served = asyncio.create_task(serve_sites(folder, Served(door, mailbox, registry, limits), stop))
    try:
        await asyncio.wait([served, *beside], return_when=asyncio.FIRST_COMPLETED)
        for task in (served, *beside):
            if task.done():
                task.result()  # an error of any ends the coordinator
    finally:
        for task in (served, *beside):
            task.cancel()
        await asyncio.gather(served, *beside, return_exceptions=True)
        with contextlib.suppress(RuntimeError):
            await door.close()


class PublicKeys:
    """The public keys (PEM) of the sites that are admitted now, by name."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[bytes, bytes] = {}  # by certificate

    def __call__(self) -> Mapping[str, bytes]:
        """Every admitted site's key."""
        found = self._registry.certificates()
        self._known = {der: self._known.get(der) or _public(der) for der in found.values()}
        return {name: self._known[der] for name, der in found.items()}


def _public(der: bytes) -> bytes:
    return keys.public_pem(ssl.DER_cert_to_PEM_cert(der).encode("ascii"))
