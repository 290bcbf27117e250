from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Masked, Pictures, Scripted, Senses, Walk

from unidle.envs.make import env_maker
from unidle.envs.spec import mask_from, probe, random_action
from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout


@pytest.mark.parametrize("env", [Walk, Senses, Pictures])
def test_a_probe_learns_the_spaces_and_the_price_of_a_step(env: type[gymnasium.Env]) -> None:
    env_spec = probe(env_maker(env))
    assert env_spec.obs_layout.space == env.observation_space
    assert env_spec.action_layout.space == env.action_space
    assert env_spec.obs_layout.mask_width == 0
    assert 0 < env_spec.step_seconds < 1


def test_a_large_observation_has_its_price_although_the_step_itself_is_free() -> None:
    picture = np.zeros(4 * 2**20, np.uint8)
    space = spaces.Box(0, 255, picture.shape, np.uint8)

    class Large(Scripted):
        def step(self, action: Any) -> Any:
            return picture, 0.0, False, False, {}

    env_spec = probe(env_maker(lambda: Large(space, (picture, {}))))
    assert env_spec.step_seconds > 4e-5  # 100 GB/s: no core copies so fast


def test_a_probe_closes_its_environment_even_if_it_fails() -> None:
    closed = []

    class Closing(Scripted):
        def close(self) -> None:
            closed.append(True)

    space = spaces.Box(-1, 1, (1,))
    with pytest.raises(UsageError):
        probe(env_maker(lambda: Closing(space, (np.zeros(2, np.float32), {}))))
    assert closed == [True]


def test_an_unsupported_space_is_said_before_anything_is_stepped() -> None:
    with pytest.raises(UsageError, match=r"^observation is a Text space"):
        probe(env_maker(lambda: Scripted(spaces.Text(3), reset=None)))


def test_discretize_reaches_the_layout_of_actions() -> None:
    assert probe(env_maker(Pictures), discretize=5).action_layout.nvec == (5, 5)


@pytest.mark.parametrize("in_observation", [False, True])
def test_a_mask_is_found_in_info_or_in_the_observation_and_obeyed(in_observation: bool) -> None:
    env_spec = probe(env_maker(lambda: Masked(in_observation)))  # a disallowed action would raise
    assert env_spec.obs_layout.mask_width == 4
    assert env_spec.obs_layout.mask_key == ("action_mask" if in_observation else None)


def test_a_mask_without_anything_to_mask_is_left_alone() -> None:
    class Reals(Scripted):
        action_space = spaces.Tuple((spaces.Box(-1, 1), spaces.Box(-1, 1)))

        def __init__(self) -> None:
            where = np.zeros(1, np.float32)
            info = {"action_mask": np.ones(9)}
            super().__init__(spaces.Box(-1, 1, (1,)), (where, info), (where, 0.0, False, False, info))
            self.action_space = spaces.Tuple((spaces.Box(-1, 1), spaces.Box(-1, 1)))

    assert probe(env_maker(Reals)).obs_layout.mask_width == 0


def test_a_mask_that_is_missing_after_some_steps_is_said() -> None:
    with pytest.raises(UsageError, match=r"^info\['action_mask'\] is missing after some steps"):
        probe(env_maker(lambda: Masked(forget=3)))


def test_a_mask_that_allows_nothing_is_said() -> None:
    with pytest.raises(UsageError, match=r"^action_mask allows no action for head 0; allow at least one"):
        probe(env_maker(lambda: Masked(allow=0)))


def test_the_mask_in_the_observation_goes_before_the_one_in_info() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2)})
    inside, outside = np.array([1, 0]), np.array([0, 1])
    assert mask_from({"action_mask": inside}, {"action_mask": outside}, space) is inside
    assert mask_from(np.zeros(1), {"action_mask": outside}, spaces.Box(0, 1)) is outside
    assert mask_from(np.zeros(1), {}, spaces.Box(0, 1)) is None


def test_random_actions_cover_the_space_and_stay_inside_it() -> None:
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
    bounded, free = np.stack([action["how"] for action in drawn]).T
    assert bounded.min() < -1.5
    assert bounded.max() > 4.5
    assert abs(free.std() - 1) < 0.2


def test_random_actions_obey_a_mask() -> None:
    layout, rng = ActionLayout.of(spaces.MultiDiscrete([3, 2])), np.random.default_rng(0)
    mask = np.array([1, 0, 1, 0, 1], np.uint8)
    assert {tuple(random_action(layout, rng, mask)) for _ in range(50)} == {(0, 1), (2, 1)}


class LateMask(Walk):
    """Gives a mask after steps only."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        *outcome, _ = super().step(action)
        return (*outcome, {"action_mask": np.ones(3, np.int8)})  # type: ignore[return-value]


class OldReset(Walk):
    def reset(self) -> tuple[np.ndarray, dict]:  # type: ignore[override]
        return super().reset()


class NoSpaces(gymnasium.Env):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return np.zeros(1), {}


class Yes(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, "no", info


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (LateMask, "info['action_mask'] is set by step() but not by reset(); set it in both."),
        (OldReset, "reset() must accept seed and options as keywords: def reset(self, *, seed=None, options=None)."),
        (NoSpaces, "The environment has no observation_space; set it in __init__ to one of gymnasium.spaces."),
        (Yes, "step() must return terminated and truncated as bools; wrap them in bool(…)."),
    ],
)
def test_an_environment_of_another_shape_gets_its_sentence(env: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as mistake:
        probe(env_maker(env))
    assert str(mistake.value) == sentence
