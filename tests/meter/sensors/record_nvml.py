"""Records the NVIDIA driver's answers to the meter, for tests on machines without a GPU.

    PYTHONPATH=src python tests/meter/sensors/record_nvml.py tests/meter/sensors/recordings/h200.json.gz [--seconds 6]

The GPU idles for a third of the time, multiplies matrices for a third (if torch with CUDA is installed) and idles
again, while `unidle.meter.sensors.nvml` polls it at the meter's usual rate. A hook in nvidia-ml-py records the time,
name, arguments and return code of every call, and the memory that the driver wrote. `replay_nvml` gives the same
answers at the same times.

The recording is anonymised: text other than the GPU's model and the driver's version, process ids and PCI addresses
are replaced by placeholders of the same length, and pointers by numbers.

The file is JSON: `calls` has [nanoseconds since the start, function, inputs, return code, outputs]. Inputs and outputs
have an entry per argument: a handle, or an index into `memory`, which holds each distinct output once, in hexadecimal
without trailing zeros.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvml_hook import (
    HOOK,
    IDENTIFYING_FIELDS,
    Clock,
    MeterPoller,
    address,
    binding,
    hooked,
    memory_of,
    request,
    sensitive_fields,
    write,
)

_PERIOD_S = 0.1  # polling period, as in unidle.meter.sensors.background
_SETTLE_S = 2.0  # the driver's own windows are up to a second long
_HARMLESS_TEXT = {"nvmlDeviceGetName", "nvmlSystemGetDriverVersion"}

_LOAD = """
import sys, threading
try:
    import torch
except ImportError:
    sys.exit("torch is not installed")
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU")
matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
product = matrix @ matrix
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
while not ended.is_set():
    for _ in range(8):
        torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
sys.stdin.read()  # stay idle until the recording has ended
"""


class Recorder:
    """Passes calls on to the driver and records them."""

    def __init__(self) -> None:
        self._binding = binding()
        self._real_pointer = getattr(self._binding, HOOK)
        self._began_ns, self.clock = time.perf_counter_ns(), Clock(time.time_ns())
        self._numbers: dict[str, dict[Any, int]] = {}
        self._memory: dict[str, int] = {}
        self._missing: set[str] = set()
        self._calls: list[list[Any]] = []

    def tick(self) -> int:
        """Bring the clock up to date."""
        self.clock.move(time.perf_counter_ns() - self._began_ns)
        return self.clock.now_ns

    def pointer(self, name: str) -> Callable[..., int]:
        try:
            function = self._real_pointer(name)
        except self._binding.NVMLError:
            self._missing.add(name)
            raise
        return partial(self._call, name, function)

    def recorded(self) -> dict[str, Any]:
        return {"missing": sorted(self._missing), "memory": list(self._memory), "calls": self._calls}

    def _call(self, name: str, function: Callable[..., int], *arguments: Any) -> int:
        inputs = request(arguments, partial(self._number, "handle"))
        code = function(*arguments)
        at_ns = self.tick()
        written = [self._written(name, memory_of(argument)) for argument in arguments]
        self._calls.append([at_ns, name, inputs, code, written])
        return code

    def _written(self, name: str, memory: Any) -> Any:
        if memory is None:
            return None
        if isinstance(memory, ctypes._Pointer):
            return f"handle {self._number('handle', address(memory))}"
        text = self.anonymised(name, memory).hex()
        return self._memory.setdefault(text, len(self._memory))

    def anonymised(self, function: str, memory: Any) -> bytes:
        """The bytes of `memory`, anonymised and without trailing zeros."""
        data = bytearray(memory)
        for start, size, what in sensitive_fields(memory.__class__):
            part = slice(start, start + size)
            if what == "address":
                data[part] = bytes(size)
            elif what == "text" and function not in _HARMLESS_TEXT:
                text = bytes(data[part]).split(b"\0")[0]
                kind = text[:4] if text.startswith((b"GPU-", b"MIG-")) else b""
                digit = b"%d" % (self._number("text", text) % 10)
                data[part] = (kind + re.sub(rb"[0-9A-Za-z]", digit, text[len(kind) :])).ljust(size, b"\0")
            elif what in IDENTIFYING_FIELDS:
                data[part] = self._number(what, int.from_bytes(data[part], sys.byteorder)).to_bytes(size, sys.byteorder)
        return bytes(data).rstrip(b"\0")

    def _number(self, what: str, real: Any) -> int:
        """A number from 1 for each distinct value; 0 for 0."""
        numbers = self._numbers.setdefault(what, {})
        return numbers.setdefault(real, len(numbers) + 1) if real else 0


class Load:
    """A process that multiplies matrices on the GPU when switched on."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", _LOAD], stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self.is_ready = self._process.stdout.readline().strip() == "ready"

    def switch(self) -> None:
        """Switch on; the second call switches off."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate()


def record(seconds: float, load: Load | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recording, and what the meter read meanwhile."""
    recorder = Recorder()
    polls: list[int] = []
    switches: list[int] = []
    with hooked(recorder.pointer, recorder.clock):
        poller = MeterPoller()
        if not poller.driver.gpus:
            sys.exit(f"Nothing to record: {poller.driver.no_gpu_reason}")
        first_ns = recorder.tick()
        while (passed_s := (recorder.tick() - first_ns) * 1e-9) < seconds:
            if load is not None and len(switches) < 2 and passed_s >= seconds * (len(switches) + 1) / 3:
                load.switch()
                switches.append(recorder.tick())
            polls.append(recorder.tick())
            poller.poll()
            time.sleep(max(0.0, _PERIOD_S - (recorder.tick() - polls[-1]) * 1e-9))
        readings = poller.end()
        bounds = [polls[0], *switches, recorder.tick()]
        parts = [[what, start, end] for what, start, end in zip(("idle", "busy", "idle"), bounds, bounds[1:])]
    versions = {"nvidia-ml-py": _version_of_binding(), "driver": _version_of_driver()}
    header = {"versions": versions, "system_ns": recorder.clock.system_ns, "looks": polls, "parts": parts}
    return {**header, **recorder.recorded()}, readings


def _version_of_binding() -> str:
    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _version_of_driver() -> str:
    nvml = binding()
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return "unknown"
    return version.decode() if isinstance(version, bytes) else str(version)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the NVIDIA driver's answers to the meter.")
    parser.add_argument("file", type=Path, help="output file, NAME.json.gz")
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    load = Load()
    if load.is_ready:
        time.sleep(_SETTLE_S)
    else:
        print("torch with CUDA is not installed: the GPU stays idle in this recording.")
    try:
        recording, readings = record(options.seconds, load if load.is_ready else None)
    finally:
        load.close()
    write(recording, options.file)
    counts = {name: len(samples) for name, samples in readings["gpus"][0]["samples"].items()}
    print(
        f"{readings['gpus'][0]['model']}, {recording['versions']}, {len(recording['calls'])} calls, samples: {counts}"
    )
    print(f"{options.file}: {options.file.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
