"""What the agent tells Prometheus: itself, and this node's GPUs. Base units, its own registry."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from pacekeeper.core.errors import HostError
from pacekeeper.core.reports import AgentHealth
from pacekeeper.core.topology import DeviceSample


class AgentMetrics:
    """All series of one agent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counters = {
            "records_read": "Records read from rings.",
            "records_lost": "Records overwritten before they were read.",
            "records_corrupt": "Records that did not fit their checksum.",
            "batches_dropped": "Reports dropped because the controller was away too long.",
        }
        self._counters = {
            name: Counter(f"pacekeeper_agent_{name}_total", text, registry=self.registry)
            for name, text in counters.items()
        }
        self._last = dict.fromkeys(counters, 0)
        self.rings = Gauge("pacekeeper_agent_rings", "Ring files read.", registry=self.registry)
        self.spool = Gauge(
            "pacekeeper_agent_spool_batches",
            "Reports waiting to be acknowledged.",
            registry=self.registry,
        )
        self.connected = Gauge(
            "pacekeeper_agent_connected",
            "1 while the controller is attached.",
            registry=self.registry,
        )
        self.look = Summary(
            "pacekeeper_agent_look_seconds", "One look into all rings.", registry=self.registry
        )
        device = ["device_uuid", "device_index"]
        self._devices = {
            "temperature_celsius": Gauge(
                "pacekeeper_device_temperature_celsius", "GPU.", device, registry=self.registry
            ),
            "power_watts": Gauge(
                "pacekeeper_device_power_watts", "GPU.", device, registry=self.registry
            ),
            "utilisation_ratio": Gauge(
                "pacekeeper_device_utilisation_ratio", "GPU.", device, registry=self.registry
            ),
        }
        self._clock = Gauge(
            "pacekeeper_device_sm_clock_hertz", "GPU.", device, registry=self.registry
        )

    def serve(self, listen: str) -> WSGIServer:
        """Answer /metrics on host:port. Raises HostError where the port is taken."""
        host, _, port = listen.rpartition(":")
        try:
            server, _ = start_http_server(int(port), addr=host, registry=self.registry)
        except (OSError, ValueError) as error:
            raise HostError(
                f"metrics on {listen!r}: {error}",
                remedy="another agent may run here; choose another --metrics-listen, or ''",
            ) from None
        return server

    def update(self, health: AgentHealth, *, rings: int, spooled: int, connected: bool) -> None:
        """Take over the agent's own counters."""
        for name, counter in self._counters.items():
            value = getattr(health, name)
            counter.inc(value - self._last[name])
            self._last[name] = value
        self.rings.set(rings)
        self.spool.set(spooled)
        self.connected.set(int(connected))

    def update_devices(self, samples: tuple[DeviceSample, ...]) -> None:
        """Take over the newest samples; what a device does not tell has no series."""
        for sample in samples:
            labels = (sample.device_uuid, str(sample.device_index))
            for name, gauge in self._devices.items():
                value = getattr(sample, name)
                if value is not None:
                    gauge.labels(*labels).set(value)
            if sample.sm_clock_mhz is not None:
                self._clock.labels(*labels).set(sample.sm_clock_mhz * 1e6)
