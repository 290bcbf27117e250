"""The one door through which nvidia-ml-py reaches the driver, and what recorder and player, who stand there, share."""

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

DOOR = "_nvmlGetFunctionPointer"
LOOKS_PER_PROCESS_LOOK = 10
MAKE_BELIEVE_UUID = "GPU-11111111-1111-1111-1111-111111111111"  # of the first GPU
IDENTITIES = {"pid", "domain", "bus", "device"}  # fields of structs
_POINTERS = (ctypes._Pointer, ctypes.c_char_p, ctypes.c_void_p)


class Clock:
    """Stands in for the module `time` in the meter, and stands still between two calls.

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


class Watch:
    """Asks the driver as the meter does, and keeps what it made of the answers."""

    def __init__(self) -> None:
        self.driver = Driver()
        self._looks = 0
        self._kept: list[dict[str, Any]] = [{"samples": {}, "processes": [], "throttled": []} for _ in self.driver.gpus]

    def look(self) -> None:
        for gpu, kept in zip(self.driver.gpus, self._kept, strict=True):
            for name, samples in gpu.poll().items():
                kept["samples"].setdefault(name, []).extend([sample.at_ns, sample.value] for sample in samples)
            kept["throttled"].append(gpu.throttled_by)
            if self._looks % LOOKS_PER_PROCESS_LOOK == 0:
                gpu.poll_processes()
                users = None if gpu.processes is None else [vars(process) for process in gpu.processes]
                kept["processes"].append(users)
        self._looks += 1

    def end(self) -> dict[str, Any]:
        """Close the driver; all that was seen, ready for JSON."""
        gpus = [
            {
                "model": gpu.model,
                "has_uuid": gpu.has_uuid(MAKE_BELIEVE_UUID),
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
    """The module of nvidia-ml-py that has the door."""
    try:
        import pynvml
    except ImportError:
        sys.exit("There is no nvidia-ml-py here; run: pip install nvidia-ml-py.")
    module = sys.modules[pynvml.nvmlInit.__module__]
    if not hasattr(module, DOOR):
        sys.exit(f"This version of nvidia-ml-py reaches the driver otherwise than by {DOOR}; install version 12 or 13.")
    return module


@contextmanager
def behind_the_door(pointer: Callable[[str], Callable[..., int]], clock: Clock) -> Iterator[None]:
    """Have `pointer` give the binding its functions, and `clock` the meter its times."""
    module, meter = binding(), vars(unidle.meter.sensors.nvml)
    real_pointer, real_time = getattr(module, DOOR), meter["time"]
    setattr(module, DOOR, pointer)
    meter["time"] = clock
    try:
        yield
    finally:
        meter["time"] = real_time
        setattr(module, DOOR, real_pointer)


def memory_of(argument: Any) -> Any:
    """What a call can write to through an argument; None for a plain value or a handle."""
    if isinstance(argument, ctypes.Array):
        return argument
    if isinstance(argument, ctypes._Pointer):  # a handle is one to a type that nobody knows
        return argument.contents if argument and getattr(argument._type_, "_fields_", None) else None
    return getattr(argument, "_obj", None)


@cache
def places(kind: Any, start: int = 0, name: str = "") -> tuple[tuple[int, int, str], ...]:
    """Where a type has addresses, text and identities: (offset, bytes, what)."""
    if issubclass(kind, _POINTERS):
        return ((start, ctypes.sizeof(kind), "address"),)
    if issubclass(kind, ctypes.Array):
        if kind._type_ is ctypes.c_char:
            return ((start, ctypes.sizeof(kind), "text"),)
        step = ctypes.sizeof(kind._type_)
        return tuple(p for i in range(kind._length_) for p in places(kind._type_, start + i * step, name))
    if issubclass(kind, ctypes.Structure):
        fields = [(getattr(kind, field[0]).offset, field[1], field[0]) for field in kind._fields_]
        return tuple(p for offset, inner, name in fields for p in places(inner, start + offset, name))
    return ((start, ctypes.sizeof(kind), name),) if name in IDENTITIES else ()


def question(arguments: tuple[Any, ...], handle: Callable[[int], int]) -> list[Any]:
    """What is asked, ready for JSON. The room for an answer is no part of it: versions of the binding differ there."""
    asked: list[Any] = []
    for before, argument in zip((None, *arguments), arguments):
        memory = memory_of(argument)
        if argument is None:
            asked.append(None)
        elif isinstance(memory, (ctypes.Array, ctypes.Structure)):
            asked.append(_without_addresses(memory).hex())
        elif memory is not None:
            asked.append("out")
        elif isinstance(argument, ctypes._Pointer):
            asked.append(f"handle {handle(address(argument))}")
        else:
            value = getattr(argument, "value", argument)
            asked.append("room" if isinstance(before, ctypes.Array) and value == len(before) else value)
    return asked


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
    for start, size, what in places(memory.__class__):
        if what == "address":
            data[start : start + size] = bytes(size)
    return bytes(data).rstrip(b"\0")
