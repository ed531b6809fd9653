"""A private authority for tests, and the settings that name its files."""

from datetime import datetime, timedelta
from pathlib import Path

from pacekeeper.cli.admin import ca as authority
from pacekeeper.cli.admin.ca import Kind
from pacekeeper.core.config.security import TRUST_DOMAIN, TlsConfig


class Authority:
    """An authority in a directory; `now` is when everything is made."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        self.directory = directory
        self.now = authority.utc_now() if now is None else now
        authority.create_authority(directory, f"authority {directory.name}", 3650, self.now)

    @property
    def ca(self) -> Path:
        return self.directory / authority.CA_CERT

    def cert(
        self,
        kind: Kind,
        name: str,
        *,
        hosts: tuple[str, ...] = (),
        domain: str = TRUST_DOMAIN,
        made_days_ago: int = 0,
        days: int = 1,
    ) -> Path:
        """The certificate's file; its key lies beside it."""
        return authority.issue_certificate(
            self.directory,
            authority.CertificateSubject(kind=kind, name=name, hosts=hosts, domain=domain),
            days=days,
            now=self.now - timedelta(days=made_days_ago),
            out=self.directory / f"{kind}-{name}-{made_days_ago}",
        )

    def tls(self, cert: Path | None = None) -> TlsConfig:
        """Settings of who has this certificate and believes this authority."""
        if cert is None:
            return TlsConfig(ca=str(self.ca))
        return TlsConfig(ca=str(self.ca), cert=str(cert), key=str(cert.with_suffix(".key")))


def as_toml(tls: TlsConfig) -> str:
    """The table of these settings."""
    return f'[tls]\nca = "{tls.ca}"\ncert = "{tls.cert}"\nkey = "{tls.key}"\n'
