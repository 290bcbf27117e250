"""`unidle pack` with real trainers side by side: Stable-Baselines3's and unidle's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unidle

AT_ONCE = min(4, len(os.sched_getaffinity(0)))
SB3 = """
import sys
from stable_baselines3 import PPO

seed = int(sys.argv[1])
PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=1, seed=seed, device="cpu", verbose=1).learn(256)
"""
UNIDLE = "--env CartPole-v1 --preset classic --timesteps 16384 --eval-every 0 --device cpu --no-tensorboard"


def sb3_job(seed: int) -> dict[str, Any]:
    return {"name": f"sb3-{seed}", "command": [sys.executable, "sb3.py", str(seed)]}


def unidle_job(seed: int) -> dict[str, Any]:
    flags = [*UNIDLE.split(), "--seed", str(seed), "--run-name", f"packed-{seed}"]
    return {"name": f"unidle-{seed}", "command": [sys.executable, "-m", "unidle", "train", *flags]}


def pack(folder: Path, jobs: list[dict[str, Any]], env: dict[str, str]) -> dict[str, Any]:
    """Run the jobs to their ends; returns the summary. Only Python itself is on the PATH: NVIDIA MPS is not."""
    (folder / "sb3.py").write_text(SB3)
    (folder / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    command = [sys.executable, "-m", "unidle", "pack", "jobs.yaml", "--at-once", str(AT_ONCE), "--out", "out", "--json"]
    env = {**os.environ, **env, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + "".join(log.read_text() for log in folder.glob("out/*.log"))
    summary: dict[str, Any] = json.loads(done.stdout)
    assert [(job["name"], job["state"]) for job in summary["jobs"]] == [(job["name"], "finished") for job in jobs]
    assert all(job["steps_per_second"] > 0 for job in summary["jobs"])
    return summary


def test_four_sb3_jobs_without_a_gpu(tmp_path: Path) -> None:
    summary = pack(tmp_path, [sb3_job(seed) for seed in range(4)], {"CUDA_VISIBLE_DEVICES": ""})
    assert summary["mps"] == "off: no GPU"
    assert not {*summary["jobs"][0]["cores"]} & {*summary["jobs"][1]["cores"]} or AT_ONCE == 1
    for seed in range(4):
        assert re.search(r"total_timesteps +\| 256", (tmp_path / f"out/sb3-{seed}.log").read_text())


def test_two_unidle_jobs_and_an_sb3_job_on_a_gpu_without_mps(
    tmp_path: Path, fake_driver: Callable[..., dict[str, str]]
) -> None:
    summary = pack(tmp_path, [unidle_job(1), sb3_job(1), unidle_job(2)], fake_driver())
    assert summary["mps"] == "off: nvidia-cuda-mps-control is not installed"
    assert [job["run"] for job in summary["jobs"]] == ["runs/packed-1", None, "runs/packed-2"]
    assert all(unidle.load(tmp_path / f"runs/packed-{seed}").summary()["step"] == 16384 for seed in (1, 2))
