"""Activity of a device between two calls, by NVML's GPU performance monitor (Hopper and later)."""

from dataclasses import dataclass
from typing import Any

# NVML_GPM_METRIC_*, in percent of the time.
_METRICS = {"sm_active_ratio": 2, "tensor_active_ratio": 5, "memory_active_ratio": 10}


@dataclass(slots=True, kw_only=True)
class Activity:
    """Two GPM samples used in turn. They stay allocated until NVML is shut down."""

    handle: Any
    older: Any
    newer: Any
    is_first: bool = True

    @classmethod
    def begin(cls, pynvml: Any, handle: Any) -> "Activity":
        """Allocate the samples. Raises NVMLError; NOT_SUPPORTED if the device has no monitor."""
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        older, newer = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        return cls(handle=handle, older=older, newer=newer)

    def since_last(self, pynvml: Any) -> dict[str, float]:
        """Fields of a DeviceSample: active ratios since the last call; empty at the first."""
        self.older, self.newer = self.newer, self.older
        pynvml.nvmlGpmSampleGet(self.handle, self.newer)
        if self.is_first:
            self.is_first = False
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = self.older, self.newer
        for place, metric in enumerate(_METRICS.values()):
            request.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        found = zip(_METRICS, request.metrics, strict=False)
        return {name: m.value / 100.0 for name, m in found if m.nvmlReturn == pynvml.NVML_SUCCESS}
