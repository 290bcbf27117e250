from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from small_envs import Fickle
from toy_envs import Failing, Masked, SavedWalk, Scripted, Senses, Walk

from unidle.envs.make import env_maker
from unidle.envs.pool.slot import EnvSlot, episode_seed
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec, probe
from unidle.errors import TrainingError, UsageError
from unidle.spaces.observations import ObservationLayout

EnvFactory = Callable[[], gymnasium.Env]


def slot_of(
    env: EnvFactory, index: int = 3, seed: int = 11, env_spec: EnvSpec | None = None
) -> tuple[EnvSlot, SharedBlock]:
    """One environment in its place."""
    maker = env_maker(env)
    env_spec = env_spec or probe(maker)
    block = SharedBlock(env_spec, 1)
    return EnvSlot(maker, index, 0, seed, env_spec, block), block


def observation(slot: EnvSlot, obs: np.ndarray) -> Any:
    return slot._env_spec.obs_layout.unpack(obs[0])


def play(slot: EnvSlot, block: SharedBlock, actions: np.ndarray) -> list[tuple]:
    """Step through `actions` [k, width]; what the block showed after each."""
    seen = []
    for action in actions:
        block.actions[0] = action
        slot.step()
        flags = (block.reward[0], block.terminated[0], block.truncated[0], block.episode[0])
        seen.append((block.obs[0].tobytes(), *flags))
    return seen


def random_actions(slot: EnvSlot, steps: int, seed: int = 0) -> np.ndarray:
    layout, rng = slot._env_spec.action_layout, np.random.default_rng(seed)
    heads = np.stack([rng.integers(n, size=steps) for n in layout.nvec], 1)
    return np.concatenate([heads, rng.uniform(layout.low, layout.high, (steps, layout.reals))], 1).astype(np.float32)


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_episode_seeds_repeat_and_differ_by_run_environment_and_episode() -> None:
    keys = [(run, env, episode) for run in range(8) for env in range(16) for episode in range(16)]
    seeds = [episode_seed(*key) for key in keys]
    assert [episode_seed(*key) for key in keys] == seeds
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_episode_seeds_spread_over_their_whole_range() -> None:
    seeds = np.array([episode_seed(0, env, 0) for env in range(2000)])
    counts, _ = np.histogram(seeds, bins=10, range=(0, 2**31))
    assert ((counts - 200.0) ** 2 / 200).sum() < 27.88  # the 99.9 % point of chi-square, 9 degrees of freedom


@pytest.mark.parametrize("other", [{"index": 4}, {"seed": 12}])
def test_another_environment_or_run_begins_differently(other: dict[str, int]) -> None:
    first_rows = []
    for place in ({}, {}, other):
        slot, block = slot_of(Walk, **place)
        slot.start_episode(0)
        first_rows.append(block.obs[0].copy())
    assert np.array_equal(first_rows[0], first_rows[1])
    assert not np.array_equal(first_rows[0], first_rows[2])


def test_each_episode_begins_from_the_seed_of_its_number() -> None:
    slot, block = slot_of(lambda: Walk(length=2))
    slot.start_episode(0)
    play(slot, block, np.ones((4, 1)))
    assert block.episode[0] == 2
    follows = observation(slot, block.obs)
    expected, _ = Walk().reset(seed=episode_seed(11, 3, 2))
    np.testing.assert_array_equal(follows, expected)


# -- ends of episodes --------------------------------------------------------------------------------------------------


def expected_walk(steps: int, episode: int = 0) -> tuple[list[np.ndarray], list[float]]:
    """The same episode without a slot, always going right."""
    env = Walk(length=1000)
    observations, rewards = [env.reset(seed=episode_seed(11, 3, episode))[0]], []
    for _ in range(steps):
        seen, reward, *_ = env.step(1)
        observations.append(seen)
        rewards.append(reward)
    return observations, rewards


def test_a_step_writes_what_the_environment_returned() -> None:
    slot, block = slot_of(Walk)
    slot.start_episode(0)
    observations, rewards = expected_walk(2)
    np.testing.assert_array_equal(observation(slot, block.obs), observations[0])
    for t in range(2):
        block.actions[0] = 2  # category 2 of Discrete(3, start=-1) is the action 1
        slot.step()
        np.testing.assert_array_equal(observation(slot, block.obs), observations[t + 1])
        assert block.reward[0] == np.float32(rewards[t])
        assert not block.terminated[0]
        assert not block.truncated[0]


@pytest.mark.parametrize("ending", ["truncation", "termination", "both"])
def test_only_truncation_keeps_the_true_final_observation(ending: str) -> None:
    slot, block = slot_of(lambda: Walk(ending, length=3))
    slot.start_episode(0)
    block.final_obs[:] = 255
    play(slot, block, np.full((3, 1), 2))
    observations, rewards = expected_walk(3)
    if ending == "truncation":
        np.testing.assert_array_equal(observation(slot, block.final_obs), observations[3])
    else:  # an episode that ends and runs out of time at once has ended
        assert (block.final_obs == 255).all()
    assert (block.terminated[0], block.truncated[0]) == (ending != "truncation", ending == "truncation")
    np.testing.assert_array_equal(observation(slot, block.obs), expected_walk(0, episode=1)[0][0])
    assert block.episode_length[0] == 3
    assert block.episode_return[0] == pytest.approx(sum(rewards))
    assert block.episode[0] == 1


def test_the_flags_of_an_ended_episode_are_gone_after_the_next_step() -> None:
    slot, block = slot_of(lambda: Walk("termination", length=3))
    slot.start_episode(0)
    seen = play(slot, block, np.ones((7, 1)))
    assert [terminated for _, _, terminated, _, _ in seen] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("in_observation", [False, True])
def test_the_mask_of_the_next_action_stands_in_the_row(in_observation: bool) -> None:
    slot, block = slot_of(lambda: Masked(in_observation))
    slot.start_episode(0)
    for step in range(5):
        expected = [int(i == step % 4) for i in range(4)]
        assert slot._env_spec.obs_layout.mask_view(block.obs)[0].tolist() == expected
        block.actions[0] = step % 4
        slot.step()


def test_a_mask_that_goes_missing_is_said_in_training_too() -> None:
    env_spec = probe(env_maker(Masked))
    slot, block = slot_of(lambda: Masked(forget=2), env_spec=env_spec)
    slot.start_episode(0)
    block.actions[0] = 0
    slot.step()
    block.actions[0] = 1
    with pytest.raises(UsageError, match=r"^info\['action_mask'\] is missing after some steps"):
        slot.step()


# -- resuming ----------------------------------------------------------------------------------------------------------

TASKS: dict[str, EnvFactory] = {
    "walk": lambda: Walk(length=1000),
    "senses": Senses,
    "cartpole": lambda: gymnasium.make("CartPole-v1"),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("steps", [0, 5])
def test_replaying_the_actions_of_an_open_episode_brings_it_back(task: str, steps: int) -> None:
    slot, block = slot_of(TASKS[task])
    slot.start_episode(0)
    actions, record, episode = random_actions(slot, 400), [], 0
    for action in actions:  # until an episode has been open for so many steps (in Senses they end by chance)
        if len(record) == steps and episode >= (task == "senses"):
            break
        play(slot, block, action[None])
        record = [*record, action] if slot.episode == episode else []
        episode = slot.episode
    played = np.array(record, np.float32).reshape(-1, actions.shape[1])
    assert len(played) == steps

    later, later_block = slot_of(TASKS[task])
    assert later.resume(episode, played, block.obs[0].copy(), None)
    assert np.array_equal(later_block.obs, block.obs)
    assert later_block.episode[0] == episode
    assert play(later, later_block, actions[:50]) == play(slot, block, actions[:50])
    assert later_block.episode_return[0] == block.episode_return[0]
    assert later_block.episode_length[0] == block.episode_length[0]


def test_an_environment_that_does_not_repeat_itself_is_found_and_begins_its_next_episode() -> None:
    slot, block = slot_of(Fickle)
    slot.start_episode(4)
    actions = np.zeros((3, 1), np.float32)
    play(slot, block, actions)
    again, again_block = slot_of(Fickle)
    assert not again.resume(4, actions, block.obs[0].copy(), None)
    assert again.episode == again_block.episode[0] == 5
    play(again, again_block, actions)  # and goes on


def test_an_episode_that_ends_while_it_is_replayed_is_not_taken_for_the_same() -> None:
    slot, block = slot_of(lambda: Walk(length=1000))
    slot.start_episode(0)
    actions = np.ones((5, 1), np.float32)
    play(slot, block, actions)
    shorter, shorter_block = slot_of(lambda: Walk(length=2))
    assert not shorter.resume(0, actions, block.obs[0].copy(), None)
    assert shorter_block.episode[0] == 1


def test_an_environment_with_a_state_of_its_own_resumes_by_it_time_limit_included() -> None:
    def env() -> gymnasium.Env:
        return TimeLimit(SavedWalk(length=1000), 6)

    slot, block = slot_of(env)
    slot.start_episode(2)
    actions = np.ones((4, 1), np.float32)
    play(slot, block, actions)
    state = slot.state()
    assert state is not None

    later, later_block = slot_of(env)
    assert later.resume(2, actions, block.obs[0].copy(), state)  # by replay it could not: its noise is never the same
    assert np.array_equal(later_block.obs, block.obs)
    for place in (slot, later):
        env_id = later_block if place is later else block
        seen = play(place, env_id, actions[:2])
        assert [truncated for *_, truncated, _ in seen] == [False, True]  # 4 + 2 steps
        assert env_id.episode_length[0] == 6
    assert later_block.final_obs.tobytes() == block.final_obs.tobytes()
    assert later_block.reward[0] == block.reward[0]
    assert later_block.episode_return[0] == block.episode_return[0]


def test_an_environment_from_the_registry_offers_its_state_through_gymnasiums_own_wrappers() -> None:
    gymnasium.register("SavedWalk-v0", entry_point=SavedWalk, max_episode_steps=50)
    try:
        slot, _ = slot_of(lambda: gymnasium.make("SavedWalk-v0"))
        slot.start_episode(0)
        assert slot.state() is not None
    finally:
        gymnasium.registry.pop("SavedWalk-v0")


def test_no_state_is_taken_where_a_wrapper_keeps_one_beside_it() -> None:
    slot, _ = slot_of(lambda: FrameStackObservation(SavedWalk(), 3))
    slot.start_episode(0)
    assert slot.state() is None


def test_no_state_is_taken_where_the_environment_offers_none() -> None:
    slot, _ = slot_of(Walk)
    slot.start_episode(0)
    assert slot.state() is None


# -- failures ----------------------------------------------------------------------------------------------------------

FAILING = EnvSpec(ObservationLayout.of(Walk.observation_space), probe(env_maker(Walk)).action_layout, 0.0)


def test_a_failure_is_told_with_environment_episode_seed_step_and_traceback() -> None:
    slot, block = slot_of(Failing, env_spec=FAILING)
    slot.start_episode(7)
    with pytest.raises(TrainingError) as failure:
        play(slot, block, np.ones((3, 1)))
    first, *rest = str(failure.value).splitlines()
    seed = episode_seed(11, 3, 7)
    assert first == (f"Environment 3 failed in episode 7 (seed {seed}), step 2: ZeroDivisionError: the robot fell over")
    assert any("toy_envs.py" in env_id for env_id in rest)


def test_a_failure_while_it_is_made_is_told_the_same_way() -> None:
    def broken() -> gymnasium.Env:
        raise OSError("no such robot")

    slot, _ = slot_of(broken, env_spec=FAILING)
    with pytest.raises(TrainingError, match=r"^Environment 3 failed in episode 0 .*OSError: no such robot"):
        slot.make()


def test_an_observation_that_no_longer_fits_its_row_is_told_the_same_way() -> None:
    space = spaces.Box(-1, 1, (2,))
    good, bad = np.zeros(2, np.float32), np.zeros(3, np.float32)
    env = Scripted(space, (good, {}), (bad, 0.0, False, False, {}), from_step=50)  # later than what is checked in full
    slot, block = slot_of(lambda: env)
    slot.start_episode(0)
    with pytest.raises(TrainingError, match=r"^Environment 3 failed in episode 0 .*ValueError"):
        play(slot, block, np.zeros((60, 1)))
