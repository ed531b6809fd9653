"""Settings of the Prometheus endpoint of agent and controller, table `[metrics]`."""

from dataclasses import dataclass

from pacekeeper.core.config.security import TlsConfig, open_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """How metrics are served; all empty: in the clear, to whoever reaches the port."""

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
        """The same as what other endpoints have."""
        return TlsConfig(ca=self.ca, cert=self.cert, key=self.key)


def open_metrics(address: str, metrics: MetricsConfig) -> str:
    """Why metrics may not be served there like that, unless told to; empty: all is well."""
    why = open_listener("--metrics-listen", address, metrics.tls, metrics.token_file)
    return why.replace("nothing tells who calls", "nobody is asked who he is")
