"""The controller's Prometheus metrics: its own counters, and the newest state at each scrape.

A scrape renders the state in its own thread; between scrapes nothing is computed.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from pacekeeper.controller.observability import state_metrics
from pacekeeper.controller.observability.event_loop_lag import LoopLag
from pacekeeper.controller.observability.rank_metrics import RankInfoSeries
from pacekeeper.controller.state.state import State
from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.incidents.findings import Decision, FindingKind, Incident, MitigationLevel
from pacekeeper.core.prometheus_text import MetricsPage
from pacekeeper.protos import metrics_server
from pacekeeper.protos.metrics_server import MetricsServer

_COUNTERS = {
    "reports": "Reports accepted.",
    "reports_missed": "Reports missing from agents' sequence numbers: dropped or rejected.",
    "reports_repeated": "Reports ignored because they were accepted before.",
    "reports_rejected": "Invalid streams and reports that were rejected.",
    "advance_failures": "Events dropped because of an internal error.",
    "ingest_restarts": "Restarts of the ingest process, which serves agents' streams.",
    "store_retries": "Writes to the store that were retried.",
    "refusals": "Calls, streams and connections rejected by access control or rate limits.",
    "audit_failures": "Audit entries that could not be written.",
    "plans_refused": "Plans that a rank rejected, or that were rolled back.",
    "webhook_sent": "Notifications of alerts and their ends that the webhook accepted.",
    "webhook_lost": "Notifications that the webhook did not accept.",
}
_log = logging.getLogger(__name__)


class ControllerMetrics:
    """All metrics of one controller. `certificates`: certificate files by their use."""

    def __init__(self, certificates: Mapping[str, str] | None = None) -> None:
        self._certificates = certificates or {}
        self.registry = CollectorRegistry()
        counters = {
            name: Counter(f"pacekeeper_{name}_total", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self.reports = counters["reports"]
        self.rejected = counters["reports_rejected"]
        self._missed = counters["reports_missed"]
        self._repeated = counters["reports_repeated"]
        self._exported_sequences = (0, 0)
        self.failures = counters["advance_failures"]
        self.ingest_restarts = counters["ingest_restarts"]
        self.store_retries = counters["store_retries"]
        self.refusals = counters["refusals"]
        self.audit_failures = counters["audit_failures"]
        self._plans_refused = counters["plans_refused"]
        self._webhook = {True: counters["webhook_sent"], False: counters["webhook_lost"]}
        self._plans = Counter(
            "pacekeeper_plans_total", "Plans decided.", ["level"], registry=self.registry
        )
        self._incidents = Counter(
            "pacekeeper_incidents_total", "Incidents opened.", ["kind"], registry=self.registry
        )
        # Series start at 0: Prometheus sees no increase in a series that appears at 1.
        for kind in FindingKind:
            self._incidents.labels(kind.value)
        for level in MitigationLevel:
            self._plans.labels(level.value)
        self.advance = Summary(
            "pacekeeper_advance_seconds",
            "Duration of one event in the state machine.",
            registry=self.registry,
        )
        self.lag = LoopLag(time.monotonic())
        lag = Gauge(
            "pacekeeper_loop_lag_seconds",
            "Longest delay of the controller's event loop in the last minute.",
            registry=self.registry,
        )
        lag.set_function(lambda: self.lag.worst_s(time.monotonic()))
        self._refusing = Gauge(
            "pacekeeper_store_refusing",
            "1 while the store rejects writes and intake waits.",
            ["reason"],
            registry=self.registry,
        )
        self._leader = Gauge(
            "pacekeeper_leader",
            "1 if this controller leads; 0 if another one may, which then exports the jobs.",
            registry=self.registry,
        )
        self._is_leader = False
        self._transitions = Counter(
            "pacekeeper_leader_transitions_total",
            "Times that this controller began or ceased to lead.",
            registry=self.registry,
        )
        self.age_s: Callable[[], float] = lambda: 0.0
        age = Gauge(
            "pacekeeper_reads_age_seconds",
            "Age of the state that this controller answers reads with; 0 while it leads.",
            registry=self.registry,
        )
        age.set_function(lambda: self.age_s())
        self._store_bytes = Gauge(
            "pacekeeper_store_bytes",
            "Size of the store's content and of its write-ahead log.",
            ["part"],
            registry=self.registry,
        )
        self._newest_incident = 0
        self._state = State()
        self._ranks = RankInfoSeries()
        self._one_at_a_time = threading.Lock()

    @classmethod
    def of(cls, config: ControllerConfig) -> "ControllerMetrics":
        """Those of a controller with this configuration."""
        return cls({"tls": config.tls.cert, "metrics": config.metrics.cert})

    def begin_after(self, newest_incident: int) -> None:
        """Begin a term: do not count incidents up to this number, which an earlier leader did."""
        self._newest_incident = newest_incident
        self._exported_sequences = (0, 0)

    def count_incident(self, incident: Incident) -> None:
        """Count an incident at its first update only."""
        if incident.incident_id > self._newest_incident:
            self._newest_incident = incident.incident_id
            self._incidents.labels(incident.finding.kind.value).inc()

    def count_decision(self, decision: Decision) -> None:
        """Count a plan, or a refused plan, which has no layout."""
        if decision.layout is None:
            self._plans_refused.inc()
        else:
            self._plans.labels(decision.level.value).inc()

    def count_webhook(self, is_taken: bool, count: int) -> None:
        """Count notifications that the webhook accepted or lost; called from any thread."""
        self._webhook[is_taken].inc(count)

    def set_store_refusing(self, refused: str) -> None:
        """Set why the store rejects writes; empty: it accepts them."""
        self._refusing.clear()
        if refused:
            self._refusing.labels(refused).set(1)

    def set_store_size(self, used_bytes: int, log_bytes: int) -> None:
        """Set the size of the store and of its write-ahead log."""
        self._store_bytes.labels("used").set(used_bytes)
        self._store_bytes.labels("log").set(log_bytes)

    def set_sequences(self, *, missed: int, repeated: int) -> None:
        """Set the totals of missed and repeated reports."""
        before_missed, before_repeated = self._exported_sequences
        self._missed.inc(missed - before_missed)
        self._repeated.inc(repeated - before_repeated)
        self._exported_sequences = (missed, repeated)

    def set_leading(self, leads: bool) -> None:
        """Set whether this controller leads; one that does not exports no state."""
        self._leader.set(leads)
        if leads is not self._is_leader:
            self._is_leader = leads
            self._transitions.inc()
        if not leads:
            self._state = State()

    def update(self, state: State) -> None:
        """Set the newest state."""
        self._state = state

    def page(self) -> bytes:
        """Render the page of a scrape; called from any thread."""
        page = MetricsPage()
        with self._one_at_a_time:
            state = self._state
            state_metrics.write(page, state)
            self._ranks.write(page, state.jobs)
            metrics_server.write_expiry(page, self._certificates)
        return generate_latest(self.registry) + page.text().encode()

    @contextlib.contextmanager
    def serving(self, config: ControllerConfig) -> Iterator[None]:
        """Serve /metrics at `metrics_listen` while the block runs. Raises HostError."""
        if not config.metrics_listen:
            yield
            return
        host, port = split_address(config.metrics_listen, first_port=0)
        server = self.serve(host, port, config.metrics)
        _log.info("metrics=%s:%d", host, server.server_port)
        try:
            yield
        finally:
            server.close()

    def serve(self, host: str, port: int, config: MetricsConfig | None = None) -> MetricsServer:
        """Serve /metrics.

        Args:
            host: Address to listen on.
            port: TCP port; 0 takes any free one.
            config: Certificate and token.

        Raises:
            HostError: The port is taken.
        """
        return MetricsServer(
            host,
            port,
            render=self.page,
            config=config or MetricsConfig(),
            rival="another service",
        )
