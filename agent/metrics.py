"""What the agent tells Prometheus: itself, and this node's GPUs. Base units, its own registry."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from pacekeeper.agent import device_series
from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.config.metrics_config import MetricsConfig
from pacekeeper.core.prometheus_text import Page
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.protos import certificate_metrics
from pacekeeper.protos.metrics_http import MetricsServer

_COUNTERS = {
    "records_read": "Records read from rings.",
    "records_lost": "Records overwritten before they were read.",
    "records_corrupt": "Records that did not fit their checksum.",
    "batches_dropped": "Reports given up: the controller was away too long or refused them.",
}
_GAUGES = {
    "rings": "Ring files read.",
    "unreadable": "Ring and layout files that can not be read.",
    "spool_batches": "Reports waiting to be acknowledged.",
    "spool_bytes": "Size of the reports waiting to be acknowledged.",
    "connected": "1 while the controller is attached.",
    "devices": "GPUs that answer NVML, MIG instances among them.",
    "nvml_waiting_seconds": "How long NVML's present answer has been waited for.",
}
# Of a number that somebody else counts up.
_TOTALS = {
    "nvml_readings": "Readings of all devices.",
    "nvml_seconds": "Time spent in these readings.",
}


class AgentMetrics:
    """All series of one agent."""

    def __init__(self, node: str = "", certificates: Mapping[str, str] | None = None) -> None:
        """`certificates`: files by what they are used for."""
        self._certificates = certificates or {}
        self.devices: tuple[DeviceSample, ...] = ()
        self.host: HostSample | None = None
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"pacekeeper_agent_{name}_total", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._counters |= {
            name: Counter(f"pacekeeper_agent_{name}_total", text, registry=self.registry)
            for name, text in _TOTALS.items()
        }
        self._last = dict.fromkeys(self._counters, 0.0)
        self._gauges = {
            name: Gauge(f"pacekeeper_agent_{name}", text, registry=self.registry)
            for name, text in _GAUGES.items()
        }
        self.poll = Summary(
            "pacekeeper_agent_poll_seconds",
            "Duration of one look into all rings.",
            registry=self.registry,
        )
        info = Gauge("pacekeeper_agent_info", "1: its node.", ["node"], registry=self.registry)
        info.labels(node).set(1)

    def page(self) -> bytes:
        """What a scrape is answered now; called by any thread."""
        page = Page()
        device_series.write(page, self.devices, self.host)
        certificate_metrics.write(page, self._certificates)
        return generate_latest(self.registry) + page.text().encode()

    def serve(self, listen: str, config: MetricsConfig | None = None) -> MetricsServer:
        """Answer /metrics on host:port (port 0: any free one).

        Raises HostError where that address can not be had, ValueError where it is none.
        """
        host, port = host_and_port(listen, first_port=0)
        config = config or MetricsConfig()
        return MetricsServer(host, port, render=self.page, config=config, rival="another agent")

    def update(self, health: AgentHealth, **gauges: float) -> None:
        """Take over the agent's own counters, and gauges by their names."""
        for name in _COUNTERS:
            self._count_to(name, getattr(health, name))
        self._gauges["unreadable"].set(len(health.unreadable))
        self._gauges["devices"].set(health.num_devices)
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def update_nvml(self, *, readings: int, spent_s: float, waiting_s: float) -> None:
        """What asking the devices costs, since the agent's start: slow answers are a sign, too."""
        self._count_to("nvml_readings", readings)
        self._count_to("nvml_seconds", spent_s)
        self._gauges["nvml_waiting_seconds"].set(waiting_s)

    def _count_to(self, name: str, value: float) -> None:
        self._counters[name].inc(value - self._last[name])
        self._last[name] = value
