"""What is announced about an environment's masks and unbounded actions, and how a run uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import unidle

SMALL: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "net_arch": (8,),
    "timesteps": 64,
    "eval_every": 64,
    "eval_episodes": 1,
    "tensorboard": False,
    "subproc": False,
}
FOUND = "Action masks found in info (action_mask): masked actions are never taken; --no-action-masks ignores them."


class OnlyOne(gymnasium.Env):
    """Allows one of three actions, counts the others, and has a mask in info or in the observation."""

    forbidden = 0

    def __init__(self, in_observation: bool = False) -> None:
        self._in_observation, self.action_space = in_observation, spaces.Discrete(3)
        self.observation_space: spaces.Space = spaces.Box(0, 1, (1,))
        if in_observation:
            self.observation_space = spaces.Dict(x=spaces.Box(0, 1, (1,)), action_mask=spaces.MultiBinary(3))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        OnlyOne.forbidden += int(action) != 1
        self._steps += 1
        observation, info = self._show()
        return observation, 0.0, self._steps == 8, False, info

    def _show(self) -> tuple[Any, dict]:
        mask, x = np.array([0, 1, 0], np.int8), np.zeros(1, np.float32)
        return ({"x": x, "action_mask": mask}, {}) if self._in_observation else (x, {"action_mask": mask})


def in_observation() -> OnlyOne:
    return OnlyOne(in_observation=True)


class Unbounded(gymnasium.Env):
    """Actions without bounds, with one bound, and with both, as given by `seen`."""

    seen: list[np.ndarray] = []  # noqa: RUF012  # of all instances

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,))
        low = np.array([-np.inf, 2.0, -np.inf, -4.0], np.float32)
        self.action_space = spaces.Box(low, np.array([np.inf, np.inf, -3.0, 4.0], np.float32))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        Unbounded.seen.append(action.copy())
        self._steps += 1
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), 0.0, self._steps == 8, False, {}


def train(env: Any, tmp_path: Path, algo: str = "ppo", **settings: Any) -> unidle.TrainedRun:
    preset = "classic" if algo == "ppo" else algo
    return unidle.train(env, preset=preset, runs_dir=str(tmp_path), **{**SMALL, **settings})


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_masks_in_info_are_announced_once_and_obeyed(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OnlyOne.forbidden = 0
    train(OnlyOne, tmp_path, algo)
    assert capsys.readouterr().err.replace("\n", " ").count("Action masks found in info") == 1
    assert OnlyOne.forbidden == 0


@pytest.mark.parametrize("factory", [OnlyOne, in_observation], ids=["info", "observation"])
def test_masks_can_be_turned_off(factory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    OnlyOne.forbidden = 0
    run = train(factory, tmp_path, action_masks=False)
    assert "Action masks" not in capsys.readouterr().err
    assert OnlyOne.forbidden > 0
    assert not run.agent.policy.masked
    assert run.agent.policy.encoder.n_features == (1 if factory is OnlyOne else 4)  # the mask is a plain observation
    before = OnlyOne.forbidden
    run.evaluate(4, deterministic=False)
    assert OnlyOne.forbidden > before
    unidle.resume(run.path, timesteps=96, quiet=True)


def test_masks_of_a_vector_environment_can_be_turned_off(tmp_path: Path) -> None:
    def make() -> gymnasium.vector.VectorEnv:
        return gymnasium.vector.SyncVectorEnv([OnlyOne, OnlyOne])

    OnlyOne.forbidden = 0
    run = train(make, tmp_path, action_masks=False, quiet=True, eval_every=0)
    assert OnlyOne.forbidden > 0
    assert not run.agent.policy.masked


@pytest.mark.parametrize("subproc", [False, True], ids=["device", "host"])
def test_masks_of_a_device_environment_can_be_turned_off(subproc: bool, tmp_path: Path) -> None:
    settings = {"action_masks": False, "quiet": True, "eval_every": 0, "subproc": subproc or None}
    run = train("unidle/Mission-v0", tmp_path, **settings)
    assert not run.agent.policy.masked


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_unbounded_actions_are_kept_within_action_limit(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Unbounded.seen.clear()
    run = train(Unbounded, tmp_path, algo, action_limit=0.5, learning_starts=32, buffer_size=200)
    note = f"3 of 4 action numbers have no bounds: {algo.upper()} keeps them within ±0.5; --action-limit changes it."
    assert capsys.readouterr().err.replace("\n", " ").count(note) == 1
    taken = np.array(Unbounded.seen)[32:]  # after the test steps before training
    low, high = np.array([-0.5, 2.0, -4.0, -4.0]), np.array([0.5, 3.0, -3.0, 4.0])
    assert (taken >= low - 1e-6).all()
    assert (taken <= high + 1e-6).all()
    spread = taken.max(0) - taken.min(0)
    assert (spread > 0.5 * (high - low)).all()  # the warm-up covers the range
    assert run.evaluate(1).mean_length == 8


def test_bounded_actions_ignore_action_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("Pendulum-v1", tmp_path, "sac", action_limit=0.5, timesteps=32, eval_every=0, buffer_size=200)
    assert "action numbers" not in capsys.readouterr().err
    assert float(run.agent.policy.distribution.high[0]) == 2.0
