"""The NVML sensors with the real binding and a fake driver (fake_nvml.c), each test in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest

Environment = Callable[..., dict[str, str]]

POLLS = """
import json, sys, time
from unidle.meter.sensors.nvml import Driver
driver = Driver()
samples = [{} for gpu in driver.gpus]
began = time.perf_counter_ns()
for poll in range(%d):
    for gpu, kept in zip(driver.gpus, samples):
        for name, found in gpu.poll().items():
            kept.setdefault(name, []).extend((s.at_ns - began, s.value) for s in found)
        if poll %% 2 == 0:
            gpu.poll_processes()
    time.sleep(0.03)
print(json.dumps({
    "no_gpu_reason": driver.no_gpu_reason,
    "gpus": [
        {"model": gpu.model, "samples": kept, "unavailable": sorted(gpu.unavailable), "lost": gpu.is_lost,
         "throttled_by": gpu.throttled_by, "readings": [r.name for r in gpu.readings],
         "full": {r.name: r.full for r in gpu.readings},
         "processes": gpu.processes and [vars(p) for p in gpu.processes]}
        for gpu, kept in zip(driver.gpus, samples)
    ],
}))
driver.close()
"""


def poll_gpus(env: dict[str, str], polls: int = 12) -> dict[str, Any]:
    """The result of `polls` polls, 30 ms apart."""
    done = subprocess.run([sys.executable, "-c", POLLS % polls], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def values(gpu: dict[str, Any], name: str) -> list[float]:
    return [value for _, value in gpu["samples"].get(name, [])]


def distinct_values(gpu: dict[str, Any], name: str, period_s: float = 0.95) -> list[float]:
    """The values of the samples without repeats; asserts that repeated values are at least a period apart."""
    samples = gpu["samples"][name]
    for (earlier, before), (later, after) in pairwise(samples):
        assert after != before or later - earlier >= period_s * 1e9
    return [value for value, _ in groupby(value for _, value in samples)]


@pytest.fixture(scope="module")
def gpus(fake_driver: Environment) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = poll_gpus(fake_driver())["gpus"]
    return found


def test_every_gpu_is_found_with_its_model(gpus: list[dict[str, Any]]) -> None:
    assert [gpu["model"] for gpu in gpus] == ["Fake Large", "Fake Small"]


def test_driver_samples_are_read_once_each_with_their_timestamps(gpus: list[dict[str, Any]]) -> None:
    samples = gpus[0]["samples"]["utilisation"]
    assert len(samples) >= 5
    numbers = [value for _, value in samples]
    assert numbers == list(range(int(numbers[0]), int(numbers[0]) + len(numbers)))  # sample k has the value k
    assert numbers[0] >= 2  # of those before the first poll only the latest
    for (before, _), (after, _) in pairwise(samples):
        assert after - before == pytest.approx(50e6, abs=20e6)


def test_samples_with_new_timestamp_and_same_value_count(gpus: list[dict[str, Any]]) -> None:
    assert values(gpus[0], "memory controller") == [7.0] * len(values(gpus[0], "utilisation"))


def test_gpm_is_not_polled_faster_than_its_period(gpus: list[dict[str, Any]]) -> None:
    assert distinct_values(gpus[0], "SM active", 0.095) == [31.5]
    assert len(values(gpus[0], "SM active")) >= 2
    assert set(values(gpus[0], "tensor active")) == {12.5}


def test_missing_gpm_counter_has_no_samples(gpus: list[dict[str, Any]]) -> None:
    assert values(gpus[0], "DRAM active") == []


def test_power_is_instantaneous_and_power_share_is_relative_to_limit(gpus: list[dict[str, Any]]) -> None:
    assert distinct_values(gpus[0], "power", 0.095) == [210.0]
    assert set(values(gpus[0], "power share")) == {30.0}
    assert gpus[0]["full"]["power"] == 700.0
    assert len(values(gpus[0], "power")) == len(values(gpus[0], "power share"))


def test_repeated_value_within_period_is_not_a_sample(gpus: list[dict[str, Any]]) -> None:
    assert distinct_values(gpus[0], "temperature") == [41.0]
    assert distinct_values(gpus[0], "memory") == [2.0]
    assert distinct_values(gpus[1], "utilisation") == [10.0, 20.0, 30.0]  # each was read four times


def test_energy_is_increase_of_counter_and_survives_counter_reset(gpus: list[dict[str, Any]]) -> None:
    assert sorted(set(values(gpus[0], "energy"))) == [0.0, 25.0, 60.0]
    assert values(gpus[0], "energy")[-1] == 60.0


def test_throttle_reasons_are_named_and_idle_clocks_excluded(gpus: list[dict[str, Any]]) -> None:
    assert gpus[0]["throttled_by"] == ["power limit", "heat"]
    assert gpus[1]["throttled_by"] is None  # unknown, not an empty list


def test_processes_have_memory_and_utilisation_if_known(fake_driver: Environment) -> None:
    large, small = poll_gpus(fake_driver(), polls=1)["gpus"]
    assert large["processes"] == [{"pid": 4242, "memory": 2**30, "utilisation": 37.0}]  # the mean of two samples
    assert small["processes"] == [{"pid": 4242, "memory": None, "utilisation": None}]


def test_process_without_recent_kernels_has_no_utilisation(fake_driver: Environment) -> None:
    large, _ = poll_gpus(fake_driver("quiet"), polls=1)["gpus"]
    assert large["processes"] == [{"pid": 4242, "memory": 2**30, "utilisation": None}]


def test_unavailable_readings_are_listed_and_have_no_samples(gpus: list[dict[str, Any]]) -> None:
    unavailable = {"SM active", "tensor active", "DRAM active", "power", "power share", "energy"}
    assert unavailable <= set(gpus[1]["unavailable"])
    assert unavailable.isdisjoint(gpus[1]["samples"])
    assert set(gpus[1]["readings"]) - unavailable <= set(gpus[1]["samples"])


def test_old_driver_without_some_functions_still_gives_other_readings(fake_driver: Environment) -> None:
    large, _ = poll_gpus(fake_driver(old=True))["gpus"]
    assert distinct_values(large, "utilisation") == [10.0, 20.0, 30.0]
    assert set(values(large, "power")) == {350.0}  # average power, not instantaneous
    assert {"energy", "SM active", "processes"} <= set(large["unavailable"])
    assert large["processes"] is None


def test_driver_without_samples_falls_back_to_polling(fake_driver: Environment) -> None:
    large, _ = poll_gpus(fake_driver("silent"), polls=75)["gpus"]
    assert distinct_values(large, "utilisation")[:3] == [10.0, 20.0, 30.0]
    assert large["samples"]["utilisation"][0][0] > 1.4e9


def test_lost_gpu_is_reported_and_other_gpu_continues(fake_driver: Environment) -> None:
    large, small = poll_gpus(fake_driver("lost"))["gpus"]
    assert large["lost"]
    assert large["processes"] is None
    assert not small["lost"]
    assert distinct_values(small, "utilisation") == [10.0, 20.0, 30.0]


TWO_THREADS = """
import threading
from unidle.meter.sensors.nvml import Driver
barrier = threading.Barrier(2)
def poll_repeatedly(driver, kept):
    for _ in range(6):
        barrier.wait()
        found = driver.gpus[0].poll()
        kept += [sample.value for sample in found.get("SM active", [])]
        threading.Event().wait(0.1)
drivers, results = [Driver(), Driver()], ([], [])
threads = [threading.Thread(target=poll_repeatedly, args=pair) for pair in zip(drivers, results)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print([31.5 in values for values in results])
"""


def test_gpm_samples_are_not_taken_concurrently(fake_driver: Environment) -> None:
    """Concurrent samples crash the process with driver 580, e.g. from a run's meter and a phase meter."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], env=fake_driver(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"exit status {done.returncode} (-11: a segmentation fault)"
    assert done.stdout.strip() == "[True, True]"


def test_gpu_by_uuid_finds_each_gpu(fake_driver: Environment) -> None:
    code = "from unidle.meter.sensors.nvml import Driver\ndriver = Driver()\n"
    code += "uuids = [f'{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}' for n in '123']\n"
    code += "found = [driver.gpu_by_uuid(word + uuid) for word in ('', 'GPU-') for uuid in uuids]\n"
    code += "print([gpu and gpu.index for gpu in found])"
    done = subprocess.run([sys.executable, "-c", code], env=fake_driver(), capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[0, 1, None, 0, 1, None]", done.stderr


@pytest.mark.parametrize(
    ("visible", "index"),
    [
        *((None, 0), ("0", 0), ("1", 1), ("1,0", 1), ("7", None), ("", None), ("-1", None)),
        *(("GPU-22222222-2222-2222-2222-222222222222", 1), ("GPU-33333333-2222-2222-2222-222222222222", None)),
    ],
)
def test_own_gpu_follows_cuda_visible_devices(visible: str | None, index: int | None, fake_driver: Environment) -> None:
    code = "from unidle.meter.sensors.nvml import Driver\nown = Driver().own_gpu()\nprint(own and own.index)"
    env = {**fake_driver(), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(index), done.stderr


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("not loaded", "No NVIDIA GPU found: the NVIDIA driver is installed but not loaded."),
        ("none", "No NVIDIA GPU found: the driver is loaded but lists none."),
    ],
)
def test_no_gpu_gives_reason_without_error(mode: str, sentence: str, fake_driver: Environment) -> None:
    assert poll_gpus(fake_driver(mode), polls=1) == {"no_gpu_reason": sentence, "gpus": []}


BACKGROUND = """
import json, time
from unidle.meter.sensors.background import Background
background = Background(("power", "energy"))
background.start()
time.sleep(1.5)
background.stop()
print(json.dumps({name: len(background.samples(name, 0)) for name in ("power", "energy")}))
"""


def test_power_is_polled_more_often_than_energy(fake_driver: Environment) -> None:
    run = [sys.executable, "-c", BACKGROUND]
    done = subprocess.run(run, env=fake_driver(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["energy"] > 1  # at the start and at the end
    assert found["power"] > 2 * found["energy"]
