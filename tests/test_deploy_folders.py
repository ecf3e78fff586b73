"""The folders of a federation: what is admitted is what a site made; everything else is refused."""

import base64
import os
import stat
import tomllib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coterie.deploy import keys, site_folder
from coterie.deploy.admission import public_part
from coterie.deploy.documents import host_and_port
from coterie.deploy.folders import FederationFolder, SiteFolder
from coterie.deploy.small_files import MOST_BYTES, read_private, to_toml, write_document
from coterie.errors import ConfigError, CoterieError, StoreError

ADDRESS = "coordinator.example.org:8443"


@pytest.fixture
def fed(tmp_path):
    return FederationFolder.create(tmp_path / "fed", ADDRESS)


@pytest.fixture
def site(fed, tmp_path):
    return SiteFolder.create(tmp_path / "a", fed.invite, "a")


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


# ---- what one side makes, the other takes --------------------------------------------------------


def test_what_a_site_makes_is_admitted(fed, site):
    admitted = fed.add_site(site.public, "a")
    assert fed.sites() == (admitted,) == (fed.site("a"),)
    assert admitted.certificate.encode() == site.certificate.read_bytes()
    assert admitted.sha256 == keys.fingerprint(site.certificate.read_bytes())
    assert admitted.revoked is None
    assert admitted.box == site.public_part().box
    assert site.coordinator.read_bytes() == fed.ca.read_bytes()
    keys.check_key(site.key.read_bytes(), site.certificate.read_bytes())
    keys.check_key(fed.server_key.read_bytes(), fed.server.read_bytes())
    assert len(site.secret()) == len(site.box_key()) == 32
    said = (site.name, site.federation, site.address, site.transport)
    assert said == ("a", fed.name, ADDRESS, "direct")


def test_opened_again_a_folder_is_the_same(fed, site):
    assert FederationFolder.open(fed.path) == fed
    assert SiteFolder.open(site.path) == site


def test_a_site_consents_to_nothing_by_itself(site):
    assert not any(dict(site.consent).values())
    assert site.code == {}
    assert site.data.name is None
    assert site.data.options == {}


def test_sites_are_in_the_order_of_their_names(fed, tmp_path):
    for name in ("c", "B", "a1", "a"):
        made = SiteFolder.create(tmp_path / f"of-{name}", fed.invite, name)
        fed.add_site(made.public, name)
    assert [each.name for each in fed.sites()] == sorted(("c", "B", "a1", "a"))


def test_no_private_byte_leaves_a_folder(fed, site):
    """No four bytes in a row of a secret, in whatever writing, are in a file of the other side."""
    fed.add_site(site.public, "a")
    public = [site.public.read_bytes(), fed.invite.read_bytes()]
    theirs = b"".join([*tree(fed.path).values(), *public])
    ours = b"".join([*tree(site.path).values(), *public])
    for secret in (site.key.read_bytes(), site.box_key(), site.secret()):
        assert not leaks(secret, theirs)
    for secret in (fed.server_key.read_bytes(), (fed.path / "ca.key").read_bytes()):
        assert not leaks(secret, ours)
    assert leaks(site.key.read_bytes(), site.key.read_bytes())  # the check can fail
    assert leaks(site.box_key(), b"x" + base64.b64encode(site.box_key()))


def leaks(secret: bytes, text: bytes) -> bool:
    """Whether a part of a secret is in a text: as bytes, in hex or in base64."""
    if b"PRIVATE KEY" in secret:
        number = serialization.load_pem_private_key(secret, None).private_numbers().private_value
        if any(line in text for line in secret.splitlines()[2:-1]):
            return True
        secret = number.to_bytes(48, "big")
    forms = [secret, secret.hex().encode()]
    forms += [base64.b64encode(secret[at:])[:40] for at in range(3)]
    return any(form[at : at + 12] in text for form in forms for at in range(len(form) - 12))


# ---- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_secrets_have_mode_600_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        if umask != 0o277:  # nobody could enter a folder of that umask
            fed = FederationFolder.create(tmp_path / "fed", ADDRESS)
            site = SiteFolder.create(tmp_path / "a", fed.invite, "a")
            fed.renew()
            site.renew()
            secrets = [fed.path / "ca.key", fed.server_key, site.key]
            secrets += [site.path / "box.key", site.path / "secret"]
            assert {mode(path) for path in secrets} == {0o600}
            assert {mode(path) for path in (fed.path, fed.path / "sites", site.path)} == {0o700}
        else:
            site_folder.write_private(tmp_path / "secret", b"x")
            assert mode(tmp_path / "secret") == 0o600
    finally:
        os.umask(before)


def test_a_secret_is_never_readable_by_others_for_a_moment(tmp_path, monkeypatch):
    """The file is private when it is made, before its mode is set against a strange umask."""
    seen = []
    real = os.fchmod

    def watched(handle, bits):
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        real(handle, bits)

    monkeypatch.setattr(os, "fchmod", watched)
    before = os.umask(0)
    try:
        site_folder.write_private(tmp_path / "secret", b"x")
    finally:
        os.umask(before)
    assert seen == [0o600]


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_reach_is_refused(fed, site, bits):
    for path, use in (
        (site.path / "key.pem", lambda: site.key),
        (site.path / "box.key", site.box_key),
        (site.path / "secret", site.secret),
        (fed.path / "server.key", lambda: fed.server_key),
        (fed.path / "ca.key", fed.renew),
    ):
        use()
        path.chmod(bits)
        with pytest.raises(StoreError, match=r"mode 600; chmod 600"):
            use()
        path.chmod(0o600)


# ---- what add-site refuses -----------------------------------------------------------------------


def test_a_flipped_byte_is_refused_or_changes_nothing(fed, site):
    """Spaces, line ends and the comment mean nothing; any other byte is noticed."""
    data = site.public.read_bytes()
    part = site.public_part()
    refused = 0
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1
        site.public.write_bytes(changed)
        try:
            admitted = fed.add_site(site.public, "a")
        except CoterieError:
            refused += 1
            continue
        assert admitted.model_dump(include=set(type(part).model_fields)) == part.model_dump()
        (fed.path / "sites" / "a.toml").unlink()
    assert refused > 0.9 * len(data) / 3


@pytest.mark.parametrize("field", ["box", "signature", "certificate", "name"])
def test_a_field_of_another_site_is_refused(fed, site, tmp_path, field):
    other = SiteFolder.create(tmp_path / "other", fed.invite, "a").public_part()
    if field == "name":
        other = other.model_copy(update={"name": "b"})
    mixed = site.public_part().model_copy(update={field: getattr(other, field)})
    write_document(tmp_path / "mixed.pub", mixed, "mixed")
    with pytest.raises(CoterieError):
        fed.add_site(tmp_path / "mixed.pub", "a")
    assert fed.sites() == ()


def test_a_site_cannot_sign_for_what_is_not_its_own(fed, site, tmp_path):
    """A right signature over a certificate of another kind, or of another site."""
    ca, server = keys.make_ca("a"), keys.make_server(*keys.make_ca("a"), "a")
    wrong = []
    for certificate, private in (ca, server, keys.make_site("b")):
        part = public_part("a", certificate, private, keys.make_box()[1])
        wrong.append((private, part))
    for private, part in wrong:
        signed = part.model_copy(update={"signature": keys.sign(private, part.signed())})
        write_document(tmp_path / "wrong.pub", signed, "wrong")
        with pytest.raises(CoterieError, match=r"wrong\.pub: .*(expected|is not)"):
            fed.add_site(tmp_path / "wrong.pub", "a")
    assert fed.sites() == ()


def test_a_private_key_in_a_public_file_is_refused(fed, site, tmp_path):
    for name, text in (
        ("key.pub", site.key.read_bytes()),
        ("both.pub", site.public.read_bytes() + b"# " + site.key.read_bytes()),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(StoreError, match="holds a private key"):
            fed.add_site(tmp_path / name, "a")


def test_links_large_and_special_files_are_refused(fed, site, tmp_path):
    (tmp_path / "link.pub").symlink_to(site.public)
    with pytest.raises(StoreError, match="is a link"):
        fed.add_site(tmp_path / "link.pub", "a")
    os.mkfifo(tmp_path / "pipe.pub")
    with pytest.raises(StoreError, match="no plain file"):
        fed.add_site(tmp_path / "pipe.pub", "a")
    (tmp_path / "large.pub").write_bytes(site.public.read_bytes() + b"\n" * MOST_BYTES)
    with pytest.raises(StoreError, match="more than 65,536 bytes"):
        fed.add_site(tmp_path / "large.pub", "a")
    with pytest.raises(StoreError, match="cannot be read"):
        fed.add_site(tmp_path / "missing.pub", "a")
    for text in (b"\xff", b"name = ", b"[" * 5000, b""):
        (tmp_path / "bad.pub").write_bytes(text)
        with pytest.raises(StoreError, match=r"bad\.pub"):
            fed.add_site(tmp_path / "bad.pub", "a")
    (tmp_path / "more.pub").write_text('extra = "x"\n' + site.public.read_text())
    with pytest.raises(StoreError, match="extra: there is no such field"):
        fed.add_site(tmp_path / "more.pub", "a")


def test_links_in_the_folders_are_refused(fed, site, tmp_path):
    fed.add_site(site.public, "a")
    (fed.path / "sites" / "b.toml").symlink_to(fed.path / "sites" / "a.toml")
    with pytest.raises(StoreError, match="is a link"):
        fed.sites()
    (fed.path / "sites" / "b.toml").unlink()
    (fed.path / "sites").rename(tmp_path / "sites")
    (fed.path / "sites").symlink_to(tmp_path / "sites")
    with pytest.raises(StoreError, match="is a link"):
        fed.sites()
    (site.path / "key.pem").rename(tmp_path / "key.pem")
    (site.path / "key.pem").symlink_to(tmp_path / "key.pem")
    with pytest.raises(StoreError, match="is a link"):
        _ = site.key


def test_a_doubled_name_or_key_is_refused(fed, site, tmp_path):
    fed.add_site(site.public, "a")
    with pytest.raises(ConfigError, match="already called 'a'"):
        fed.add_site(site.public, "a")
    capital = SiteFolder.create(tmp_path / "capital", fed.invite, "A")
    with pytest.raises(ConfigError, match="differs in more than capitals"):
        fed.add_site(capital.public, "A")
    for name, part in doubles(site, tmp_path).items():
        write_document(tmp_path / f"{name}.pub", part, "double")
        with pytest.raises(ConfigError, match="has the keys that the site 'a' has"):
            fed.add_site(tmp_path / f"{name}.pub", name)
    fed.revoke("a")
    for name in doubles(site, tmp_path):
        with pytest.raises(ConfigError, match="which are revoked"):
            fed.add_site(tmp_path / f"{name}.pub", name)


def doubles(site, tmp_path):
    """Rightly signed public parts of sites with other names, but with a key of ``site``."""
    key = serialization.load_pem_private_key(site.key.read_bytes(), None)
    made = keys.ec.generate_private_key
    try:
        keys.ec.generate_private_key = lambda _: key
        same_key = public_part("b", *keys.make_site("b"), keys.make_box()[1])
    finally:
        keys.ec.generate_private_key = made
    same_box = public_part("c", *keys.make_site("c"), site.public_part().box)
    return {"b": same_key, "c": same_box}


def test_a_stored_site_that_was_changed_is_refused(fed, site, tmp_path):
    fed.add_site(site.public, "a")
    path = fed.path / "sites" / "a.toml"
    text = path.read_text()
    lines = text.splitlines()
    del lines[len(lines) // 2]  # of its certificate
    path.write_text("\n".join(lines))
    with pytest.raises(StoreError, match="no certificate"):
        fed.sites()
    path.unlink()
    (fed.path / "sites" / "b.toml").write_text(text)
    with pytest.raises(StoreError, match="expected that of 'b'"):
        fed.sites()


# ---- revoking, renewing, expiry ------------------------------------------------------------------


def test_a_revoked_site_stays_listed_and_comes_back_with_new_keys_only(fed, site):
    fed.add_site(site.public, "a")
    old = site.public.read_bytes()
    revoked = fed.revoke("a")
    assert fed.sites() == (revoked,)
    assert revoked.revoked is not None
    with pytest.raises(ConfigError, match="is revoked since"):
        fed.revoke("a")
    with pytest.raises(ConfigError, match="has the keys"):
        fed.add_site(site.public, "a")
    secret = site.secret()
    site.renew()
    back = fed.add_site(site.public, "a")
    assert back.revoked is None
    assert back.former == (revoked.key,)
    assert site.secret() == secret
    fed.revoke("a")
    site.renew()
    assert fed.add_site(site.public, "a").former == (revoked.key, back.key)
    fed.revoke("a")
    site.public.write_bytes(old)
    with pytest.raises(ConfigError, match="has the keys"):
        fed.add_site(site.public, "a")


def test_an_unknown_site_cannot_be_revoked(fed, site):
    fed.add_site(site.public, "a")
    with pytest.raises(ConfigError, match=r"no site is called 'aa'; did you mean 'a'\?"):
        fed.revoke("aa")


def test_a_renewed_coordinator_has_the_same_ca(fed, site):
    before = (fed.server.read_bytes(), fed.server_key.read_bytes(), fed.ca.read_bytes())
    fed.renew()
    after = (fed.server.read_bytes(), fed.server_key.read_bytes(), fed.ca.read_bytes())
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True]
    keys.check_key(after[1], after[0])


def test_expiry_is_warned_of_thirty_days_before(fed, site, monkeypatch):
    fed.add_site(site.public, "a")
    assert fed.warnings() == site.warnings() == ()

    def in_days(days):
        monkeypatch.setattr(site_folder, "now", lambda: datetime.now(UTC) + timedelta(days=days))

    in_days(keys.SERVER_DAYS - 31)
    assert fed.warnings() == ()
    in_days(keys.SERVER_DAYS - 29)
    (line,) = fed.warnings()
    assert "the coordinator's certificate expires on" in line
    in_days(keys.SITE_DAYS + 1)
    assert "the coordinator's certificate expired on" in fed.warnings()[0]
    assert "the certificate of 'a' expired on" in fed.warnings()[1]
    assert "this site's certificate expired on" in site.warnings()[0]
    fed.revoke("a")
    assert len(fed.warnings()) == 1
    in_days(keys.CA_DAYS)
    assert len(site.warnings()) == 2


# ---- names, addresses, invitations ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "-a", "_a", "a b", "a.b", "a/b", "..", "é", "a" * 41, "a\n"])
def test_names_that_cannot_be_files_are_refused(fed, tmp_path, name):
    with pytest.raises(ConfigError, match="--name"):
        SiteFolder.create(tmp_path / "x", fed.invite, name)
    assert not (tmp_path / "x").exists()


def test_names_that_can_be_files_are_taken(fed, tmp_path):
    for at, name in enumerate(("a" * 40, "0", "Ward-7_b")):
        assert SiteFolder.create(tmp_path / str(at), fed.invite, name).public.is_file()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:1", ("localhost", 1)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("[::1]:8443", ("::1", 8443)),
    ],
)
def test_addresses_have_a_host_and_a_port(address, expected):
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "host",
            "host:",
            ":8443",
            "host:0",
            "host:65536",
            "host:-1",
            "host:٣",
            "host.:1",
            "a b:1",
        ),
        *(
            "::1:80",
            "[x]:1",
            "h_:1",
            "http://host:1",
            "[fe80::1%eth0]:1",
            '"\n:1',
            "a" * 254 + ":1",
        ),
    ],
)
def test_other_addresses_are_refused(address, tmp_path):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        FederationFolder.create(tmp_path / "fed", address)
    assert not (tmp_path / "fed").exists()


def test_an_unknown_transport_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'flower'"):
        FederationFolder.create(tmp_path / "fed", ADDRESS, "flowers")


def test_no_folder_is_overwritten(fed, site, tmp_path):
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        FederationFolder.create(fed.path, ADDRESS)
    with pytest.raises(ConfigError, match="exists already"):
        SiteFolder.create(site.path, fed.invite, "a")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        SiteFolder.create(tmp_path / "link", fed.invite, "a")
    (tmp_path / "link").unlink()
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    SiteFolder.create(tmp_path / "empty", fed.invite, "a")


def test_a_folder_that_fails_leaves_nothing(fed, tmp_path, monkeypatch):
    before = tree(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(site_folder, "_write_keys", full)
    with pytest.raises(StoreError, match="No space left"):
        SiteFolder.create(tmp_path / "x", fed.invite, "a")
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob(".x*"))


@pytest.mark.parametrize("field", ["operator", "ca", "signature"])
def test_an_invitation_that_was_changed_is_refused(fed, tmp_path, field):
    other = FederationFolder.create(tmp_path / "other", ADDRESS)
    ours, theirs = (tomllib.loads(each.invite.read_text()) for each in (fed, other))
    (tmp_path / "mixed.toml").write_text(to_toml({**ours, field: theirs[field]}))
    with pytest.raises(StoreError, match="the signature is not the certificate's"):
        SiteFolder.create(tmp_path / "a", tmp_path / "mixed.toml", "a")
    leaf = {**ours, "ca": fed.server.read_text()}
    (tmp_path / "leaf.toml").write_text(to_toml(leaf))
    with pytest.raises(StoreError, match="is not the CA's"):
        SiteFolder.create(tmp_path / "a", tmp_path / "leaf.toml", "a")


# ---- site.toml -----------------------------------------------------------------------------------


def test_the_administrators_tables_are_read(site):
    (site.path / "their.csv").write_text("x,y\n1,2\n")
    path = site.path / "site.toml"
    text = path.read_text().replace('# name = "their.csv"', 'name = "their.csv"')
    text = text.replace('# target = "outcome"', 'target = "y"\ndrop = ["x"]')
    text = text.replace("shown = false", "shown = true").replace("mib = 1024", "mib = 7")
    path.write_text(text + f'"methods/own.py" = "{"0" * 64}"\n')
    found = SiteFolder.open(site.path)
    assert found.data.name == str(site.path / "their.csv")
    assert found.data.options == {"target": "y", "drop": ["x"]}
    path.write_text(path.read_text().replace('"their.csv"', '"digits"'))
    assert SiteFolder.open(site.path).data.name == "digits"  # no file of the folder
    assert found.consent.shown
    assert found.limits.message_mib == 7
    assert found.code == {"methods/own.py": "0" * 64}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("shown = false", "show = true", r"consent\.show: .*did you mean 'shown'"),
        ("shown = false", 'shown = "yes"', r"consent\.shown: found 'yes'; expected a valid bool"),
        ("shown = false", "shown = 1", r"consent\.shown: found 1"),
        ("seconds = 3600", "seconds = 0", r"limits\.seconds: found 0; expected greater than"),
        ("seconds = 3600", "seconds = inf", r"limits\.seconds"),
        ('name = "a"', 'name = "../a"', r"site\.name"),
        ('transport = "direct"', 'transport = "http"', r"'direct' or 'flower'"),
        ("[data]", '[data]\nname = "a\\u0000b"', r"data\.name"),
        ("[code]", '[code]\n"x.py" = "abc"', r"code\.x\.py"),
        ("[consent]", "[consents]", r"consents: there is no such field; did you mean 'consent'"),
        (f'address = "{ADDRESS}"\n', "", r"site\.address: missing"),
    ],
)
def test_a_wrong_field_is_named(site, old, new, said):
    path = site.path / "site.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(StoreError, match=said):
        SiteFolder.open(site.path)


def test_a_folder_of_another_kind_is_refused(fed, site, tmp_path):
    with pytest.raises(ConfigError, match=r"has no site\.toml; .*'coterie site init'"):
        SiteFolder.open(fed.path)
    with pytest.raises(ConfigError, match=r"has no federation\.toml"):
        FederationFolder.open(site.path)
    with pytest.raises(StoreError, match="cannot be read"):
        read_private(tmp_path / "none")


# ---- TOML ----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAF = st.one_of(TEXT, st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
TABLE = st.dictionaries(TEXT, LEAF | st.lists(LEAF, max_size=3), max_size=4)


@settings(deadline=None, max_examples=50)
@example({"\n": "\n", "a\n": {"\n": ["\n", "a\r\nb", '"""\n', "\\\n"]}})
@given(st.dictionaries(TEXT, TABLE | LEAF, max_size=4))
def test_what_is_written_as_toml_is_read_again(table):
    assert tomllib.loads(to_toml(table)) == table
