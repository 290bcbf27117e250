"""Training with each distribution of continuous actions besides the Gaussian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import unidle


class Aim(gymnasium.Env):
    """One-step episodes; the best action depends on the observation and can be close to the action bounds."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(np.array([-2.0], np.float32), np.array([6.0], np.float32))

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        self.target = float(self.np_random.uniform(-1, 1))
        return np.array([self.target], np.float32), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        best_action = 2.0 + 3.5 * self.target
        return np.zeros(1, np.float32), -abs(float(action[0]) - best_action), True, False, {}


SETTINGS = {"preset": "classic", "n_envs": 8, "n_steps": 64, "batch_size": 128, "learning_rate": 3e-3, "gamma": 0.0}


@pytest.mark.parametrize(
    "actions",
    [
        {"action_distribution": "squashed"},
        {"action_distribution": "beta"},
        {"use_sde": True, "sde_sample_freq": 4, "log_std_init": -2.0},
    ],
    ids=["squashed", "beta", "gsde"],
)
def test_ppo_learns_with_action_distribution(actions: dict[str, Any], tmp_path: Path) -> None:
    run = unidle.train(Aim, **SETTINGS, **actions, timesteps=24_000, runs_dir=str(tmp_path), quiet=True, seed=1)
    predicted = [float(run.predict(np.array([target], np.float32))[0][0]) for target in (-0.9, -0.3, 0.4, 0.9)]
    np.testing.assert_allclose(predicted, [2.0 + 3.5 * target for target in (-0.9, -0.3, 0.4, 0.9)], atol=0.6)


@pytest.mark.parametrize("distribution", ["squashed", "beta"])
def test_resumed_run_equals_uninterrupted_run(distribution: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "action_distribution": distribution, "runs_dir": str(tmp_path), "quiet": True}
    settings |= {"eval_every": 0, "normalize_obs": True, "ent_coef": 0.01}
    uninterrupted = unidle.train(Aim, **settings, timesteps=2048, run_name="uninterrupted")
    unidle.train(Aim, **settings, timesteps=1024, run_name="resumed")
    resumed = unidle.resume(tmp_path / "resumed", env=Aim, timesteps=2048)
    for (name, expected), (_, actual) in zip(
        uninterrupted.agent.policy.state_dict().items(), resumed.agent.policy.state_dict().items()
    ):
        assert expected.equal(actual), name


@pytest.mark.parametrize("distribution", ["squashed", "beta"])
def test_unbounded_box_is_rejected_before_training(distribution: str, tmp_path: Path) -> None:
    class Unbounded(Aim):
        action_space = spaces.Box(-np.inf, np.inf, (1,))

    with pytest.raises(unidle.UsageError, match="finite bounds"):
        unidle.train(Unbounded, **SETTINGS, action_distribution=distribution, runs_dir=str(tmp_path), quiet=True)
