"""What the NVIDIA driver tells about its GPUs, through nvidia-ml-py.

What the numbers are, and how often the driver renews them:

- *utilisation*: the share of time in which some kernel ran, were it of one thread; *memory controller*: in which
  memory was read or written. Each is over a window of 1/6 to 1 s. The driver keeps its own samples, with their times:
  those are taken, and none is missed or seen twice. Only where it has none is the value polled.
- *SM, tensor, DRAM active*: see `gpm`.
- *power*, at this instant where the driver knows it, else its mean over the last second, and its share of the limit in
  force; *energy*: the difference of the driver's counter, not a sum of powers. Both move about ten times a second.
- *memory*, *temperature*, *clocks*, *throttle reasons*, *processes*: as they are when asked.

A GPU need not have all of them. What the driver refuses for good is listed as lacking; it is never a 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from unidle.meter.sensors.gpm import READINGS as GPM_READINGS
from unidle.meter.sensors.gpm import Gpm
from unidle.meter.sensors.reading import Reading, Renewed, Sample

_T = TypeVar("_T")

_NO_DRIVER = "No NVIDIA GPU here: there is no NVIDIA driver."
_NO_PACKAGE = "GPU readings need the package nvidia-ml-py; run: pip install 'unidle[meter]'."
_TRACES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of a driver; the second is how WSL has it

_SLOW_S, _FAST_S = 1.0, 0.1
_SILENCE_S = 1.5  # longer than the longest window of a sample
# Clocks below their highest for a reason that is no fault, an idle GPU above all, are not throttled.
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
    """A process that computes on a GPU."""

    pid: int  # as the driver numbers it, which in a container may not be the number there
    memory: int | None  # bytes
    utilisation: float | None  # %: the share of time in which some kernel of it ran, mean since the last look


class Gpu:
    """One GPU, and what is new about it since it was last asked."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self.index, self.name = nvml, index, f"gpu {index}"
        self.lacking: set[str] = set()
        self.is_lost = False
        self.throttled_by: tuple[str, ...] | None = None
        self.processes: list[GpuProcess] | None = None
        # Errors that the next call will meet again; any other is of the moment.
        self._final = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,  # how older drivers refuse a field they do not know
        }
        self._handle = self._ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if self._handle is None:
            self.is_lost = True
        self.model = self._ask("name", lambda: _text(nvml.nvmlDeviceGetName(self._handle))) or "NVIDIA GPU"
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle).total / 2**30)
        self.power_limit = self._ask("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000)
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
        self._renewed = {reading.name: Renewed(reading.period_s) for reading in self.readings}
        self._seen: dict[int, int] = {}  # kind of the driver's samples → time of the last one, in its microseconds
        self._heard_ns = dict.fromkeys(self._renewed, time.perf_counter_ns())  # when the driver's samples last came
        self._processes_seen = 0
        self._joules: tuple[float, float] | None = None  # the counter when last read, and what was used until then
        self._gpm: Gpm | None = self._ask("GPM", lambda: Gpm(nvml, self._handle))
        if self._gpm is None:
            self.lacking |= {reading.name for reading in GPM_READINGS}

    def is_called(self, uuid: str) -> bool:
        """Whether this is the GPU's name for good, with or without the word GPU before it."""
        own = self._ask("UUID", lambda: _text(self._nvml.nvmlDeviceGetUUID(self._handle)))
        return own is not None and own.removeprefix("GPU-") == uuid.removeprefix("GPU-")

    def poll(self) -> dict[str, list[Sample]]:
        """The samples that are new since the last call; none for what this GPU lacks."""
        found = self.poll_only({reading.name for reading in self.readings})
        self.poll_throttling()
        return found

    def poll_only(self, wanted: Container[str]) -> dict[str, list[Sample]]:
        """The same of these readings alone.

        All of them take the driver of an H200 about 10 ms: utilisation and memory controller 5, energy 3, GPM 1.5.
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
        """Renew `throttled_by`."""
        nvml = self._nvml
        mask = self._ask("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        self.throttled_by = None if mask is None else tuple(word for bit, word in _REASONS.items() if mask & bit)

    def poll_processes(self) -> None:
        """Renew `processes`; apart, for it takes the driver longer than all else and need not be as often."""
        nvml = self._nvml
        users = self._ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        shares: dict[int, list[float]] = {}
        for sample in self._ask("process use", self._process_samples) or []:
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
        """Let go of what the driver keeps for this object."""
        if self._gpm is not None:
            self._ask("GPM", self._gpm.close)

    def _ask(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """The driver's answer; None if there is none, and no more asking for what it never has."""
        if self.is_lost or what in self.lacking:
            return None
        try:
            return ask()
        except self._nvml.NVMLLibraryMismatchError:  # no NVMLError: the driver is older than the function asked for
            self.lacking.add(what)
            return None
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self.is_lost = True
            elif error.value in self._final:
                self.lacking.add(what)
            return None

    def _read(self, found: dict[str, list[Sample]], name: str, ask: Callable[[], float]) -> None:
        value = self._ask(name, ask)
        if value is not None:
            found[name] = self._renewed[name].take(time.perf_counter_ns(), value)

    def _read_gpm(self, found: dict[str, list[Sample]]) -> None:
        if self._gpm is not None:
            gpm, at_ns = self._gpm, time.perf_counter_ns()
            for name, value in (self._ask("GPM", lambda: gpm.poll(at_ns)) or {}).items():
                found[name] = [Sample(at_ns, value)]
            if "GPM" in self.lacking:
                self.lacking |= {reading.name for reading in GPM_READINGS}

    def _read_share(self, found: dict[str, list[Sample]], name: str, kind: int, polled: str) -> None:
        """By the driver's own samples; by `polled`, the name of a field, only where it keeps none or is silent."""
        stamped, now_ns = self._ask(f"samples of {name}", lambda: self._stamped(kind)), time.perf_counter_ns()
        if stamped:
            self._heard_ns[name] = now_ns
            found[name] = stamped
        elif f"samples of {name}" in self.lacking or now_ns - self._heard_ns[name] > _SILENCE_S * 1e9:
            rates = self._nvml.nvmlDeviceGetUtilizationRates
            self._read(found, name, lambda: float(getattr(rates(self._handle), polled)))

    def _stamped(self, kind: int) -> list[Sample]:
        """The driver's own samples since the last call; of those from before the first call, only the latest."""
        nvml = self._nvml
        seen = self._seen.get(kind, 0)
        try:
            value_type, samples = nvml.nvmlDeviceGetSamples(self._handle, kind, seen)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                return []  # none since
            raise
        fresh = sorted((s for s in samples if s.timeStamp > seen), key=lambda s: s.timeStamp)
        if not fresh:
            return []
        self._seen[kind] = fresh[-1].timeStamp
        # The driver's clock is the system's, in microseconds.
        now_ns, system_ns = time.perf_counter_ns(), time.time_ns()
        field = _VALUE_FIELDS[value_type]
        return [
            Sample(min(now_ns, now_ns - system_ns + s.timeStamp * 1000), float(getattr(s.sampleValue, field)))
            for s in (fresh if seen else fresh[-1:])
        ]

    def _read_power(self, found: dict[str, list[Sample]]) -> None:
        nvml, handle = self._nvml, self._handle
        watts = self._ask("power at this instant", self._instant_power)
        if watts is None:
            watts = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        if watts is not None:
            found["power"] = self._renewed["power"].take(time.perf_counter_ns(), watts)
            if self.power_limit:
                found["power share"] = [Sample(s.at_ns, 100 * s.value / self.power_limit) for s in found["power"]]
        if not self.power_limit or "power" in self.lacking:
            self.lacking.add("power share")

    def _instant_power(self) -> float:
        nvml = self._nvml
        (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(field.nvmlReturn)
        return float(getattr(field.value, _VALUE_FIELDS[field.valueType])) / 1000

    def _energy(self) -> float:
        """Joules since the first call."""
        counter = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
        before, used = self._joules or (counter, 0.0)
        # The counter begins anew when the driver is loaded again: what was used in between is not known.
        used += max(0.0, counter - before)
        self._joules = counter, used
        return used

    def _process_samples(self) -> list[Any]:
        nvml = self._nvml
        try:
            samples: list[Any] = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._processes_seen)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                return []  # the binding takes "none, and no error" for an error
            raise
        return samples


class Driver:
    """The NVIDIA driver and all GPUs that it knows; none is a normal case, and `why_none` says why."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.why_none: str | None = None
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.why_none = _NO_PACKAGE if any(path.exists() for path in _TRACES) else _NO_DRIVER
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.why_none = _why(pynvml, error)
            return
        self._nvml = pynvml
        try:
            self.gpus = [Gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.why_none = _why(pynvml, error)
        if not self.gpus and not self.why_none:
            self.why_none = "No NVIDIA GPU here: the driver is there and knows of none."

    def gpu_called(self, uuid: str) -> Gpu | None:
        """The GPU with this name, whatever its number here is."""
        return next((gpu for gpu in self.gpus if gpu.is_called(uuid)), None)

    def own_gpu(self) -> Gpu | None:
        """The GPU that this process uses or, before it uses any, the first that CUDA_VISIBLE_DEVICES leaves to it.

        Numbers there are taken for the driver's; CUDA may count otherwise where GPUs differ.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return self.gpu_called(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if first.isdecimal():
            return self.gpus[int(first)] if int(first) < len(self.gpus) else None
        return self.gpu_called(first) if first.startswith("GPU-") else None

    def close(self) -> None:
        """End the talk with the driver."""
        for gpu in self.gpus:
            gpu.close()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _why(nvml: Any, error: Any) -> str:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _NO_DRIVER
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "No NVIDIA GPU here: the NVIDIA driver is installed, but not loaded."
    return f"The NVIDIA driver does not answer: {error}."


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
