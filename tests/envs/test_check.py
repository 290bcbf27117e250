from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Scripted

from unidle.envs.check import check_observation
from unidle.envs.make import env_maker
from unidle.envs.pool.slot import EnvSlot
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec, probe
from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"eye": BOX, "gear": spaces.Discrete(3)})
GOOD = np.zeros(3, np.float32)


def high(at: int, value: float) -> np.ndarray:
    observation = GOOD.copy()
    observation[at] = value
    return observation


# space, a good observation, the bad one, and the sentence after "observation from <method>() "
BAD_OBSERVATIONS = {
    "dtype": (
        BOX,
        GOOD,
        np.zeros(3),
        r"has dtype float64, but its space has float32; return .astype\(float32\)\.",
    ),
    "whole numbers": (
        BOX,
        GOOD,
        np.zeros(3, np.int64),
        r"has dtype int64, but its space has float32; return .astype",
    ),
    "outside": (
        BOX,
        GOOD,
        high(1, 1.5),
        r"is outside its space: 1.5 at index \(1,\), whose bounds are -1.0 and 1.0; widen the space or clip",
    ),
    "NaN": (BOX, GOOD, high(2, np.nan), r"holds nan at index \(2,\); observations must be finite\."),
    "infinity": (spaces.Box(-np.inf, np.inf, (3,)), GOOD, high(0, np.inf), r"holds inf at index \(0,\); observations"),
    "shape": (
        BOX,
        GOOD,
        np.zeros(4, np.float32),
        r"has shape \(4,\), but its space has \(3,\); make them equal\.",
    ),
    "list": (BOX, GOOD, [0.0, 0.0, 0.0], r"must be a NumPy array, not list; return np.asarray\(…, float32\)\."),
    "picture": (
        spaces.Box(0, 255, (2, 2), np.uint8),
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2), np.int64),
        r"has dtype int64, but its space has uint8; return .astype\(uint8\)\.",
    ),
    "bits": (spaces.MultiBinary(2), np.array([0, 1]), np.array([0, 2]), r"is outside its space MultiBinary\(2\); "),
    "real bits": (spaces.MultiBinary(2), np.array([0, 1]), np.array([0.0, 1.0]), r"has dtype float64, but .* int8; "),
    "dials": (
        spaces.MultiDiscrete([2, 3]),
        np.array([0, 2]),
        np.array([2, 0]),
        r"is outside its space MultiDiscrete",
    ),
    "category": (spaces.Discrete(3, start=1), 3, 0, r"is 0, outside its space Discrete\(3, start=1\)\."),
    "half a category": (
        spaces.Discrete(3),
        1,
        1.0,
        r"must be one integer, because its space is Discrete\(3\), not 1",
    ),
    "keys missing": (
        DICT,
        {"eye": GOOD, "gear": 1},
        {"eye": GOOD},
        r"must be a dict with keys \['eye', 'gear'\], not \['eye'\]\.",
    ),
    "no dict": (DICT, {"eye": GOOD, "gear": 1}, GOOD, r"must be a dict with keys \['eye', 'gear'\], not ndarray\."),
    "no tuple": (spaces.Tuple((BOX, BOX)), (GOOD, GOOD), (GOOD,), r"must be a tuple of 2 parts\."),
}


def slot_of(env: Scripted) -> EnvSlot:
    """The environment in training, without the probe that would have found its mistake before."""
    env_spec = EnvSpec(ObservationLayout.of(env.observation_space), ActionLayout.of(env.action_space), 0.0)
    return EnvSlot(env_maker(lambda: env), 0, 0, 0, env_spec, SharedBlock(env_spec, 1))


def begin(slot: EnvSlot) -> None:
    slot.start_episode(0)
    slot.step()


def assert_said_everywhere(sentence: str, space: spaces.Space, reset: Any, step: Any) -> None:
    """The same sentence from a probe (check-env) and from an environment in training."""
    with pytest.raises(UsageError, match=sentence) as refusal:
        probe(env_maker(lambda: Scripted(space, reset, step)))
    assert "\n" not in str(refusal.value)
    slot = slot_of(Scripted(space, reset, step))
    with pytest.raises(UsageError, match=sentence):
        begin(slot)


@pytest.mark.parametrize("mistake", BAD_OBSERVATIONS)
def test_a_wrong_observation_from_reset_is_one_sentence(mistake: str) -> None:
    space, _, bad, sentence = BAD_OBSERVATIONS[mistake]
    assert_said_everywhere(rf"^observation from reset\(\) {sentence}", space, (bad, {}), None)


@pytest.mark.parametrize("mistake", BAD_OBSERVATIONS)
def test_a_wrong_observation_from_step_is_one_sentence(mistake: str) -> None:
    space, good, bad, sentence = BAD_OBSERVATIONS[mistake]
    step = (bad, 0.0, False, False, {})
    assert_said_everywhere(rf"^observation from step\(\) {sentence}", space, (good, {}), step)


@pytest.mark.parametrize("mistake", BAD_OBSERVATIONS)
def test_the_right_observations_of_these_spaces_pass(mistake: str) -> None:
    space, good, _, _ = BAD_OBSERVATIONS[mistake]
    probe(env_maker(lambda: Scripted(space, (good, {}), (good, 1.0, False, True, {}))))


def test_a_mistake_deep_in_the_structure_is_named_with_its_place() -> None:
    space = spaces.Dict({"a": spaces.Tuple((BOX, spaces.Discrete(2)))})
    with pytest.raises(UsageError, match=r"^observation\['a'\]\[0\] from step\(\) has shape \(2,\)"):
        check_observation(space, {"a": (np.zeros(2, np.float32), 0)}, "step")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_a_narrower_dtype_that_the_space_can_hold_is_taken_as_gymnasium_takes_it(dtype: type) -> None:
    observation = np.zeros(3, dtype)
    space = spaces.Box(-1, 1, (3,), np.float64)
    assert space.contains(observation)
    check_observation(space, observation, "step")


FIVE = r"\(observation, reward, terminated, truncated, info\)"


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ((GOOD, 0.0, False, {}), rf"^step\(\) must return {FIVE}, not 4 values; see Gymnasium's Env.step\."),
        (GOOD, rf"^step\(\) must return {FIVE}, not ndarray; see Gymnasium's Env.step\."),
        (None, rf"^step\(\) must return {FIVE}, not NoneType; "),
        ((GOOD, 0.0, False, False, None), r"^step\(\) must return info as a dict, not NoneType\."),
        ((GOOD, np.nan, False, False, {}), r"^step\(\) returned the reward nan; rewards must be finite\."),
        ((GOOD, -np.inf, False, False, {}), r"^step\(\) returned the reward -inf; rewards must be finite\."),
        ((GOOD, np.ones(1), False, False, {}), r"^step\(\) must return the reward as a scalar, not ndarray "),
        ((GOOD, "1.0", False, False, {}), r"^step\(\) must return the reward as a scalar, not str '1.0'\."),
        ((GOOD, None, False, False, {}), r"^step\(\) must return the reward as a scalar, not NoneType None\."),
    ],
)
def test_a_wrong_outcome_of_step_is_one_sentence(step: Any, sentence: str) -> None:
    assert_said_everywhere(sentence, BOX, (GOOD, {}), step)


@pytest.mark.parametrize(
    ("reset", "sentence"),
    [
        (GOOD, r"^reset\(\) must return \(observation, info\), not ndarray; see Gymnasium's Env.reset\."),
        ((GOOD, 0.0, {}), r"^reset\(\) must return \(observation, info\), not 3 values; "),
        ((GOOD, []), r"^reset\(\) must return info as a dict, not list\."),
    ],
)
def test_a_wrong_outcome_of_reset_is_one_sentence(reset: Any, sentence: str) -> None:
    assert_said_everywhere(sentence, BOX, reset, None)


@pytest.mark.parametrize("reward", [1, 1.5, True, np.float32(2), np.int64(3), np.array(4.0)])
def test_any_single_finite_number_is_a_reward(reward: Any) -> None:
    check_observation(BOX, GOOD, "step", reward)


def test_a_mistake_that_shows_only_after_some_steps_is_still_found_in_training() -> None:
    slot = slot_of(Scripted(BOX, (GOOD, {}), (high(0, 3.0), 0.0, False, False, {}), from_step=3))
    slot.start_episode(0)
    for _ in range(3):
        slot.step()
    with pytest.raises(UsageError, match=r"^observation from step\(\) is outside its space"):
        slot.step()
