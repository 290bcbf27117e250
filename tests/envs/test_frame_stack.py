"""`--frame-stack N` stacks observations as Stable-Baselines3's VecFrameStack does."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from resumed_runs import StopAfter, assert_same, final_state
from toy_envs import Walk

import unidle
from unidle.config import Config
from unidle.envs.frame_stack import FrameStack
from unidle.envs.make import env_maker
from unidle.errors import UsageError
from unidle.spaces.observations import ObservationLayout, image_axes


class Random(gymnasium.Env):
    """Random observations of a space; episodes of 3 steps, truncated."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space = copy.deepcopy(space)  # each environment samples from its own generator

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._steps += 1
        return self.observation_space.sample(), 0.0, False, self._steps == 3, {}


def box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(0, 255, shape, dtype) if dtype is np.uint8 else spaces.Box(-1, 2, shape, dtype)


SPACES = {
    "vector": box(3),
    "matrix": box(2, 3),
    "image, channels last": box(36, 40, 3, dtype=np.uint8),
    "image, channels first": box(3, 36, 40, dtype=np.uint8),
    "Dict": spaces.Dict({"camera": box(36, 36, 1, dtype=np.uint8), "speed": box(2)}),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("kind", SPACES)
def test_steps_and_final_observations_equal_those_of_sb3(kind: str) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    space = SPACES[kind]
    theirs = vec_env.VecFrameStack(vec_env.DummyVecEnv([lambda: Random(space)]), 4)
    ours = FrameStack(Random(space), 4)
    first = {key: part.shape for key, part in ours.observation_space.items()} if kind == "Dict" else None
    assert first == ({key: part.shape for key, part in theirs.observation_space.items()} if first else None)
    theirs.seed(5)
    batch, (observation, _) = theirs.reset(), ours.reset(seed=5)
    for _ in range(8):
        assert observation in ours.observation_space
        assert same(one_of(batch), observation)
        batch, _, dones, infos = theirs.step([0])
        observation, _, _, truncated, _ = ours.step(0)
        assert truncated == dones[0]
        if truncated:
            assert same(infos[0]["terminal_observation"], observation)
            observation, _ = ours.reset()


def one_of(batch: Any) -> Any:
    return {key: part[0] for key, part in batch.items()} if isinstance(batch, dict) else batch[0]


def test_grey_image_without_channels_gets_a_channel_per_frame() -> None:
    env = FrameStack(Random(box(36, 40, dtype=np.uint8)), 4)
    assert env.observation_space.shape == (4, 36, 40)
    assert image_axes(env.observation_space.shape) == (4, 36, 40)
    last = [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(3))]
    assert [int((frame != 0).any((1, 2)).sum()) for frame in last] == [1, 2, 3, 4]
    assert all(np.array_equal(later[2], earlier[3]) for earlier, later in itertools.pairwise(last))


def test_bounds_are_repeated_in_order_and_include_the_zeros_before_an_episode() -> None:
    space = spaces.Box(np.array([1, -2], np.float32), np.array([3, -1], np.float32))
    stacked = FrameStack(Random(space), 2).observation_space
    assert stacked == spaces.Box(np.array([0, -2, 0, -2], np.float32), np.array([3, 0, 3, 0], np.float32))


def test_action_mask_is_not_stacked() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2), "speed": box(2)})
    env = FrameStack(Random(space), 3)
    assert env.observation_space["action_mask"] == space["action_mask"]
    assert env.observation_space["speed"].shape == (6,)
    assert env.reset(seed=0)[0]["action_mask"].shape == (2,)
    assert ObservationLayout.of(env.observation_space, 2).mask_key == "action_mask"


def test_observations_that_were_returned_do_not_change() -> None:
    env = FrameStack(Random(box(2)), 2)
    first, _ = env.reset(seed=0)
    kept = first.copy()
    env.step(0)
    assert np.array_equal(first, kept)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Dict({"place": spaces.Discrete(3), "speed": box(2)})])
def test_spaces_that_cannot_be_stacked_are_rejected(space: spaces.Space) -> None:
    with pytest.raises(UsageError, match=r"^--frame-stack stacks Box spaces .* is a Discrete; leave it out"):
        FrameStack(Random(space), 2)


# -- in runs -----------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 16,
    "n_epochs": 1,
    "timesteps": 128,
    "eval_every": 64,
    "eval_episodes": 2,
    "frame_stack": 3,
    "tensorboard": False,
    "quiet": True,
}


def test_run_with_stacked_frames_resumes_exactly(tmp_path: Path) -> None:
    settings = {**SETTINGS, "runs_dir": str(tmp_path)}
    whole = unidle.train("CartPole-v1", run_name="whole", **settings)
    unidle.train("CartPole-v1", run_name="part", **settings, after_iteration=[StopAfter(2)])
    part = unidle.resume(tmp_path / "part", quiet=True)
    assert_same(final_state(part.path), final_state(whole.path))
    assert whole.agent.obs_layout.space.shape == (12,)
    assert part.evaluate(2).returns == whole.evaluate(2).returns


def test_stack_is_around_the_users_wrappers() -> None:
    run = (
        Config()
        .with_values(
            {"wrappers": [{"gymnasium.wrappers:FrameStackObservation": {"stack_size": 3}}], "frame_stack": 2}, "test"
        )
        .run
    )
    with_stack = env_maker(Walk, {}, run.env_wrappers)()
    assert with_stack.observation_space.shape == (3, 4)
    assert type(with_stack).__name__ == "FrameStack"


@pytest.mark.parametrize(
    ("env", "frame_stack", "message"),
    [
        ("CartPole-v1", 0, r"^`frame_stack` is 0; it must be at least 1\.$"),
        ("envpool:CartPole-v1", 2, r"`frame_stack` wrap a single gymnasium\.Env, which|needs the package envpool"),
        ("FrozenLake-v1", 2, r"^`frame_stack` stacks Box spaces"),
    ],
    ids=["zero", "envpool", "Discrete"],
)
def test_frame_stack_that_is_not_possible_is_a_usage_error(
    env: str, frame_stack: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(env, **{**SETTINGS, "frame_stack": frame_stack}, runs_dir=str(tmp_path))
