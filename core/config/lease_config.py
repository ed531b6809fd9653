"""Settings of controllers that stand by for each other: docs/high-availability.md."""

from dataclasses import dataclass

from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.config.config_checks import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Where the lease is kept that lets one of several controllers command."""

    # etcd://HOST:PORT,HOST:PORT/KEY or k8s://NAMESPACE/NAME; empty: this is the only controller.
    url: str = ""
    # This controller's name among them; empty: the host name.
    member: str = ""
    # host:port at which the others reach it; empty: where it listens.
    advertise: str = ""
    # Seconds without a renewal after which another takes over. Raising it bears longer pauses of
    # the lease's store, and makes a takeover as much later.
    duration_s: float = 4.0
    # Seconds between two renewals.
    renew_s: float = 1.0
    # Seconds by which the leader stops before another may begin: it bears clocks whose rates differ
    # by as large a part of duration_s.
    margin_s: float = 1.0
    # Seconds for which a standby may hold up what the leader stores before it counts no more.
    sync_within_s: float = 2.0
    # PEM files for the store of the lease: its authority, our certificate and key. Of Kubernetes
    # and of etcd://; without `ca` etcd is spoken to in the clear, on loopback only.
    ca: str = ""
    cert: str = ""
    key: str = ""
    # Kubernetes: https://HOST:PORT of the API and the file of the token; empty: as in every pod.
    api: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        positive(self, "duration_s", "renew_s", "margin_s", "sync_within_s")
        if self.url and not self.url.startswith(("etcd://", "k8s://")):
            raise ValueError(
                f"url: expected etcd://HOST:PORT/KEY or k8s://NAMESPACE/NAME, got {self.url!r}"
            )
        if self.renew_s + self.margin_s >= self.duration_s:
            raise ValueError("duration_s: expected above renew_s + margin_s")
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert, key: expected both files or neither")
        if self.advertise:
            try:
                host_and_port(self.advertise)
            except ValueError as error:
                raise ValueError(f"advertise: {error}") from None
