"""Settings of the metrics endpoint and of the controller's own webhook.

The webhook is for fleets without Alertmanager.
"""

from dataclasses import dataclass

from pacekeeper.core.config.checks import at_least, at_most, one_of, positive
from pacekeeper.core.config.security import TlsConfig, unauthenticated_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """The destination of the controller's own notifications; without URL there are none."""

    # URL that is told, or a file with it where it is itself a secret (Slack's), readable by its
    # owner only and read anew at each delivery. At most one of both.
    url: str = ""
    url_file: str = ""
    # "alertmanager" (the JSON of its webhook, version 4) or "slack" (a message).
    format: str = "alertmanager"
    # File with the secret that deliveries are signed with (headers of Standard Webhooks), readable
    # by its owner only; empty: they are not signed.
    secret_file: str = ""
    # PEM file with the authorities that the other side's certificate may come from; empty: the
    # system's.
    ca: str = ""
    # URL of a proxy on the way; empty: none, whatever the environment says.
    proxy: str = ""
    # Share of the time that the alert rules wait (`for`) before something is told; 0: at once.
    hold_ratio: float = 1.0
    # Seconds for one attempt, and attempts, with pauses of 1, 2, 4, ... 30 s; then it is given up.
    timeout_s: float = 5.0
    attempts: int = 6

    def __post_init__(self) -> None:
        one_of(self, "format", "alertmanager", "slack")
        positive(self, "timeout_s")
        at_most(self, 60.0, "timeout_s")
        at_least(self, 0.0, "hold_ratio")
        at_least(self, 1, "attempts")
        at_most(self, 100, "attempts")
        if self.url and self.url_file:
            raise ValueError("url, url_file: expected one of them at most")

    @property
    def is_on(self) -> bool:
        """Whether notifications are sent."""
        return bool(self.url or self.url_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Protection of the metrics endpoint; all empty: unencrypted and open to every caller."""

    # PEM file with the endpoint's certificate (`pacekeeper certs issue metrics`), and its private
    # key, which nobody but its owner may read. Both are read again when they change.
    cert: str = ""
    key: str = ""
    # PEM file with authorities: who asks must have a certificate of theirs; empty: needs none.
    ca: str = ""
    # File with the bearer token that who asks must show, readable by its owner only; empty: none.
    token_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert, key: expected both files or neither")
        if self.ca and not self.cert:
            raise ValueError("ca: expected cert and key, too: without TLS nobody shows any")

    @property
    def tls(self) -> TlsConfig:
        """The same files as TLS settings."""
        return TlsConfig(ca=self.ca, cert=self.cert, key=self.key)


def unauthenticated_metrics(address: str, metrics: MetricsConfig) -> str:
    """Why metrics need `insecure` to be served at `address`; empty: they do not."""
    why = unauthenticated_listener("--metrics-listen", address, metrics.tls, metrics.token_file)
    return why.replace("nothing tells who calls", "nobody is asked who he is")
