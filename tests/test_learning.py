"""PPO learns small environments with every action and observation space, with masks, and with recurrence.

SAC and DQN learn from images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from identity_envs import ActionIdentityEnv, CueMemoryEnv, MaskedActionsEnv, ObservationIdentityEnv
from image_envs import BrightQuadrant

import unidle

pytestmark = pytest.mark.learning

ACTION_SPACES: dict[str, spaces.Space] = {
    "Discrete": spaces.Discrete(5),
    "Discrete with start": spaces.Discrete(4, start=-2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 5, 3]),
    "MultiDiscrete 2-D": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "MultiBinary": spaces.MultiBinary(6),
    "MultiBinary 2-D": spaces.MultiBinary([2, 3]),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "Box with other bounds": spaces.Box(np.array([-2.0, -1.0]), np.array([2.0, 3.0]), dtype=np.float64),
    "Box unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "Dict": spaces.Dict(turn=spaces.Discrete(3), push=spaces.Box(-1, 1, (1,), np.float32)),
    "Tuple, nested": spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(a=spaces.MultiDiscrete([3, 2]))]),
}

OBSERVATION_SPACES: dict[str, spaces.Space] = {
    "Box": spaces.Box(-1, 1, (3, 2), np.float64),
    "integer Box": spaces.Box(-100, 100, (3,), np.int16),
    "image, channels last": spaces.Box(0, 255, (16, 16, 3), np.uint8),
    "image, channels first": spaces.Box(0, 255, (2, 40, 40), np.uint8),
    "Discrete": spaces.Discrete(50, start=-3),
    "MultiDiscrete": spaces.MultiDiscrete([[9, 8], [7, 6]]),
    "MultiBinary": spaces.MultiBinary(12),
    "Dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 255, (12, 12), np.uint8), c=spaces.Box(-1, 1, (2,))),
    "Tuple, nested": spaces.Tuple([spaces.MultiBinary(3), spaces.Dict(x=spaces.Tuple([spaces.Discrete(30)]))]),
}

SMALL = {
    "preset": "classic",
    "n_envs": 8,
    "n_steps": 64,
    "batch_size": 128,
    "n_epochs": 8,
    "net_arch": (64,),
    "learning_rate": 3e-3,
    "gamma": 0.5,
    "eval_every": 2560,
    "eval_episodes": 10,
    "tensorboard": False,
    "seed": 1,
    "quiet": True,
}


def best_return(env: Any, folder: Path, goal: float, **settings: Any) -> float:
    run = unidle.train(env=env, runs_dir=str(folder), target_return=goal, **{**SMALL, **settings})
    best: float = run.summary()["best_evaluation"]
    return best


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_ppo_learns_identity_env_of_each_action_space(name: str, tmp_path: Path) -> None:
    space = ACTION_SPACES[name]
    assert best_return(lambda: ActionIdentityEnv(space), tmp_path, 14.4, timesteps=60_000) >= 14.4  # of 16


def test_ppo_learns_with_discretised_box_actions(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    # With eleven bins 0.2 apart the mean error is 0.05, so the optimum is 15.2.
    best = best_return(lambda: ActionIdentityEnv(space), tmp_path, 14.0, timesteps=60_000, discretize=11)
    assert best >= 14.0


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_ppo_learns_to_classify_observations_of_each_space(name: str, tmp_path: Path) -> None:
    space = OBSERVATION_SPACES[name]
    scaled = {"normalize_obs": True} if name == "integer Box" else {}
    rate = {"learning_rate": 1e-3} if "image" in name or name == "Dict" else {}
    settings = {**scaled, **rate, "timesteps": 30_000}
    assert best_return(lambda: ObservationIdentityEnv(space), tmp_path, 15.2, **settings) >= 15.2


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_off_policy_algorithms_learn_from_stacked_and_shifted_images(algo: str, tmp_path: Path) -> None:
    settings = {
        **{name: value for name, value in SMALL.items() if name not in ("preset", "n_epochs")},
        "preset": algo,
        "n_envs": 4,
        "n_steps": 4,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "timesteps": 4000,
        "buffer_size": 1000,
        "learning_starts": 200,
        "utd_ratio": 0.25,
        "eval_every": 500,
        "target_return": 14.4,
        **({"exploration_fraction": 0.1} if algo == "dqn" else {"target_entropy": 0.1}),
    }
    run = unidle.train(BrightQuadrant, runs_dir=str(tmp_path), frame_stack=2, random_shift=2, **settings)
    assert run.summary()["best_evaluation"] >= 14.4  # of 16


def test_impala_encoder_learns_from_images(tmp_path: Path) -> None:
    settings = {"encoder": "impala", "n_epochs": 4, "learning_rate": 1e-3, "eval_every": 1024, "timesteps": 20_000}
    assert best_return(BrightQuadrant, tmp_path, 14.4, **settings) >= 14.4


@pytest.mark.parametrize("in_observation", [False, True], ids=["info", "observation"])
def test_masked_actions_are_never_taken_and_best_allowed_action_is_learned(
    in_observation: bool, tmp_path: Path
) -> None:
    env = lambda: MaskedActionsEnv(in_observation)  # noqa: E731  # raises on a masked action
    assert best_return(env, tmp_path, 14.4, timesteps=60_000) >= 14.4


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_policy_learns_to_recall_cue(kind: str, tmp_path: Path) -> None:
    settings = {"recurrent": kind, "recurrent_size": 16, "gamma": 0.99, "eval_episodes": 40, "timesteps": 60_000}
    assert best_return(CueMemoryEnv, tmp_path, 0.95, **settings) >= 0.95


def test_feed_forward_policy_cannot_recall_cue(tmp_path: Path) -> None:
    settings = {"gamma": 0.99, "eval_episodes": 100, "timesteps": 10_000}
    assert best_return(CueMemoryEnv, tmp_path, 0.95, **settings) < 0.75
