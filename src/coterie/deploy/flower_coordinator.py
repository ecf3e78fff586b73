"""The coordinator of the Flower transport: a SuperLink on loopback, a door for the sites in front.

One process serves the door, the operator's unix socket and the mailbox; the SuperLink is its child.
What sites dial, how they are known and what the operator asks are as with the direct transport.
"""

import asyncio
import ssl
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

from . import keys
from .flower_api import httpx
from .flower_calls import over_tls
from .flower_door import Door
from .flower_link import FlowerLink
from .flower_mailbox import FlowerMailbox
from .flower_run import FlowerRun
from .folders import FederationFolder
from .mailbox_registry import Registry
from .mailbox_routes import Limits
from .mailbox_server import Served, serve_sites

SILENCE = 60.0  # a killed agent's node is offline, and can come back, only after 20 seconds


def coordinate(folder: FederationFolder, stop: threading.Event, silence: float = SILENCE) -> None:
    """Carry messages between the operator and the sites of a folder until ``stop`` is set.

    A site without a sign of life for ``silence`` seconds is offline, and what waits for it is lost.
    """
    limits = Limits(folder.limits.message_mib * 2**20, silence)
    asyncio.run(serve_link(folder, limits, stop))


async def serve_link(folder: FederationFolder, limits: Limits, stop: threading.Event) -> None:
    """As :func:`coordinate`, with all limits."""
    link, registry = FlowerLink.create(folder.path / "link"), Registry(folder)
    mailbox, admitted = FlowerMailbox(limits.silence, limits.message), PublicKeys(registry)
    base, trust = f"https://{link.address}", link.trust()
    with over_tls(link.address, trust, proxies=False) as http:
        async with httpx.AsyncClient(
            base_url=base, verify=trust, trust_env=False, timeout=30.0
        ) as passed:
            served = Served(Door(passed, admitted, mailbox), mailbox, registry, limits)
            await _until_one_ends(
                serve_sites(folder, served, stop),
                mailbox.serve(lambda: FlowerRun.begin(http, link.secret), admitted),
                link.keep(),
            )


async def _until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, then cancel the others; an error is raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
