"""What the controller tells Prometheus: few series, base units, its own registry."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from pacekeeper.controller.state import State
from pacekeeper.core.errors import HostError
from pacekeeper.core.findings import FindingKind


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
        gauges = {
            "jobs": ("Jobs known.", []),
            "nodes_connected": ("Agents attached.", []),
            "incidents_open": ("Incidents open.", ["kind"]),
            "job_step": ("Newest complete step.", ["job"]),
            "job_tokens_per_second": ("Tokens per second of it.", ["job"]),
            "job_generation": ("Layout in force.", ["job"]),
            "job_info": ("1 for what is said of the job.", ["job", "watch"]),
        }
        self._gauges = {
            name: Gauge(f"pacekeeper_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in gauges.items()
        }

    def serve(self, listen: str) -> WSGIServer:
        """Answer /metrics on host:port. Raises HostError where the port is taken."""
        host, _, port = listen.rpartition(":")
        try:
            server, _ = start_http_server(int(port), addr=host, registry=self.registry)
        except (OSError, ValueError) as error:
            raise HostError(
                f"metrics on {listen!r}: {error}", remedy="choose another --metrics-listen"
            ) from None
        return server

    def update(self, state: State) -> None:
        """Take over the newest state; called on ticks, not on events."""
        gauges = self._gauges
        gauges["jobs"].set(len(state.jobs))
        gauges["nodes_connected"].set(sum(node.is_connected for node in state.nodes.values()))
        for kind in FindingKind:
            number = sum(
                incident.finding.kind is kind
                for job in state.jobs.values()
                for incident in job.open_incidents
            )
            gauges["incidents_open"].labels(kind).set(number)
        gauges["job_info"].clear()
        for name, job in state.jobs.items():
            gauges["job_step"].labels(name).set(job.step)
            gauges["job_tokens_per_second"].labels(name).set(job.tokens_per_s)
            generation = 0 if job.layout is None else job.layout.generation
            gauges["job_generation"].labels(name).set(generation)
            gauges["job_info"].labels(name, job.watch).set(1)
