"""Keys and certificates of a federation: a private CA, the coordinator's certificate, sites' own.

The CA signs the coordinator's certificate and nothing else. A site makes its own key and signs its
own certificate; the coordinator knows that certificate by the sha256 of its bytes, so no CA decides
who a site is. All keys are on the curve P-384.
Everything is PEM; no key has a password, because services start without a person. Only this module
uses the package cryptography.
"""

import base64
import hashlib
import ipaddress
import os
from datetime import UTC, datetime, timedelta

from ..errors import ConfigError, StoreError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.utils import CryptographyDeprecationWarning
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(f"keys need cryptography ({error}): pip install 'coterie[direct]'") from error

CURVE = "secp384r1"
CA_DAYS = 3653  # ten years: a new CA means that every site needs a new invitation
SERVER_DAYS = 398
SITE_DAYS = 1096  # three years: a site's certificate is known by its hash and can be revoked
_EARLY = timedelta(days=1)  # clocks of sites differ
_HASH = hashes.SHA384()
_PEM = serialization.Encoding.PEM
_MALFORMED = (
    *(ValueError, TypeError, UnsupportedAlgorithm, CryptographyDeprecationWarning),
    *(x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType),
)
_Public = ec.EllipticCurvePublicKey
_Use = x509.ObjectIdentifier | None


# ---- making --------------------------------------------------------------------------------------


def make_ca(name: str) -> tuple[bytes, bytes]:
    """The certificate and the private key of a new CA, which signs coordinators only."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _named(f"coterie CA of {name}"[:64])
    made = _builder(subject, subject, key.public_key(), CA_DAYS, None)
    return made.sign(key, _HASH).public_bytes(_PEM), _private(key)


def make_server(ca_cert: bytes, ca_key: bytes, *hosts: str) -> tuple[bytes, bytes]:
    """A certificate for a coordinator at these hosts, signed by the CA, and its private key."""
    check_key(ca_key, ca_cert)
    ca, signer = _certificate(ca_cert), _private_key(ca_key)
    key = ec.generate_private_key(ec.SECP384R1())
    made = _builder(
        _named(hosts[0][:64]),
        ca.subject,
        key.public_key(),
        SERVER_DAYS,
        ExtendedKeyUsageOID.SERVER_AUTH,
    )
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    made = made.add_extension(signed_by, critical=False)
    names = x509.SubjectAlternativeName([*dict.fromkeys(map(_host_name, hosts))])
    made = made.add_extension(names, critical=False)
    return made.sign(signer, _HASH).public_bytes(_PEM), _private(key)


def make_site(name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate of a site, which can sign no other, and its private key."""
    key = ec.generate_private_key(ec.SECP384R1())
    use = ExtendedKeyUsageOID.CLIENT_AUTH
    made = _builder(_named(name), _named(name), key.public_key(), SITE_DAYS, use)
    return made.sign(key, _HASH).public_bytes(_PEM), _private(key)


def make_box() -> tuple[bytes, str]:
    """An X25519 private key (32 bytes) and its public key in base64."""
    key = x25519.X25519PrivateKey.generate()
    return key.private_bytes_raw(), base64.b64encode(key.public_key().public_bytes_raw()).decode()


def shared_secret(box_key: bytes, other: str) -> bytes:
    """What the owners of two boxes know, and nobody else: their X25519 secret (32 bytes)."""
    key = x25519.X25519PrivateKey.from_private_bytes(box_key)
    return key.exchange(x25519.X25519PublicKey.from_public_bytes(base64.b64decode(other)))


def sealed(secret: bytes, context: bytes, data: bytes) -> bytes:
    """Data that only the two owners of a shared secret can open, and only for this context."""
    nonce = os.urandom(12)
    return nonce + _cipher(secret).encrypt(nonce, data, context)


def opened(secret: bytes, context: bytes, data: bytes) -> bytes:
    """What was sealed for this context; a StoreError if it was not, or has changed."""
    try:
        return _cipher(secret).decrypt(data[:12], data[12:], context)
    except (InvalidTag, ValueError):
        raise StoreError("a sealed message cannot be opened") from None


def _cipher(secret: bytes) -> ChaCha20Poly1305:
    derived = HKDF(hashes.SHA256(), 32, salt=None, info=b"coterie sealed").derive(secret)
    return ChaCha20Poly1305(derived)


def make_operator() -> tuple[bytes, str]:
    """An Ed25519 private key (32 bytes) that signs messages, and its public key in base64."""
    key = ed25519.Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), base64.b64encode(key.public_key().public_bytes_raw()).decode()


def sign_message(key: bytes, data: bytes) -> bytes:
    """The operator's signature (64 bytes) over these bytes."""
    return ed25519.Ed25519PrivateKey.from_private_bytes(key).sign(data)


def signed_by(public: str, signature: bytes, data: bytes) -> bool:
    """Whether the owner of this public key has signed these bytes."""
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
        key.verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(key_pem: bytes, data: bytes) -> str:
    """The signature of a certificate's key over these bytes, in base64."""
    return base64.b64encode(_private_key(key_pem).sign(data, ec.ECDSA(_HASH))).decode()


# ---- reading -------------------------------------------------------------------------------------


def fingerprint(cert_pem: bytes) -> str:
    """The sha256 of a certificate's DER bytes, in hex."""
    return _certificate(cert_pem).fingerprint(hashes.SHA256()).hex()


def expiry(cert_pem: bytes) -> datetime:
    """The time after which a certificate is no longer valid."""
    return _certificate(cert_pem).not_valid_after_utc


def key_sha256(cert_pem: bytes) -> str:
    """The sha256 of a certificate's public key, in hex."""
    public, form = _public(_certificate(cert_pem)), serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def check_key(key_pem: bytes, cert_pem: bytes) -> None:
    """Refuse a private key that does not belong to a certificate."""
    if _private_key(key_pem).public_key() != _certificate(cert_pem).public_key():
        raise StoreError(
            "the private key does not belong to the certificate; expected two files that were made "
            "together; restore both from the same backup, or renew them"
        )


def check_ca(cert_pem: bytes) -> None:
    """Refuse a certificate that is not as :func:`make_ca` makes it, or is not valid now."""
    _check_form(_certificate(cert_pem), None, "the CA's")


def check_site(cert_pem: bytes, name: str) -> None:
    """Refuse a certificate that is not as :func:`make_site` makes it, or is not valid now."""
    found = _certificate(cert_pem)
    _check_form(found, ExtendedKeyUsageOID.CLIENT_AUTH, "a site's")
    if found.subject != _named(name):
        raise StoreError(
            f"the certificate is for '{found.subject.rfc4514_string()}'; expected 'CN={name}'; "
            "admit the site under the name that it was made with"
        )


def check_signature(cert_pem: bytes, data: bytes, signature: str) -> None:
    """Refuse a signature that the certificate's key did not make over these bytes."""
    public = _public(_certificate(cert_pem))
    try:
        public.verify(base64.b64decode(signature, validate=True), data, ec.ECDSA(_HASH))
    except (InvalidSignature, ValueError):
        raise StoreError(
            "the signature is not the certificate's over the other fields; expected the file as "
            "coterie wrote it; have it sent again"
        ) from None


# ---- parts ---------------------------------------------------------------------------------------


def _builder(
    subject: x509.Name, issuer: x509.Name, public: _Public, days: int, use: _Use
) -> x509.CertificateBuilder:
    now = _now()
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - _EARLY).not_valid_after(now + timedelta(days=days))
    for extension in _extensions(public, use):
        soft = isinstance(extension, x509.SubjectKeyIdentifier)
        made = made.add_extension(extension, critical=not soft)
    return made


def _now() -> datetime:
    return datetime.now(UTC)


def _extensions(public: _Public, use: _Use) -> list[x509.ExtensionType]:
    """The extensions of a certificate for one use alone; without a use, those of a CA."""
    ca = use is None
    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment"), False)
    no |= dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
    found: list[x509.ExtensionType] = [
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.BasicConstraints(ca=ca, path_length=0 if ca else None),
        x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **no),
    ]
    return found if use is None else [*found, x509.ExtendedKeyUsage([use])]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(_PEM, form, serialization.NoEncryption())


def _private_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        found = serialization.load_pem_private_key(key_pem, None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        _public(found)
    except _MALFORMED as error:
        raise StoreError(f"no private key in PEM ({error}); restore it from a backup") from None
    return found


def _certificate(cert_pem: bytes) -> x509.Certificate:
    """The certificate of a PEM text, which holds nothing else; its key is on the curve P-384."""
    try:
        found = x509.load_pem_x509_certificate(cert_pem)
        _public(found)
        list(found.extensions)
    except _MALFORMED as error:
        raise StoreError(f"no certificate in PEM ({error}); expected one as it was made") from None
    if found.public_bytes(_PEM).split() != cert_pem.split():
        raise StoreError("found more than a certificate in PEM; expected that alone")
    return found


def _public(found: x509.Certificate | ec.EllipticCurvePrivateKey) -> _Public:
    public = found.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != CURVE:
        raise ValueError("its key is not on the curve P-384")
    return public


def _check_form(found: x509.Certificate, use: _Use, whose: str) -> None:
    """Refuse what is not signed by itself with exactly these extensions, and valid now."""
    try:
        found.verify_directly_issued_by(found)
        if [each.value for each in found.extensions] != _extensions(_public(found), use):
            raise ValueError("it has other uses")
    except (InvalidSignature, ValueError, TypeError) as error:
        said = str(error) or "its signature is wrong"
        raise StoreError(
            f"found a certificate that is not {whose} ({said}); expected it as it was made; have "
            "it sent again"
        ) from None
    if not found.not_valid_before_utc <= _now() <= found.not_valid_after_utc:
        raise StoreError(
            f"the certificate is valid from {found.not_valid_before_utc:%Y-%m-%d} to "
            f"{found.not_valid_after_utc:%Y-%m-%d}; expected today to be between; check the clock, "
            "or make a new one"
        )
