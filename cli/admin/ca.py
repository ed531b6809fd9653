"""A private certificate authority: one key, short-lived certificates with a SPIFFE identity.

Called by `pacekeeper certs`. All keys are P-256. Certificates of nodes, viewers and operators are
for TLS clients only, those of metrics endpoints for servers only, those of controllers for both: a
standby connects to the leader. The key of the authority never leaves its directory.
"""

import ipaddress
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pacekeeper.core.config.security import TRUST_DOMAIN
from pacekeeper.core.errors import ConfigError, HostError, PacekeeperError
from pacekeeper.core.telemetry.attachment import is_node_name

CA_CERT, CA_KEY = "ca.crt", "ca.key"
CA_DAYS = 5 * 365
DAYS = 7
CLOCK_SKEW = timedelta(minutes=5)  # between the machines of a fleet
_SCHEME = "spiffe://"


class Kind(StrEnum):
    """Holder of a certificate; part of its identity."""

    NODE = "node"
    OPERATOR = "operator"
    VIEWER = "viewer"
    CONTROLLER = "controller"
    METRICS = "metrics"


SERVER_KINDS = (Kind.CONTROLLER, Kind.METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateInfo:
    """Contents of a certificate."""

    file: str
    identity: str
    hosts: tuple[str, ...]
    issuer: str
    is_authority: bool
    begins: datetime
    ends: datetime
    sha256: str

    def is_expired(self, now: datetime) -> bool:
        """Return whether the certificate is invalid at `now`: expired, or not yet valid."""
        return not self.begins <= now <= self.ends


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSubject:
    """Holder of a certificate to issue.

    Attributes:
        kind: kind of holder.
        name: part of the identity.
        hosts: DNS names or IP addresses of a server; empty for clients.
        domain: trust domain of the identity.
    """

    kind: Kind
    name: str
    hosts: Sequence[str] = ()
    domain: str = TRUST_DOMAIN

    def alternative_names(self) -> list[x509.GeneralName]:
        """Return the SPIFFE identity and the hosts. Raises ConfigError if one is invalid."""
        if not is_node_name(self.name) or not self.name.isascii() or set(self.name) & set(" /?#%"):
            raise ConfigError(f"{self.name!r}: expected a name of letters, digits, '-', '.' or '_'")
        if bool(self.hosts) != (self.kind in SERVER_KINDS):
            raise ConfigError(
                "--host is required for controllers and metrics endpoints, and invalid for others"
            )
        identity = f"{_SCHEME}{self.domain}/{self.kind}/{self.name}"
        return [x509.UniformResourceIdentifier(identity), *map(_host, self.hosts)]

    def usages(self) -> list[x509.ObjectIdentifier]:
        """Return the extended key usages of this kind."""
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if self.kind in SERVER_KINDS else []
        if self.kind is Kind.CONTROLLER or not usages:
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        return usages


def create_authority(directory: Path, name: str, days: int, now: datetime) -> Path:
    """Create an authority in a directory.

    Args:
        directory: created if missing.
        name: common name of the authority.
        days: validity.
        now: start of the validity.

    Returns:
        Path of its certificate; the key lies next to it.

    Raises:
        HostError: the directory holds an authority or is not writable.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _usage(signs_certificates=True)
    cert = (
        _builder(subject, subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: {error.strerror}") from None
    if (directory / CA_KEY).exists() or (directory / CA_CERT).exists():
        raise HostError(f"{directory} already holds an authority", remedy="choose another --dir")
    _write(directory / CA_KEY, _key_pem(key), 0o600)
    _write(directory / CA_CERT, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return directory / CA_CERT


def issue_certificate(
    directory: Path, subject: CertificateSubject, *, days: int, now: datetime, out: Path
) -> Path:
    """Issue a certificate OUT.crt with a new key OUT.key; existing files are replaced.

    Args:
        directory: directory of the authority.
        subject: holder of the certificate.
        days: validity.
        now: start of the validity.
        out: path without suffix.

    Raises:
        ConfigError: name or hosts are invalid, or there is no authority.
    """
    names, usages = subject.alternative_names(), subject.usages()
    return _sign(directory, names, usages, subject.name, days, now, out)


def renew_certificate(directory: Path, cert_file: Path, days: int, now: datetime) -> Path:
    """Renew a certificate: same identity, new key, new expiry.

    Raises:
        ConfigError: another authority issued it.
    """
    cert, (authority, _) = _load(cert_file), _authority(directory)
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"{cert_file}: not issued by the authority in {directory}") from None
    names = list(_names(cert))
    usages = list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    common = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    return _sign(directory, names, usages, str(common), days, now, cert_file.with_suffix(""))


def read_certificate(cert_file: Path) -> CertificateInfo:
    """Read a certificate.

    Raises:
        ConfigError: the file is not a certificate, or a damaged one.
        HostError: the file is not readable.
    """
    cert = _load(cert_file, HostError)
    try:
        return _shown(cert_file, cert)
    except (ValueError, x509.DuplicateExtension):
        # The library parses extensions lazily.
        raise ConfigError(f"{cert_file}: damaged certificate") from None


def _shown(cert_file: Path, cert: x509.Certificate) -> CertificateInfo:
    names = _names(cert)
    constraints = [e.value for e in cert.extensions if isinstance(e.value, x509.BasicConstraints)]
    uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    hosts = [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]
    return CertificateInfo(
        file=str(cert_file),
        identity=", ".join(uris),
        hosts=tuple(hosts),
        issuer=cert.issuer.rfc4514_string(),
        is_authority=any(one.ca for one in constraints),
        begins=cert.not_valid_before_utc,
        ends=cert.not_valid_after_utc,
        sha256=cert.fingerprint(hashes.SHA256()).hex(),
    )


def utc_now() -> datetime:
    """Return the present time; tests replace it."""
    return datetime.now(UTC)


def _sign(
    directory: Path,
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    name: str,
    days: int,
    now: datetime,
    out: Path,
) -> Path:
    authority, authority_key = _authority(directory)
    if now + timedelta(days=days) > authority.not_valid_after_utc:
        raise ConfigError(
            f"the authority in {directory} expires on {authority.not_valid_after_utc:%Y-%m-%d}",
            remedy="use fewer --days, or create a new authority with `pacekeeper certs init`",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    signer = authority_key.public_key()
    cert = (
        _builder(subject, authority.subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    cert_file = out.with_name(f"{out.name}.crt")
    # A reader between the two writes sees a mismatch and keeps the pair that it has.
    _write(out.with_name(f"{out.name}.key"), _key_pem(key), 0o600)
    _write(cert_file, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return cert_file


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert = _load(directory / CA_CERT)
    path = directory / CA_KEY
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", remedy="create one with `pacekeeper certs init`"
        ) from None
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not a private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: not a key of `pacekeeper certs init`")
    return cert, key


def _load(path: Path, unreadable: type[PacekeeperError] = ConfigError) -> x509.Certificate:
    """Load a PEM certificate. Raises ConfigError if invalid, `unreadable` if not readable."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise unreadable(f"{path}: {error.strerror}") from None
    except (ValueError, x509.InvalidVersion):
        raise ConfigError(f"{path}: not a PEM certificate") from None


def _names(cert: x509.Certificate) -> tuple[x509.GeneralName, ...]:
    for extension in cert.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            return tuple(extension.value)
    return ()


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise ConfigError(f"--host {text!r}: neither a DNS name nor an IP address") from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically, with its mode set before the first byte. Raises HostError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            fresh.replace(path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None
