"""Environments that fail, in this process and in workers: one begins again, the others do not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from troubled import CHECKED, ENV_SPEC, SEED, Do, Troubled, at, place, reward_of

from unidle.envs.faults import Fault, FaultCounter
from unidle.envs.make import env_maker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.protocol import HostEnvs
from unidle.envs.shared_block import SharedBlock
from unidle.errors import TrainingError, UsageError

FIRST = 40  # number of the first environment
N = 3
Make = Callable[..., HostEnvs]


@pytest.fixture(params=["serial", "pool"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes three troubled environments, here or in two workers (of two and one)."""
    made: list[HostEnvs] = []

    def make(env: Any = Troubled, **kwargs: Any) -> HostEnvs:
        maker = env_maker(env)
        if request.param == "serial":
            made.append(SerialEnvs(maker, ENV_SPEC, N, SEED, FIRST, **kwargs))
        else:
            made.append(ProcessPool(maker, ENV_SPEC, N, SEED, 2, FIRST, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.fixture
def started(make: Make) -> Make:
    def started(*args: Any, **kwargs: Any) -> HostEnvs:
        envs = make(*args, **kwargs)
        envs.start(np.zeros(N, np.int64))
        return envs

    return started


def do(envs: HostEnvs, *what: Do) -> list[str]:
    """One step of all environments; returns the first env_ids of the faults it brought."""
    envs.block.actions[:, 0] = what or [Do.STEP] * N
    envs.send(range(len(envs.bounds)))
    assert envs.recv(len(envs.bounds)) == list(range(len(envs.bounds)))
    return take(envs)


def take(envs: HostEnvs) -> list[str]:
    texts = [fault.text.splitlines()[0] for fault in envs.faults]
    envs.faults.clear()
    return texts


def places(envs: HostEnvs) -> list[tuple[int, int]]:
    return [place(row) for row in envs.block.obs]


def where(env: int, episode: int, step: int) -> str:
    return f"episode {episode} (seed {episode_seed(SEED, env, episode)}), step {step}"


# -- one that raises ---------------------------------------------------------------------------------------------------


def test_only_the_environment_that_raises_begins_again_and_says_so(started: Make) -> None:
    envs = started()
    for _ in range(3):
        assert do(envs) == []
        assert not envs.block.retry.any()
    envs.block.actions[:, 0] = [Do.STEP, Do.RAISE, Do.END]
    envs.send(range(len(envs.bounds)))
    envs.recv(len(envs.bounds))

    (fault,) = envs.faults
    assert (fault.env, fault.kind) == (41, "exception")
    first, *rest = fault.text.splitlines()
    assert first == f"Environment 41 failed in {where(41, 0, 3)}: ZeroDivisionError: the robot fell over"
    assert any("troubled.py" in env_id for env_id in rest)
    assert envs.block.retry.tolist() == [False, True, False]
    assert places(envs) == [at(40, 0, 4), at(41, 1, 0), at(42, 1, 0)]
    assert envs.block.episode.tolist() == [0, 1, 1]
    assert envs.block.reward[[0, 2]].tolist() == [reward_of(*at(40, 0, 4)), reward_of(*at(42, 0, 4))]
    assert envs.block.terminated[[0, 2]].tolist() == [False, True]
    assert envs.restarted == []

    envs.faults.clear()
    assert do(envs) == []
    assert not envs.block.retry.any()
    assert places(envs) == [at(40, 0, 5), at(41, 1, 1), at(42, 1, 1)]
    assert envs.block.reward[1] == reward_of(*at(41, 1, 1))


def test_the_length_and_return_of_the_next_episode_hold_nothing_of_the_one_that_failed(started: Make) -> None:
    envs = started()
    do(envs)
    do(envs, Do.RAISE, Do.STEP, Do.STEP)
    do(envs)
    do(envs, Do.END, Do.END, Do.STEP)
    assert envs.block.episode_length[:2].tolist() == [2, 4]
    assert envs.block.episode_return[0] == sum(reward_of(*at(40, 1, step)) for step in (1, 2))


def test_a_reset_that_fails_is_a_step_that_did_not_happen_and_its_seed_is_not_tried_again(started: Make) -> None:
    envs = started()
    texts = do(envs, Do.STEP, Do.STEP, Do.END_AND_FAIL_RESET)
    assert texts == [f"Environment 42 failed in {where(42, 1, 0)}: RuntimeError: stuck in the mud"]
    assert envs.block.retry.tolist() == [False, False, True]
    assert places(envs) == [at(40, 0, 1), at(41, 0, 1), at(42, 2, 0)]
    assert envs.block.episode[2] == 2


def test_an_environment_that_cannot_be_made_again_is_tried_again_at_each_step(started: Make, tmp_path: Path) -> None:
    envs = started(lambda: Troubled(str(tmp_path)))
    do(envs)
    (tmp_path / "unmakeable").touch()
    assert do(envs, Do.STEP, Do.RAISE, Do.STEP) == [
        f"Environment 41 failed in {where(41, 0, 1)}: ZeroDivisionError: the robot fell over"
    ]
    for step in (3, 4):  # each of these steps tells why the one before it could not begin an episode
        assert do(envs) == [f"Environment 41 failed in {where(41, step - 2, 0)}: OSError: no such robot"]
        assert envs.block.retry.tolist() == [False, True, False]
        shown = places(envs)
        assert shown[::2] == [at(40, 0, step), at(42, 0, step)]
        assert shown[1][1] == 0  # some first observation
    (tmp_path / "unmakeable").unlink()
    assert do(envs) == [f"Environment 41 failed in {where(41, 3, 0)}: OSError: no such robot"]
    assert envs.block.retry.tolist() == [False, True, False]
    assert places(envs)[1] == at(41, 4, 0)
    assert do(envs) == []
    assert places(envs) == [at(40, 0, 6), at(41, 4, 1), at(42, 0, 6)]


class StuckOpen(Troubled):
    _fell = False

    def step(self, action: Any) -> Any:
        self._fell = action == Do.RAISE
        return super().step(action)

    def close(self) -> None:
        if self._fell:
            raise OSError("the lid is stuck")


def test_an_environment_that_does_not_close_either_is_made_again(started: Make) -> None:
    envs = started(StuckOpen)
    assert len(do(envs, Do.RAISE, Do.STEP, Do.STEP)) == 1
    assert places(envs)[0] == at(40, 1, 0)


class WrongShape(Troubled):
    def step(self, action: Any) -> Any:
        _, *rest = super().step(Do.STEP)
        return {"at": np.zeros(3, np.int64), "x": np.zeros(1, np.float32)}, *rest


def test_a_mistake_of_the_user_is_not_survived(started: Make) -> None:
    envs = started(WrongShape)
    with pytest.raises(UsageError, match=r"^observation\['at'\] from step\(\) has shape \(3,\)"):
        do(envs)


def test_more_words_than_a_pipe_holds_arrive(started: Make) -> None:
    envs = started()
    texts = do(envs, Do.SHOUT, Do.SHOUT, Do.SHOUT)
    assert [len(text) > 3_000_000 for text in texts] == [True] * 3


# -- beginning and coming back -----------------------------------------------------------------------------------------


class StuckAt(Troubled):
    """Cannot be reset from one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._bad = seed

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if seed == self._bad:
            raise RuntimeError("not from here")
        return super().reset(seed=seed)


def test_an_episode_that_cannot_be_started_is_passed_over(started: Make) -> None:
    bad = episode_seed(SEED, 41, 0)
    envs = started(lambda: StuckAt(bad))
    assert take(envs) == [f"Environment 41 failed in {where(41, 0, 0)}: RuntimeError: not from here"]
    assert places(envs) == [at(40, 0, 0), at(41, 1, 0), at(42, 0, 0)]
    assert do(envs) == []
    assert not envs.block.retry.any()


def test_an_environment_that_never_begins_is_a_failure_at_once(make: Make, tmp_path: Path) -> None:
    envs = make(lambda: Troubled(str(tmp_path)))
    (tmp_path / "unresettable").touch()
    with pytest.raises(TrainingError, match=r"^Environment 4[02] failed in episode 1 .*stuck in the mud"):
        envs.start(np.zeros(N, np.int64))


def test_an_episode_whose_replay_fails_is_given_up_like_one_that_does_not_repeat(started: Make) -> None:
    envs = started()
    actions = [np.full((3, 1), what, np.float32) for what in (Do.STEP, Do.RAISE, Do.STEP)]
    do(envs)
    do(envs)
    do(envs)
    row = envs.block.obs.copy()
    points = [(0, actions[i], row[i], None) for i in range(N)]
    assert envs.resume(points) == [True, False, True]
    assert take(envs) == [f"Environment 41 failed in {where(41, 0, 0)}: ZeroDivisionError: the robot fell over"]
    assert places(envs) == [at(40, 0, 3), at(41, 1, 0), at(42, 0, 3)]


# -- numbers that are none ---------------------------------------------------------------------------------------------

NOT_FINITE = {  # what → what of it, the episode and step it is said to be in, and the episode that follows
    Do.NAN_REWARD: ("reward", 0, CHECKED + 1, 1),
    Do.INFINITE_OBSERVATION: ("observation", 0, CHECKED + 1, 1),
    Do.CUT_WITH_NAN: ("observation", 0, CHECKED + 1, 2),
    Do.END_WITH_NAN_REWARD: ("reward", 0, CHECKED + 1, 2),
    Do.END_AND_NAN_RESET: ("observation", 1, 0, 2),
}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_number_that_is_none_never_reaches_the_learner(started: Make, what: Do) -> None:
    thing, episode, step, follows = NOT_FINITE[what]
    envs = started()
    for _ in range(CHECKED):
        do(envs)
    texts = do(envs, Do.STEP, what, Do.CUT)
    assert texts == [f"Environment 41 returned a NaN or infinite {thing} in {where(41, episode, step)}."]
    block = envs.block
    assert block.retry.tolist() == [False, True, False]
    assert places(envs) == [at(40, 0, CHECKED + 1), at(41, follows, 0), at(42, 1, 0)]
    assert block.truncated[[0, 2]].tolist() == [False, True]
    assert np.isfinite(block.reward).all()
    assert do(envs) == []
    assert not block.retry.any()
    assert places(envs) == [at(40, 0, CHECKED + 2), at(41, follows, 1), at(42, 1, 1)]


def test_a_new_environment_whose_first_observation_is_not_finite_is_given_up(started: Make, tmp_path: Path) -> None:
    envs = started(lambda: Troubled(str(tmp_path)))
    for _ in range(CHECKED):
        do(envs)
    (tmp_path / "blind").touch()
    assert len(do(envs, Do.RAISE, Do.STEP, Do.STEP)) == 1
    assert np.isfinite(ENV_SPEC.obs_layout.float_views(envs.block.obs)[0]).all()
    assert do(envs) == [f"Environment 40 returned a NaN or infinite observation in {where(40, 1, 0)}."]


def test_an_episode_that_is_started_with_something_not_finite_is_passed_over_too(started: Make, tmp_path: Path) -> None:
    envs = started(lambda: Troubled(str(tmp_path)))
    for _ in range(CHECKED):
        do(envs)
    (tmp_path / "blind").touch()
    envs.start(np.full(N, 5))
    assert np.isfinite(ENV_SPEC.obs_layout.float_views(envs.block.obs)[0]).all()
    (tmp_path / "blind").unlink()
    assert take(envs) == [
        f"Environment {env} returned a NaN or infinite observation in {where(env, 5, 0)}." for env in (40, 41, 42)
    ]
    assert len(do(envs)) == N  # the episode after it was no better
    assert places(envs) == [at(40, 7, 0), at(41, 7, 0), at(42, 7, 0)]


# -- how often is too often --------------------------------------------------------------------------------------------


def test_too_many_failures_in_a_row_are_an_error_that_tells_the_last_one(started: Make) -> None:
    envs = started(max_env_restarts=2)
    for _ in range(2):
        assert len(do(envs, Do.STEP, Do.RAISE, Do.STEP)) == 1
    with pytest.raises(TrainingError) as failure:
        do(envs, Do.RAISE, Do.RAISE, Do.STEP)
    first, second, *rest = str(failure.value).splitlines()
    assert first == (
        "Environment 41 failed 3 times without finishing an episode in between; max_env_restarts allows 2. "
        "The last fault:"
    )
    assert second.startswith(f"Environment 41 failed in {where(41, 2, 0)}: ZeroDivisionError")
    assert any("troubled.py" in env_id for env_id in rest)


def test_without_restarts_the_first_failure_is_the_last(started: Make) -> None:
    envs = started(max_env_restarts=0)
    with pytest.raises(TrainingError, match=r"^Environment 40 failed 1 times"):
        do(envs, Do.RAISE, Do.STEP, Do.STEP)


@pytest.mark.parametrize("ending", [Do.END, Do.CUT])
def test_a_finished_episode_makes_up_for_all_failures_before_it(started: Make, ending: Do) -> None:
    envs = started(max_env_restarts=2)
    for _ in range(3):
        do(envs, Do.RAISE, Do.RAISE, Do.STEP)
        do(envs, Do.RAISE, Do.RAISE, ending)
        do(envs, ending, ending, Do.STEP)
    do(envs, Do.RAISE, Do.STEP, Do.STEP)
    do(envs, Do.RAISE, Do.STEP, ending)  # the ends of others are not its own
    with pytest.raises(TrainingError, match=r"^Environment 40 failed 3 times"):
        do(envs, Do.RAISE, Do.STEP, Do.STEP)


def test_what_a_skipped_or_cut_line_shows_makes_up_for_nothing() -> None:
    tally = FaultCounter(4, FIRST, limit=1)
    block = SharedBlock(ENV_SPEC, 4)
    for env in range(4):
        tally.add(Fault(FIRST + env, "exception", "it broke"))
    block.terminated[:] = [True, True, False, True]
    block.truncated[2] = True
    block.skip[0] = True
    block.retry[1] = True
    block.episode_length[2] = -1
    tally.reset_finished(block, slice(0, 4))
    tally.add(Fault(FIRST + 3, "exception", "it broke"))
    for env in range(3):
        with pytest.raises(TrainingError, match=rf"^Environment {FIRST + env} failed 2 times"):
            tally.add(Fault(FIRST + env, "exception", "it broke"))


# -- skipped environments ---------------------------------------------------------------------------------------------


def test_a_skipped_line_is_left_exactly_as_it_is(started: Make) -> None:
    envs = started()
    block = envs.block
    arrays = {
        name: array for name, array in vars(block).items() if isinstance(array, np.ndarray) and name != "heartbeats"
    }
    do(envs, Do.CUT, Do.RAISE, Do.STEP)
    do(envs, Do.STEP, Do.RAISE, Do.CUT)
    for env_id in range(N):
        block.skip[:] = False
        block.skip[env_id] = True
        block.retry[env_id] = True  # whatever it says there stays
        block.actions[:, 0] = Do.STEP
        before = {name: array[env_id].copy() for name, array in arrays.items()}
        others = [place(row) for row in block.obs]
        envs.send(range(len(envs.bounds)))
        envs.recv(len(envs.bounds))
        for name, array in arrays.items():
            assert array[env_id].tobytes() == before[name].tobytes(), name
        for other in {0, 1, 2} - {env_id}:
            assert place(block.obs[other]) == (others[other][0], others[other][1] + 1)
            assert not block.retry[other]
    block.skip[:] = True
    assert do(envs, Do.RAISE, Do.RAISE, Do.RAISE) == []
    block.skip[:] = False
    here = places(envs)
    do(envs)
    assert places(envs) == [(seed, step + 1) for seed, step in here]  # they had not moved on behind the scenes


def test_a_skipped_line_with_a_number_that_is_none_is_not_looked_at(started: Make) -> None:
    envs = started()
    envs.block.skip[1] = True
    envs.block.reward[1] = np.nan
    assert do(envs, Do.STEP, Do.RAISE, Do.STEP) == []


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_nothing_comes_back_that_was_not_sent(started: Make) -> None:
    envs = started()
    assert envs.recv(1, seconds=0) == []
    assert envs.recv(1, seconds=0.05) == []
    do(envs)
    assert envs.recv(1, seconds=0) == []
    assert places(envs) == [at(40, 0, 1), at(41, 0, 1), at(42, 0, 1)]
