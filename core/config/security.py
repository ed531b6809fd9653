"""Settings of certificates, access control and limits; each comment gives the unit.

What they mean together: docs/security.md. `core/config/loader.py` reads them.
"""

import re
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from pacekeeper.core.addresses import is_loopback
from pacekeeper.core.config.base import named, reject, settings

TRUST_DOMAIN = "pacekeeper"
TrustDomain = Annotated[
    str,
    named(
        lambda name: re.fullmatch(r"[\w.-]+", name) is not None,
        "letters, digits, '-', '.' or '_'",
    ),
]
MessageBytes = Annotated[int, Field(ge=1024, le=1 << 30)]


def lone_file(cert: str, key: str) -> str:
    """The violation of a certificate without its key, or a key without certificate; or empty."""
    return "" if bool(cert) == bool(key) else "cert, key: expected both files or neither"


@settings
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
        reject(lone_file(self.cert, self.key))

    @property
    def is_on(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.ca or self.cert)


@settings
class AccessConfig:
    """Identities of the controller's callers, and its audit log."""

    # The trust domain of identities in certificates: spiffe://DOMAIN/node/NAME and so on.
    trust_domain: TrustDomain = TRUST_DOMAIN
    # Whether a certificate without such an identity counts as the node of its one DNS name.
    nodes_by_dns: bool = False
    # File of bearer tokens, made by `pacekeeper tokens`; empty: none are taken.
    tokens: str = ""
    # File of the audit log, JSON lines; empty: the name of the SQLite store with ".audit.jsonl" at
    # its end. To be set with a PostgreSQL store.
    audit: str = ""
    # The audit log is set aside at this size, and so many old ones are kept.
    audit_max_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20
    audit_kept: Annotated[int, Field(ge=1, le=1000)] = 8


@settings
class LimitsConfig:
    """Limits for one caller of the controller; unidentified callers are counted by address."""

    # Largest report of an agent, and largest question of anybody.
    max_report_bytes: MessageBytes = 64 << 20
    max_question_bytes: MessageBytes = 64 << 10
    # Calls per second in the long run, and at once; beyond, a call is refused.
    calls_per_s: PositiveFloat = 100.0
    calls_at_once: PositiveInt = 500
    # The same of reports on one stream; beyond, they are read later: nothing is lost.
    reports_per_s: PositiveFloat = 500.0
    reports_at_once: PositiveInt = 8192
    # Watches that one caller may have open.
    watches: PositiveInt = 64
    # Seconds a connection lives before it is made anew: certificates and tokens are looked at then.
    connection_s: PositiveFloat = 3600.0


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
