"""The probe reads spaces, step time and action masks; random actions respect spaces and masks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import ImageEnv, Masked, MixedDictEnv, Scripted, Walk

from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.spec import mask_from, random_action
from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout


@pytest.mark.parametrize("env", [Walk, MixedDictEnv, ImageEnv])
def test_probe_reads_spaces_and_step_time(env: type[gymnasium.Env]) -> None:
    env_spec = probe(env_maker(env))
    assert env_spec.obs_layout.space == env.observation_space
    assert env_spec.action_layout.space == env.action_space
    assert env_spec.obs_layout.mask_width == 0
    assert 0 < env_spec.step_seconds < 1


def test_step_time_includes_copying_the_observation() -> None:
    image = np.zeros(4 * 2**20, np.uint8)
    space = spaces.Box(0, 255, image.shape, np.uint8)

    class LargeObservation(Scripted):
        def step(self, action: Any) -> Any:
            return image, 0.0, False, False, {}

    env_spec = probe(env_maker(lambda: LargeObservation(space, (image, {}))))
    assert env_spec.step_seconds > 4e-5  # less would be 100 GB/s, faster than a core can copy


def test_probe_closes_env_after_failure() -> None:
    closed = []

    class Closing(Scripted):
        def close(self) -> None:
            closed.append(True)

    space = spaces.Box(-1, 1, (1,))
    with pytest.raises(UsageError):
        probe(env_maker(lambda: Closing(space, (np.zeros(2, np.float32), {}))))
    assert closed == [True]


def test_unsupported_space_is_rejected_before_stepping() -> None:
    with pytest.raises(UsageError, match=r"^observation is a Text space"):
        probe(env_maker(lambda: Scripted(spaces.Text(3), reset=None)))


def test_discretize_reaches_action_layout() -> None:
    assert probe(env_maker(ImageEnv), discretize=5).action_layout.nvec == (5, 5)


@pytest.mark.parametrize("in_observation", [False, True])
def test_probe_finds_and_obeys_action_mask(in_observation: bool) -> None:
    env_spec = probe(env_maker(lambda: Masked(in_observation)))  # a disallowed action would raise
    assert env_spec.obs_layout.mask_width == 4
    assert env_spec.obs_layout.mask_key == ("action_mask" if in_observation else None)


def test_mask_is_ignored_without_discrete_actions() -> None:
    class ContinuousActions(Scripted):
        action_space = spaces.Tuple((spaces.Box(-1, 1), spaces.Box(-1, 1)))

        def __init__(self) -> None:
            where = np.zeros(1, np.float32)
            info = {"action_mask": np.ones(9)}
            super().__init__(spaces.Box(-1, 1, (1,)), (where, info), (where, 0.0, False, False, info))
            self.action_space = spaces.Tuple((spaces.Box(-1, 1), spaces.Box(-1, 1)))

    assert probe(env_maker(ContinuousActions)).obs_layout.mask_width == 0


def test_mask_missing_after_some_steps_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"^info\['action_mask'\] is missing after some steps"):
        probe(env_maker(lambda: Masked(forget=3)))


def test_mask_without_allowed_action_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"^action_mask allows no action for head 0; allow at least one"):
        probe(env_maker(lambda: Masked(allow=0)))


def test_mask_in_observation_takes_precedence_over_info() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2)})
    in_observation, in_info = np.array([1, 0]), np.array([0, 1])
    assert mask_from({"action_mask": in_observation}, {"action_mask": in_info}, space) is in_observation
    assert mask_from(np.zeros(1), {"action_mask": in_info}, spaces.Box(0, 1)) is in_info
    assert mask_from(np.zeros(1), {}, spaces.Box(0, 1)) is None


def test_random_actions_cover_and_stay_in_space() -> None:
    space = spaces.Dict(
        {
            "go": spaces.MultiDiscrete([3, 2]),
            "how": spaces.Box(np.array([-2.0, -np.inf], np.float32), np.array([5.0, np.inf], np.float32)),
            "level": spaces.Box(-1, 1, (1,), np.int8),
        }
    )
    layout, rng = ActionLayout.of(space), np.random.default_rng(0)
    drawn = [random_action(layout, rng) for _ in range(300)]
    assert all(space.contains(action) for action in drawn)
    assert {tuple(action["go"]) for action in drawn} == {(i, j) for i in range(3) for j in range(2)}
    assert {int(action["level"][0]) for action in drawn} == {-1, 0, 1}
    bounded, unbounded = np.stack([action["how"] for action in drawn]).T
    assert bounded.min() < -1.5
    assert bounded.max() > 4.5
    assert abs(unbounded.std() - 1) < 0.2


def test_random_actions_obey_mask() -> None:
    layout, rng = ActionLayout.of(spaces.MultiDiscrete([3, 2])), np.random.default_rng(0)
    mask = np.array([1, 0, 1, 0, 1], np.uint8)
    assert {tuple(random_action(layout, rng, mask)) for _ in range(50)} == {(0, 1), (2, 1)}


class LateMask(Walk):
    """Sets the mask in step() only."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        *outcome, _ = super().step(action)
        return (*outcome, {"action_mask": np.ones(3, np.int8)})  # type: ignore[return-value]


class ResetWithoutKeywords(Walk):
    def reset(self) -> tuple[np.ndarray, dict]:  # type: ignore[override]
        return super().reset()


class NoSpaces(gymnasium.Env):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return np.zeros(1), {}


class StringTruncated(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, "no", info


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (LateMask, "info['action_mask'] is set by step() but not by reset(); set it in both."),
        (
            ResetWithoutKeywords,
            "reset() must accept seed and options as keywords: def reset(self, *, seed=None, options=None).",
        ),
        (NoSpaces, "The environment has no observation_space; set it in __init__ to one of gymnasium.spaces."),
        (StringTruncated, "step() must return terminated and truncated as bools; wrap them in bool(…)."),
    ],
)
def test_env_that_violates_gymnasium_api_gets_specific_error(env: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        probe(env_maker(env))
    assert str(error.value) == message
