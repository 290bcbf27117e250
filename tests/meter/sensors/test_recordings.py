"""The meter against recordings of real drivers (recordings/), and the recorder and the player against each other."""

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

import pytest

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

from nvml_door import DOOR, binding, read  # noqa: E402
from paths import DOCS  # noqa: E402
from record_nvml import Recorder  # noqa: E402

from unidle.meter.sensors.reading import EARLY  # noqa: E402

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
Environment = Callable[..., dict[str, str]]


@dataclass(frozen=True)
class Machine:
    """What the data sheet says, which no recording needs to tell."""

    model: str
    memory_gib: tuple[float, float]
    limit_w: float
    sm_mhz: float
    memory_mhz: tuple[float, float]
    has_gpm: bool


MACHINES = {"h200": Machine("NVIDIA H200", (135, 144), 700, 1980, (1500, 3300), has_gpm=True)}

# What the meter reads ← the functions of the driver, any of which suffices.
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
    """What the meter sees of a recording, without any driver here."""
    seen: dict[str, Any] = json.loads(python([str(HERE / "replay_nvml.py"), str(path)], dict(os.environ)))
    return seen


class Played:
    """A recording, and what the meter makes of it."""

    def __init__(self, name: str) -> None:
        path = RECORDINGS / f"{name}.json.gz"
        self.machine = MACHINES[name]
        self.recording, self.seen = read(path), replayed(path)
        (self.gpu,) = self.seen["gpus"]

    def samples(self, name: str) -> list[tuple[int, float]]:
        return [(at, value) for at, value in self.gpu["samples"][name]]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.samples(name)]

    def mean(self, name: str, part: str) -> float:
        """The mean of a reading while the GPU idled or was busy; not of the first second, which a window may reach."""
        return fmean(
            value
            for what, start, end in self.recording["parts"]
            for at, value in self.samples(name)
            if what == part and start + 1e9 <= at <= end
        )


def every_question_of_the_meter_was_asked_in_the_recording(it: Played) -> None:
    assert it.seen["unanswered"] == []  # else the meter has changed, and a new recording is needed


def the_model_and_the_size_of_its_memory_are_right(it: Played) -> None:
    assert it.gpu["model"] == it.machine.model
    _, total = it.gpu["readings"]["memory"]
    assert it.machine.memory_gib[0] < total < it.machine.memory_gib[1]
    assert all(0.1 < used < total / 2 for used in it.values("memory"))  # of a machine that is otherwise idle
    assert it.mean("memory", "busy") > 0.25  # two matrices of 128 MiB each


def what_the_driver_answered_is_there_and_only_that(it: Played) -> None:
    answered = {name for _, name, _, code, _ in it.recording["calls"] if code == 0}
    there = {name for name, functions in ANSWERED_BY.items() if functions & answered}
    assert set(it.gpu["readings"]) == set(ANSWERED_BY)
    assert {name for name, samples in it.gpu["samples"].items() if samples} == there
    assert set(it.gpu["unavailable"]) & set(ANSWERED_BY) == set(ANSWERED_BY) - there
    assert it.machine.has_gpm == ("SM active" in there)


def utilisation_tells_idle_from_busy(it: Played) -> None:
    assert all(0 <= value <= 100 for name in ("utilisation", "memory controller") for value in it.values(name))
    assert it.mean("utilisation", "idle") < 5
    assert it.mean("utilisation", "busy") > 90
    assert it.mean("memory controller", "idle") < 5 < it.mean("memory controller", "busy")


def gpm_tells_idle_from_busy(it: Played) -> None:
    for name in ("SM active", "tensor active", "DRAM active"):
        assert all(0 <= value <= 100 for value in it.values(name))
        assert it.mean(name, "idle") < 2 < it.mean(name, "busy")
    assert it.mean("SM active", "busy") > 60
    assert it.mean("tensor active", "busy") > 30
    _, start, end = it.recording["parts"][1]
    inside = [value for at, value in it.samples("SM active") if start + 0.3e9 <= at <= end]
    assert len(inside) > 10
    assert min(inside) > 60  # asked too often, it would answer 0 now and then


def power_is_between_idle_and_the_limit(it: Played) -> None:
    limit = it.gpu["power_limit"]
    assert 0.2 * it.machine.limit_w <= limit <= it.machine.limit_w
    assert all(0.05 * limit < watts < 1.15 * limit for watts in it.values("power"))  # the limit holds in the mean
    assert it.mean("power", "idle") < 0.35 * limit
    assert it.mean("power", "busy") > 0.5 * limit
    for (_, watts), (_, share) in zip(it.samples("power"), it.samples("power share"), strict=True):
        assert share == pytest.approx(100 * watts / limit)


def energy_is_power_times_time(it: Played) -> None:
    counter = it.samples("energy")
    (start, first), (end, last) = counter[0], counter[-1]
    by_power = sum(
        (before + after) / 2 * (min(later, end) - max(earlier, start)) * 1e-9
        for (earlier, before), (later, after) in pairwise(it.samples("power"))
    )
    assert last - first == pytest.approx(by_power, rel=0.05)
    assert all(before <= after for (_, before), (_, after) in pairwise(counter))


def temperature_and_clocks_are_plausible(it: Played) -> None:
    assert all(15 <= value <= 95 for value in it.values("temperature"))
    assert all(100 <= value <= it.machine.sm_mhz for value in it.values("SM clock"))
    assert it.mean("SM clock", "busy") > 0.5 * it.machine.sm_mhz
    assert all(it.machine.memory_mhz[0] <= value <= it.machine.memory_mhz[1] for value in it.values("memory clock"))
    assert all(reasons is not None for reasons in it.gpu["throttled"])
    assert it.gpu["throttled"][0] == []  # it was idle then
    assert (["power limit"] in it.gpu["throttled"]) == (max(it.values("power share")) > 100)


def no_sample_is_counted_twice(it: Played) -> None:
    for name, samples in it.gpu["samples"].items():
        is_stamped = name in ("utilisation", "memory controller")  # by the driver: the same value can be a new sample
        period_ns = 0 if is_stamped else EARLY * it.gpu["readings"][name][0] * 1e9
        for (earlier, before), (later, after) in pairwise(samples):
            assert later > earlier, name
            assert after != before or later - earlier >= period_ns, name
    looks = len(it.recording["looks"])
    assert len(it.values("temperature")) < looks / 2  # so that the above had repetitions to find
    assert len(it.values("power")) > looks / 2
    for (earlier, _), (later, _) in pairwise(it.samples("SM active")):
        assert later - earlier >= EARLY * 0.1e9


def the_drivers_samples_lie_within_the_recording(it: Played) -> None:
    """By their own times, which are of the system's clock in microseconds."""
    first, last = it.recording["looks"][0], it.recording["looks"][-1]
    times = [at for at, _ in it.samples("utilisation")]
    assert first - 1.5e9 < times[0]
    assert last - 1.5e9 < times[-1] <= last + 1e9
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.5e9


def processes_and_names_are_read(it: Played) -> None:
    assert it.gpu["has_uuid"]  # by the make-believe UUID
    _, total = it.gpu["readings"]["memory"]
    for processes in it.gpu["processes"]:
        assert processes is not None
        for process in processes:
            assert process["memory"] is None or process["memory"] < total * 2**30
            assert process["utilisation"] is None or 0 <= process["utilisation"] <= 100


FACTS: list[Callable[[Played], None]] = [
    every_question_of_the_meter_was_asked_in_the_recording,
    the_model_and_the_size_of_its_memory_are_right,
    what_the_driver_answered_is_there_and_only_that,
    utilisation_tells_idle_from_busy,
    gpm_tells_idle_from_busy,
    power_is_between_idle_and_the_limit,
    energy_is_power_times_time,
    temperature_and_clocks_are_plausible,
    no_sample_is_counted_twice,
    the_drivers_samples_lie_within_the_recording,
    processes_and_names_are_read,
]
CASES = [pytest.param(name, fact, id=f"{name}-{fact.__name__}") for name in MACHINES for fact in FACTS]


def test_every_recording_is_of_a_machine_that_is_known() -> None:
    assert {path.name for path in RECORDINGS.iterdir()} == {"README.md", *(f"{name}.json.gz" for name in MACHINES)}


@pytest.mark.parametrize(("name", "fact"), CASES)
def test_recorded(name: str, fact: Callable[[Played], None]) -> None:
    fact(Played(name))


def test_the_picture_in_the_docs_shows_that_recording_as_the_monitor_does_now() -> None:
    """Else draw it again: the first lines of picture_monitor.py say how."""
    pytest.importorskip("psutil")
    committed = DOCS / "images" / "monitor.svg"
    drawn = python(
        [str(HERE / "picture_monitor.py"), str(RECORDINGS / "h200.json.gz"), "/dev/stdout"], dict(os.environ)
    )
    assert words(committed.read_text(encoding="utf-8")) == words(drawn)


def words(picture: str) -> str:
    """What can be read in an SVG of rich, whose versions draw the same differently."""
    return "".join("".join(re.findall(r"<text [^>]*>([^<]*)</text>", picture)).split("&#160;"))


RECORD = """
import json, sys, pathlib, nvml_door, record_nvml
recording, seen = record_nvml.record(0.9)
nvml_door.write(recording, pathlib.Path(sys.argv[1]))
json.dump(seen, sys.stdout)
"""


@pytest.mark.parametrize(("mode", "old"), [("", False), ("", True), ("lost", False)], ids=["sound", "old", "lost"])
def test_the_meter_sees_of_a_recording_what_it_saw_of_the_driver(
    mode: str, old: bool, fake_driver: Environment, tmp_path: Path
) -> None:
    path = tmp_path / "fake.json.gz"
    at_first = json.loads(python(["-c", RECORD, str(path)], {**fake_driver(mode, old=old), "PYTHONPATH": str(HERE)}))
    again = replayed(path)
    assert again.pop("unanswered") == []
    users = [process for gpu in at_first["gpus"] for look in gpu["processes"] for process in look or []]
    assert {user["pid"] for user in users} == (set() if old else {4242})  # the old one cannot tell
    for user in users:
        user["pid"] = 1  # the recording does not tell the real one
    assert again == at_first
    assert [gpu["model"] for gpu in again["gpus"]] == ["Fake Large", "Fake Small"]
    assert len(again["gpus"][mode == "lost"]["samples"]["SM clock"]) > len(read(path)["looks"]) / 2
    for (earlier, _), (later, _) in pairwise(again["gpus"][0]["samples"]["utilisation"] if not (mode or old) else []):
        assert later - earlier == pytest.approx(50e6, abs=5e6)  # by the driver's clock, which the recording's must be


def test_the_command_has_the_gpu_idle_then_busy_then_idle(fake_driver: Environment, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
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


STAND_IN = """  # just enough of torch for what the recorder does with it
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


def test_a_binding_without_that_door_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, DOOR)
    with pytest.raises(SystemExit, match="This version of nvidia-ml-py reaches the driver otherwise"):
        binding()


def test_a_recording_does_not_tell_which_machine_it_was() -> None:
    recorder = Recorder()
    uuid = ctypes.create_string_buffer(b"GPU-4f2c9a01-77aa-1b2c-3d4e-5f60718293a4", 96)
    assert recorder.scrubbed("nvmlDeviceGetUUID", uuid) == b"GPU-11111111-1111-1111-1111-111111111111"
    other = ctypes.create_string_buffer(b"1650523012345", 30)
    assert recorder.scrubbed("nvmlDeviceGetSerial", other) == b"2" * 13
    model = ctypes.create_string_buffer(b"NVIDIA H200", 96)
    assert recorder.scrubbed("nvmlDeviceGetName", model) == b"NVIDIA H200"

    place = pynvml.nvmlPciInfo_t(busId=b"00000000:1B:00.0", bus=0x1B, domain=7, pciDeviceId=0x233510DE)
    data = recorder.scrubbed("nvmlDeviceGetPciInfo_v3", place).ljust(ctypes.sizeof(place), b"\0")
    assert b"33333333:33:33.3" in data
    told = pynvml.nvmlPciInfo_t.from_buffer_copy(data)
    assert (told.bus, told.domain, told.pciDeviceId) == (1, 1, place.pciDeviceId)  # the last is of the model

    users = (pynvml.c_nvmlProcessInfo_v3_t * 3)()
    users[0].pid, users[1].pid, users[0].usedGpuMemory = 31415, 92653, 2**30
    told = type(users).from_buffer_copy(
        recorder.scrubbed("nvmlDeviceGetComputeRunningProcesses_v3", users).ljust(ctypes.sizeof(users), b"\0")
    )
    assert [user.pid for user in told] == [1, 2, 0]
    assert told[0].usedGpuMemory == 2**30
