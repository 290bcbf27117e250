"""Failing environments, serial and in workers: the failed one restarts, the others are unaffected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from action_faults import CHECKED_STEPS, ENV_SPEC, SEED, ActionFaultEnv, Do, expected_position, position, reward_of

from unidle.envs.faults import Fault, FaultCounter
from unidle.envs.make import env_maker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.protocol import HostEnvs
from unidle.envs.shared_block import SharedBlock
from unidle.errors import TrainingError, UsageError

FIRST_INDEX = 40  # index of the first environment
N = 3
Make = Callable[..., HostEnvs]


@pytest.fixture(params=["serial", "pool"])
def make_envs(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes three `ActionFaultEnv`s, in this process or in two workers (of two and one)."""
    created: list[HostEnvs] = []

    def make_envs(env: Any = ActionFaultEnv, **kwargs: Any) -> HostEnvs:
        maker = env_maker(env)
        if request.param == "serial":
            created.append(SerialEnvs(maker, ENV_SPEC, N, SEED, FIRST_INDEX, **kwargs))
        else:
            created.append(ProcessPool(maker, ENV_SPEC, N, SEED, 2, FIRST_INDEX, **kwargs))
        return created[-1]

    yield make_envs
    for envs in created:
        envs.close()


@pytest.fixture
def start_envs(make_envs: Make) -> Make:
    def start_envs(*args: Any, **kwargs: Any) -> HostEnvs:
        envs = make_envs(*args, **kwargs)
        envs.start(np.zeros(N, np.int64))
        return envs

    return start_envs


def step_all(envs: HostEnvs, *actions: Do) -> list[str]:
    """One step of all environments; returns the first line of each fault."""
    envs.block.actions[:, 0] = actions or [Do.STEP] * N
    envs.send(range(len(envs.bounds)))
    assert envs.recv(len(envs.bounds)) == list(range(len(envs.bounds)))
    return take_messages(envs)


def take_messages(envs: HostEnvs) -> list[str]:
    texts = [fault.text.splitlines()[0] for fault in envs.faults]
    envs.faults.clear()
    return texts


def positions(envs: HostEnvs) -> list[tuple[int, int]]:
    return [position(obs) for obs in envs.block.obs]


def describe_step(env: int, episode: int, step: int) -> str:
    return f"episode {episode} (seed {episode_seed(SEED, env, episode)}), step {step}"


# -- exceptions --------------------------------------------------------------------------------------------------------


def test_only_the_raising_env_restarts(start_envs: Make) -> None:
    envs = start_envs()
    for _ in range(3):
        assert step_all(envs) == []
        assert not envs.block.retry.any()
    envs.block.actions[:, 0] = [Do.STEP, Do.RAISE, Do.TERMINATE]
    envs.send(range(len(envs.bounds)))
    envs.recv(len(envs.bounds))

    (fault,) = envs.faults
    assert (fault.env, fault.kind) == (41, "exception")
    first, *rest = fault.text.splitlines()
    assert first == f"Environment 41 failed in {describe_step(41, 0, 3)}: ZeroDivisionError: the robot fell over"
    assert any("action_faults.py" in line for line in rest)
    assert envs.block.retry.tolist() == [False, True, False]
    assert positions(envs) == [expected_position(40, 0, 4), expected_position(41, 1, 0), expected_position(42, 1, 0)]
    assert envs.block.episode.tolist() == [0, 1, 1]
    assert envs.block.reward[[0, 2]].tolist() == [
        reward_of(*expected_position(40, 0, 4)),
        reward_of(*expected_position(42, 0, 4)),
    ]
    assert envs.block.terminated[[0, 2]].tolist() == [False, True]
    assert envs.restarted == []

    envs.faults.clear()
    assert step_all(envs) == []
    assert not envs.block.retry.any()
    assert positions(envs) == [expected_position(40, 0, 5), expected_position(41, 1, 1), expected_position(42, 1, 1)]
    assert envs.block.reward[1] == reward_of(*expected_position(41, 1, 1))


def test_episode_stats_exclude_failed_episode(start_envs: Make) -> None:
    envs = start_envs()
    step_all(envs)
    step_all(envs, Do.RAISE, Do.STEP, Do.STEP)
    step_all(envs)
    step_all(envs, Do.TERMINATE, Do.TERMINATE, Do.STEP)
    assert envs.block.episode_length[:2].tolist() == [2, 4]
    assert envs.block.episode_return[0] == sum(reward_of(*expected_position(40, 1, step)) for step in (1, 2))


def test_failed_reset_retries_step_with_next_seed(start_envs: Make) -> None:
    envs = start_envs()
    texts = step_all(envs, Do.STEP, Do.STEP, Do.TERMINATE_AND_FAIL_RESET)
    assert texts == [f"Environment 42 failed in {describe_step(42, 1, 0)}: RuntimeError: stuck in the mud"]
    assert envs.block.retry.tolist() == [False, False, True]
    assert positions(envs) == [expected_position(40, 0, 1), expected_position(41, 0, 1), expected_position(42, 2, 0)]
    assert envs.block.episode[2] == 2


def test_failed_env_creation_is_retried_each_step(start_envs: Make, tmp_path: Path) -> None:
    envs = start_envs(lambda: ActionFaultEnv(str(tmp_path)))
    step_all(envs)
    (tmp_path / "creation fails").touch()
    assert step_all(envs, Do.STEP, Do.RAISE, Do.STEP) == [
        f"Environment 41 failed in {describe_step(41, 0, 1)}: ZeroDivisionError: the robot fell over"
    ]
    for step in (3, 4):  # each step reports why the previous one could not start an episode
        assert step_all(envs) == [f"Environment 41 failed in {describe_step(41, step - 2, 0)}: OSError: no such robot"]
        assert envs.block.retry.tolist() == [False, True, False]
        shown = positions(envs)
        assert shown[::2] == [expected_position(40, 0, step), expected_position(42, 0, step)]
        assert shown[1][1] == 0  # a first observation
    (tmp_path / "creation fails").unlink()
    assert step_all(envs) == [f"Environment 41 failed in {describe_step(41, 3, 0)}: OSError: no such robot"]
    assert envs.block.retry.tolist() == [False, True, False]
    assert positions(envs)[1] == expected_position(41, 4, 0)
    assert step_all(envs) == []
    assert positions(envs) == [expected_position(40, 0, 6), expected_position(41, 4, 1), expected_position(42, 0, 6)]


class FailsToClose(ActionFaultEnv):
    _fails_to_close = False

    def step(self, action: Any) -> Any:
        self._fails_to_close = action == Do.RAISE
        return super().step(action)

    def close(self) -> None:
        if self._fails_to_close:
            raise OSError("the lid is stuck")


def test_env_whose_close_fails_is_recreated(start_envs: Make) -> None:
    envs = start_envs(FailsToClose)
    assert len(step_all(envs, Do.RAISE, Do.STEP, Do.STEP)) == 1
    assert positions(envs)[0] == expected_position(40, 1, 0)


class WrongShape(ActionFaultEnv):
    def step(self, action: Any) -> Any:
        _, *rest = super().step(Do.STEP)
        return {"at": np.zeros(3, np.int64), "x": np.zeros(1, np.float32)}, *rest


def test_usage_error_is_raised_instead_of_restarting_the_env(start_envs: Make) -> None:
    envs = start_envs(WrongShape)
    with pytest.raises(UsageError, match=r"^observation\['at'\] from step\(\) has shape \(3,\)"):
        step_all(envs)


def test_message_larger_than_pipe_arrives(start_envs: Make) -> None:
    envs = start_envs()
    texts = step_all(envs, Do.RAISE_LONG_MESSAGE, Do.RAISE_LONG_MESSAGE, Do.RAISE_LONG_MESSAGE)
    assert [len(text) > 3_000_000 for text in texts] == [True] * 3


# -- start and resume --------------------------------------------------------------------------------------------------


class FailsAtSeed(ActionFaultEnv):
    """Fails to reset with one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._failing_seed = seed

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if seed == self._failing_seed:
            raise RuntimeError("not from here")
        return super().reset(seed=seed)


def test_episode_that_cannot_start_is_skipped(start_envs: Make) -> None:
    failing_seed = episode_seed(SEED, 41, 0)
    envs = start_envs(lambda: FailsAtSeed(failing_seed))
    assert take_messages(envs) == [f"Environment 41 failed in {describe_step(41, 0, 0)}: RuntimeError: not from here"]
    assert positions(envs) == [expected_position(40, 0, 0), expected_position(41, 1, 0), expected_position(42, 0, 0)]
    assert step_all(envs) == []
    assert not envs.block.retry.any()


def test_env_that_never_resets_raises_at_start(make_envs: Make, tmp_path: Path) -> None:
    envs = make_envs(lambda: ActionFaultEnv(str(tmp_path)))
    (tmp_path / "reset fails").touch()
    with pytest.raises(TrainingError, match=r"^Environment 4[02] failed in episode 1 .*stuck in the mud"):
        envs.start(np.zeros(N, np.int64))


def test_failed_replay_starts_next_episode(start_envs: Make) -> None:
    envs = start_envs()
    actions = [np.full((3, 1), action, np.float32) for action in (Do.STEP, Do.RAISE, Do.STEP)]
    rewards = np.zeros((3, N), np.float32)
    for step in range(3):
        step_all(envs)
        rewards[step] = envs.block.reward
    obs = envs.block.obs.copy()
    differences = envs.resume([OpenEpisode(0, actions[i], rewards[:, i], obs[i]) for i in range(N)])
    assert [difference is None for difference in differences] == [True, False, True]
    assert differences[1] == Difference(
        f"Environment 41 failed in {describe_step(41, 0, 0)}: ZeroDivisionError: the robot fell over", is_lost=True
    )
    assert take_messages(envs) == [
        f"Environment 41 failed in {describe_step(41, 0, 0)}: ZeroDivisionError: the robot fell over"
    ]
    assert positions(envs) == [expected_position(40, 0, 3), expected_position(41, 1, 0), expected_position(42, 0, 3)]


# -- NaN and infinite values -------------------------------------------------------------------------------------------

NOT_FINITE = {  # action → the value, episode and step in the message, and the next episode
    Do.NAN_REWARD: ("reward", 0, CHECKED_STEPS + 1, 1),
    Do.INFINITE_OBSERVATION: ("observation", 0, CHECKED_STEPS + 1, 1),
    Do.TRUNCATE_WITH_NAN: ("observation", 0, CHECKED_STEPS + 1, 2),
    Do.TERMINATE_WITH_NAN_REWARD: ("reward", 0, CHECKED_STEPS + 1, 2),
    Do.TERMINATE_AND_NAN_RESET: ("observation", 1, 0, 2),
}


@pytest.mark.parametrize("action", NOT_FINITE)
def test_nonfinite_value_never_reaches_learner(start_envs: Make, action: Do) -> None:
    value, episode, step, next_episode = NOT_FINITE[action]
    envs = start_envs()
    for _ in range(CHECKED_STEPS):
        step_all(envs)
    texts = step_all(envs, Do.STEP, action, Do.TRUNCATE)
    assert texts == [f"Environment 41 returned a NaN or infinite {value} in {describe_step(41, episode, step)}."]
    block = envs.block
    assert block.retry.tolist() == [False, True, False]
    assert positions(envs) == [
        expected_position(40, 0, CHECKED_STEPS + 1),
        expected_position(41, next_episode, 0),
        expected_position(42, 1, 0),
    ]
    assert block.truncated[[0, 2]].tolist() == [False, True]
    assert np.isfinite(block.reward).all()
    assert step_all(envs) == []
    assert not block.retry.any()
    assert positions(envs) == [
        expected_position(40, 0, CHECKED_STEPS + 2),
        expected_position(41, next_episode, 1),
        expected_position(42, 1, 1),
    ]


def test_recreated_env_with_nonfinite_first_observation_is_discarded(start_envs: Make, tmp_path: Path) -> None:
    envs = start_envs(lambda: ActionFaultEnv(str(tmp_path)))
    for _ in range(CHECKED_STEPS):
        step_all(envs)
    (tmp_path / "reset nan").touch()
    assert len(step_all(envs, Do.RAISE, Do.STEP, Do.STEP)) == 1
    assert np.isfinite(ENV_SPEC.obs_layout.float_views(envs.block.obs)[0]).all()
    assert step_all(envs) == [f"Environment 40 returned a NaN or infinite observation in {describe_step(40, 1, 0)}."]


def test_episode_with_nonfinite_first_observation_is_skipped(start_envs: Make, tmp_path: Path) -> None:
    envs = start_envs(lambda: ActionFaultEnv(str(tmp_path)))
    for _ in range(CHECKED_STEPS):
        step_all(envs)
    (tmp_path / "reset nan").touch()
    envs.start(np.full(N, 5))
    assert np.isfinite(ENV_SPEC.obs_layout.float_views(envs.block.obs)[0]).all()
    (tmp_path / "reset nan").unlink()
    assert take_messages(envs) == [
        f"Environment {env} returned a NaN or infinite observation in {describe_step(env, 5, 0)}."
        for env in (40, 41, 42)
    ]
    assert len(step_all(envs)) == N  # the next episode also started with NaN
    assert positions(envs) == [expected_position(40, 7, 0), expected_position(41, 7, 0), expected_position(42, 7, 0)]


# -- restart limit -----------------------------------------------------------------------------------------------------


def test_too_many_faults_raise_with_last_fault(start_envs: Make) -> None:
    envs = start_envs(max_env_restarts=2)
    for _ in range(2):
        assert len(step_all(envs, Do.STEP, Do.RAISE, Do.STEP)) == 1
    with pytest.raises(TrainingError) as error:
        step_all(envs, Do.RAISE, Do.RAISE, Do.STEP)
    first, second, *rest = str(error.value).splitlines()
    assert first == (
        "Environment 41 failed 3 times without finishing an episode in between; max_env_restarts allows 2. "
        "The last fault:"
    )
    assert second.startswith(f"Environment 41 failed in {describe_step(41, 2, 0)}: ZeroDivisionError")
    assert any("action_faults.py" in line for line in rest)


def test_zero_restarts_raise_at_first_fault(start_envs: Make) -> None:
    envs = start_envs(max_env_restarts=0)
    with pytest.raises(TrainingError, match=r"^Environment 40 failed 1 times"):
        step_all(envs, Do.RAISE, Do.STEP, Do.STEP)


@pytest.mark.parametrize("ending", [Do.TERMINATE, Do.TRUNCATE])
def test_finished_episode_resets_fault_count(start_envs: Make, ending: Do) -> None:
    envs = start_envs(max_env_restarts=2)
    for _ in range(3):
        step_all(envs, Do.RAISE, Do.RAISE, Do.STEP)
        step_all(envs, Do.RAISE, Do.RAISE, ending)
        step_all(envs, ending, ending, Do.STEP)
    step_all(envs, Do.RAISE, Do.STEP, Do.STEP)
    step_all(envs, Do.RAISE, Do.STEP, ending)  # another environment's episode end does not count
    with pytest.raises(TrainingError, match=r"^Environment 40 failed 3 times"):
        step_all(envs, Do.RAISE, Do.STEP, Do.STEP)


def test_skipped_or_fault_truncated_env_keeps_fault_count() -> None:
    counter = FaultCounter(4, FIRST_INDEX, limit=1)
    block = SharedBlock(ENV_SPEC, 4)
    for env in range(4):
        counter.add(Fault(FIRST_INDEX + env, "exception", "it broke"))
    block.terminated[:] = [True, True, False, True]
    block.truncated[2] = True
    block.skip[0] = True
    block.retry[1] = True
    block.episode_length[2] = -1
    counter.reset_finished(block, slice(0, 4))
    counter.add(Fault(FIRST_INDEX + 3, "exception", "it broke"))
    for env in range(3):
        with pytest.raises(TrainingError, match=rf"^Environment {FIRST_INDEX + env} failed 2 times"):
            counter.add(Fault(FIRST_INDEX + env, "exception", "it broke"))


# -- skipped environments ---------------------------------------------------------------------------------------------


def test_skipped_env_is_left_unchanged(start_envs: Make) -> None:
    envs = start_envs()
    block = envs.block
    arrays = {
        name: array for name, array in vars(block).items() if isinstance(array, np.ndarray) and name != "heartbeats"
    }
    step_all(envs, Do.TRUNCATE, Do.RAISE, Do.STEP)
    step_all(envs, Do.STEP, Do.RAISE, Do.TRUNCATE)
    for env_id in range(N):
        block.skip[:] = False
        block.skip[env_id] = True
        block.retry[env_id] = True  # must stay as it is
        block.actions[:, 0] = Do.STEP
        before = {name: array[env_id].copy() for name, array in arrays.items()}
        others = [position(obs) for obs in block.obs]
        envs.send(range(len(envs.bounds)))
        envs.recv(len(envs.bounds))
        for name, array in arrays.items():
            assert array[env_id].tobytes() == before[name].tobytes(), name
        for other in {0, 1, 2} - {env_id}:
            assert position(block.obs[other]) == (others[other][0], others[other][1] + 1)
            assert not block.retry[other]
    block.skip[:] = True
    assert step_all(envs, Do.RAISE, Do.RAISE, Do.RAISE) == []
    block.skip[:] = False
    before_step = positions(envs)
    step_all(envs)
    assert positions(envs) == [(seed, step + 1) for seed, step in before_step]  # none of the skipped ones was stepped


def test_nan_of_skipped_env_is_ignored(start_envs: Make) -> None:
    envs = start_envs()
    envs.block.skip[1] = True
    envs.block.reward[1] = np.nan
    assert step_all(envs, Do.STEP, Do.RAISE, Do.STEP) == []


# -- recv --------------------------------------------------------------------------------------------------------------


def test_recv_without_send_returns_nothing(start_envs: Make) -> None:
    envs = start_envs()
    assert envs.recv(1, seconds=0) == []
    assert envs.recv(1, seconds=0.05) == []
    step_all(envs)
    assert envs.recv(1, seconds=0) == []
    assert positions(envs) == [expected_position(40, 0, 1), expected_position(41, 0, 1), expected_position(42, 0, 1)]
