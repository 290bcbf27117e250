"""The GPU that jobs share, read through the fake driver in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

CODE = """
import json, sys, time
from unidle.errors import UsageError
from unidle.packing.gpu import SharedGpu
from unidle.packing.jobs import Job
gpu = SharedGpu()
jobs = [Job(str(n), ("x",), gpu_memory=size) for n, size in enumerate(json.loads(sys.argv[1]))]
try:
    note = gpu.require_memory(jobs, int(sys.argv[2]))
except UsageError as error:
    note = str(error)
gpu.poll()
gpu.poll()
shares = gpu.share([4242]), gpu.share([1, 4242, 5]), gpu.share([1])
print(json.dumps([note, gpu.text, gpu.missing, gpu.is_there, *shares]))
gpu.close()
"""
GIB = 2**30

Driver = Callable[..., dict[str, str]]


def read(env: dict[str, str], sizes: list[int | None], at_once: int) -> list[Any]:
    command = [sys.executable, "-c", CODE, json.dumps(sizes), str(at_once)]
    found: list[Any] = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    return found


def test_readings_of_the_gpu_and_of_a_job(fake_driver: Driver) -> None:
    note, text, missing, is_there, share, same, unknown = read(fake_driver(), [None], 1)
    assert (note, missing, is_there) == (None, None, True)
    assert text.startswith("GPU 0: ")
    assert text.endswith("2.00 of 8.00 GiB")
    assert share == same == 37.0  # the mean of 63 and 11
    assert unknown is None


@pytest.mark.parametrize(
    ("sizes", "at_once", "note"),
    [
        ([3 * GIB, 3 * GIB], 2, None),
        ([3 * GIB, 3 * GIB, 3 * GIB, None], 2, None),
        (
            [3 * GIB, 2 * GIB, 2 * GIB],
            3,
            "3 jobs at once need up to 7.00 GiB of GPU memory, but 6.00 GiB are free; run fewer at once with "
            "--at-once 2.",
        ),
        (
            [GIB, 7 * GIB],
            1,
            "Job `1` needs 7.00 GiB of GPU memory, but 6.00 GiB are free; make it smaller, or end other programs.",
        ),
    ],
)
def test_jobs_must_fit_in_the_free_memory(
    fake_driver: Driver, sizes: list[int | None], at_once: int, note: Any
) -> None:
    assert read(fake_driver(), sizes, at_once)[0] == note  # 6 of 8 GiB are free


def test_without_a_gpu_memory_is_not_checked_and_that_is_said(fake_driver: Driver) -> None:
    note, text, missing, is_there, *shares = read(fake_driver("none"), [GIB], 1)
    assert missing == "No NVIDIA GPU found: the driver is loaded but lists none."
    assert note == f"GPU memory is not checked. {missing}"
    assert (text, is_there, shares) == (None, False, [None] * 3)


def test_hidden_gpu_is_none(fake_driver: Driver) -> None:
    _, text, missing, is_there, *_ = read({**fake_driver(), "CUDA_VISIBLE_DEVICES": ""}, [None], 1)
    assert (text, missing, is_there) == (None, "CUDA_VISIBLE_DEVICES names no GPU.", False)
