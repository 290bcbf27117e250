"""Reads NVIDIA GPUs through NVML (nvidia-ml-py).

The readings, and how often the driver updates them:

- *utilisation*: share of time in which some kernel ran, even a kernel of one thread; *memory controller*: share in
  which memory was read or written. Both are averages over 1/6 to 1 s. The driver keeps timestamped samples, which are
  read so that none is missed or counted twice; only where there are none is the current value polled.
- *SM, tensor, DRAM active*: see `gpm`.
- *power*: instantaneous if the driver supports it, else its mean over the last second, and its share of the enforced
  limit; *energy*: the difference of the driver's counter, not a sum of power samples. Both change about ten times a
  second.
- *memory*, *temperature*, *clocks*, *throttle reasons*, *processes*: current values.

Not every GPU has all of them. Readings that the driver does not support are listed as unavailable and never shown as 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import pynvml

from unidle.meter.sensors.gpm import READINGS as GPM_READINGS
from unidle.meter.sensors.gpm import Gpm
from unidle.meter.sensors.reading import Reading, RepeatFilter, Sample

_T = TypeVar("_T")

NO_DRIVER = "No NVIDIA GPU found: there is no NVIDIA driver."

_SLOW_S, _FAST_S = 1.0, 0.1
_NO_SAMPLES_S = 1.5  # without samples before polling; longer than the longest averaging window
# Reasons that slow a busy GPU down; low clocks of an idle GPU are not throttling.
_REASONS = {
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power brake",
}
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int  # the host's pid, which may differ from the one inside a container
    memory: int | None  # bytes
    utilisation: float | None  # %: share of time in which one of its kernels ran, mean since the last poll


class Gpu:
    """One GPU and its readings."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self.index, self.name = nvml, index, f"gpu {index}"
        self.unavailable: set[str] = set()
        self.is_lost = False
        self.throttled_by: tuple[str, ...] | None = None
        self.processes: list[GpuProcess] | None = None
        # Errors that will not go away; any other is temporary.
        self._final = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,  # older drivers return it for unknown fields
        }
        self._handle = self._query("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if self._handle is None:
            self.is_lost = True
        self.model = self._query("name", lambda: _text(nvml.nvmlDeviceGetName(self._handle))) or "NVIDIA GPU"
        memory = self._query("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle).total / 2**30)
        self.power_limit = self._query("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000)
        self.readings = (
            Reading("utilisation", "%", _SLOW_S, 100.0),
            Reading("memory controller", "%", _SLOW_S, 100.0),
            *GPM_READINGS,
            Reading("memory", "GiB", _SLOW_S, memory),
            Reading("power", "W", _FAST_S, self.power_limit),
            Reading("power share", "%", _FAST_S, 100.0),
            Reading("energy", "J", _FAST_S, is_total=True),
            Reading("temperature", "°C", _SLOW_S, 100.0),
            Reading("SM clock", "MHz", _FAST_S),
            Reading("memory clock", "MHz", _FAST_S),
        )
        self._repeat_filters = {reading.name: RepeatFilter(reading.period_s) for reading in self.readings}
        self._seen: dict[int, int] = {}  # kind of driver samples → timestamp of the last one, µs
        self._last_samples_ns = dict.fromkeys(self._repeat_filters, time.perf_counter_ns())
        self._processes_seen = 0
        self._joules: tuple[float, float] | None = None  # last counter value, energy used so far
        self._gpm: Gpm | None = self._query("GPM", lambda: Gpm(nvml, self._handle))
        if self._gpm is None:
            self.unavailable |= {reading.name for reading in GPM_READINGS}

    def has_uuid(self, uuid: str) -> bool:
        """Whether this is the GPU's UUID, with or without the prefix GPU-."""
        own = self._query("UUID", lambda: _text(self._nvml.nvmlDeviceGetUUID(self._handle)))
        return own is not None and own.removeprefix("GPU-") == uuid.removeprefix("GPU-")

    def poll(self) -> dict[str, list[Sample]]:
        """Return the samples that are new since the last call; none for unavailable readings."""
        found = self.poll_only({reading.name for reading in self.readings})
        self.poll_throttling()
        return found

    def poll_only(self, wanted: Container[str]) -> dict[str, list[Sample]]:
        """Poll only these readings.

        Polling all takes about 10 ms on an H200: utilisation and memory controller 5, energy 3, GPM 1.5.
        """
        nvml, handle = self._nvml, self._handle
        found: dict[str, list[Sample]] = {}
        if "utilisation" in wanted:
            self._read_share(found, "utilisation", nvml.NVML_GPU_UTILIZATION_SAMPLES, "gpu")
        if "memory controller" in wanted:
            self._read_share(found, "memory controller", nvml.NVML_MEMORY_UTILIZATION_SAMPLES, "memory")
        if any(reading.name in wanted for reading in GPM_READINGS):
            self._read_gpm(found)
        if "memory" in wanted:
            self._read(found, "memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30)
        if "power" in wanted or "power share" in wanted:
            self._read_power(found)
        if "energy" in wanted:
            self._read(found, "energy", self._energy)
        if "temperature" in wanted:
            degrees = nvml.nvmlDeviceGetTemperature
            self._read(found, "temperature", lambda: float(degrees(handle, nvml.NVML_TEMPERATURE_GPU)))
        for name, kind in (("SM clock", nvml.NVML_CLOCK_SM), ("memory clock", nvml.NVML_CLOCK_MEM)):
            if name in wanted:
                self._read(found, name, lambda kind=kind: float(nvml.nvmlDeviceGetClockInfo(handle, kind)))  # type: ignore[misc]
        return found

    def poll_throttling(self) -> None:
        """Update `throttled_by`."""
        nvml = self._nvml
        mask = self._query("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        self.throttled_by = None if mask is None else tuple(word for bit, word in _REASONS.items() if mask & bit)

    def poll_processes(self) -> None:
        """Update `processes`; separate from `poll` because it is slow and needed less often."""
        nvml = self._nvml
        users = self._query("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        shares: dict[int, list[float]] = {}
        for sample in self._query("process use", self._process_samples) or []:
            shares.setdefault(sample.pid, []).append(float(sample.smUtil))
            self._processes_seen = max(self._processes_seen, sample.timeStamp)
        if users is None:
            self.processes = None
        else:
            self.processes = [
                GpuProcess(user.pid, user.usedGpuMemory, fmean(shares[user.pid]) if user.pid in shares else None)
                for user in users
            ]

    def close(self) -> None:
        """Free the driver's resources."""
        if self._gpm is not None:
            self._query("GPM", self._gpm.close)

    def _query(self, what: str, query: Callable[[], _T]) -> _T | None:
        """Return the result of a driver query, or None; an unsupported query is not repeated."""
        if self.is_lost or what in self.unavailable:
            return None
        try:
            return query()
        except self._nvml.NVMLLibraryMismatchError:  # not an NVMLError: the driver is too old for this function
            self.unavailable.add(what)
            return None
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self.is_lost = True
            elif error.value in self._final:
                self.unavailable.add(what)
            return None

    def _read(self, found: dict[str, list[Sample]], name: str, query: Callable[[], float]) -> None:
        value = self._query(name, query)
        if value is not None:
            found[name] = self._repeat_filters[name].take(time.perf_counter_ns(), value)

    def _read_gpm(self, found: dict[str, list[Sample]]) -> None:
        if self._gpm is not None:
            gpm, at_ns = self._gpm, time.perf_counter_ns()
            for name, value in (self._query("GPM", lambda: gpm.poll(at_ns)) or {}).items():
                found[name] = [Sample(at_ns, value)]
            if "GPM" in self.unavailable:
                self.unavailable |= {reading.name for reading in GPM_READINGS}

    def _read_share(self, found: dict[str, list[Sample]], name: str, kind: int, polled: str) -> None:
        """Read the driver's own samples, or poll the field `polled` if there are none or they stopped coming."""
        stamped, now_ns = self._query(f"samples of {name}", lambda: self._stamped(kind)), time.perf_counter_ns()
        if stamped:
            self._last_samples_ns[name] = now_ns
            found[name] = stamped
        elif f"samples of {name}" in self.unavailable or now_ns - self._last_samples_ns[name] > _NO_SAMPLES_S * 1e9:
            rates = self._nvml.nvmlDeviceGetUtilizationRates
            self._read(found, name, lambda: float(getattr(rates(self._handle), polled)))

    def _stamped(self, kind: int) -> list[Sample]:
        """Return the driver's own samples since the last call; the first call returns only the latest."""
        nvml = self._nvml
        seen = self._seen.get(kind, 0)
        try:
            value_type, samples = nvml.nvmlDeviceGetSamples(self._handle, kind, seen)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                return []  # no new samples
            raise
        new = sorted((s for s in samples if s.timeStamp > seen), key=lambda s: s.timeStamp)
        if not new:
            return []
        self._seen[kind] = new[-1].timeStamp
        # The driver uses the system clock, in microseconds.
        now_ns, system_ns = time.perf_counter_ns(), time.time_ns()
        field = _VALUE_FIELDS[value_type]
        return [
            Sample(min(now_ns, now_ns - system_ns + s.timeStamp * 1000), float(getattr(s.sampleValue, field)))
            for s in (new if seen else new[-1:])
        ]

    def _read_power(self, found: dict[str, list[Sample]]) -> None:
        nvml, handle = self._nvml, self._handle
        watts = self._query("instant power", self._instant_power)
        if watts is None:
            watts = self._query("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        if watts is not None:
            found["power"] = self._repeat_filters["power"].take(time.perf_counter_ns(), watts)
            if self.power_limit:
                found["power share"] = [Sample(s.at_ns, 100 * s.value / self.power_limit) for s in found["power"]]
        if not self.power_limit or "power" in self.unavailable:
            self.unavailable.add("power share")

    def _instant_power(self) -> float:
        nvml = self._nvml
        (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(field.nvmlReturn)
        return float(getattr(field.value, _VALUE_FIELDS[field.valueType])) / 1000

    def _energy(self) -> float:
        """Return joules since the first call."""
        counter = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
        before, used = self._joules or (counter, 0.0)
        # The counter restarts when the driver is reloaded; the energy used in between is unknown.
        used += max(0.0, counter - before)
        self._joules = counter, used
        return used

    def _process_samples(self) -> list[Any]:
        nvml = self._nvml
        try:
            samples: list[Any] = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._processes_seen)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                return []  # the binding raises an error for an empty list
            raise
        return samples


class Driver:
    """The NVIDIA driver and its GPUs; without any, `no_gpu_reason` says why."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.no_gpu_reason: str | None = None
        self._nvml: Any = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.no_gpu_reason = _failure_reason(pynvml, error)
            return
        self._nvml = pynvml
        try:
            self.gpus = [Gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.no_gpu_reason = _failure_reason(pynvml, error)
        if not self.gpus and not self.no_gpu_reason:
            self.no_gpu_reason = "No NVIDIA GPU found: the driver is loaded but lists none."

    @property
    def version(self) -> str | None:
        """The driver's version; None if it is not known."""
        with suppress(pynvml.NVMLError):
            return _text(pynvml.nvmlSystemGetDriverVersion())
        return None

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest version of CUDA that the driver supports; None if it is not known."""
        with suppress(pynvml.NVMLError):
            newest = pynvml.nvmlSystemGetCudaDriverVersion()  # 12040 for 12.4
            return newest // 1000, newest % 1000 // 10
        return None

    def gpu_by_uuid(self, uuid: str) -> Gpu | None:
        """Return the GPU with this UUID."""
        return next((gpu for gpu in self.gpus if gpu.has_uuid(uuid)), None)

    def own_gpu(self) -> Gpu | None:
        """Return the GPU that this process uses or, before it uses one, the first in CUDA_VISIBLE_DEVICES.

        Indices there are taken as the driver's; CUDA may order GPUs of different kinds differently.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return self.gpu_by_uuid(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if first.isdecimal():
            return self.gpus[int(first)] if int(first) < len(self.gpus) else None
        return self.gpu_by_uuid(first) if first.startswith("GPU-") else None

    def close(self) -> None:
        """Shut NVML down."""
        for gpu in self.gpus:
            gpu.close()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _failure_reason(nvml: Any, error: Any) -> str:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NO_DRIVER
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "No NVIDIA GPU found: the NVIDIA driver is installed but not loaded."
    return f"The NVIDIA driver does not respond: {error}."


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
