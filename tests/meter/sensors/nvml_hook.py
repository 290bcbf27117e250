"""The hook where nvidia-ml-py looks up driver functions, and what recorder and player share."""

from __future__ import annotations

import ctypes
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import unidle.meter.sensors.nvml
from unidle.meter.sensors.nvml import Driver

HOOK = "_nvmlGetFunctionPointer"
POLLS_PER_PROCESS_POLL = 10
ANONYMISED_UUID = "GPU-11111111-1111-1111-1111-111111111111"  # of the first GPU
IDENTIFYING_FIELDS = {"pid", "domain", "bus", "device"}  # fields of structs
_POINTERS = (ctypes._Pointer, ctypes.c_char_p, ctypes.c_void_p)


class Clock:
    """Replaces the module `time` in the meter; the time changes only between calls.

    So a recording and its replay see the same times to the nanosecond.
    """

    def __init__(self, system_ns: int) -> None:
        self.now_ns, self.system_ns = 0, system_ns

    def move(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns + 1, now_ns)

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.system_ns + self.now_ns


class MeterPoller:
    """Polls the driver as the meter does and keeps the readings."""

    def __init__(self) -> None:
        self.driver = Driver()
        self._polls = 0
        self._kept: list[dict[str, Any]] = [{"samples": {}, "processes": [], "throttled": []} for _ in self.driver.gpus]

    def poll(self) -> None:
        for gpu, kept in zip(self.driver.gpus, self._kept, strict=True):
            for name, samples in gpu.poll().items():
                kept["samples"].setdefault(name, []).extend([sample.at_ns, sample.value] for sample in samples)
            kept["throttled"].append(gpu.throttled_by)
            if self._polls % POLLS_PER_PROCESS_POLL == 0:
                gpu.poll_processes()
                users = None if gpu.processes is None else [vars(process) for process in gpu.processes]
                kept["processes"].append(users)
        self._polls += 1

    def end(self) -> dict[str, Any]:
        """Close the driver and return all readings, ready for JSON."""
        gpus = [
            {
                "model": gpu.model,
                "has_uuid": gpu.has_uuid(ANONYMISED_UUID),
                "power_limit": gpu.power_limit,
                "readings": {reading.name: [reading.period_s, reading.full] for reading in gpu.readings},
                "unavailable": sorted(gpu.unavailable),
                **kept,
            }
            for gpu, kept in zip(self.driver.gpus, self._kept, strict=True)
        ]
        self.driver.close()
        return {"no_gpu_reason": self.driver.no_gpu_reason, "gpus": gpus}


def binding() -> Any:
    """The module of nvidia-ml-py that has the hook."""
    try:
        import pynvml
    except ImportError:
        sys.exit("There is no nvidia-ml-py here; run: pip install nvidia-ml-py.")
    module = sys.modules[pynvml.nvmlInit.__module__]
    if not hasattr(module, HOOK):
        sys.exit(f"This version of nvidia-ml-py reaches the driver otherwise than by {HOOK}; install version 12 or 13.")
    return module


@contextmanager
def hooked(pointer: Callable[[str], Callable[..., int]], clock: Clock) -> Iterator[None]:
    """Make the binding look up functions with `pointer`, and the meter use `clock`."""
    module, meter = binding(), vars(unidle.meter.sensors.nvml)
    real_pointer, real_time = getattr(module, HOOK), meter["time"]
    setattr(module, HOOK, pointer)
    meter["time"] = clock
    try:
        yield
    finally:
        meter["time"] = real_time
        setattr(module, HOOK, real_pointer)


def memory_of(argument: Any) -> Any:
    """The memory that a call can write through an argument; None for a plain value or a handle."""
    if isinstance(argument, ctypes.Array):
        return argument
    if isinstance(argument, ctypes._Pointer):  # handles point to opaque types
        return argument.contents if argument and getattr(argument._type_, "_fields_", None) else None
    return getattr(argument, "_obj", None)


@cache
def sensitive_fields(kind: Any, start: int = 0, name: str = "") -> tuple[tuple[int, int, str], ...]:
    """Where a type has addresses, text and identifying fields: (offset, bytes, kind)."""
    if issubclass(kind, _POINTERS):
        return ((start, ctypes.sizeof(kind), "address"),)
    if issubclass(kind, ctypes.Array):
        if kind._type_ is ctypes.c_char:
            return ((start, ctypes.sizeof(kind), "text"),)
        step = ctypes.sizeof(kind._type_)
        return tuple(p for i in range(kind._length_) for p in sensitive_fields(kind._type_, start + i * step, name))
    if issubclass(kind, ctypes.Structure):
        fields = [(getattr(kind, field[0]).offset, field[1], field[0]) for field in kind._fields_]
        return tuple(p for offset, inner, name in fields for p in sensitive_fields(inner, start + offset, name))
    return ((start, ctypes.sizeof(kind), name),) if name in IDENTIFYING_FIELDS else ()


def request(arguments: tuple[Any, ...], handle: Callable[[int], int]) -> list[Any]:
    """A call's inputs, ready for JSON, without output buffer sizes, which differ between versions of the binding."""
    inputs: list[Any] = []
    for before, argument in zip((None, *arguments), arguments):
        memory = memory_of(argument)
        if argument is None:
            inputs.append(None)
        elif isinstance(memory, (ctypes.Array, ctypes.Structure)):
            inputs.append(_without_addresses(memory).hex())
        elif memory is not None:
            inputs.append("out")
        elif isinstance(argument, ctypes._Pointer):
            inputs.append(f"handle {handle(address(argument))}")
        else:
            value = getattr(argument, "value", argument)
            inputs.append("room" if isinstance(before, ctypes.Array) and value == len(before) else value)
    return inputs


def write(recording: dict[str, Any], path: Path) -> None:
    text = json.dumps(recording, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return recording


def address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _without_addresses(memory: Any) -> bytes:
    data = bytearray(memory)
    for start, size, what in sensitive_fields(memory.__class__):
        if what == "address":
            data[start : start + size] = bytes(size)
    return bytes(data).rstrip(b"\0")
