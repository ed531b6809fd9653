"""Settings of the controller, tables `[controller]`, `[lease]` and `[retention]`.

Each comment gives unit and trade-off. `core/config/loader.py` reads the TOML file.
"""

from dataclasses import field
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from pacekeeper.core.addresses import AGENT_PORT, API_PORT
from pacekeeper.core.config.base import (
    Listener,
    NonEmpty,
    OptionalAddress,
    OptionalListener,
    reject,
    settings,
)
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.metrics import MetricsConfig, WebhookConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.config.security import AccessConfig, LimitsConfig, TlsConfig
from pacekeeper.core.errors import ConfigError

Days = Annotated[float, Field(gt=0.0, le=36_500.0)]


@settings
class RetentionConfig:
    """Limits of the history in the store.

    Open incidents, waiting proposals, standing orders and running jobs are kept regardless of age.
    Device strikes have a limit of their own (90 days).
    """

    # Days that the past is kept: closed incidents with their courses, decisions, proposals that
    # are over, layouts that were in force, how fast jobs went.
    history_days: Days = 90.0
    # The newest of each that are kept at most.
    incidents: PositiveInt = 50_000
    decisions: PositiveInt = 50_000
    proposals: PositiveInt = 10_000
    layouts: PositiveInt = 4096
    # Bytes in the store; beyond, the oldest of these go whatever their age.
    store_bytes: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    # Days, and number, of ended jobs that `pacekeeper status` still shows.
    ended_job_days: Days = 3.0
    ended_jobs: PositiveInt = 512


@settings
class LeaseConfig:
    """The lease that selects the leader among controllers that share a PostgreSQL store."""

    # This controller's name among them; empty: the host name.
    member: str = ""
    # host:port of commands that standbys name as the leader's; empty: api_listen.
    advertise: OptionalAddress = ""
    # Seconds without a renewal after which another takes over. Raising it bears longer pauses of
    # the database, and makes a takeover as much later.
    duration_s: PositiveFloat = 4.0
    # Seconds between two renewals.
    renew_s: PositiveFloat = 1.0
    # Seconds by which the leader stops before another may begin: it bears clocks whose rates differ
    # by as large a part of duration_s. Commands wait for up to half of it (at most 0.5 s) on their
    # way to agents, which leaves them the other half.
    margin_s: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        reject(
            self.renew_s + self.margin_s >= self.duration_s
            and "duration_s: expected above renew_s + margin_s",
        )


@settings
class ControllerConfig:
    """The central service."""

    # host:port that agents attach to; loopback unless you say otherwise.
    listen: Listener = f"127.0.0.1:{AGENT_PORT}"
    # host:port of status, commands and health, for people; loopback unless you say otherwise.
    api_listen: Listener = f"127.0.0.1:{API_PORT}"
    # Processes that serve agents on that port. One is enough below some 5,000 agents; each more
    # costs memory, and some CPU time for every report.
    ingest_processes: Annotated[int, Field(ge=1, le=16)] = 1
    # Whether to listen beyond loopback without encryption, or without knowing who calls.
    insecure: bool = False
    # host:port of the Prometheus endpoint; empty: none.
    metrics_listen: OptionalListener = ""
    # host:port of the web page; empty: none. Needs pacekeeper[web].
    web: OptionalListener = ""
    # Jobs, incidents, decisions and layouts: path of an SQLite file (or sqlite:///PATH), or
    # postgresql://USER@HOST:PORT/DATABASE, which several controllers share. Give the password in
    # the environment (PGPASSWORD) or a file (PGPASSFILE).
    store: NonEmpty = "pacekeeper.sqlite"
    # Seconds between two ticks: policy and blindness are looked at then.
    tick_interval_s: PositiveFloat = 0.2
    # Seconds without a record before a job counts as blind.
    blind_after_s: PositiveFloat = 30.0
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    webhook: WebhookConfig = field(default_factory=WebhookConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    @property
    def is_shared(self) -> bool:
        """Whether several controllers share the store, and a lease in it selects the leader."""
        return self.store.startswith(("postgresql://", "postgres://"))

    @property
    def audit_path(self) -> str:
        """The file of the audit log; by default it lies in the directory of the SQLite store.

        Raises:
            ConfigError: No file is set, and the store is a shared database.
        """
        if self.is_shared and not self.access.audit:
            raise ConfigError(
                "a controller of a shared store needs a path for its own audit log",
                remedy="set [access] audit, such as /var/lib/pacekeeper/audit.jsonl",
            )
        return self.access.audit or f"{self.store.removeprefix('sqlite:///')}.audit.jsonl"
