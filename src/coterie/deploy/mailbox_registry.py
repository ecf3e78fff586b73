"""Which certificates the coordinator admits now: read from its folder again after every change."""

import hashlib
import logging
import os
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import StoreError

if TYPE_CHECKING:
    from .folders import FederationFolder

_LOG = logging.getLogger(__name__)
_TICK = 50_000_000  # nanoseconds within which two changes of a folder may bear the same time


class Registry:
    """The admitted sites by the sha256 of their certificates, and the TLS settings that fit.

    The folder is looked at for every new connection and for every request, so that
    ``coterie deploy add-site`` and ``revoke`` take effect at once.
    """

    def __init__(self, folder: "FederationFolder") -> None:
        self._folder = folder
        self._version: list[tuple[int, int]] | None = None
        self._names: dict[str, str] = {}
        self._certificates: dict[str, bytes] = {}
        self._context = self._new_context([])
        self._refresh()

    def site(self, sha256: str) -> str | None:
        """The name of the site whose certificate has this hash; None if it is not admitted."""
        self._refresh()
        return self._names.get(sha256)

    def names(self) -> list[str]:
        """The names of all admitted sites that are not revoked."""
        self._refresh()
        return sorted(self._names.values())

    def certificates(self) -> Mapping[str, bytes]:
        """The certificates (DER) of all admitted sites that are not revoked, by name."""
        self._refresh()
        return self._certificates

    def context(self) -> ssl.SSLContext:
        """TLS settings for a listening socket: every handshake uses those of its moment."""
        context = self._new_context([])
        context.sni_callback = self._use_newest  # called whether or not a name was sent
        return context

    def _use_newest(
        self, connection: ssl.SSLObject, _name: str, _old: ssl.SSLContext
    ) -> ssl.AlertDescription | None:
        try:
            self._refresh()
        except StoreError as error:
            _LOG.error("no connection is taken: %s", error)
            return ssl.AlertDescription.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._context
        return None

    def _refresh(self) -> None:
        """Read the folder again if a file in it was added, replaced or removed."""
        places = [self._folder.path / "sites", self._folder.server]
        try:
            version = [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, places)]
            if version != self._version:
                self._read()
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder.path}: cannot be read ({error})") from None
        settled = time.time_ns() - max(changed for _, changed in version) > _TICK
        self._version = version if settled else None

    def _read(self) -> None:
        admitted = [site for site in self._folder.sites() if site.revoked is None]
        found = {site.name: ssl.PEM_cert_to_DER_cert(site.certificate) for site in admitted}
        self._context = self._new_context(list(found.values()))
        self._certificates = found
        self._names = {hashlib.sha256(der).hexdigest(): name for name, der in found.items()}

    def _new_context(self, certificates: list[bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # every connection shows its certificate
        context.load_cert_chain(self._folder.server, self._folder.server_key)
        if certificates:
            context.load_verify_locations(cadata=b"".join(certificates))
        return context
