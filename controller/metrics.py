"""What the controller tells Prometheus: few series, base units, its own registry.

No series per rank: of each job only the slowest few ranks are shown, and none while all are well.
"""

from collections import Counter as Tally
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from pacekeeper.controller.state import JobState, State
from pacekeeper.core.errors import listen_error
from pacekeeper.core.findings import FindingKind, Incident

SHOWN_RANKS = 8  # per job
WORTH_SHOWING = 1.05  # slowdown


class ControllerMetrics:
    """All series of one controller."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reports = Counter(
            "pacekeeper_reports_total", "Reports taken in.", registry=self.registry
        )
        self.rejected = Counter(
            "pacekeeper_reports_rejected_total",
            "Streams and reports refused as impossible.",
            registry=self.registry,
        )
        self.failures = Counter(
            "pacekeeper_advance_failures_total",
            "Events dropped because of a bug.",
            registry=self.registry,
        )
        self.advance = Summary(
            "pacekeeper_advance_seconds", "One event through the machine.", registry=self.registry
        )
        self.incidents = Counter(
            "pacekeeper_incidents_total", "Incidents opened.", ["kind"], registry=self.registry
        )
        self.store_retries = Counter(
            "pacekeeper_store_retries_total",
            "Writes to the store that had to be tried again.",
            registry=self.registry,
        )
        self.refusals = Counter(
            "pacekeeper_refusals_total",
            "Calls, streams and connections refused for who made them or how many they were.",
            registry=self.registry,
        )
        self.audit_failures = Counter(
            "pacekeeper_audit_failures_total",
            "Lines that the audit log did not take.",
            registry=self.registry,
        )
        self._newest_incident = 0
        gauges = {
            "jobs": ("Jobs known.", []),
            "nodes_connected": ("Agents attached.", []),
            "incidents_open": ("Incidents open.", ["kind"]),
            "job_step": ("Newest complete step.", ["job"]),
            "job_tokens_per_second": ("Tokens per second of it.", ["job"]),
            "job_generation": ("Layout in force.", ["job"]),
            "job_proposals_waiting": ("Plans that wait for a person.", ["job"]),
            "store_refusing": ("1 while the store takes no writes: intake waits.", ["reason"]),
            "rank_slowdown": ("Slowest ranks: observed / expected.", ["job", "rank"]),
            "job_info": ("1 for what is said of the job.", ["job", "watch"]),
            "job_blind": ("1 while something would be missed, and why.", ["job", "cause"]),
            "job_detectable_slowdown": ("Smallest that would be named in time.", ["job"]),
            "job_detectable_steps": ("Steps in which it would be named.", ["job"]),
            "job_checkpoint_step": ("Newest complete checkpoint.", ["job"]),
            "job_checkpoint_seconds": ("What it took the rank that ended it.", ["job"]),
            "job_checkpoint_trouble": (
                "1: the newest did not come about, and why.",
                ["job", "cause"],
            ),
            "canary_found": ("1: the last made-up slow rank was found in time.", ["job"]),
            "canary_steps": ("Steps until it was found or given up.", ["job"]),
            "canary_last_step": ("The step at which that was.", ["job"]),
        }
        self._gauges = {
            name: Gauge(f"pacekeeper_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in gauges.items()
        }

    def begin_after(self, newest_incident: int) -> None:
        """Incidents up to this number were counted in an earlier life."""
        self._newest_incident = newest_incident

    def count_incident(self, incident: Incident) -> None:
        """Count it once, however often it is re-measured."""
        if incident.incident_id > self._newest_incident:
            self._newest_incident = incident.incident_id
            self.incidents.labels(incident.finding.kind.value).inc()

    def say_store(self, refused: str) -> None:
        """Why the store takes no writes now; empty: it does."""
        self._gauges["store_refusing"].clear()
        if refused:
            self._gauges["store_refusing"].labels(refused).set(1)

    def serve(self, host: str, port: int) -> WSGIServer:
        """Answer /metrics there (port 0: any free one). Raises HostError where it is taken."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise listen_error(
                f"{host}:{port}", error, option="--metrics-listen", rival="another service"
            ) from None
        return server

    def update(self, state: State) -> None:
        """Take over the newest state; called on ticks, not on events."""
        gauges = self._gauges
        gauges["jobs"].set(len(state.jobs))
        gauges["nodes_connected"].set(sum(node.is_connected for node in state.nodes.values()))
        open_now = Tally(
            incident.finding.kind for job in state.jobs.values() for incident in job.open_incidents
        )
        for kind in FindingKind:
            gauges["incidents_open"].labels(kind.value).set(open_now[kind])
        for name in gauges:
            if name.startswith(("job_", "canary_")):
                gauges[name].clear()  # of jobs that were forgotten
        gauges["rank_slowdown"].clear()
        for name, job in state.jobs.items():
            gauges["job_step"].labels(name).set(job.step)
            gauges["job_tokens_per_second"].labels(name).set(job.tokens_per_s)
            generation = 0 if job.layout is None else job.layout.generation
            gauges["job_generation"].labels(name).set(generation)
            is_waiting = job.open_proposal is not None and job.approved is None
            gauges["job_proposals_waiting"].labels(name).set(is_waiting)
            gauges["job_info"].labels(name, job.watch.value).set(1)
            if job.blind is not None:
                gauges["job_blind"].labels(name, job.blind.value).set(1)
            if job.sight is not None:
                gauges["job_detectable_slowdown"].labels(name).set(job.sight.slowdown)
                gauges["job_detectable_steps"].labels(name).set(job.sight.steps)
            if job.saves is not None:
                if job.saves.complete[1] >= 0:
                    gauges["job_checkpoint_step"].labels(name).set(job.saves.complete[1])
                    gauges["job_checkpoint_seconds"].labels(name).set(job.saves.duration_s)
                if job.saves.trouble:
                    gauges["job_checkpoint_trouble"].labels(name, job.saves.trouble).set(1)
            canary = job.canaries.last
            if canary is not None:
                gauges["canary_found"].labels(name).set(canary.is_found)
                gauges["canary_steps"].labels(name).set(canary.num_steps)
                gauges["canary_last_step"].labels(name).set(canary.step)
            for number, slowdown in slowest_ranks(job):
                gauges["rank_slowdown"].labels(name, str(number)).set(slowdown)


def slowest_ranks(job: JobState) -> list[tuple[int, float]]:
    """The slowest few living ranks of a job that are slow at all: (rank, slowdown)."""
    slow = [
        (number, job.ranks[number].slowdown or 0.0)
        for number in job.living
        if (job.ranks[number].slowdown or 0.0) >= WORTH_SHOWING
    ]
    return sorted(slow, key=lambda pair: (-pair[1], pair[0]))[:SHOWN_RANKS]
