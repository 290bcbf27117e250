"""Observations, rewards and return values of environments are checked; a mistake is a one-line error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import Scripted

from unidle.envs.check import check_observation, layout_check
from unidle.envs.make import env_maker
from unidle.envs.pool.slot import EnvSlot
from unidle.envs.probe import probe
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError, UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"eye": BOX, "gear": spaces.Discrete(3)})
VALID = np.zeros(3, np.float32)


def observation_with(index: int, value: float) -> np.ndarray:
    observation = VALID.copy()
    observation[index] = value
    return observation


# space, a valid observation, an invalid one, and the error after "observation from <method>() "
INVALID_OBSERVATIONS = {
    "dtype": (
        BOX,
        VALID,
        np.zeros(3),
        r"has dtype float64, but its space has float32; return .astype\(float32\)\.",
    ),
    "integer dtype": (
        BOX,
        VALID,
        np.zeros(3, np.int64),
        r"has dtype int64, but its space has float32; return .astype",
    ),
    "out of bounds": (
        BOX,
        VALID,
        observation_with(1, 1.5),
        r"is outside its space: 1.5 at index \(1,\), whose bounds are -1.0 and 1.0; widen the space or clip",
    ),
    "NaN": (BOX, VALID, observation_with(2, np.nan), r"holds nan at index \(2,\); observations must be finite\."),
    "infinity": (
        spaces.Box(-np.inf, np.inf, (3,)),
        VALID,
        observation_with(0, np.inf),
        r"holds inf at index \(0,\); observations",
    ),
    "shape": (
        BOX,
        VALID,
        np.zeros(4, np.float32),
        r"has shape \(4,\), but its space has \(3,\); make them equal\.",
    ),
    "list": (BOX, VALID, [0.0, 0.0, 0.0], r"must be a NumPy array, not list; return np.asarray\(…, float32\)\."),
    "image dtype": (
        spaces.Box(0, 255, (2, 2), np.uint8),
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2), np.int64),
        r"has dtype int64, but its space has uint8; return .astype\(uint8\)\.",
    ),
    "MultiBinary value": (
        spaces.MultiBinary(2),
        np.array([0, 1]),
        np.array([0, 2]),
        r"is outside its space MultiBinary\(2\); ",
    ),
    "MultiBinary dtype": (
        spaces.MultiBinary(2),
        np.array([0, 1]),
        np.array([0.0, 1.0]),
        r"has dtype float64, but .* int8; ",
    ),
    "MultiDiscrete value": (
        spaces.MultiDiscrete([2, 3]),
        np.array([0, 2]),
        np.array([2, 0]),
        r"is outside its space MultiDiscrete",
    ),
    "Discrete value": (spaces.Discrete(3, start=1), 3, 0, r"is 0, outside its space Discrete\(3, start=1\)\."),
    "Discrete float": (
        spaces.Discrete(3),
        1,
        1.0,
        r"must be a single integer, because its space is Discrete\(3\), not 1",
    ),
    "missing key": (
        DICT,
        {"eye": VALID, "gear": 1},
        {"eye": VALID},
        r"must be a dict with keys \['eye', 'gear'\], not \['eye'\]\.",
    ),
    "not a dict": (
        DICT,
        {"eye": VALID, "gear": 1},
        VALID,
        r"must be a dict with keys \['eye', 'gear'\], not ndarray\.",
    ),
    "short tuple": (spaces.Tuple((BOX, BOX)), (VALID, VALID), (VALID,), r"must be a tuple of 2 values\."),
}


def make_slot(env: Scripted) -> EnvSlot:
    """A slot without the probe, which would have rejected the environment."""
    env_spec = EnvSpec(ObservationLayout.of(env.observation_space), ActionLayout.of(env.action_space), 0.0)
    return EnvSlot(env_maker(lambda: env), 0, 0, 0, env_spec, SharedBlock(env_spec, 1))


def reset_and_step(slot: EnvSlot) -> None:
    slot.start_episode(0)
    slot.step()


def assert_same_error_in_probe_and_training(message: str, space: spaces.Space, reset: Any, step: Any) -> None:
    """The probe (check-env) and training raise the same one-line error."""
    with pytest.raises(UsageError, match=message) as error:
        probe(env_maker(lambda: Scripted(space, reset, step)))
    assert "\n" not in str(error.value)
    slot = make_slot(Scripted(space, reset, step))
    with pytest.raises(UsageError, match=message):
        reset_and_step(slot)


@pytest.mark.parametrize("case", INVALID_OBSERVATIONS)
def test_invalid_reset_observation_is_one_line_error(case: str) -> None:
    space, _, invalid, message = INVALID_OBSERVATIONS[case]
    assert_same_error_in_probe_and_training(rf"^observation from reset\(\) {message}", space, (invalid, {}), None)


@pytest.mark.parametrize("case", INVALID_OBSERVATIONS)
def test_invalid_step_observation_is_one_line_error(case: str) -> None:
    space, valid, invalid, message = INVALID_OBSERVATIONS[case]
    step = (invalid, 0.0, False, False, {})
    assert_same_error_in_probe_and_training(rf"^observation from step\(\) {message}", space, (valid, {}), step)


@pytest.mark.parametrize("case", INVALID_OBSERVATIONS)
def test_valid_observations_pass(case: str) -> None:
    space, valid, _, _ = INVALID_OBSERVATIONS[case]
    probe(env_maker(lambda: Scripted(space, (valid, {}), (valid, 1.0, False, True, {}))))


def test_error_names_path_of_nested_observation() -> None:
    space = spaces.Dict({"a": spaces.Tuple((BOX, spaces.Discrete(2)))})
    with pytest.raises(UsageError, match=r"^observation\['a'\]\[0\] from step\(\) has shape \(2,\)"):
        check_observation(space, {"a": (np.zeros(2, np.float32), 0)}, "step")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_narrower_dtype_is_accepted_as_in_gymnasium(dtype: type) -> None:
    observation = np.zeros(3, dtype)
    space = spaces.Box(-1, 1, (3,), np.float64)
    assert space.contains(observation)
    check_observation(space, observation, "step")


STEP_TUPLE = r"\(observation, reward, terminated, truncated, info\)"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((VALID, 0.0, False, {}), rf"^step\(\) must return {STEP_TUPLE}, not 4 values; see Gymnasium's Env.step\."),
        (VALID, rf"^step\(\) must return {STEP_TUPLE}, not ndarray; see Gymnasium's Env.step\."),
        (None, rf"^step\(\) must return {STEP_TUPLE}, not NoneType; "),
        ((VALID, 0.0, False, False, None), r"^step\(\) must return info as a dict, not NoneType\."),
        ((VALID, np.nan, False, False, {}), r"^step\(\) returned the reward nan; rewards must be finite\."),
        ((VALID, -np.inf, False, False, {}), r"^step\(\) returned the reward -inf; rewards must be finite\."),
        ((VALID, np.ones(1), False, False, {}), r"^step\(\) must return the reward as a scalar, not ndarray "),
        ((VALID, "1.0", False, False, {}), r"^step\(\) must return the reward as a scalar, not str '1.0'\."),
        ((VALID, None, False, False, {}), r"^step\(\) must return the reward as a scalar, not NoneType None\."),
    ],
)
def test_invalid_step_return_value_is_one_line_error(step: Any, message: str) -> None:
    assert_same_error_in_probe_and_training(message, BOX, (VALID, {}), step)


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        (VALID, r"^reset\(\) must return \(observation, info\), not ndarray; see Gymnasium's Env.reset\."),
        ((VALID, 0.0, {}), r"^reset\(\) must return \(observation, info\), not 3 values; "),
        ((VALID, []), r"^reset\(\) must return info as a dict, not list\."),
    ],
)
def test_invalid_reset_return_value_is_one_line_error(reset: Any, message: str) -> None:
    assert_same_error_in_probe_and_training(message, BOX, reset, None)


@pytest.mark.parametrize("reward", [1, 1.5, True, np.float32(2), np.int64(3), np.array(4.0)])
def test_any_finite_scalar_is_a_valid_reward(reward: Any) -> None:
    check_observation(BOX, VALID, "step", reward)


def test_later_invalid_observation_is_found_in_training() -> None:
    slot = make_slot(Scripted(BOX, (VALID, {}), (observation_with(0, 3.0), 0.0, False, False, {}), from_step=3))
    slot.start_episode(0)
    for _ in range(3):
        slot.step()
    with pytest.raises(UsageError, match=r"^observation from step\(\) is outside its space"):
        slot.step()


LATE = {
    "wider shape": (BOX, VALID, np.zeros((1, 3), np.float32), r"has shape \(1, 3\), not \(3,\)"),
    "scalar": (BOX, VALID, np.float32(0.5), r"has shape \(\), not \(3,\)"),
    "part of shape": (BOX, VALID, np.zeros(1, np.float32), r"has shape \(1,\), not \(3,\)"),
    "Discrete above": (spaces.Discrete(3), 2, 3, r"is 3, outside its space Discrete\(3\)"),
    "Discrete below": (spaces.Discrete(3, start=2), 2, 1, r"is 1, outside its space Discrete"),
    "Discrete in Dict": (DICT, {"eye": VALID, "gear": 0}, {"eye": VALID, "gear": -1}, r"\['gear'\] is -1, outside"),
    "MultiDiscrete": (
        spaces.MultiDiscrete([2, 3]),
        np.array([1, 2]),
        np.array([2, 2]),
        r"is \[2 2\], outside its space MultiDiscrete",
    ),
}


@pytest.mark.parametrize("is_last", [False, True], ids=["during episode", "final"])
@pytest.mark.parametrize(("space", "valid", "invalid", "message"), LATE.values(), ids=LATE)
def test_late_observation_that_would_be_broadcast_or_misread_is_refused(
    space: spaces.Space, valid: Any, invalid: Any, message: str, is_last: bool
) -> None:
    env = Scripted(space, (valid, {}), (invalid, 0.0, False, is_last, {}), from_step=50)
    env_spec = EnvSpec(ObservationLayout.of(space), ActionLayout.of(env.action_space), 0.0)
    block = SharedBlock(env_spec, 1)
    slot = EnvSlot(env_maker(lambda: env), 0, 0, 0, env_spec, block)
    slot.start_episode(0)
    for _ in range(50):
        slot.step()
    with pytest.raises(TrainingError, match=message):
        slot.step()


def test_late_batch_of_vector_env_is_checked() -> None:
    check = layout_check(ObservationLayout.of(DICT))
    check({"eye": np.zeros((4, 3)), "gear": np.array([0, 1, 2, 0])}, (4,))
    with pytest.raises(ValueError, match=r"\['eye'\] has shape \(4, 1\), not \(4, 3\)"):
        check({"eye": np.zeros((4, 1)), "gear": np.zeros(4, int)}, (4,))
    with pytest.raises(ValueError, match=r"\['gear'\] is \[0 3 0 0\], outside"):
        check({"eye": np.zeros((4, 3)), "gear": np.array([0, 3, 0, 0])}, (4,))


def test_late_arrays_are_checked_alone_and_in_batches() -> None:
    check = layout_check(ObservationLayout.of(spaces.Box(0, 1, (3,))))
    check(np.zeros(3))
    check([0.0, 0.0, 0.0])
    check(np.zeros((4, 3)), (4,))
    with pytest.raises(ValueError, match=r"observation has shape \(1,\), not \(3,\)"):
        check(np.zeros(1))
    with pytest.raises(ValueError, match=r"observation has shape \(3,\), not \(4, 3\)"):
        check(np.zeros(3), (4,))
