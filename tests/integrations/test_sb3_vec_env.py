"""unidle's `SubprocVecEnv` steps exactly like Stable-Baselines3's."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Walk

from unidle.errors import TrainingError, UsageError

vec_env = pytest.importorskip("stable_baselines3.common.vec_env")

from unidle.integrations.sb3_vec_env import SubprocVecEnv  # noqa: E402


class Episodes(gymnasium.Env):
    """Random episodes with infos; returns the options of its reset."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (6,), np.uint8), "speed": spaces.Box(-np.inf, np.inf, (2,), np.float32)}
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"
    gravity = 9.8

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {"options": options, "first": self.np_random.normal()}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self._steps += 1
        ending = self.np_random.random()
        reward = float(np.float32(action.sum()))
        return self._observation(), reward, bool(ending < 0.1), bool(ending > 0.8), {"steps": self._steps}

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self._steps, np.uint8)

    def double(self, value: int, *, offset: int = 0) -> int:
        return 2 * value + offset

    def _observation(self) -> dict[str, Any]:
        picture = self.np_random.integers(0, 256, 6, np.uint8)
        return {"picture": picture, "speed": self.np_random.normal(size=2).astype(np.float32)}


def make() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Episodes(), 7)


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_same(*pair)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    else:
        assert left == right


@pytest.fixture
def both() -> Any:
    theirs = vec_env.SubprocVecEnv([make] * 3, start_method="fork")
    with closing(SubprocVecEnv([make] * 3, workers=2)) as ours:
        yield ours, theirs
    theirs.close()


def test_steps_resets_and_infos_equal_those_of_sb3(both: Any) -> None:
    ours, theirs = both
    for name in ("num_envs", "observation_space", "action_space", "render_mode", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name)
    for envs in both:
        assert envs.seed(5) == [5, 6, 7]
        envs.set_options([{"level": 1}, {}, {"level": 3}])
    assert_same(ours.reset(), theirs.reset())
    assert_same(ours.reset_infos, theirs.reset_infos)
    ended = truncated = 0
    rng = np.random.default_rng(0)
    for _ in range(40):
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        left, right = ours.step(actions), theirs.step(actions)
        assert_same(left, right)
        assert_same(ours.reset_infos, theirs.reset_infos)
        ended += int(left[2].sum())
        truncated += sum(info["TimeLimit.truncated"] for info in left[3])
        assert [("terminal_observation" in info) for info in left[3]] == left[2].tolist()
    assert ended > truncated > 3
    assert_same(ours.reset(), theirs.reset())  # without a seed, the random streams continue


def test_attributes_and_methods_equal_those_of_sb3(both: Any) -> None:
    for envs in both:
        envs.seed(0)
        envs.reset()
        envs.set_attr("gravity", 3.0, indices=[2, 0])
    ours, theirs = both
    for call in (
        lambda envs: envs.get_attr("gravity"),
        lambda envs: envs.get_attr("gravity", indices=[2, 1]),
        lambda envs: envs.get_attr("gravity", indices=1),
        lambda envs: envs.env_method("double", 4, offset=1, indices=[1, 0]),
        lambda envs: envs.env_is_wrapped(gymnasium.wrappers.TimeLimit),
        lambda envs: envs.env_is_wrapped(gymnasium.wrappers.ClipAction, indices=[0]),
        lambda envs: (envs.has_attr("gravity"), envs.has_attr("nowhere")),
        lambda envs: [frame.tolist() for frame in envs.get_images()],
        lambda envs: envs.render().tolist(),
    ):
        assert call(ours) == call(theirs)
    with pytest.raises(AttributeError, match="nowhere"):
        ours.get_attr("nowhere")
    assert ours.get_attr("gravity") == [3.0, 9.8, 3.0]  # and it still works


def test_ppo_trains_on_it_as_on_sb3s(both: Any) -> None:
    ppo = pytest.importorskip("stable_baselines3").PPO
    weights = []
    for envs in both:
        model = ppo("MultiInputPolicy", envs, n_steps=8, batch_size=12, n_epochs=1, seed=3, device="cpu")
        model.learn(24)
        weights.append(np.concatenate([p.detach().numpy().ravel() for p in model.policy.parameters()]))
    assert np.array_equal(*weights)


def test_sb3_wrappers_accept_it() -> None:
    wrapped = vec_env.VecNormalize(vec_env.VecFrameStack(SubprocVecEnv([Walk] * 2, workers=1), 3))
    with closing(wrapped):
        wrapped.seed(0)
        assert wrapped.reset().shape == (2, 6)
        assert wrapped.step(np.zeros(2, np.int64))[0].shape == (2, 6)


def test_different_spaces_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"^Environment 1 and environment 0 have different spaces; make them all the"):
        SubprocVecEnv([Walk, Episodes], workers=1)


def test_exception_in_an_env_ends_the_workers() -> None:
    envs = SubprocVecEnv([Walk] * 2, workers=1)
    envs.reset()
    with pytest.raises(TrainingError, match=r"^Environment 0 failed: "):
        envs.env_method("step", "no action")
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        envs.reset()
