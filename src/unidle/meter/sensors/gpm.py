"""GPM, the counters of Hopper and newer: how much of the SMs, tensor cores and DRAM bandwidth was at work.

Utilisation says only that some kernel ran. GPM compares two snapshots of counters, so that each value is the mean
over the time between them. Snapshots less than about a tenth of a second apart yield zeros: such are never taken here.
Two threads that take one at the same time end the process (a segmentation fault, driver 580): here they take turns.
"""

from __future__ import annotations

import threading
from typing import Any

from unidle.meter.sensors.reading import EARLY, Reading

PERIOD_S = 0.1
_ONE_AT_A_TIME = threading.Lock()
READINGS = tuple(Reading(f"{unit} active", "%", PERIOD_S, 100.0) for unit in ("SM", "tensor", "DRAM"))


class Gpm:
    """Two snapshots in turn: the later of one pair is the earlier of the next, so that no time is left out."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises NVMLError where there are no such counters."""
        self._nvml, self._handle = nvml, handle
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._last, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._since_ns: int | None = None

    def poll(self, now_ns: int) -> dict[str, float]:
        """A value for each reading the GPU has, if it is time for one."""
        nvml = self._nvml
        if self._since_ns is not None and now_ns - self._since_ns < EARLY * PERIOD_S * 1e9:
            return {}
        earlier, later = self._last, self._spare
        with _ONE_AT_A_TIME:
            nvml.nvmlGpmSampleGet(self._handle, later)
        is_first, self._since_ns = self._since_ns is None, now_ns
        self._last, self._spare = later, earlier
        if is_first:
            return {}
        pair = nvml.c_nvmlGpmMetricsGet_t()
        pair.version = nvml.NVML_GPM_METRICS_GET_VERSION
        pair.sample1, pair.sample2 = earlier, later
        units = (nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL)
        pair.numMetrics = len(units)
        for place, metric in enumerate(units):
            pair.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(pair)
        return {
            reading.name: pair.metrics[place].value
            for place, reading in enumerate(READINGS)
            if pair.metrics[place].nvmlReturn == nvml.NVML_SUCCESS
        }

    def close(self) -> None:
        """Give the snapshots back to the driver."""
        for snapshot in (self._last, self._spare):
            self._nvml.nvmlGpmSampleFree(snapshot)
