"""What the controller tells Prometheus: counters of its own, and the newest state when asked.

A scrape reads the state as it is then, in a thread of its own: between scrapes nothing is done.
"""

import threading
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from pacekeeper.controller.observability import state_metrics
from pacekeeper.controller.observability.event_loop_lag import LoopLag
from pacekeeper.controller.observability.rank_metrics import RankInfoSeries
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.incidents.findings import Decision, FindingKind, Incident, MitigationLevel
from pacekeeper.core.prometheus_text import MetricsPage
from pacekeeper.protos import metrics_server
from pacekeeper.protos.metrics_server import MetricsServer

_COUNTERS = {
    "reports": "Reports taken in.",
    "reports_missed": "Reports that agents numbered and that never came: dropped, or refused.",
    "reports_repeated": "Reports that were passed over, since they had been taken in before.",
    "reports_rejected": "Streams and reports refused as impossible.",
    "advance_failures": "Events dropped because of a bug.",
    "front_restarts": "Starts anew of the process that serves agents' streams.",
    "store_retries": "Writes to the store that had to be tried again.",
    "refusals": "Calls, streams and connections refused for who made them or how many they were.",
    "audit_failures": "Lines that the audit log did not take.",
    "plans_refused": "Plans that a rank could not follow, or that were undone.",
    "webhook_sent": "Alerts, and ends of alerts, that the webhook took.",
    "webhook_lost": "The same that it did not take.",
}


class ControllerMetrics:
    """All series of one controller. `certificates`: files by what they are used for."""

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
        self._told_sequences = (0, 0)
        self.failures = counters["advance_failures"]
        self.front_restarts = counters["front_restarts"]
        self.store_retries = counters["store_retries"]
        self.refusals = counters["refusals"]
        self.audit_failures = counters["audit_failures"]
        self._plans_refused = counters["plans_refused"]
        self._webhook = {True: counters["webhook_sent"], False: counters["webhook_lost"]}
        self._plans = Counter(
            "pacekeeper_plans_total", "Plans decided on.", ["rung"], registry=self.registry
        )
        self._incidents = Counter(
            "pacekeeper_incidents_total", "Incidents opened.", ["kind"], registry=self.registry
        )
        # From 0 on: an increase from nothing is none for Prometheus.
        for kind in FindingKind:
            self._incidents.labels(kind.value)
        for rung in MitigationLevel:
            self._plans.labels(rung.value)
        self.advance = Summary(
            "pacekeeper_advance_seconds", "One event through the machine.", registry=self.registry
        )
        self.lag = LoopLag(time.monotonic())
        lag = Gauge(
            "pacekeeper_loop_lag_seconds",
            "The longest that the controller's event loop let somebody wait in the last minute.",
            registry=self.registry,
        )
        lag.set_function(lambda: self.lag.worst_s(time.monotonic()))
        self._refusing = Gauge(
            "pacekeeper_store_refusing",
            "1 while the store takes no writes: intake waits.",
            ["reason"],
            registry=self.registry,
        )
        self._leading = Gauge(
            "pacekeeper_leading",
            "1: this controller leads; 0: another one may, and tells of the jobs.",
            registry=self.registry,
        )
        self._store_bytes = Gauge(
            "pacekeeper_store_bytes",
            "What lies in the store, and its write-ahead log.",
            ["part"],
            registry=self.registry,
        )
        self._newest_incident = 0
        self._state = State()
        self._ranks = RankInfoSeries()
        self._one_at_a_time = threading.Lock()

    def begin_after(self, newest_incident: int) -> None:
        """Incidents up to this number were counted in an earlier life."""
        self._newest_incident = newest_incident

    def count_incident(self, incident: Incident) -> None:
        """Count it once, however often it is re-measured."""
        if incident.incident_id > self._newest_incident:
            self._newest_incident = incident.incident_id
            self._incidents.labels(incident.finding.kind.value).inc()

    def count_decision(self, decision: Decision) -> None:
        """A plan was decided on, or one was refused: that has no layout."""
        if decision.layout is None:
            self._plans_refused.inc()
        else:
            self._plans.labels(decision.rung.value).inc()

    def count_webhook(self, is_taken: bool, count: int) -> None:
        """What the webhook was told; called by its thread, too."""
        self._webhook[is_taken].inc(count)

    def say_store(self, refused: str) -> None:
        """Why the store takes no writes now; empty: it does."""
        self._refusing.clear()
        if refused:
            self._refusing.labels(refused).set(1)

    def say_size(self, used_bytes: int, log_bytes: int) -> None:
        """How large the store is."""
        self._store_bytes.labels("used").set(used_bytes)
        self._store_bytes.labels("log").set(log_bytes)

    def say_sequences(self, *, missed: int, repeated: int) -> None:
        """Export the totals of reports that were missed, and of those that came again."""
        before_missed, before_repeated = self._told_sequences
        self._missed.inc(missed - before_missed)
        self._repeated.inc(repeated - before_repeated)
        self._told_sequences = (missed, repeated)

    def say_leading(self, leads: bool) -> None:
        """Does this controller lead? One that does not knows nothing that is worth telling."""
        self._leading.set(leads)
        if not leads:
            self._state = State()

    def update(self, state: State) -> None:
        """This is the newest state."""
        self._state = state

    def page(self) -> bytes:
        """What a scrape is answered now; called by any thread."""
        page = MetricsPage()
        with self._one_at_a_time:
            state = self._state
            state_metrics.write(page, state)
            self._ranks.write(page, state.jobs)
            metrics_server.write_expiry(page, self._certificates)
        return generate_latest(self.registry) + page.text().encode()

    def serve(self, host: str, port: int, config: MetricsConfig | None = None) -> MetricsServer:
        """Answer /metrics there (port 0: any free one). Raises HostError where it is taken."""
        return MetricsServer(
            host,
            port,
            render=self.page,
            config=config or MetricsConfig(),
            rival="another service",
        )
