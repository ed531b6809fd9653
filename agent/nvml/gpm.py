"""How busy a device's parts were between two looks, by NVML's performance monitor (Hopper on)."""

from dataclasses import dataclass
from typing import Any

# NVML_GPM_METRIC_*, in percent of the time.
_METRICS = {"sm_active_ratio": 2, "tensor_active_ratio": 5, "memory_active_ratio": 10}


@dataclass(slots=True, kw_only=True)
class Activity:
    """Two of the driver's samples, taken in turn. They stay allocated until the driver closes."""

    handle: Any
    older: Any
    newer: Any
    is_first: bool = True

    @classmethod
    def begin(cls, pynvml: Any, handle: Any) -> "Activity":
        """Raises NVMLError, of value NOT_SUPPORTED where the device has no such monitor."""
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        older, newer = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        return cls(handle=handle, older=older, newer=newer)

    def since_last(self, pynvml: Any) -> dict[str, float]:
        """Fields of a DeviceSample: shares of the time since the last call; none at the first."""
        self.older, self.newer = self.newer, self.older
        pynvml.nvmlGpmSampleGet(self.handle, self.newer)
        if self.is_first:
            self.is_first = False
            return {}
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(_METRICS)
        asked.sample1, asked.sample2 = self.older, self.newer
        for place, metric in enumerate(_METRICS.values()):
            asked.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(asked)
        told = zip(_METRICS, asked.metrics, strict=False)
        return {name: m.value / 100.0 for name, m in told if m.nvmlReturn == pynvml.NVML_SUCCESS}
