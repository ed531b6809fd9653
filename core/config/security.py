"""Settings of certificates, access control and limits; each comment gives the unit.

What they mean together: docs/security.md. `core/config/loader.py` reads them.
"""

from dataclasses import dataclass

from pacekeeper.core.addresses import is_loopback

TRUST_DOMAIN = "pacekeeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """The certificate of this process and the authorities it trusts; all empty: no encryption."""

    # PEM file with the authorities that the other side's certificate must come from. A controller
    # that has one asks every caller for a certificate.
    ca: str = ""
    # PEM file with the certificate (and those between it and the authority), and its private key,
    # which nobody but its owner may read. Both are read again when they change.
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert, key: expected both files or neither")

    @property
    def is_on(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.ca or self.cert)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Identities of the controller's callers, and its audit log."""

    # The trust domain of identities in certificates: spiffe://DOMAIN/node/NAME and so on.
    trust_domain: str = TRUST_DOMAIN
    # Whether a certificate without such an identity counts as the node of its one DNS name.
    nodes_by_dns: bool = False
    # File of bearer tokens, made by `pacekeeper tokens`; empty: none are taken.
    tokens: str = ""
    # File of the audit log, JSON lines; empty: the store's name with ".audit.jsonl" at its end.
    audit: str = ""
    # The audit log is set aside at this size, and so many old ones are kept.
    audit_max_bytes: int = 64 << 20
    audit_kept: int = 8

    def __post_init__(self) -> None:
        if not self.trust_domain or not all(c.isalnum() or c in "-._" for c in self.trust_domain):
            raise ValueError(
                f"trust_domain: expected letters, digits, '-', '.' or '_', got "
                f"{self.trust_domain!r}"
            )
        if self.audit_max_bytes < 1 << 16:
            raise ValueError(
                f"audit_max_bytes: expected at least {1 << 16}, got {self.audit_max_bytes}"
            )
        if not 1 <= self.audit_kept <= 1000:
            raise ValueError(f"audit_kept: expected 1 to 1000, got {self.audit_kept}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits for one caller of the controller; unidentified callers are counted by address."""

    # Largest report of an agent, and largest question of anybody.
    max_report_bytes: int = 64 << 20
    max_question_bytes: int = 64 << 10
    # Calls per second in the long run, and at once; beyond, a call is refused.
    calls_per_s: float = 100.0
    calls_at_once: int = 500
    # The same of reports on one stream; beyond, they are read later: nothing is lost.
    reports_per_s: float = 500.0
    reports_at_once: int = 8192
    # Watches that one caller may have open.
    watches: int = 64
    # Seconds a connection lives before it is made anew: certificates and tokens are looked at then.
    connection_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_report_bytes", "max_question_bytes"):
            if not 1024 <= getattr(self, name) <= 1 << 30:
                raise ValueError(f"{name}: expected 1024 to {1 << 30}, got {getattr(self, name)}")
        for name in ("calls_per_s", "reports_per_s", "connection_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}: expected a value above 0, got {getattr(self, name)}")
        for name in ("calls_at_once", "reports_at_once", "watches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


def unencrypted_listener(option: str, address: str, tls: TlsConfig) -> str:
    """Why listening at `address` needs `insecure`: no encryption beyond loopback; empty: it does
    not.
    """
    if is_loopback(address) or tls.cert:
        return ""
    return f"{option} {address} is beyond loopback, and there is no certificate for it"


def unauthenticated_listener(option: str, address: str, tls: TlsConfig, tokens: str) -> str:
    """Why gRPC needs `insecure` at `address`: no encryption or no caller identity; empty: it does
    not.
    """
    if (why := unencrypted_listener(option, address, tls)) or is_loopback(address):
        return why
    if tls.ca or tokens:
        return ""
    return f"{option} {address} is beyond loopback, and nothing tells who calls"


def unencrypted_controller(address: str, tls: TlsConfig) -> str:
    """Why a daemon needs `insecure` for a controller at `address`; empty: it does not."""
    if tls.is_on or is_loopback(address):
        return ""
    return f"the way to controller {address} is beyond loopback and not encrypted"
