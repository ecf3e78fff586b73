"""A site's public part (``NAME.pub``): made at the site, checked before the site is admitted."""

from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError, CoterieError
from . import keys
from .documents import AdmittedSite, PublicPart
from .small_files import read_document


def spoken(sha256: str) -> str:
    """A fingerprint as it is read out by telephone: in groups of four.

    >>> spoken("0123456789abcdef")
    '0123 4567 89ab cdef'
    """
    return " ".join(sha256[at : at + 4] for at in range(0, len(sha256), 4))


def public_part(name: str, certificate: bytes, key: bytes, box: str) -> PublicPart:
    """What a site sends to the coordinator, signed by the site's key."""
    unsigned = PublicPart(name=name, box=box, signature="-", certificate=certificate.decode())
    return unsigned.model_copy(update={"signature": keys.sign(key, unsigned.signed())})


def read_public_part(path: Path, name: str) -> PublicPart:
    """The public part of a site of this name, from a file that came from elsewhere."""
    part = read_document(path, PublicPart)
    try:
        check_part(part, name)
    except CoterieError as error:
        raise type(error)(f"{path}: {error}") from None
    return part


def check_part(part: PublicPart, name: str) -> None:
    """Refuse a public part that is not one site's own, whole and for this name."""
    if part.name != name:
        raise ConfigError(
            f"is the public part of the site '{part.name}'; expected that of '{name}'; admit it "
            f"with --name {part.name}, or have the right file sent"
        )
    certificate = part.certificate.encode()
    keys.check_site(certificate, name)
    keys.check_signature(certificate, part.signed(), part.signature)


def refuse_doubled(part: PublicPart, others: Iterable[AdmittedSite]) -> None:
    """Refuse a site whose name, key, certificate or box key another site has or had.

    A revoked site may come back under its own name with new keys.
    """
    held = {part.key, part.box}
    for other in others:
        back = other.name == part.name and other.revoked is not None
        if other.name.casefold() == part.name.casefold() and not back:
            raise ConfigError(
                f"--name: a site is already called '{other.name}'; expected a name that differs in "
                f"more than capitals; choose another, or revoke '{other.name}' first"
            )
        if held & {other.key, other.box, *other.former}:
            said = "had, and which are revoked" if other.revoked else "has"
            raise ConfigError(
                f"'{part.name}' has the keys that the site '{other.name}' {said}; expected keys of "
                "its own; run 'coterie site init' in a new folder and send the file of that"
            )
