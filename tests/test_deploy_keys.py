"""Keys and certificates: what TLS accepts of them, and what is refused as not ours."""

import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.deploy import keys
from coterie.errors import StoreError

HOST = "coordinator.example.org"
PEM = serialization.Encoding.PEM


@pytest.fixture(scope="module")
def ca():
    return keys.make_ca("demo")


@pytest.fixture(scope="module")
def server(ca):
    return keys.make_server(*ca, HOST)


@pytest.fixture(scope="module")
def site():
    return keys.make_site("a")


def load(context: ssl.SSLContext, pair: tuple[bytes, bytes], folder) -> ssl.SSLContext:
    for name, data in zip(("cert", "key"), pair, strict=True):
        (folder / name).write_bytes(data)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context


def handshake(server, site, trusted, ca, folder, host=HOST) -> bytes:
    """The DER of the client's certificate after a TLS 1.3 handshake in memory; or ssl.SSLError."""
    there = load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server, folder)
    there.verify_mode = ssl.CERT_REQUIRED
    there.load_verify_locations(cadata="".join(cert.decode() for cert in trusted))
    here = load(ssl.create_default_context(cadata=ca.decode()), site, folder)
    for context in (there, here):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = here.wrap_bio(down, up, server_hostname=host)
    door = there.wrap_bio(up, down, server_side=True)
    waiting = [client, door]
    for _ in range(6):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    return door.getpeercert(binary_form=True)


def test_a_site_and_its_coordinator_meet_over_tls(ca, server, site, tmp_path):
    """The coordinator learns the sha256 that `fingerprint` gives; strict checks included."""
    found = handshake(server, site, [site[0]], ca[0], tmp_path)
    assert x509.load_der_x509_certificate(found).fingerprint(hashes.SHA256()).hex() == (
        keys.fingerprint(site[0])
    )


def test_an_address_may_be_an_ip(ca, site, tmp_path):
    for host in ("127.0.0.1", "::1"):
        handshake(keys.make_server(*ca, host), site, [site[0]], ca[0], tmp_path, host)


def test_tls_refuses_strangers(ca, server, site, tmp_path):
    other_ca, other_site = keys.make_ca("demo"), keys.make_site("a")
    with pytest.raises(ssl.SSLError):  # a coordinator of another CA of the same name
        handshake(keys.make_server(*other_ca, HOST), site, [site[0]], ca[0], tmp_path)
    with pytest.raises(ssl.SSLError):  # another host
        handshake(server, site, [site[0]], ca[0], tmp_path, "elsewhere.example.org")
    with pytest.raises(ssl.SSLError):  # a site of that name that was not admitted
        handshake(server, other_site, [site[0]], ca[0], tmp_path)
    with pytest.raises(ssl.SSLError):  # a site's key in the place of the coordinator's
        handshake(site, site, [site[0]], site[0], tmp_path)
    with pytest.raises(ssl.SSLError):  # the coordinator's certificate as a site's
        handshake(server, server, [site[0], ca[0]], ca[0], tmp_path)


def signed_by(signer_cert: bytes, signer_key: bytes, name: str) -> tuple[bytes, bytes]:
    """A client certificate for ``name`` that another certificate's key signed."""
    issuer = x509.load_pem_x509_certificate(signer_cert)
    signer = serialization.load_pem_private_key(signer_key, None)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(issuer.subject, subject, key.public_key(), 7)
    made = made.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(9))
    for part in x509.load_pem_x509_certificate(keys.make_site(name)[0]).extensions:
        if not isinstance(part.value, x509.SubjectKeyIdentifier):
            made = made.add_extension(part.value, part.critical)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.sign(signer, hashes.SHA384()).public_bytes(PEM), key.private_bytes(PEM, *form)


def test_a_site_signs_no_other_site(ca, server, site, tmp_path):
    """Neither TLS nor admission takes a certificate that an admitted site signed."""
    forged = signed_by(*keys.make_site("mallory"), "a")
    with pytest.raises(StoreError, match="is not a site's"):
        keys.check_site(forged[0], "a")
    by_site = signed_by(*site, "victim")
    with pytest.raises(ssl.SSLError):
        handshake(server, by_site, [site[0]], ca[0], tmp_path)


def test_only_the_ca_may_sign_and_only_leaves(ca, server, site):
    for pair, signs in ((ca, True), (server, False), (site, False)):
        found = x509.load_pem_x509_certificate(pair[0]).extensions
        basic = found.get_extension_for_class(x509.BasicConstraints)
        usage = found.get_extension_for_class(x509.KeyUsage)
        assert basic.critical
        assert usage.critical
        assert (basic.value.ca, usage.value.key_cert_sign) == (signs, signs)
        assert basic.value.path_length == (0 if signs else None)


def test_checks_accept_their_own_kind_alone(ca, server, site):
    keys.check_ca(ca[0])
    keys.check_site(site[0], "a")
    for wrong in (server[0], site[0]):
        with pytest.raises(StoreError, match="is not the CA's"):
            keys.check_ca(wrong)
    for wrong in (server[0], ca[0]):
        with pytest.raises(StoreError, match="is not a site's"):
            keys.check_site(wrong, "a")
    with pytest.raises(StoreError, match="expected 'CN=b'"):
        keys.check_site(site[0], "b")
    for wrong in (b"", b"nothing", site[1], site[0] + ca[0], site[0] + site[1]):
        with pytest.raises(StoreError, match="certificate"):
            keys.check_site(wrong, "a")
    with pytest.raises(StoreError, match="does not belong"):
        keys.make_server(ca[0], site[1], HOST)


def test_a_certificate_has_its_days(ca, server, site, monkeypatch):
    for (cert, _), days in (
        (ca, keys.CA_DAYS),
        (server, keys.SERVER_DAYS),
        (site, keys.SITE_DAYS),
    ):
        left = keys.expiry(cert) - datetime.now(UTC)
        assert timedelta(days=days - 1) < left <= timedelta(days=days)
    assert keys.SERVER_DAYS == 398
    for when in (keys.SITE_DAYS + 1, -2):
        later = datetime.now(UTC) + timedelta(days=when)
        monkeypatch.setattr(keys, "_now", lambda later=later: later)
        with pytest.raises(StoreError, match="expected today to be between"):
            keys.check_site(site[0], "a")


def test_a_key_is_known_in_another_certificate(site, monkeypatch):
    key = serialization.load_pem_private_key(site[1], None)
    monkeypatch.setattr(keys.ec, "generate_private_key", lambda _: key)
    again, _ = keys.make_site("a")
    assert keys.key_sha256(again) == keys.key_sha256(site[0])
    assert keys.fingerprint(again) != keys.fingerprint(site[0])


def test_a_signature_is_over_every_byte(site):
    signature = keys.sign(site[1], b"data")
    keys.check_signature(site[0], b"data", signature)
    for data, given in ((b"Data", signature), (b"data", signature[:-6]), (b"data", "§")):
        with pytest.raises(StoreError, match="signature"):
            keys.check_signature(site[0], data, given)
    with pytest.raises(StoreError, match="signature"):
        keys.check_signature(keys.make_site("a")[0], b"data", signature)


def test_what_is_sealed_opens_for_two_owners_and_one_context_alone():
    (mine, my_box), (theirs, their_box), (other, _) = (keys.make_box() for _ in range(3))
    secret = keys.shared_secret(mine, their_box)
    data = keys.sealed(secret, b"round 3", b"model")
    assert keys.opened(keys.shared_secret(theirs, my_box), b"round 3", data) == b"model"
    stranger = keys.shared_secret(other, my_box)
    wrong = [(stranger, b"round 3", data), (secret, b"round 4", data), (secret, b"round 3", b"")]
    wrong += [
        (secret, b"round 3", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for at in range(len(data))
    ]
    for attempt in wrong:
        with pytest.raises(StoreError, match="cannot be opened"):
            keys.opened(*attempt)


def test_without_cryptography_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from coterie.errors import ConfigError\n"
        "try:\n    import coterie.deploy.keys\n"
        "except ConfigError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'coterie[direct]'" in told.stdout
