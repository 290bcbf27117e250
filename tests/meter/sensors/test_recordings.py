"""The meter on recordings of real drivers (recordings/), and record and replay with the fake driver."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pynvml
import pytest
from nvml_hook import HOOK, binding, read
from paths import DOCS
from record_nvml import Recorder

from unidle.meter.sensors.reading import EARLY

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
Environment = Callable[..., dict[str, str]]


@dataclass(frozen=True)
class Machine:
    """Values from the data sheet."""

    model: str
    memory_gib: tuple[float, float]
    limit_w: float
    sm_mhz: float
    memory_mhz: tuple[float, float]
    has_gpm: bool


MACHINES = {"h200": Machine("NVIDIA H200", (135, 144), 700, 1980, (1500, 3300), has_gpm=True)}

# Reading ← driver functions, any of which suffices.
ANSWERED_BY = {
    "utilisation": {"nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"},
    "memory controller": {"nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"},
    "SM active": {"nvmlGpmMetricsGet"},
    "tensor active": {"nvmlGpmMetricsGet"},
    "DRAM active": {"nvmlGpmMetricsGet"},
    "memory": {"nvmlDeviceGetMemoryInfo"},
    "power": {"nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage"},
    "power share": {"nvmlDeviceGetEnforcedPowerLimit"},
    "energy": {"nvmlDeviceGetTotalEnergyConsumption"},
    "temperature": {"nvmlDeviceGetTemperature"},
    "SM clock": {"nvmlDeviceGetClockInfo"},
    "memory clock": {"nvmlDeviceGetClockInfo"},
}


def python(arguments: list[str], env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def replayed(path: Path) -> dict[str, Any]:
    """What the meter reads from a recording, without a driver."""
    readings: dict[str, Any] = json.loads(python([str(HERE / "replay_nvml.py"), str(path)], dict(os.environ)))
    return readings


class Replay:
    """A recording and what the meter reads from it."""

    def __init__(self, name: str) -> None:
        path = RECORDINGS / f"{name}.json.gz"
        self.machine = MACHINES[name]
        self.recording, self.result = read(path), replayed(path)
        (self.gpu,) = self.result["gpus"]

    def samples(self, name: str) -> list[tuple[int, float]]:
        return [(at, value) for at, value in self.gpu["samples"][name]]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.samples(name)]

    def mean(self, name: str, part: str) -> float:
        """The mean of a reading in an idle or busy part, without its first second, which a driver window may span."""
        return fmean(
            value
            for what, start, end in self.recording["parts"]
            for at, value in self.samples(name)
            if what == part and start + 1e9 <= at <= end
        )


def every_driver_call_is_in_recording(replay: Replay) -> None:
    assert replay.result["unanswered"] == []  # otherwise the meter has changed and needs a new recording


def model_and_memory_size_match(replay: Replay) -> None:
    assert replay.gpu["model"] == replay.machine.model
    _, total = replay.gpu["readings"]["memory"]
    assert replay.machine.memory_gib[0] < total < replay.machine.memory_gib[1]
    assert all(0.1 < used < total / 2 for used in replay.values("memory"))  # the machine is otherwise idle
    assert replay.mean("memory", "busy") > 0.25  # two matrices of 128 MiB each


def readings_match_answered_calls(replay: Replay) -> None:
    answered = {name for _, name, _, code, _ in replay.recording["calls"] if code == 0}
    available = {name for name, functions in ANSWERED_BY.items() if functions & answered}
    assert set(replay.gpu["readings"]) == set(ANSWERED_BY)
    assert {name for name, samples in replay.gpu["samples"].items() if samples} == available
    assert set(replay.gpu["unavailable"]) & set(ANSWERED_BY) == set(ANSWERED_BY) - available
    assert replay.machine.has_gpm == ("SM active" in available)


def utilisation_separates_idle_from_busy(replay: Replay) -> None:
    assert all(0 <= value <= 100 for name in ("utilisation", "memory controller") for value in replay.values(name))
    assert replay.mean("utilisation", "idle") < 5
    assert replay.mean("utilisation", "busy") > 90
    assert replay.mean("memory controller", "idle") < 5 < replay.mean("memory controller", "busy")


def gpm_separates_idle_from_busy(replay: Replay) -> None:
    for name in ("SM active", "tensor active", "DRAM active"):
        assert all(0 <= value <= 100 for value in replay.values(name))
        assert replay.mean(name, "idle") < 2 < replay.mean(name, "busy")
    assert replay.mean("SM active", "busy") > 60
    assert replay.mean("tensor active", "busy") > 30
    _, start, end = replay.recording["parts"][1]
    inside = [value for at, value in replay.samples("SM active") if start + 0.3e9 <= at <= end]
    assert len(inside) > 10
    assert min(inside) > 60  # if sampled too often, it would sometimes be 0


def power_is_between_idle_and_limit(replay: Replay) -> None:
    limit = replay.gpu["power_limit"]
    assert 0.2 * replay.machine.limit_w <= limit <= replay.machine.limit_w
    assert all(0.05 * limit < watts < 1.15 * limit for watts in replay.values("power"))  # the limit applies to the mean
    assert replay.mean("power", "idle") < 0.35 * limit
    assert replay.mean("power", "busy") > 0.5 * limit
    for (_, watts), (_, share) in zip(replay.samples("power"), replay.samples("power share"), strict=True):
        assert share == pytest.approx(100 * watts / limit)


def energy_is_power_times_time(replay: Replay) -> None:
    counter = replay.samples("energy")
    (start, first), (end, last) = counter[0], counter[-1]
    by_power = sum(
        (before + after) / 2 * (min(later, end) - max(earlier, start)) * 1e-9
        for (earlier, before), (later, after) in pairwise(replay.samples("power"))
    )
    assert last - first == pytest.approx(by_power, rel=0.05)
    assert all(before <= after for (_, before), (_, after) in pairwise(counter))


def temperature_and_clocks_are_plausible(replay: Replay) -> None:
    assert all(15 <= value <= 95 for value in replay.values("temperature"))
    assert all(100 <= value <= replay.machine.sm_mhz for value in replay.values("SM clock"))
    assert replay.mean("SM clock", "busy") > 0.5 * replay.machine.sm_mhz
    assert all(
        replay.machine.memory_mhz[0] <= value <= replay.machine.memory_mhz[1] for value in replay.values("memory clock")
    )
    assert all(reasons is not None for reasons in replay.gpu["throttled"])
    assert replay.gpu["throttled"][0] == []  # idle at the start
    assert (["power limit"] in replay.gpu["throttled"]) == (max(replay.values("power share")) > 100)


def no_sample_is_counted_twice(replay: Replay) -> None:
    for name, samples in replay.gpu["samples"].items():
        # These are timestamped by the driver, so an equal value can be a new sample.
        is_stamped = name in ("utilisation", "memory controller")
        period_ns = 0 if is_stamped else EARLY * replay.gpu["readings"][name][0] * 1e9
        for (earlier, before), (later, after) in pairwise(samples):
            assert later > earlier, name
            assert after != before or later - earlier >= period_ns, name
    n_polls = len(replay.recording["looks"])
    assert len(replay.values("temperature")) < n_polls / 2  # so there were repeats to filter
    assert len(replay.values("power")) > n_polls / 2
    for (earlier, _), (later, _) in pairwise(replay.samples("SM active")):
        assert later - earlier >= EARLY * 0.1e9


def driver_samples_lie_within_recording(replay: Replay) -> None:
    """Their timestamps are system time in microseconds."""
    first, last = replay.recording["looks"][0], replay.recording["looks"][-1]
    times = [at for at, _ in replay.samples("utilisation")]
    assert first - 1.5e9 < times[0]
    assert last - 1.5e9 < times[-1] <= last + 1e9
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.5e9


def processes_and_names_are_read(replay: Replay) -> None:
    assert replay.gpu["has_uuid"]  # the anonymised UUID
    _, total = replay.gpu["readings"]["memory"]
    for processes in replay.gpu["processes"]:
        assert processes is not None
        for process in processes:
            assert process["memory"] is None or process["memory"] < total * 2**30
            assert process["utilisation"] is None or 0 <= process["utilisation"] <= 100


CHECKS: list[Callable[[Replay], None]] = [
    every_driver_call_is_in_recording,
    model_and_memory_size_match,
    readings_match_answered_calls,
    utilisation_separates_idle_from_busy,
    gpm_separates_idle_from_busy,
    power_is_between_idle_and_limit,
    energy_is_power_times_time,
    temperature_and_clocks_are_plausible,
    no_sample_is_counted_twice,
    driver_samples_lie_within_recording,
    processes_and_names_are_read,
]
CASES = [pytest.param(name, check, id=f"{name}-{check.__name__}") for name in MACHINES for check in CHECKS]


def test_every_recording_has_a_data_sheet() -> None:
    assert {path.name for path in RECORDINGS.iterdir()} == {"README.md", *(f"{name}.json.gz" for name in MACHINES)}


@pytest.mark.parametrize(("name", "check"), CASES)
def test_recording(name: str, check: Callable[[Replay], None]) -> None:
    check(Replay(name))


def test_monitor_image_in_docs_is_up_to_date() -> None:
    """If it is not, redraw it; see the docstring of picture_monitor.py."""
    committed = DOCS / "images" / "monitor.svg"
    drawn = python(
        [str(HERE / "picture_monitor.py"), str(RECORDINGS / "h200.json.gz"), "/dev/stdout"], dict(os.environ)
    )
    assert svg_text(committed.read_text(encoding="utf-8")) == svg_text(drawn)


def svg_text(picture: str) -> str:
    """The text of an SVG made by rich, which does not depend on rich's version."""
    return "".join("".join(re.findall(r"<text [^>]*>([^<]*)</text>", picture)).split("&#160;"))


RECORD = """
import json, sys, pathlib, nvml_hook, record_nvml
recording, readings = record_nvml.record(0.9)
nvml_hook.write(recording, pathlib.Path(sys.argv[1]))
json.dump(readings, sys.stdout)
"""


@pytest.mark.parametrize(
    ("mode", "old"), [("", False), ("", True), ("lost", False)], ids=["current driver", "old driver", "lost GPU"]
)
def test_replay_gives_the_same_readings_as_recording(
    mode: str, old: bool, fake_driver: Environment, tmp_path: Path
) -> None:
    path = tmp_path / "fake.json.gz"
    recorded = json.loads(python(["-c", RECORD, str(path)], {**fake_driver(mode, old=old), "PYTHONPATH": str(HERE)}))
    replay = replayed(path)
    assert replay.pop("unanswered") == []
    users = [process for gpu in recorded["gpus"] for poll in gpu["processes"] for process in poll or []]
    assert {user["pid"] for user in users} == (set() if old else {4242})  # the old driver does not list processes
    for user in users:
        user["pid"] = 1  # the recording is anonymised
    assert replay == recorded
    assert [gpu["model"] for gpu in replay["gpus"]] == ["Fake Large", "Fake Small"]
    assert len(replay["gpus"][mode == "lost"]["samples"]["SM clock"]) > len(read(path)["looks"]) / 2
    for (earlier, _), (later, _) in pairwise(replay["gpus"][0]["samples"]["utilisation"] if not (mode or old) else []):
        assert later - earlier == pytest.approx(50e6, abs=5e6)  # by the driver's clock, which the replay must keep


def test_record_command_makes_gpu_idle_busy_idle(fake_driver: Environment, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    env = {**fake_driver(), "PYTHONPATH": str(tmp_path), "MULTIPLIED": str(tmp_path / "times")}
    path = tmp_path / "fake.json.gz"
    python([str(HERE / "record_nvml.py"), str(path), "--seconds", "1.5"], env)
    recording = read(path)
    assert [what for what, _, _ in recording["parts"]] == ["idle", "busy", "idle"]
    _, start, end = recording["parts"][1]
    assert (end - start) * 1e-9 == pytest.approx(0.5, abs=0.2)
    times = [int(line) - recording["system_ns"] for line in (tmp_path / "times").read_text().split()]
    assert len(times) >= 8
    assert start - 0.05e9 < times[0]
    assert times[-1] < end + 0.4e9


FAKE_TORCH = """  # just enough of torch for the recorder's load
import os, time
bfloat16 = None
class Matrix:
    __matmul__ = lambda self, other: self
class cuda:
    is_available = lambda: True
    synchronize = lambda: None
def randn(*size, device, dtype):
    return Matrix()
def mm(left, right, out):
    time.sleep(0.005)
    with open(os.environ["MULTIPLIED"], "a") as file:
        print(time.time_ns(), file=file)
"""


def test_binding_without_function_pointer_hook_exits_with_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, HOOK)
    with pytest.raises(SystemExit, match="This version of nvidia-ml-py reaches the driver otherwise"):
        binding()


def test_recording_is_anonymised() -> None:
    recorder = Recorder()
    uuid = ctypes.create_string_buffer(b"GPU-4f2c9a01-77aa-1b2c-3d4e-5f60718293a4", 96)
    assert recorder.anonymised("nvmlDeviceGetUUID", uuid) == b"GPU-11111111-1111-1111-1111-111111111111"
    other = ctypes.create_string_buffer(b"1650523012345", 30)
    assert recorder.anonymised("nvmlDeviceGetSerial", other) == b"2" * 13
    model = ctypes.create_string_buffer(b"NVIDIA H200", 96)
    assert recorder.anonymised("nvmlDeviceGetName", model) == b"NVIDIA H200"

    pci = pynvml.nvmlPciInfo_t(busId=b"00000000:1B:00.0", bus=0x1B, domain=7, pciDeviceId=0x233510DE)
    data = recorder.anonymised("nvmlDeviceGetPciInfo_v3", pci).ljust(ctypes.sizeof(pci), b"\0")
    assert b"33333333:33:33.3" in data
    anonymised = pynvml.nvmlPciInfo_t.from_buffer_copy(data)
    # The PCI device id identifies only the model.
    assert (anonymised.bus, anonymised.domain, anonymised.pciDeviceId) == (1, 1, pci.pciDeviceId)

    users = (pynvml.c_nvmlProcessInfo_v3_t * 3)()
    users[0].pid, users[1].pid, users[0].usedGpuMemory = 31415, 92653, 2**30
    anonymised = type(users).from_buffer_copy(
        recorder.anonymised("nvmlDeviceGetComputeRunningProcesses_v3", users).ljust(ctypes.sizeof(users), b"\0")
    )
    assert [user.pid for user in anonymised] == [1, 2, 0]
    assert anonymised[0].usedGpuMemory == 2**30
