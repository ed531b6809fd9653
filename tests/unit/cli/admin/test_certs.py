"""A private authority: who a certificate is for stands in it, and it ends soon."""

import json
import ssl
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from pacekeeper.cli.admin import ca
from pacekeeper.cli.admin.ca import DAYS, Kind
from pacekeeper.cli.admin.certs import command
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.protos import tls
from support.authorities import Authority


@pytest.fixture
def fleet(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def usages(cert: Path) -> list[x509.ObjectIdentifier]:
    loaded = x509.load_pem_x509_certificate(cert.read_bytes())
    return list(loaded.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


@pytest.mark.parametrize("kind", [Kind.NODE, Kind.OPERATOR, Kind.VIEWER])
def test_a_callers_certificate_names_it_and_can_not_answer(fleet: Authority, kind: Kind) -> None:
    cert = fleet.cert(kind, "x")
    assert ca.read_certificate(cert).identity == f"spiffe://pacekeeper/{kind}/x"
    assert usages(cert) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_controllers_certificate_has_its_hosts_and_calls_the_one_that_leads(
    fleet: Authority,
) -> None:
    cert = fleet.cert(Kind.CONTROLLER, "c", hosts=("ctl.example", "10.0.0.1", "::1"))
    assert ca.read_certificate(cert).hosts == ("ctl.example", "10.0.0.1", "::1")
    assert usages(cert) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def test_keys_are_their_owners_only_and_fit(fleet: Authority) -> None:
    cert = fleet.cert(Kind.NODE, "x")
    for key in (cert.with_suffix(".key"), fleet.directory / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    context = ssl.create_default_context(cafile=str(fleet.ca))
    context.load_cert_chain(cert, cert.with_suffix(".key"))


def test_certificates_end_soon_and_never_after_their_authority(fleet: Authority) -> None:
    shown = ca.read_certificate(fleet.cert(Kind.NODE, "x", days=DAYS))
    assert shown.ends - shown.begins <= timedelta(days=DAYS, minutes=10)
    with pytest.raises(ConfigError, match="--days"):
        fleet.cert(Kind.NODE, "x", days=4000)


def test_renewing_keeps_the_identity_and_makes_a_new_key(fleet: Authority) -> None:
    cert = fleet.cert(Kind.CONTROLLER, "c", hosts=("ctl.example",), days=1)
    before, key_before = ca.read_certificate(cert), cert.with_suffix(".key").read_bytes()
    ca.renew_certificate(fleet.directory, cert, 3, fleet.now)
    after = ca.read_certificate(cert)
    assert (after.identity, after.hosts) == (before.identity, before.hosts)
    assert usages(cert) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    assert after.ends - before.ends == timedelta(days=2)
    assert cert.with_suffix(".key").read_bytes() != key_before
    assert sorted(path.name for path in fleet.directory.iterdir() if path.name[0] == ".") == []


def test_what_is_of_another_authority_is_not_renewed(fleet: Authority, tmp_path: Path) -> None:
    cert = Authority(tmp_path / "other").cert(Kind.NODE, "x")
    with pytest.raises(ConfigError, match="pki"):
        ca.renew_certificate(fleet.directory, cert, 3, fleet.now)


def test_an_authority_is_never_made_over_another(fleet: Authority) -> None:
    with pytest.raises(HostError, match="pki"):
        ca.create_authority(fleet.directory, "x", 1, fleet.now)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "\u00e4", "x" * 254, "a?b"])
def test_a_name_that_no_identity_can_hold_is_refused(fleet: Authority, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet.cert(Kind.NODE, name)
    assert repr(name) in str(refused.value)


def test_hosts_are_for_controllers_and_only_for_them(fleet: Authority) -> None:
    with pytest.raises(ConfigError, match="--host"):
        fleet.cert(Kind.CONTROLLER, "c")
    with pytest.raises(ConfigError, match="--host"):
        fleet.cert(Kind.NODE, "x", hosts=("x.example",))


def test_a_pair_that_does_not_fit_or_that_others_may_read_is_refused(fleet: Authority) -> None:
    cert, other = fleet.cert(Kind.NODE, "x"), fleet.cert(Kind.NODE, "y")
    mixed = TlsConfig(ca=str(fleet.ca), cert=str(cert), key=str(other.with_suffix(".key")))
    with pytest.raises(ConfigError, match="node-x"):
        tls.check_client(mixed, "")
    tls.check_client(fleet.tls(cert), "")
    cert.with_suffix(".key").chmod(0o644)
    with pytest.raises(ConfigError, match="node-x"):
        tls.check_client(fleet.tls(cert), "")


def test_a_damaged_certificate_is_said(fleet: Authority, tmp_path: Path) -> None:
    """Its parts are read late, one by one."""
    cert = fleet.cert(Kind.NODE, "x")
    der = ssl.PEM_cert_to_DER_cert(cert.read_text())
    (tmp_path / "bad.crt").write_text(
        ssl.DER_cert_to_PEM_cert(der.replace(b"spiffe://", b"\xff\xff\xff\xff\xff\xff\xff//"))
    )
    with pytest.raises(ConfigError, match=r"bad\.crt"):
        ca.read_certificate(tmp_path / "bad.crt")


def test_the_commands_make_show_and_renew(tmp_path: Path) -> None:
    runner, folder = CliRunner(), str(tmp_path / "pki")
    assert runner.invoke(command, ["init", "--dir", folder]).exit_code == 0
    made = runner.invoke(command, ["issue", "--dir", folder, "node", "gpu-7"])
    assert "spiffe://pacekeeper/node/gpu-7" in made.output, made.output
    cert = str(tmp_path / "pki" / "node-gpu-7.crt")
    before = Path(cert).read_text()
    runner.invoke(command, ["renew", "--dir", folder, "--within", "3", cert])
    assert Path(cert).read_text() == before
    runner.invoke(command, ["renew", "--dir", folder, "--days", "30", cert])
    assert (ca.read_certificate(Path(cert)).ends - ca.utc_now()).days in (29, 30)
    (document,) = json.loads(runner.invoke(command, ["show", "--json", cert]).output)
    assert (document["identity"], document["is_expired"]) == (
        "spiffe://pacekeeper/node/gpu-7",
        False,
    )


def test_of_several_all_are_shown_and_the_worse_counts(fleet: Authority, tmp_path: Path) -> None:
    well, over = fleet.cert(Kind.NODE, "x"), fleet.cert(Kind.NODE, "y", made_days_ago=3, days=1)
    missing, none = tmp_path / "missing.crt", tmp_path / "none.crt"
    none.write_text("no certificate")

    def shown(*files: Path) -> tuple[int, list[str]]:
        done = CliRunner().invoke(command, ["show", *map(str, files)])
        return done.exit_code, done.output.splitlines()

    assert shown(well)[0] == 0
    assert shown(well, over)[0] == shown(none, well)[0] == 3
    code, lines = shown(missing, over, none, well)
    assert (code, len(lines)) == (4, 4)
    assert [line.partition(":")[0] for line in lines] == list(map(str, (missing, over, none, well)))
    assert shown(over, missing)[0] == 4, "whatever their order"


def test_programs_hear_what_is_wrong_with_each(fleet: Authority, tmp_path: Path) -> None:
    files = [str(tmp_path / "missing.crt"), str(fleet.cert(Kind.NODE, "x"))]
    done = CliRunner().invoke(command, ["show", "--json", *files])
    missing, well = json.loads(done.stdout)
    assert done.exit_code == 4
    assert missing["file"] == files[0] and missing["error"].startswith(files[0])
    assert (well["error"], well["is_expired"]) == ("", False)


def test_showing_what_is_over_ends_with_a_code(fleet: Authority) -> None:
    cert = fleet.cert(Kind.NODE, "x", made_days_ago=3, days=1)
    shown = CliRunner().invoke(command, ["show", str(cert)])
    assert shown.exit_code == int(ConfigError.exit_code)
