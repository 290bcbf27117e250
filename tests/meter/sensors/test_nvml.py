"""The real binding against a make-believe driver (fake_nvml.c), each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest

Environment = Callable[..., dict[str, str]]

LOOKS = """
import json, sys, time
from unidle.meter.sensors.nvml import Driver
driver = Driver()
samples = [{} for gpu in driver.gpus]
began = time.perf_counter_ns()
for look in range(%d):
    for gpu, seen in zip(driver.gpus, samples):
        for name, found in gpu.poll().items():
            seen.setdefault(name, []).extend((s.at_ns - began, s.value) for s in found)
        if look %% 2 == 0:
            gpu.poll_processes()
    time.sleep(0.03)
print(json.dumps({
    "no_gpu_reason": driver.no_gpu_reason,
    "gpus": [
        {"model": gpu.model, "samples": seen, "unavailable": sorted(gpu.unavailable), "lost": gpu.is_lost,
         "throttled_by": gpu.throttled_by, "readings": [r.name for r in gpu.readings],
         "full": {r.name: r.full for r in gpu.readings},
         "processes": gpu.processes and [vars(p) for p in gpu.processes]}
        for gpu, seen in zip(driver.gpus, samples)
    ],
}))
driver.close()
"""


def look(env: dict[str, str], looks: int = 12) -> dict[str, Any]:
    """What `looks` polls, 30 ms apart, find."""
    done = subprocess.run([sys.executable, "-c", LOOKS % looks], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def values(gpu: dict[str, Any], name: str) -> list[float]:
    return [value for _, value in gpu["samples"].get(name, [])]


def taken(gpu: dict[str, Any], name: str, period_s: float = 0.95) -> list[float]:
    """The values of the samples, the same one in a row only once; no two such are closer than the period."""
    samples = gpu["samples"][name]
    for (earlier, before), (later, after) in pairwise(samples):
        assert after != before or later - earlier >= period_s * 1e9
    return [value for value, _ in groupby(value for _, value in samples)]


@pytest.fixture(scope="module")
def gpus(fake_driver: Environment) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = look(fake_driver())["gpus"]
    return found


def test_every_gpu_is_found_with_its_name(gpus: list[dict[str, Any]]) -> None:
    assert [gpu["model"] for gpu in gpus] == ["Fake Large", "Fake Small"]


def test_the_drivers_own_samples_come_each_once_none_missed_with_their_own_times(gpus: list[dict[str, Any]]) -> None:
    samples = gpus[0]["samples"]["utilisation"]
    assert len(samples) >= 5
    numbers = [value for _, value in samples]
    assert numbers == list(range(int(numbers[0]), int(numbers[0]) + len(numbers)))  # sample k has the value k
    assert numbers[0] >= 2  # of those from before the first look only the latest
    for (before, _), (after, _) in pairwise(samples):
        assert after - before == pytest.approx(50e6, abs=20e6)


def test_samples_that_are_stamped_anew_count_though_their_value_is_the_same(gpus: list[dict[str, Any]]) -> None:
    assert values(gpus[0], "memory controller") == [7.0] * len(values(gpus[0], "utilisation"))


def test_gpm_is_never_asked_so_often_that_it_answers_zero(gpus: list[dict[str, Any]]) -> None:
    assert taken(gpus[0], "SM active", 0.095) == [31.5]
    assert len(values(gpus[0], "SM active")) >= 2
    assert set(values(gpus[0], "tensor active")) == {12.5}


def test_a_counter_that_gpm_lacks_has_no_samples(gpus: list[dict[str, Any]]) -> None:
    assert values(gpus[0], "DRAM active") == []


def test_power_is_that_of_the_instant_and_its_share_that_of_the_limit(gpus: list[dict[str, Any]]) -> None:
    assert taken(gpus[0], "power", 0.095) == [210.0]
    assert set(values(gpus[0], "power share")) == {30.0}
    assert gpus[0]["full"]["power"] == 700.0
    assert len(values(gpus[0], "power")) == len(values(gpus[0], "power share"))


def test_a_value_that_is_only_asked_for_again_is_no_sample(gpus: list[dict[str, Any]]) -> None:
    assert taken(gpus[0], "temperature") == [41.0]
    assert taken(gpus[0], "memory") == [2.0]
    assert taken(gpus[1], "utilisation") == [10.0, 20.0, 30.0]  # each was read four times


def test_energy_is_the_difference_of_the_counter_and_survives_its_starting_anew(gpus: list[dict[str, Any]]) -> None:
    assert sorted(set(values(gpus[0], "energy"))) == [0.0, 25.0, 60.0]
    assert values(gpus[0], "energy")[-1] == 60.0


def test_throttling_is_told_in_words_and_an_idle_clock_is_none_of_it(gpus: list[dict[str, Any]]) -> None:
    assert gpus[0]["throttled_by"] == ["power limit", "heat"]
    assert gpus[1]["throttled_by"] is None  # not: none


def test_processes_have_what_is_known_of_them(fake_driver: Environment) -> None:
    large, small = look(fake_driver(), looks=1)["gpus"]
    assert large["processes"] == [{"pid": 4242, "memory": 2**30, "utilisation": 37.0}]  # the mean of two samples
    assert small["processes"] == [{"pid": 4242, "memory": None, "utilisation": None}]


def test_a_process_that_ran_no_kernel_of_late_is_listed_without_a_share(fake_driver: Environment) -> None:
    large, _ = look(fake_driver("quiet"), looks=1)["gpus"]
    assert large["processes"] == [{"pid": 4242, "memory": 2**30, "utilisation": None}]


def test_what_a_gpu_lacks_is_listed_and_has_no_samples(gpus: list[dict[str, Any]]) -> None:
    unavailable = {"SM active", "tensor active", "DRAM active", "power", "power share", "energy"}
    assert unavailable <= set(gpus[1]["unavailable"])
    assert unavailable.isdisjoint(gpus[1]["samples"])
    assert set(gpus[1]["readings"]) - unavailable <= set(gpus[1]["samples"])


def test_an_old_driver_without_half_of_the_functions_still_gives_the_others(fake_driver: Environment) -> None:
    large, _ = look(fake_driver(old=True))["gpus"]
    assert taken(large, "utilisation") == [10.0, 20.0, 30.0]
    assert set(values(large, "power")) == {350.0}  # not of the instant
    assert {"energy", "SM active", "processes"} <= set(large["unavailable"])
    assert large["processes"] is None


def test_a_driver_that_never_has_any_samples_is_polled_after_a_while(fake_driver: Environment) -> None:
    large, _ = look(fake_driver("silent"), looks=75)["gpus"]
    assert taken(large, "utilisation")[:3] == [10.0, 20.0, 30.0]
    assert large["samples"]["utilisation"][0][0] > 1.4e9


def test_a_gpu_that_is_lost_is_told_and_the_other_goes_on(fake_driver: Environment) -> None:
    large, small = look(fake_driver("lost"))["gpus"]
    assert large["lost"]
    assert large["processes"] is None
    assert not small["lost"]
    assert taken(small, "utilisation") == [10.0, 20.0, 30.0]


TWO_THREADS = """
import threading
from unidle.meter.sensors.nvml import Driver
together = threading.Barrier(2)
def polls(driver, seen):
    for _ in range(6):
        together.wait()
        found = driver.gpus[0].poll()
        seen += [sample.value for sample in found.get("SM active", [])]
        threading.Event().wait(0.1)
drivers, seen = [Driver(), Driver()], ([], [])
threads = [threading.Thread(target=polls, args=both) for both in zip(drivers, seen)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print([31.5 in values for values in seen])
"""


def test_two_threads_never_take_a_snapshot_of_gpm_at_once(fake_driver: Environment) -> None:
    """It ends the process, by driver 580 as by the make-believe one: a run's meter and a phase meter beside it."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], env=fake_driver(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"ended by {done.returncode} (-11: a segmentation fault)"
    assert done.stdout.strip() == "[True, True]"


def test_a_gpu_is_found_by_its_name_whichever_it_is(fake_driver: Environment) -> None:
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
def test_a_process_reads_the_gpu_that_it_may_use(
    visible: str | None, index: int | None, fake_driver: Environment
) -> None:
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
def test_no_gpu_is_a_normal_case(mode: str, sentence: str, fake_driver: Environment) -> None:
    assert look(fake_driver(mode), looks=1) == {"no_gpu_reason": sentence, "gpus": []}


def test_without_the_package_there_is_no_gpu_and_no_error() -> None:
    hidden = "import sys; sys.modules['pynvml'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + LOOKS % 1], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpus"] == []
    assert found["no_gpu_reason"].startswith(("No NVIDIA GPU found: ", "GPU readings need the package nvidia-ml-py"))


BESIDE = """
import json, time
from unidle.meter.sensors.background import Background
asked = Background(("power", "energy"))
asked.start()
time.sleep(1.5)
asked.stop()
print(json.dumps({name: len(asked.samples(name, 0)) for name in ("power", "energy")}))
"""


def test_power_is_read_often_and_what_the_driver_adds_up_seldom(fake_driver: Environment) -> None:
    run = [sys.executable, "-c", BESIDE]
    done = subprocess.run(run, env=fake_driver(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["energy"] > 1  # at first and at the end
    assert found["power"] > 2 * found["energy"]
