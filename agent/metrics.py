"""What the agent tells Prometheus: itself, and this node's GPUs. Base units, its own registry."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.errors import listen_error
from pacekeeper.core.reports import AgentHealth
from pacekeeper.core.topology import DeviceSample

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
    "devices": "GPUs that answer NVML.",
}
# Metric -> (its help, the sample's field, its unit in base units).
_DEVICE_GAUGES = {
    "temperature_celsius": ("Temperature of the GPU.", "temperature_celsius", 1.0),
    "power_watts": ("Power drawn by the GPU's board.", "power_watts", 1.0),
    "sm_clock_hertz": ("Clock of the GPU's multiprocessors.", "sm_clock_mhz", 1e6),
    "utilisation_ratio": ("Share of time a kernel was running.", "utilisation_ratio", 1.0),
}
_DEVICE_LABELS = ("device_uuid", "device_index")


class AgentMetrics:
    """All series of one agent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"pacekeeper_agent_{name}_total", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._last = dict.fromkeys(_COUNTERS, 0)
        self._gauges = {
            name: Gauge(f"pacekeeper_agent_{name}", text, registry=self.registry)
            for name, text in _GAUGES.items()
        }
        self.poll = Summary(
            "pacekeeper_agent_poll_seconds",
            "Duration of one look into all rings.",
            registry=self.registry,
        )
        self._devices = {
            name: Gauge(f"pacekeeper_device_{name}", text, _DEVICE_LABELS, registry=self.registry)
            for name, (text, _, _) in _DEVICE_GAUGES.items()
        }
        self._shown: dict[str, set[tuple[str, str]]] = {name: set() for name in _DEVICE_GAUGES}

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
        for name, counter in self._counters.items():
            value = getattr(health, name)
            counter.inc(value - self._last[name])
            self._last[name] = value
        self._gauges["unreadable"].set(len(health.unreadable))
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def update_devices(self, samples: tuple[DeviceSample, ...]) -> None:
        """Take over the newest samples; what a device does not tell, or no more, has no series."""
        self._gauges["devices"].set(len(samples))
        for metric, (_, field, unit) in _DEVICE_GAUGES.items():
            told = {
                (sample.device_uuid, str(sample.device_index)): getattr(sample, field)
                for sample in samples
                if getattr(sample, field) is not None
            }
            for labels in self._shown[metric] - set(told):
                self._devices[metric].remove(*labels)
            for labels, value in told.items():
                self._devices[metric].labels(*labels).set(value * unit)
            self._shown[metric] = set(told)
