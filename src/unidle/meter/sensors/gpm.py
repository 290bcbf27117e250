"""Reads GPM, the hardware counters of Hopper and newer GPUs: activity of SMs, tensor cores and DRAM.

Utilisation says only that some kernel ran. GPM compares two snapshots of counters, so each value is the mean over the
time between them. Snapshots less than about 0.1 s apart yield zeros, so they are never taken that often. Two threads
that take a snapshot at the same time crash the process (segmentation fault, driver 580), hence the lock.
"""

from __future__ import annotations

import threading
from typing import Any

from unidle.meter.sensors.reading import EARLY, Reading

PERIOD_S = 0.1
_ONE_AT_A_TIME = threading.Lock()
READINGS = tuple(Reading(f"{unit} active", "%", PERIOD_S, 100.0) for unit in ("SM", "tensor", "DRAM"))


class Gpm:
    """Compares consecutive snapshots, so the values cover all the time."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises NVMLError if the GPU has no GPM counters."""
        self._nvml, self._handle = nvml, handle
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._last, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._since_ns: int | None = None

    def poll(self, now_ns: int) -> dict[str, float]:
        """Return a value for each available reading, or nothing if it is too early for the next snapshot."""
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
        """Free the snapshots."""
        for snapshot in (self._last, self._spare):
            self._nvml.nvmlGpmSampleFree(snapshot)
