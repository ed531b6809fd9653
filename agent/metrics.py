"""What the agent tells Prometheus: itself, and this node's GPUs. Base units, its own registry."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.prometheus_text import MetricFamily, MetricsPage
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.protos import metrics_server
from pacekeeper.protos.metrics_server import MetricsServer

_LABELS = ("UUID", "device_index")  # spelled as DCGM's exporter does, to be joined with its series


# Series -> (its help, the field of the sample or of its health, its unit in base units).
_DEVICE_GAUGES: Mapping[str, tuple[str, str, float]] = {
    "temperature_celsius": ("Temperature of the GPU.", "temperature_celsius", 1.0),
    "memory_temperature_celsius": (
        "Temperature of the GPU's memory.",
        "memory_temperature_celsius",
        1.0,
    ),
    "margin_celsius": ("Degrees until the GPU slows down.", "margin_celsius", 1.0),
    "power_watts": ("Power drawn by the GPU's board.", "power_watts", 1.0),
    "sm_clock_hertz": ("Clock of the GPU's multiprocessors.", "sm_clock_mhz", 1e6),
    "utilisation_ratio": ("Share of time a kernel was running.", "utilisation_ratio", 1.0),
    "sm_active_ratio": ("Share of multiprocessors and time that worked.", "sm_active_ratio", 1.0),
    "answer_seconds": ("How long the driver took for one reading.", "answer_s", 1.0),
    "nvlinks": ("NVLinks of the GPU.", "nvlinks", 1.0),
    "nvlinks_up": ("NVLinks that are up.", "nvlinks_up", 1.0),
    "remap_pending": ("1 while damaged rows wait for a reset.", "is_remap_pending", 1.0),
    "recovery_action": ("What NVML asks for: 0 is nothing.", "recovery_action", 1.0),
}


_DEVICE_COUNTERS: Mapping[str, tuple[str, str, float]] = {
    "energy_joules": ("Energy since the driver was loaded.", "energy_joules", 1.0),
    "pcie_replays": ("PCIe packets sent again.", "pcie_replays", 1.0),
    "pcie_errors": ("PCIe errors that the link corrected.", "pcie_errors", 1.0),
    "nvlink_errors": ("Damaged or lost NVLink packets.", "nvlink_errors", 1.0),
    "nvlink_recoveries": ("NVLinks that had to be trained anew.", "nvlink_recoveries", 1.0),
    "ecc_uncorrected": ("Uncorrected memory errors.", "ecc_uncorrected", 1.0),
    "ecc_corrected": ("Corrected memory errors.", "ecc_corrected", 1.0),
    "rows_remapped": ("Memory rows replaced over the GPU's life.", "rows_remapped", 1.0),
    "xids": ("Xids that the driver reported while it was listened to.", "num_xids", 1.0),
}


_THROTTLE_REASONS = (
    *("power_cap", "board_limit", "reliability", "sync_boost", "sw_thermal", "hw_thermal"),
    "power_brake",
)


_CLOCK_GAUGES: Mapping[str, tuple[str, str]] = {
    "clock_offset_seconds": ("What the kernel still has to correct.", "clock_offset_s"),
    "clock_error_seconds": ("The kernel's bound of the wall clock's error.", "clock_error_s"),
    "clock_synchronised": ("1 while the wall clock is synchronised.", "is_clock_synchronised"),
}


def _family(name: str, text: str, *labels: str, kind: str = "gauge") -> MetricFamily:
    return MetricFamily(f"pacekeeper_{name}", text, *labels, kind=kind)


_DEVICE_INFO = _family("device_info", "1 for what a device is.", *_LABELS, "name", "parent_UUID")


_DEVICE_LOST = _family("device_lost", "1: it answers no more.", *_LABELS)


_DEVICE_SERIES = tuple(
    (_family(f"device_{name}", text, *_LABELS), field, unit)
    for name, (text, field, unit) in _DEVICE_GAUGES.items()
) + tuple(
    (_family(f"device_{name}_total", text, *_LABELS, kind="counter"), field, unit)
    for name, (text, field, unit) in _DEVICE_COUNTERS.items()
)


_CLOCKS_THROTTLED = _family(
    "device_clocks_held_seconds_total",
    "Time in which clocks were held down, by reason.",
    *_LABELS,
    "reason",
    kind="counter",
)


_CLOCK_SERIES = tuple(
    (_family(f"agent_{name}", text), field) for name, (text, field) in _CLOCK_GAUGES.items()
)


def write_samples(
    page: MetricsPage, devices: tuple[DeviceSample, ...], host: HostSample | None
) -> None:
    """The newest samples, as series."""
    for sample in devices:
        named = sample.device_uuid, str(sample.device_index)
        page.add(_DEVICE_INFO, 1, *named, sample.name, sample.parent_uuid)
        page.add(_DEVICE_LOST, sample.is_lost, *named)
        for family, field, unit in _DEVICE_SERIES:
            if (value := _value(sample, field)) is not None:
                page.add(family, value * unit, *named)
        for reason in _THROTTLE_REASONS:
            value = getattr(sample, f"{reason}_held_s")
            if value is not None:
                page.add(_CLOCKS_THROTTLED, value, *named, reason)
    for family, field in _CLOCK_SERIES:
        value = getattr(host, field, None)
        if value is not None:
            page.add(family, value)


def _value(sample: DeviceSample, field: str) -> float | None:
    value = getattr(sample, field, None)
    if value is None:
        value = getattr(sample.health, field, None)
    return None if value is None else float(value)


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
        page = MetricsPage()
        write_samples(page, self.devices, self.host)
        metrics_server.write_expiry(page, self._certificates)
        return generate_latest(self.registry) + page.text().encode()

    def serve(self, listen: str, config: MetricsConfig | None = None) -> MetricsServer:
        """Answer /metrics on host:port (port 0: any free one).

        Raises HostError where that address can not be had, ValueError where it is none.
        """
        host, port = split_address(listen, first_port=0)
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
