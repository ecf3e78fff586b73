"""The coordinator's folder and a site's folder: made, opened, checked.

A federation's folder holds the CA, the coordinator's certificate and one file per admitted site. A
site's folder holds the site's keys, its data options and its consent. The two exchange two public
files: ``invite.toml`` from the coordinator, ``NAME.pub`` from the site. Both sides compare the
fingerprints by telephone.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from .. import __version__
from ..errors import ConfigError, CoterieError, StoreError, did_you_mean
from ..storage import files
from . import keys
from .admission import read_public_part, refuse_doubled
from .documents import (
    AdmittedSite,
    FederationDocument,
    FederationTable,
    Invite,
    LimitsTable,
    TransportName,
    checked_name,
    host_and_port,
)
from .runbook import write_runbook
from .site_folder import SiteFolder, expiring, now
from .small_files import (
    check_private,
    filled,
    new_folder,
    opened,
    read_document,
    read_plain,
    read_private,
    write_document,
    write_private,
    write_public,
)

__all__ = ["FederationFolder", "SiteFolder"]

_LOCAL = {"direct": (), "flower": ("localhost", "127.0.0.1")}  # where Flower's own processes dial


@dataclass(frozen=True)
class FederationFolder:
    """The folder of the coordinator (``fed/``)."""

    path: Path
    name: str
    address: str  # HOST:PORT that the sites dial
    transport: str  # direct or flower
    limits: LimitsTable  # the largest message, and the longest time that an answer may take

    @classmethod
    def create(
        cls, path: Path, address: str, transport: str = "direct", name: str | None = None
    ) -> "FederationFolder":
        """Make the folder with a new CA; by default the federation is called as the folder is."""
        if transport not in (known := get_args(TransportName)):
            raise ConfigError(f"--transport: '{transport}'; {did_you_mean(transport, known)}")
        host, _ = host_and_port(address)
        called = checked_name(name or path.absolute().name, "--name")
        fields = {"name": called, "address": address, "transport": transport}
        table = FederationTable.model_validate({**fields, "created": now()})
        ca, ca_key = keys.make_ca(called)
        server, server_key = keys.make_server(ca, ca_key, host, *_LOCAL[transport])
        operator_key, operator = keys.make_operator()
        fields |= {"operator": operator, "ca": ca.decode()}
        unsigned = Invite.model_validate({**fields, "signature": "-"})
        signature = keys.sign(ca_key, unsigned.signed())
        invite = unsigned.model_copy(update={"signature": signature})
        with new_folder(path) as making:
            (making / "sites").mkdir(mode=0o700)
            write_public(making / "ca.pem", ca)
            write_private(making / "ca.key", ca_key)
            write_public(making / "server.pem", server)
            write_private(making / "server.key", server_key)
            write_private(making / "operator.key", operator_key)
            write_document(making / "invite.toml", invite, "Public: send it to the sites.")
            write_runbook(making, path, table, ca, server)
            if transport == "flower":
                write_app(making / "app", path)
                write_private(making / "superexec.key", secrets.token_bytes(32))
            made = FederationDocument(federation=table)
            write_document(making / "federation.toml", made, "Written by 'coterie deploy init'.")
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "FederationFolder":
        """Open a folder that :meth:`create` made."""
        file = opened(path, "federation.toml", "coterie deploy init")
        read = read_document(file, FederationDocument)
        said = read.federation
        return cls(path, said.name, said.address, said.transport, read.limits)

    @property
    def ca(self) -> Path:
        """The CA's certificate."""
        return self.path / "ca.pem"

    @property
    def server(self) -> Path:
        """The coordinator's certificate."""
        return self.path / "server.pem"

    @property
    def server_key(self) -> Path:
        """The coordinator's private key, which other users cannot read."""
        return check_private(self.path / "server.key")

    def operator_key(self) -> bytes:
        """The Ed25519 private key (32 bytes) that signs the operator's messages to sites."""
        return read_private(self.path / "operator.key")

    @property
    def invite(self) -> Path:
        """What sites need and everybody may see."""
        return self.path / "invite.toml"

    @property
    def app(self) -> Path:
        """The folder of the Flower app, for ``flwr run``."""
        return self.path / "app"

    @property
    def socket(self) -> Path:
        """The unix socket by which runs reach the coordinator on this machine."""
        return self.path / "run.sock"

    def sites(self) -> tuple[AdmittedSite, ...]:
        """Every site that was admitted, revoked ones as well, in the order of names."""
        folder = self.path / "sites"
        files.refuse_links(self.path, ["sites"], depth=1)
        found: list[AdmittedSite] = []
        for path in sorted(folder.glob("[!.]*.toml")):
            site = read_document(path, AdmittedSite)
            try:
                if site.name != path.stem:
                    raise StoreError(
                        f"is of the site '{site.name}'; expected that of '{path.stem}'"
                    )
                refuse_doubled(site, found)
            except CoterieError as error:
                raise StoreError(f"{path}: {error}; restore the folder from a backup") from None
            found.append(site)
        return tuple(sorted(found, key=lambda site: site.name))

    def site(self, name: str) -> AdmittedSite:
        """One admitted site."""
        found = {site.name: site for site in self.sites()}
        if name not in found:
            raise ConfigError(
                f"{self.path}: no site is called '{name}'; {did_you_mean(name, found)}"
            )
        return found[name]

    def add_site(self, pub: Path, name: str) -> AdmittedSite:
        """Admit the site whose public part is in this file."""
        part, others = read_public_part(pub, name), self.sites()
        refuse_doubled(part, others)
        former = tuple(
            key for other in others if other.name == name for key in (*other.former, other.key)
        )
        admitted = AdmittedSite(**part.model_dump(), added=now(), former=former)
        self._write(admitted)
        return admitted

    def revoke(self, name: str) -> AdmittedSite:
        """Admit a site no longer; it stays listed, and its keys are never admitted again."""
        site = self.site(name)
        if site.revoked is not None:
            raise ConfigError(f"the site '{name}' is revoked since {site.revoked:%Y-%m-%d %H:%M}")
        revoked = site.model_copy(update={"revoked": now()})
        self._write(revoked)
        return revoked

    def renew(self) -> None:
        """Replace the coordinator's certificate and key by new ones of the same CA."""
        ca, ca_key = read_plain(self.ca), read_private(self.path / "ca.key")
        host, _ = host_and_port(self.address)
        server, server_key = keys.make_server(ca, ca_key, host, *_LOCAL[self.transport])
        write_private(self.path / "server.key", server_key)
        write_public(self.server, server)

    def warnings(self) -> tuple[str, ...]:
        """Certificates that have expired or will expire within 30 days, and what to do."""
        again = f"run 'coterie deploy renew {self.path}' and restart the coordinator"
        found = [expiring("the coordinator's certificate", read_plain(self.server), again)]
        found.append(expiring("the CA", read_plain(self.ca), "found a new federation folder"))
        for site in self.sites():
            if site.revoked is None:
                advice = "have the site run 'coterie site renew', revoke it and admit it again"
                certificate = site.certificate.encode()
                found.append(expiring(f"the certificate of '{site.name}'", certificate, advice))
        return tuple(line for line in found if line)

    def _write(self, site: AdmittedSite) -> None:
        path = self.path / "sites" / f"{site.name}.toml"
        write_document(path, site, "A site of this federation; written by 'coterie deploy'.")


def write_app(path: Path, federation: Path | None) -> None:
    """Write the app that ``flwr run`` takes; without a federation, for Flower's simulation."""
    folder = "" if federation is None else str(federation.absolute())
    if not folder.isprintable() or {*folder} & {*'"\\$'}:
        raise ConfigError(f"{folder!r}: expected the name of a folder without quotes or signs")
    if path.exists():
        raise ConfigError(f"{path}: exists already; expected a new folder; choose another")
    path.mkdir(parents=True)
    text = filled("app.toml", {"version": __version__, "folder": folder})
    files.write_text(path / "pyproject.toml", text)
