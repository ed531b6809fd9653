"""Prometheus metrics of the agent and of this node's GPUs, in base units.

The agent's own counters lie in a `prometheus_client` registry; series of devices are made of the
newest samples at each scrape, so a lost or silent device leaves none behind.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.prometheus_text import MetricFamily, MetricsPage
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.protos import metrics_server
from pacekeeper.protos.metrics_server import MetricsServer

_LABELS = ("UUID", "device_index")  # spelled as in DCGM's exporter, for joins with its series


# Series -> (its help, the field of the sample or of its health, its unit in base units).
_DEVICE_GAUGES: Mapping[str, tuple[str, str, float]] = {
    "temperature_celsius": ("Temperature of the GPU.", "temperature_celsius", 1.0),
    "memory_temperature_celsius": (
        "Temperature of the GPU's memory.",
        "memory_temperature_celsius",
        1.0,
    ),
    "margin_celsius": (
        "Margin to the temperature at which the GPU throttles.",
        "margin_celsius",
        1.0,
    ),
    "power_watts": ("Power drawn by the GPU's board.", "power_watts", 1.0),
    "sm_clock_hertz": ("Clock of the GPU's multiprocessors.", "sm_clock_mhz", 1e6),
    "utilisation_ratio": ("Ratio of time in which a kernel was running.", "utilisation_ratio", 1.0),
    "sm_active_ratio": ("Ratio of multiprocessor time with work, GPM.", "sm_active_ratio", 1.0),
    "answer_seconds": ("Duration of the last query of the driver.", "answer_s", 1.0),
    "nvlinks": ("NVLinks of the GPU.", "nvlinks", 1.0),
    "nvlinks_up": ("NVLinks that are up.", "nvlinks_up", 1.0),
    "remap_pending": ("1 while row remapping waits for a reset.", "is_remap_pending", 1.0),
    "recovery_action": (
        "Recovery action that the driver requests; 0: none.",
        "recovery_action",
        1.0,
    ),
}


_DEVICE_COUNTERS: Mapping[str, tuple[str, str, float]] = {
    "energy_joules": ("Energy consumed since the driver was loaded.", "energy_joules", 1.0),
    "pcie_replays": ("PCIe replays.", "pcie_replays", 1.0),
    "pcie_errors": ("PCIe errors that the link corrected.", "pcie_errors", 1.0),
    "nvlink_errors": ("NVLink packets damaged or lost.", "nvlink_errors", 1.0),
    "nvlink_recoveries": ("NVLink recoveries (link retrained).", "nvlink_recoveries", 1.0),
    "ecc_uncorrected": ("Uncorrected ECC errors.", "ecc_uncorrected", 1.0),
    "ecc_corrected": ("Corrected ECC errors.", "ecc_corrected", 1.0),
    "rows_remapped": ("Memory rows remapped over the GPU's lifetime.", "rows_remapped", 1.0),
    "xids": ("Xids reported since the start of the agent.", "num_xids", 1.0),
}


_THROTTLE_REASONS = (
    *("power_cap", "board_limit", "reliability", "sync_boost", "sw_thermal", "hw_thermal"),
    "power_brake",
)


_CLOCK_GAUGES: Mapping[str, tuple[str, str]] = {
    "clock_offset_seconds": (
        "Remaining correction of the wall clock, from adjtimex.",
        "clock_offset_s",
    ),
    "clock_error_seconds": ("Error bound of the wall clock, from adjtimex.", "clock_error_s"),
    "clock_synchronised": ("1 while the wall clock is synchronised.", "is_clock_synchronised"),
}


def _family(name: str, text: str, *labels: str, kind: str = "gauge") -> MetricFamily:
    return MetricFamily(f"pacekeeper_{name}", text, *labels, kind=kind)


_DEVICE_INFO = _family(
    "device_info", "Name and parent of a device; always 1.", *_LABELS, "name", "parent_UUID"
)


_DEVICE_LOST = _family("device_lost", "1 if the device no longer answers.", *_LABELS)


_DEVICE_SERIES = tuple(
    (_family(f"device_{name}", text, *_LABELS), field, unit)
    for name, (text, field, unit) in _DEVICE_GAUGES.items()
) + tuple(
    (_family(f"device_{name}_total", text, *_LABELS, kind="counter"), field, unit)
    for name, (text, field, unit) in _DEVICE_COUNTERS.items()
)


_CLOCKS_THROTTLED = _family(
    "device_clocks_throttled_seconds_total",
    "Time in which clocks were throttled, by reason.",
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
    """Add the series of the newest samples to a page."""
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
    "records_lost": "Records overwritten before the agent read them.",
    "records_corrupt": "Records with a wrong checksum.",
    "batches_dropped": "Reports dropped: spool full, rejected by the controller, or not encodable.",
}
_GAUGES = {
    "rings": "Open ring files.",
    "unreadable": "Ring and layout files that cannot be read or written.",
    "spool_batches": "Reports not yet acknowledged.",
    "spool_bytes": "Size of the reports not yet acknowledged.",
    "connected": "1 while connected to a controller.",
    "devices": "GPUs that answer NVML, MIG instances included.",
    "nvml_waiting_seconds": "Age of the NVML query under way; 0: none.",
}
# Totals counted by the sampler.
_TOTALS = {
    "nvml_readings": "Samples of all devices.",
    "nvml_seconds": "Time spent querying NVML.",
}


class AgentMetrics:
    """All metrics of one agent."""

    def __init__(self, node: str = "", certificates: Mapping[str, str] | None = None) -> None:
        """`certificates`: certificate files by use, for their expiry dates."""
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
            "Duration of one poll of all rings.",
            registry=self.registry,
        )
        info = Gauge(
            "pacekeeper_agent_info", "Name of the node; always 1.", ["node"], registry=self.registry
        )
        info.labels(node).set(1)

    def page(self) -> bytes:
        """The text of a scrape; called in any thread."""
        page = MetricsPage()
        write_samples(page, self.devices, self.host)
        metrics_server.write_expiry(page, self._certificates)
        return generate_latest(self.registry) + page.text().encode()

    def serve(self, listen: str, config: MetricsConfig | None = None) -> MetricsServer:
        """Serve /metrics on `listen`, HOST:PORT (port 0: any free one).

        Raises:
            HostError: The address is not available, or a certificate file is missing.
            ConfigError: A certificate or token file is not usable.
            ValueError: `listen` is not an address.
        """
        host, port = split_address(listen, first_port=0)
        config = config or MetricsConfig()
        return MetricsServer(host, port, render=self.page, config=config, rival="another agent")

    def update(self, health: AgentHealth, **gauges: float) -> None:
        """Set the counters from `health`, and gauges by their names."""
        for name in _COUNTERS:
            self._count_to(name, getattr(health, name))
        self._gauges["unreadable"].set(len(health.unreadable))
        self._gauges["devices"].set(health.num_devices)
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def update_nvml(self, *, readings: int, spent_s: float, waiting_s: float) -> None:
        """Set the cost of NVML queries.

        Args:
            readings: Number of samples since the start of the agent.
            spent_s: Time spent in them.
            waiting_s: Age of the query under way.
        """
        self._count_to("nvml_readings", readings)
        self._count_to("nvml_seconds", spent_s)
        self._gauges["nvml_waiting_seconds"].set(waiting_s)

    def _count_to(self, name: str, value: float) -> None:
        self._counters[name].inc(value - self._last[name])
        self._last[name] = value
