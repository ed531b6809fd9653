"""What the agent tells Prometheus: itself, and this node's GPUs. Base units, its own registry."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from pacekeeper.agent.device_series import DeviceSeries
from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.errors import listen_error
from pacekeeper.core.reports import AgentHealth

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

    def __init__(self) -> None:
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
        self.series = DeviceSeries()
        self.registry.register(self.series)

    def serve(self, listen: str) -> WSGIServer:
        """Answer /metrics on host:port (port 0: any free one).

        Raises HostError where that address can not be had, ValueError where it is none.
        """
        host, port = host_and_port(listen, first_port=0)
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise listen_error(
                listen, error, option="--metrics-listen", rival="another agent"
            ) from None
        return server

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
