"""Runs whose networks or rollouts do not fit in memory end with one sentence before anything is allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from paths import SOURCE
from torch import Tensor

import unidle
from unidle.buffers.rollout import Rollout
from unidle.config import Recipe, recipe_for
from unidle.engine.memory_check import require_memory_for_networks, require_memory_for_rollouts
from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, StateDependent
from unidle.spaces.observations import ObservationLayout

GIB = 2**30
CPU = torch.device("cpu")
LAYOUT = ObservationLayout.of(spaces.Box(-1, 1, (16,)))


@pytest.fixture
def four_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of which 4 GiB may be used."""
    monkeypatch.setattr("unidle.engine.memory_check.usable_memory", lambda device: 4 * GIB)


def error_of(recipe: Recipe, *sizes: int, count: int = 1) -> str:
    with pytest.raises(UsageError) as error:
        require_memory_for_rollouts(recipe, sizes, CPU, count)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.usefixtures("four_gib")
def test_rollout_that_does_not_fit_names_n_steps_and_the_largest_that_fits() -> None:
    recipe = recipe_for("ppo", n_envs=1000, n_steps=10_000)
    sentence = error_of(recipe, 512, 2, 0)
    assert sentence == (
        "The rollout of n_envs × n_steps = 1,000 × 10,000 transitions needs 5.1 GiB, but the host has 4.0 GiB free; "
        "set --n-steps to at most 7,908, or lower --n-envs."
    )
    require_memory_for_rollouts(recipe_for("ppo", n_envs=1000, n_steps=7908), (512, 2, 0), CPU, 1)


@pytest.mark.usefixtures("four_gib")
def test_overlap_needs_two_rollouts() -> None:
    recipe = recipe_for("ppo", n_envs=1000, n_steps=6000, overlap="strict")
    require_memory_for_rollouts(recipe, (512, 2, 0), CPU, 1)
    assert error_of(recipe, 512, 2, 0, count=2).startswith(
        "2 rollouts (--overlap strict) of n_envs × n_steps = 1,000 × 6,000 transitions each need 6."
    )


@pytest.mark.usefixtures("four_gib")
def test_exploration_matrices_count_too() -> None:
    actions = ActionLayout.of(spaces.Box(-1, 1, (8,)))

    def require(matrix_steps: int) -> None:
        distribution = ActionDistribution(actions, StateDependent(256, matrix_steps))
        recipe = recipe_for("ppo", n_envs=1000, n_steps=1024)
        require_memory_for_rollouts(recipe, (64, 8, 0), CPU, 1, distribution)

    require(4)  # 257 × 1,000 matrices of 8 KiB
    with pytest.raises(UsageError, match=r"needs 7\.9 GiB"):
        require(1)


def test_size_of_a_rollout_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(7, 5, 24, 3, 6, CPU)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in vars(rollout).values()
        if isinstance(t, Tensor)
    }
    size = sum(storages.values()) + 4 * 4 * 35
    recipe = recipe_for("ppo", n_envs=5, n_steps=7)
    monkeypatch.setattr("unidle.engine.memory_check.usable_memory", lambda device: size)
    require_memory_for_rollouts(recipe, (24, 3, 6), CPU, 1)
    monkeypatch.setattr("unidle.engine.memory_check.usable_memory", lambda device: size - 1)
    error_of(recipe, 24, 3, 6)


NETWORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ppo": ("ppo", {"net_arch": (20_000, 20_000)}, 2 * (16 * 20_000 + 20_000**2)),
    "ppo, larger critic": ("ppo", {"critic_arch": (20_000, 20_000)}, 16 * 64 + 64 * 64 + 16 * 20_000 + 20_000**2),
    "ppo, shared": ("ppo", {"net_arch": (20_000, 20_000), "share_trunk": True}, 16 * 20_000 + 20_000**2),
    "sac": ("sac", {"net_arch": (20_000, 20_000), "n_critics": 3}, 4 * (16 * 20_000 + 20_000**2)),
    "ppo, gru": ("ppo", {"recurrent": "gru", "recurrent_size": 20_000}, 2 * (64 * 64 + 3 * 20_000**2)),
    "ppo, lstm": (
        "ppo",
        {"recurrent": "lstm", "recurrent_size": 20_000, "share_trunk": True},
        64 * 64 + 4 * 20_000**2,
    ),
    "dqn": ("dqn", {"net_arch": (20_000, 20_000)}, 16 * 20_000 + 20_000**2),
}


@pytest.mark.usefixtures("four_gib")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_do_not_fit_are_refused_with_their_size(name: str) -> None:
    algo, settings, parameters = NETWORKS[name]
    with pytest.raises(UsageError) as error:
        require_memory_for_networks(recipe_for(algo, **settings), LAYOUT, CPU)
    names = "--net-arch or --critic-arch" if "critic_arch" in settings else "--net-arch"
    names += " or --recurrent-size" if "recurrent" in settings else ""
    assert str(error.value) == (
        f"The networks have at least {parameters:,} parameters, which need {16 * parameters / GIB:,.1f} GiB with "
        f"gradient and optimiser state, but the host has 4.0 GiB free; use narrower layers ({names})."
    )


class Camera(gymnasium.Env):
    """Large images."""

    observation_space = spaces.Box(0, 255, (1000, 1000, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.zeros((1000, 1000, 3), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return np.zeros((1000, 1000, 3), np.uint8), 0.0, False, True, {}


class FirstPixel(torch.nn.Module):
    """Keeps the policy small."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0].float()


def test_run_that_does_not_fit_creates_no_folder(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"preset": "classic", "runs_dir": str(tmp_path / "runs"), "quiet": True}
    with pytest.raises(
        UsageError, match=r"^The rollout of n_envs × n_steps = 1 × 10,000,000 transitions needs 27,9\d\d"
    ):
        unidle.train(Camera, network=lambda *_: FirstPixel(), n_steps=10_000_000, batch_size="auto", **settings)
    with pytest.raises(UsageError, match=r"^The networks have at least 1,000,008,000,000 parameters"):
        unidle.train("CartPole-v1", net_arch=(1_000_000, 500_000), **settings)
    with pytest.raises(UsageError, match=r"^The rollout of n_envs × n_steps = 1,000,000,000,000 × "):
        unidle.train("CartPole-v1", n_envs=10**12, **settings)
    assert not (tmp_path / "runs").exists()


def test_check_does_not_import_sympy(tmp_path: Path) -> None:
    """Some of torch's operations on the meta device import it, which takes a third of a second of each start-up."""
    code = (
        "import sys, unidle; unidle.train('CartPole-v1', preset='classic', n_steps=8, batch_size=8, timesteps=8, "
        "eval_every=0, quiet=True); sys.exit('sympy' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ).returncode == 0
