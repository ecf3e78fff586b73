"""The instructions that ``coterie deploy init`` writes for one federation (``RUNBOOK.md``)."""

import shlex
from pathlib import Path

from .. import __version__
from . import keys
from .admission import spoken
from .documents import FederationTable, host_and_port
from .small_files import filled


def runbook(folder: Path, said: FederationTable, ca: bytes, server: bytes) -> str:
    """Instructions for the coordinator and for a site, with this federation's names and dates."""
    host, port = host_and_port(said.address)
    fields = {
        "name": said.name,
        "address": said.address,
        "host": host,
        "port": str(port),
        "transport": said.transport,
        "created": f"{said.created:%Y-%m-%d}",
        "folder": shlex.quote(str(folder.absolute())),
        "version": __version__,
        "ca": spoken(keys.fingerprint(ca)),
        "ca_expires": f"{keys.expiry(ca):%Y-%m-%d}",
        "expires": f"{keys.expiry(server):%Y-%m-%d}",
    }
    return filled("RUNBOOK.md", fields)
