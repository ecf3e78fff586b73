"""The fields of a federation's TOML files, with their forms, bounds and defaults."""

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from ..errors import ConfigError
from .keys import fingerprint, key_sha256

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
MOST_CODE = 1000  # files on the allow-list of a site
TransportName = Literal["direct", "flower"]
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*")


def checked_name(name: str, what: str = "name") -> str:
    """The name of a site or a federation; another form is refused."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: found {name[:60]!r}; expected 1 to 40 letters, digits, - or _, of which the "
            "first is a letter or a digit"
        )
    return name


def host_and_port(address: str) -> tuple[str, int]:
    """The host and the port of an address HOST:PORT; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0
    right = _is_ipv6(bare) if bare != host else _HOST.fullmatch(host)
    if not right or not 1 <= number <= 65535:
        raise ConfigError(
            f"address: found {address[:100]!r}; expected HOST:PORT, such as "
            "coordinator.example.org:8443, with the name or the IP address that sites dial"
        )
    return bare, number


def _is_ipv6(host: str) -> bool:
    try:
        return "%" not in host and bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def _refusing(check: Callable[[str], object]) -> AfterValidator:
    """The check of a text as one of pydantic's."""

    def checked(text: str) -> str:
        try:
            check(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(checked)


SiteName = Annotated[str, _refusing(checked_name)]
Address = Annotated[str, _refusing(host_and_port)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Pem = Annotated[str, Field(max_length=8192, pattern=r"^-----BEGIN CERTIFICATE-----\n")]
PathText = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
Line = Annotated[str, Field(max_length=1024, pattern=r"^[ -~]+$")]
Key32 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$")]  # 32 bytes


class Document(BaseModel, frozen=True):
    """A file or a table of a file: no other fields, and no values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LimitsTable(Document, frozen=True):
    """The largest message, and the longest time for one."""

    message_mib: Annotated[int, Field(ge=1, le=1024 * 1024)] = 1024
    seconds: Annotated[int, Field(ge=1, le=30 * 86400)] = 3600


class SiteLimitsTable(LimitsTable, frozen=True):
    """Also what a site keeps on its disk."""

    disk_mib: Annotated[int, Field(ge=1)] = 50_000


class FederationTable(Document, frozen=True):
    """What a federation is called, where its coordinator is reached, and by which transport."""

    name: SiteName
    address: Address
    transport: TransportName
    created: AwareDatetime


Names = Annotated[tuple[Line, ...], Field(strict=False, max_length=1000)]


class FederationDocument(Document, frozen=True):
    """``federation.toml``."""

    federation: FederationTable
    limits: LimitsTable = LimitsTable()


NOTES = ("added", "revoked", "former")  # of the coordinator, about an admitted site


class SignedDocument(Document, frozen=True):
    """What travels between a site and the coordinator, signed over all of its other fields."""

    signature: Line

    def signed(self) -> bytes:
        """The bytes that the signature is made over."""
        fields = self.model_dump(exclude={"signature", *NOTES})
        return json.dumps({"coterie": sorted(fields), **fields}, sort_keys=True).encode()


class Invite(SignedDocument, frozen=True):
    """``invite.toml``: what sites need and everybody may see.

    The CA's key signs it, so that whoever has compared the CA's fingerprint has checked the key
    ``operator`` by which messages to sites are signed.
    """

    name: SiteName
    address: Address
    transport: TransportName
    operator: Key32
    ca: Pem


class PublicPart(SignedDocument, frozen=True):
    """``NAME.pub``: what travels from a site to the coordinator. It holds no secret.

    The site's key signs it, so that whoever has compared the certificate's fingerprint has checked
    all of it.
    """

    name: SiteName
    box: Key32
    certificate: Pem

    @cached_property
    def sha256(self) -> str:
        """The certificate's fingerprint."""
        return fingerprint(self.certificate.encode())

    @cached_property
    def key(self) -> str:
        """The sha256 of the certificate's key, which another certificate may have too."""
        return key_sha256(self.certificate.encode())


class AdmittedSite(PublicPart, frozen=True):
    """``sites/NAME.toml``: a site's public part, when it was admitted, and whether it is revoked.

    ``former`` are the revoked keys that a site of this name had before.
    """

    added: AwareDatetime
    revoked: AwareDatetime | None = None
    former: tuple[Sha256, ...] = Field(default=(), strict=False, max_length=100)


class SiteTable(Document, frozen=True):
    """Who this site is, which coordinator it dials, and whose messages it reads."""

    name: SiteName
    federation: SiteName
    address: Address
    transport: TransportName
    operator: Key32


class SiteDataTable(Document, frozen=True):
    """The site's own data: a name or a path, and the options of its reader."""

    name: PathText | None = None
    options: dict[str, Any] = Field(default={}, max_length=100)

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        rest = {key: value for key, value in given.items() if key != "name"}
        return {"options": rest} | ({"name": given["name"]} if "name" in given else {})


class ConsentTable(Document, frozen=True):
    """What may leave the site beside the messages of a method; ``site.toml`` says what each is."""

    shown: bool = False
    scores: bool = False
    models: bool = False
    counts: bool = False
    feature_mean: bool = False
    class_features: bool = False
    discriminators: bool = False


class PolicyTable(Document, frozen=True):
    """The most that a request may ask for, and what is approved without a person."""

    automatic: Names = ()
    rounds: Annotated[int, Field(ge=1)] = 500
    epochs: Annotated[int, Field(ge=1)] = 50
    parameters: Annotated[int, Field(ge=1)] = 50_000_000
    experiments: Annotated[int, Field(ge=1)] = 50
    sent_mib: Annotated[int, Field(ge=1)] = 100_000
    partners: Annotated[int, Field(ge=0)] = 1
    only: Names = ()
    days: Annotated[int, Field(ge=1, le=3650)] = 90
    columns: Names = ()


class StatisticsTable(Document, frozen=True):
    """How the site divides its rows, and what sums of its training rows may leave."""

    val: Annotated[float, Field(ge=0, lt=1)] = 0.2
    test: Annotated[float, Field(ge=0, lt=1)] = 0.2
    rows: Annotated[int, Field(ge=10)] = 20
    noise: Annotated[float, Field(ge=0)] = 0.0
    masked: bool = False
    salt: str = ""


class ScoresTable(Document, frozen=True):
    """How exactly, and how often, the site tells of its test rows."""

    noise: Annotated[float, Field(ge=0)] = 2.0
    most: Annotated[int, Field(ge=0)] = 100


Levels = Literal["named", "hashed"] | Names | Annotated[dict[Line, Line], Field(max_length=1000)]
Bounds = Annotated[tuple[float, float], Field(strict=False)]


class SiteDocument(Document, frozen=True):
    """``site.toml``: written once by ``coterie site init``, then edited by the administrator."""

    site: SiteTable
    data: SiteDataTable = SiteDataTable()
    policy: PolicyTable = PolicyTable()
    statistics: StatisticsTable = StatisticsTable()
    scores: ScoresTable = ScoresTable()
    levels: dict[str, Levels] = Field(default={}, max_length=10_000)
    ranges: dict[str, Bounds] = Field(default={}, max_length=10_000)
    partners: dict[SiteName, Key32] = Field(default={}, max_length=1000)
    consent: ConsentTable = ConsentTable()
    limits: SiteLimitsTable = SiteLimitsTable()
    code: dict[str, Sha256] = Field(default={}, max_length=MOST_CODE)
