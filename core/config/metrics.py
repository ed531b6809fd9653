"""Settings of the metrics endpoint and of the controller's own webhook.

The webhook is for fleets without Alertmanager.
"""

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from pacekeeper.core.config.base import one_of, reject, settings
from pacekeeper.core.config.security import TlsConfig, lone_file, unauthenticated_listener


@settings
class WebhookConfig:
    """The destination of the controller's own notifications; without URL there are none."""

    # URL that is told, or a file with it where it is itself a secret (Slack's), readable by its
    # owner only and read anew at each delivery. At most one of both.
    url: str = ""
    url_file: str = ""
    # "alertmanager" (the JSON of its webhook, version 4) or "slack" (a message).
    format: Annotated[str, one_of("alertmanager", "slack")] = "alertmanager"
    # File with the secret that deliveries are signed with (headers of Standard Webhooks), readable
    # by its owner only; empty: they are not signed.
    secret_file: str = ""
    # PEM file with the authorities that the other side's certificate may come from; empty: the
    # system's.
    ca: str = ""
    # URL of a proxy on the way; empty: none, whatever the environment says.
    proxy: str = ""
    # Share of the time that the alert rules wait (`for`) before something is told; 0: at once.
    hold_ratio: NonNegativeFloat = 1.0
    # Seconds for one attempt, and attempts, with pauses of 1, 2, 4, ... 30 s; then it is given up.
    timeout_s: Annotated[float, Field(gt=0.0, le=60.0)] = 5.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 6

    def __post_init__(self) -> None:
        reject(self.url and self.url_file and "url, url_file: expected one of them at most")

    @property
    def is_on(self) -> bool:
        """Whether notifications are sent."""
        return bool(self.url or self.url_file)


@settings
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
        reject(
            lone_file(self.cert, self.key),
            self.ca
            and not self.cert
            and "ca: expected cert and key, too: without TLS no client sends a certificate",
        )

    @property
    def tls(self) -> TlsConfig:
        """The same files as TLS settings."""
        return TlsConfig(ca=self.ca, cert=self.cert, key=self.key)


def unauthenticated_metrics(address: str, metrics: MetricsConfig) -> str:
    """Why metrics need `insecure` to be served at `address`; empty: they do not."""
    why = unauthenticated_listener("--metrics-listen", address, metrics.tls, metrics.token_file)
    return why.replace("nothing tells who calls", "nobody is asked who he is")
