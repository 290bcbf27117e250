"""benchmarks/pixels.py runs whole, with tiny settings; and its floor counts what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pixel_env
import pixel_minibatch
import pixels
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from unidle.config import PPORecipe
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

TINY = {"seconds": 0.05, "n-envs": 4, "n-steps": 8, "batch-size": 16, "n-epochs": 1, "step-us": 20, "rounds": 1}


def test_environment_follows_gymnasium_and_takes_its_time() -> None:
    env = pixel_env.Quadrant(step_us=3000.0)
    check_env(env, skip_render_check=True)
    began = time.perf_counter()
    for _ in range(5):
        env.step(0)
    assert time.perf_counter() - began >= 5 * 3000e-6


def test_every_part_is_measured_and_saved(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    sides = ["--sides", "strict tf32", "off bf16", "sb3", "--minibatches", "plain tf32", "unidle bf16"]
    command = [
        sys.executable,
        pixels.__file__,
        *(word for name, value in TINY.items() for word in (f"--{name}", str(value))),
        *sides,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "pixels.json").read_text())
    assert list(saved["sides"]) == ["strict tf32", "off bf16", "sb3"]
    assert all(side["steps_per_second"] > 0 for side in saved["sides"].values())
    assert [len(each["runs"]) for each in saved["minibatches"].values()] == [2, 2]
    assert all(each["ms"] > 0 for each in saved["minibatches"].values())
    assert len(saved["stepping"]) == 2
    assert saved["machine"]["sources"]
    assert "minibatch" in done.stdout


def test_floor_of_nature_cnn_is_that_of_its_layers() -> None:
    """Per observation: 2 × outputs × inputs of each output, three times, twice for the first layer."""
    recipe = PPORecipe(net_arch=(), batch_size=1024, n_envs=8, n_steps=128)
    layout = ObservationLayout.of(spaces.Box(0, 255, pixel_env.SHAPE, "uint8"))
    policy = ActorCritic(layout, ActionLayout.of(spaces.Discrete(4)), recipe)
    forward = {
        "conv1": 400 * 32 * 256,
        "conv2": 81 * 64 * 512,
        "conv3": 49 * 64 * 576,
        "dense": 3136 * 512,
        "heads": 5 * 512,
    }
    expected = 2 * 1024 * (3 * sum(forward.values()) - forward["conv1"])
    found = pixel_minibatch.floor(policy, 1024, "bf16")
    assert found["gflop"] == pytest.approx(expected / 1e9)
    activations = 400 * 32 + 81 * 64 + 49 * 64 + 512 + 5
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    assert found["megabytes"] == pytest.approx((1024 * (2 * 28224 + 10 * activations) + 40 * parameters) / 1e6)
    assert pixel_minibatch.floor(policy, 1024, "tf32")["floor_ms"] > found["floor_ms"] > 0
