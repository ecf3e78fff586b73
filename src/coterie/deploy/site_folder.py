"""A site's folder: its keys, its data options, its consent, and what it sends to be admitted."""

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .. import __version__
from ..errors import CoterieError
from ..storage import files
from . import keys
from .admission import public_part
from .documents import (
    ConsentTable,
    Invite,
    Levels,
    PolicyTable,
    PublicPart,
    ScoresTable,
    SiteDataTable,
    SiteDocument,
    SiteLimitsTable,
    StatisticsTable,
    checked_name,
)
from .runbook import write_services
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

WARN_BEFORE = timedelta(days=30)


@dataclass(frozen=True)
class SiteFolder:
    """The folder of a site (``a/``). Its keys are made in it and never leave it."""

    path: Path
    name: str
    federation: str
    address: str  # HOST:PORT of the coordinator
    transport: str  # direct or flower
    operator: str  # the public key by which messages are signed
    data: SiteDataTable
    policy: PolicyTable
    statistics: StatisticsTable
    scores: ScoresTable
    levels: Mapping[str, Levels]  # how the texts of columns leave
    ranges: Mapping[str, tuple[float, float]]  # to which numbers of columns are cut
    partners: Mapping[str, str]  # the box keys of other sites
    consent: ConsentTable
    limits: SiteLimitsTable
    code: Mapping[str, str]  # files that a configuration may name, with their sha256

    @classmethod
    def create(cls, path: Path, invite: Path, name: str) -> "SiteFolder":
        """Make the folder with new keys, for the federation of an invitation."""
        checked_name(name, "--name")
        asked = read_invite(invite)
        fields = asked.model_dump(include={"address", "transport", "operator"})
        text = filled("site.toml", {**fields, "name": name, "federation": asked.name})
        with new_folder(path) as making:
            write_public(making / "coordinator.pem", asked.ca.encode())
            write_private(making / "secret", secrets.token_bytes(32))
            _write_keys(making, name)
            files.write_text(making / "site.toml", text)
            said = {"name": name, "federation": asked.name, "address": asked.address}
            said |= {"folder": shlex.quote(str(path.absolute())), "version": __version__}
            write_services(making, "site", asked.transport, said)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "SiteFolder":
        """Open a folder that :meth:`create` made; relative paths of data start at the folder."""
        read = read_document(opened(path, "site.toml", "coterie site init"), SiteDocument)
        said = {**dict(read.site), **dict(read), "path": path}
        del said["site"]
        name = read.data.name
        if name is not None and (file := path / files.expanded(name)).exists():
            said["data"] = read.data.model_copy(update={"name": str(file)})
        return cls(**said)

    @property
    def coordinator(self) -> Path:
        """The certificate of the CA that must have signed the coordinator's."""
        return self.path / "coordinator.pem"

    @property
    def certificate(self) -> Path:
        """The site's own certificate."""
        return self.path / "cert.pem"

    @property
    def key(self) -> Path:
        """The site's private key, which other users cannot read."""
        return check_private(self.path / "key.pem")

    @property
    def public(self) -> Path:
        """The file that the site sends to the coordinator."""
        return self.path / f"{self.name}.pub"

    @property
    def experiments(self) -> Path:
        """One folder per experiment: agreement, states, answers, final model."""
        return self.path / "experiments"

    @property
    def sent(self) -> Path:
        """The log of what left the site, one line per answer."""
        return self.path / "sent.jsonl"

    def box_key(self) -> bytes:
        """The X25519 private key (32 bytes) that opens messages of other sites."""
        return read_private(self.path / "box.key")

    def secret(self) -> bytes:
        """The 32 random bytes that noise and hashes of rows are derived from."""
        return read_private(self.path / "secret")

    def public_part(self) -> PublicPart:
        """What the site sends to the coordinator."""
        return read_document(self.public, PublicPart)

    def renew(self) -> None:
        """Replace the site's keys and its certificate; it must then be admitted again."""
        _write_keys(self.path, self.name)

    def warnings(self) -> tuple[str, ...]:
        """Certificates that have expired or will expire within 30 days, and what to do."""
        advice = f"run 'coterie site renew {self.path}' and have the coordinator admit it again"
        found = [expiring("this site's certificate", read_plain(self.certificate), advice)]
        advice = "ask the coordinator for a new invitation"
        found.append(expiring("the coordinator's CA", read_plain(self.coordinator), advice))
        return tuple(line for line in found if line)


def read_invite(path: Path) -> Invite:
    """The checked invitation of a coordinator, from a file that came from elsewhere."""
    invite = read_document(path, Invite)
    ca = invite.ca.encode()
    try:
        keys.check_ca(ca)
        keys.check_signature(ca, invite.signed(), invite.signature)
    except CoterieError as error:
        raise type(error)(f"{path}: {error}") from None
    return invite


def _write_keys(folder: Path, name: str) -> None:
    """Write new keys, the certificate, and last the public part, which is of these keys."""
    certificate, key = keys.make_site(name)
    box_key, box = keys.make_box()
    write_private(folder / "key.pem", key)
    write_private(folder / "box.key", box_key)
    write_public(folder / "cert.pem", certificate)
    part = public_part(name, certificate, key, box)
    write_document(folder / f"{name}.pub", part, "Public: send it to the coordinator.")


def now() -> datetime:
    """The time in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def expiring(what: str, certificate: bytes, advice: str) -> str:
    """A sentence about a certificate that has expired or will within 30 days; else empty."""
    ends = keys.expiry(certificate)
    if ends - now() > WARN_BEFORE:
        return ""
    verb = "expired" if ends < now() else "expires"
    return f"{what} {verb} on {ends:%Y-%m-%d}; {advice}"
