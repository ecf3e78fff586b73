"""What ``coterie deploy init`` and ``coterie site init`` write for people and for their systems."""

import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Literal

from .. import __version__
from ..storage import files
from . import keys
from .admission import spoken
from .documents import FederationTable, host_and_port
from .small_files import filled


def write_runbook(
    into: Path, folder: Path, said: FederationTable, ca: bytes, server: bytes
) -> None:
    """Write the instructions, an example and the coordinator's services; ``folder`` is theirs."""
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
    text = _only(said.transport, filled("RUNBOOK.md", fields))
    files.write_text(into / "RUNBOOK.md", text)
    files.write_text(into / "example.toml", filled("example.toml", fields))
    write_services(into, "coordinator", said.transport, fields)


def _only(transport: str, text: str) -> str:
    """The instructions for one transport: other parts, and the marks between them, are left out."""
    parts = re.split(r"^<!-- (\w+) -->\n", text, flags=re.MULTILINE)
    kept = [parts[0]]
    for mark, part in zip(parts[1::2], parts[2::2], strict=True):
        kept += [part] if mark in (transport, "end") else []
    return "".join(kept)


def write_services(
    into: Path, place: Literal["coordinator", "site"], transport: str, fields: Mapping[str, str]
) -> None:
    """Write what starts a coordinator or a site by systemd, in containers, on Kubernetes."""
    (into / "service").mkdir(mode=0o755)
    folder = f"{place}/{transport}"
    for found in (resources.files(__package__) / "templates" / folder).iterdir():
        files.write_text(into / "service" / found.name, filled(f"{folder}/{found.name}", fields))
