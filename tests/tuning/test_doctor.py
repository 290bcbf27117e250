"""Checks of the machine, with given facts and on the real one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidle.cli.main import run
from unidle.config import machine
from unidle.meter.sensors.nvml import NO_DRIVER
from unidle.tuning import doctor
from unidle.tuning.doctor import (
    check_cuda,
    check_driver,
    check_extras,
    check_folder,
    check_gpus,
    check_lock_limit,
    check_python,
    check_shared_memory,
    check_triton,
)
from unidle.tuning.extras import Extras

Disk = namedtuple("Disk", "total used free")
NAMES = ["Python", "unidle", "torch", "driver", "CUDA", "GPU", "Triton", "locked memory", "cores", "memory"]
NAMES += ["/dev/shm", "extras", "runs folder"]


def examined(output: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(output)["checks"]}


def doctor_with(driver: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unidle", "doctor", "--json"]
    return subprocess.run(command, cwd=tmp_path, env=driver, capture_output=True, text=True, timeout=100)


# -- the command -------------------------------------------------------------------------------------------------------


def test_doctor_prints_one_line_per_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--runs-dir", str(tmp_path / "runs")])
    lines = capsys.readouterr().out.splitlines()
    assert [next(name for name in NAMES if line[9:].startswith(name)) for line in lines] == NAMES
    states = [line.split()[0] for line in lines]
    assert set(states) <= {"ok", "note", "problem"}
    assert code == ("problem" in states)
    assert list(tmp_path.iterdir()) == []  # it only looks


def test_unwritable_runs_folder_is_a_problem_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file")
    assert run(["doctor", "--runs-dir", str(tmp_path / "runs"), "--json"]) == 1
    output = capsys.readouterr().out
    found = examined(output)["runs folder"]
    assert (json.loads(output)["problems"], found["state"]) == (1, "problem")
    assert found["remedy"] == "make it writable, or choose another --runs-dir."


def test_gpu_that_a_cpu_build_of_torch_cannot_use_is_a_problem(
    fake_driver: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    done = doctor_with(fake_driver(), tmp_path)
    found = examined(done.stdout)
    assert found["driver"]["value"] == "550.54, for CUDA up to 12.4"
    assert done.returncode == 1, done.stderr
    assert {name for name, check in found.items() if check["state"] == "problem"} <= {"CUDA", "GPU"}


@pytest.mark.parametrize(("mode", "reason"), [("not loaded", "not loaded"), ("none", "the driver is loaded but lists")])
def test_driver_without_gpu_is_a_problem(
    mode: str, reason: str, fake_driver: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    done = doctor_with(fake_driver(mode), tmp_path)
    found = examined(done.stdout)["driver"]
    assert (done.returncode, found["state"]) == (1, "problem")
    assert reason in found["value"]
    assert "--gpus all" in found["remedy"]


# -- single checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10, 9), "problem"), ((3, 11, 0), "ok"), ((3, 13, 5), "ok"), ((3, 14, 0), "problem")]
)
def test_supported_pythons(version: tuple[int, ...], state: str) -> None:
    assert check_python(version).state == state


def test_machine_without_driver_has_no_problem() -> None:
    assert check_driver(NO_DRIVER, None, None).state == "ok"
    assert check_cuda(None, None).state == "ok"
    assert check_cuda("12.8", None).state == "ok"


@pytest.mark.parametrize(
    ("cuda", "newest", "state", "remedy"),
    [
        ("12.8", (12, 4), "ok", ""),  # minor versions are compatible
        ("13.0", (12, 4), "problem", "update the driver, or install a build of torch for CUDA 12."),
        (None, (12, 4), "problem", "install a build of torch for CUDA, or the GPU stays unused."),
    ],
)
def test_torch_is_compared_with_the_driver(cuda: str | None, newest: tuple[int, int], state: str, remedy: str) -> None:
    found = check_cuda(cuda, newest)
    assert (found.state, found.remedy) == (state, remedy)


def test_gpu_that_fails_is_a_problem_unless_it_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ["NVIDIA H200", "NVIDIA H200", "NVIDIA T4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_gpus(models, None).value == "2 × NVIDIA H200, 1 × NVIDIA T4"
    assert check_gpus(models, "no kernel image").state == "problem"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_gpus(models, "No CUDA GPUs are available").state == "note"


@pytest.mark.parametrize(
    ("version", "compiler", "has_gpu", "state"),
    [
        (None, None, False, "ok"),
        (None, "/usr/bin/cc", True, "note"),
        ("3.6.0", None, True, "note"),
        ("3.6.0", "/usr/bin/cc", True, "ok"),
    ],
)
def test_triton_needs_a_compiler_on_a_gpu(version: str | None, compiler: str | None, has_gpu: bool, state: str) -> None:
    assert check_triton(version, compiler, has_gpu).state == state


def test_lock_limit_is_a_note_only_if_memory_cannot_be_pinned() -> None:
    assert check_lock_limit(resource.RLIM_INFINITY, None).value == "unlimited"
    assert check_lock_limit(65536, None).value == "up to 64 KiB"
    found = check_lock_limit(65536, "CUDA error: out of memory")
    assert (found.state, "memlock=-1" in found.remedy) == ("note", True)


@pytest.mark.parametrize(("mebibytes", "state"), [(64, "note"), (1024, "ok")])
def test_small_shared_memory_is_a_note(
    mebibytes: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Disk(2**30, 0, mebibytes * 2**20))
    assert check_shared_memory(tmp_path).state == state
    assert check_shared_memory(tmp_path / "missing").state == "note"


def test_missing_extras_are_named_with_their_packages() -> None:
    found = check_extras(Extras(("onnx",), {"web": ("aiohttp", "networkx"), "wandb": ("wandb",)}))
    assert found.value == "onnx; without web (aiohttp, networkx), wandb (wandb)"
    assert "pip install 'unidle[web]'" in found.remedy
    assert check_extras(None).state == "note"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_parent_of_runs_folder_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert check_folder(tmp_path / "deep" / "runs").state == "problem"
    finally:
        tmp_path.chmod(0o700)


def test_cores_are_counted_by_affinity_and_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "none")
    (found,) = doctor.check_cores()
    assert found.state == "note"  # one whole core
    assert f"({len(os.sched_getaffinity(0))} by affinity, 1.5 by cgroup)" in found.value
