"""`EnvSlot`: episode seeds, episode ends, resume and failures of one environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from small_envs import Nondeterministic
from toy_envs import CheckpointableWalk, Failing, Masked, MixedDictEnv, Scripted, Walk

from unidle.envs.make import env_maker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.slot import EnvSlot, episode_seed
from unidle.envs.probe import probe
from unidle.envs.shared_block import SharedBlock
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError, UsageError
from unidle.spaces.observations import ObservationLayout

EnvFactory = Callable[[], gymnasium.Env]


def make_slot(
    env: EnvFactory, index: int = 3, seed: int = 11, env_spec: EnvSpec | None = None
) -> tuple[EnvSlot, SharedBlock]:
    """A slot with one environment, and the block that it writes to."""
    maker = env_maker(env)
    env_spec = env_spec or probe(maker)
    block = SharedBlock(env_spec, 1)
    return EnvSlot(maker, index, 0, seed, env_spec, block), block


def unpacked(slot: EnvSlot, obs: np.ndarray) -> Any:
    return slot._env_spec.obs_layout.unpack(obs[0])


def play(slot: EnvSlot, block: SharedBlock, actions: np.ndarray) -> list[tuple]:
    """Step through `actions` [k, width]; return what the block held after each."""
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


def test_episode_seeds_are_reproducible_and_unique() -> None:
    keys = [(run, env, episode) for run in range(8) for env in range(16) for episode in range(16)]
    seeds = [episode_seed(*key) for key in keys]
    assert [episode_seed(*key) for key in keys] == seeds
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_episode_seeds_are_uniform() -> None:
    seeds = np.array([episode_seed(0, env, 0) for env in range(2000)])
    counts, _ = np.histogram(seeds, bins=10, range=(0, 2**31))
    assert ((counts - 200.0) ** 2 / 200).sum() < 27.88  # 99.9th percentile of chi-square, 9 degrees of freedom


@pytest.mark.parametrize("other", [{"index": 4}, {"seed": 12}])
def test_first_observation_depends_on_env_index_and_run_seed(other: dict[str, int]) -> None:
    first_rows = []
    for kwargs in ({}, {}, other):
        slot, block = make_slot(Walk, **kwargs)
        slot.start_episode(0)
        first_rows.append(block.obs[0].copy())
    assert np.array_equal(first_rows[0], first_rows[1])
    assert not np.array_equal(first_rows[0], first_rows[2])


def test_each_episode_starts_from_its_own_seed() -> None:
    slot, block = make_slot(lambda: Walk(length=2))
    slot.start_episode(0)
    play(slot, block, np.ones((4, 1)))
    assert block.episode[0] == 2
    first_observation = unpacked(slot, block.obs)
    expected, _ = Walk().reset(seed=episode_seed(11, 3, 2))
    np.testing.assert_array_equal(first_observation, expected)


# -- episode ends ------------------------------------------------------------------------------------------------------


def expected_walk(steps: int, episode: int = 0) -> tuple[list[np.ndarray], list[float]]:
    """Observations and rewards of the same episode without a slot, always moving right."""
    env = Walk(length=1000)
    observations, rewards = [env.reset(seed=episode_seed(11, 3, episode))[0]], []
    for _ in range(steps):
        seen, reward, *_ = env.step(1)
        observations.append(seen)
        rewards.append(reward)
    return observations, rewards


def test_step_writes_env_outputs_to_block() -> None:
    slot, block = make_slot(Walk)
    slot.start_episode(0)
    observations, rewards = expected_walk(2)
    np.testing.assert_array_equal(unpacked(slot, block.obs), observations[0])
    for t in range(2):
        block.actions[0] = 2  # index 2 of Discrete(3, start=-1) is the action 1
        slot.step()
        np.testing.assert_array_equal(unpacked(slot, block.obs), observations[t + 1])
        assert block.reward[0] == np.float32(rewards[t])
        assert not block.terminated[0]
        assert not block.truncated[0]


@pytest.mark.parametrize("ending", ["truncation", "termination", "both"])
def test_only_truncation_stores_final_observation(ending: str) -> None:
    slot, block = make_slot(lambda: Walk(ending, length=3))
    slot.start_episode(0)
    block.final_obs[:] = 255
    play(slot, block, np.full((3, 1), 2))
    observations, rewards = expected_walk(3)
    if ending == "truncation":
        np.testing.assert_array_equal(unpacked(slot, block.final_obs), observations[3])
    else:  # both at once count as a termination
        assert (block.final_obs == 255).all()
    assert (block.terminated[0], block.truncated[0]) == (ending != "truncation", ending == "truncation")
    np.testing.assert_array_equal(unpacked(slot, block.obs), expected_walk(0, episode=1)[0][0])
    assert block.episode_length[0] == 3
    assert block.episode_return[0] == pytest.approx(sum(rewards))
    assert block.episode[0] == 1


def test_next_step_clears_episode_end_flags() -> None:
    slot, block = make_slot(lambda: Walk("termination", length=3))
    slot.start_episode(0)
    seen = play(slot, block, np.ones((7, 1)))
    assert [terminated for _, _, terminated, _, _ in seen] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("in_observation", [False, True])
def test_action_mask_is_packed_with_observation(in_observation: bool) -> None:
    slot, block = make_slot(lambda: Masked(in_observation))
    slot.start_episode(0)
    for step in range(5):
        expected = [int(i == step % 4) for i in range(4)]
        assert slot._env_spec.obs_layout.mask_view(block.obs)[0].tolist() == expected
        block.actions[0] = step % 4
        slot.step()


def test_missing_mask_is_an_error_in_training() -> None:
    env_spec = probe(env_maker(Masked))
    slot, block = make_slot(lambda: Masked(forget=2), env_spec=env_spec)
    slot.start_episode(0)
    block.actions[0] = 0
    slot.step()
    block.actions[0] = 1
    with pytest.raises(UsageError, match=r"^info\['action_mask'\] is missing after some steps"):
        slot.step()


# -- resuming ----------------------------------------------------------------------------------------------------------

TASKS: dict[str, EnvFactory] = {
    "walk": lambda: Walk(length=1000),
    "mixed dict": MixedDictEnv,
    "cartpole": lambda: gymnasium.make("CartPole-v1"),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("steps", [0, 5])
def test_replay_restores_open_episode(task: str, steps: int) -> None:
    slot, block = make_slot(TASKS[task])
    slot.start_episode(0)
    actions, episode_actions, rewards, episode = random_actions(slot, 400), [], [], 0
    for action in actions:  # until an episode is `steps` long (MixedDictEnv ends at random)
        if len(episode_actions) == steps and episode >= (task == "mixed dict"):
            break
        play(slot, block, action[None])
        continues = slot.episode == episode
        episode_actions = [*episode_actions, action] if continues else []
        rewards = [*rewards, block.reward[0]] if continues else []
        episode = slot.episode
    played = np.array(episode_actions, np.float32).reshape(-1, actions.shape[1])
    assert len(played) == steps

    resumed, resumed_block = make_slot(TASKS[task])
    assert resumed.resume(OpenEpisode(episode, played, np.array(rewards, np.float32), block.obs[0].copy())) is None
    assert np.array_equal(resumed_block.obs, block.obs)
    assert resumed_block.episode[0] == episode
    assert play(resumed, resumed_block, actions[:50]) == play(slot, block, actions[:50])
    assert resumed_block.episode_return[0] == block.episode_return[0]
    assert resumed_block.episode_length[0] == block.episode_length[0]


def test_nondeterministic_env_resumes_with_next_episode() -> None:
    slot, block = make_slot(Nondeterministic)
    slot.start_episode(4)
    actions = np.zeros((3, 1), np.float32)
    play(slot, block, actions)
    resumed, resumed_block = make_slot(Nondeterministic)
    point = OpenEpisode(4, actions, np.ones(3, np.float32), block.obs[0].copy())
    assert resumed.resume(point) == Difference("the observation after step 3 differed", is_lost=True)
    assert resumed.episode == resumed_block.episode[0] == 5
    play(resumed, resumed_block, actions)  # stepping continues


def test_replay_that_ends_early_is_rejected() -> None:
    slot, block = make_slot(lambda: Walk(length=1000))
    slot.start_episode(0)
    actions = np.ones((5, 1), np.float32)
    rewards = np.array([step[1] for step in play(slot, block, actions)], np.float32)
    shorter, shorter_block = make_slot(lambda: Walk(length=2))
    point = OpenEpisode(0, actions, rewards, block.obs[0].copy())
    assert shorter.resume(point) == Difference("it ended after 2 of 5 steps", is_lost=True)
    assert shorter_block.episode[0] == 1


def test_state_dict_restores_episode_and_time_limit() -> None:
    def env() -> gymnasium.Env:
        return TimeLimit(CheckpointableWalk(length=1000), 6)

    slot, block = make_slot(env)
    slot.start_episode(2)
    actions = np.ones((4, 1), np.float32)
    play(slot, block, actions)
    state = slot.state()
    assert state is not None

    resumed, resumed_block = make_slot(env)
    point = OpenEpisode(2, actions, np.zeros(4, np.float32), block.obs[0].copy(), state)
    assert resumed.resume(point) is None  # replay would fail: its noise is not seeded
    assert np.array_equal(resumed_block.obs, block.obs)
    for each, each_block in ((slot, block), (resumed, resumed_block)):
        seen = play(each, each_block, actions[:2])
        assert [truncated for *_, truncated, _ in seen] == [False, True]  # 4 + 2 steps
        assert each_block.episode_length[0] == 6
    assert resumed_block.final_obs.tobytes() == block.final_obs.tobytes()
    assert resumed_block.reward[0] == block.reward[0]
    assert resumed_block.episode_return[0] == block.episode_return[0]


def test_state_dict_is_found_through_gymnasium_wrappers() -> None:
    gymnasium.register("CheckpointableWalk-v0", entry_point=CheckpointableWalk, max_episode_steps=50)
    try:
        slot, _ = make_slot(lambda: gymnasium.make("CheckpointableWalk-v0"))
        slot.start_episode(0)
        assert slot.state() is not None
    finally:
        gymnasium.registry.pop("CheckpointableWalk-v0")


def test_stateful_wrapper_has_no_state() -> None:
    slot, _ = make_slot(lambda: FrameStackObservation(CheckpointableWalk(), 3))
    slot.start_episode(0)
    assert slot.state() is None


def test_env_without_state_dict_has_no_state() -> None:
    slot, _ = make_slot(Walk)
    slot.start_episode(0)
    assert slot.state() is None


# -- failures ----------------------------------------------------------------------------------------------------------

WALK_SPEC = EnvSpec(ObservationLayout.of(Walk.observation_space), probe(env_maker(Walk)).action_layout, 0.0)


def test_failure_names_env_episode_seed_and_step() -> None:
    slot, block = make_slot(Failing, env_spec=WALK_SPEC)
    slot.start_episode(7)
    with pytest.raises(TrainingError) as error:
        play(slot, block, np.ones((3, 1)))
    first, *rest = str(error.value).splitlines()
    seed = episode_seed(11, 3, 7)
    assert first == (f"Environment 3 failed in episode 7 (seed {seed}), step 2: ZeroDivisionError: the robot fell over")
    assert any("toy_envs.py" in line for line in rest)


def test_failed_env_creation_names_env_and_episode() -> None:
    def broken() -> gymnasium.Env:
        raise OSError("no such robot")

    slot, _ = make_slot(broken, env_spec=WALK_SPEC)
    with pytest.raises(TrainingError, match=r"^Environment 3 failed in episode 0 .*OSError: no such robot"):
        slot.make()


def test_late_shape_change_names_env_and_episode() -> None:
    space = spaces.Box(-1, 1, (2,))
    good, bad = np.zeros(2, np.float32), np.zeros(3, np.float32)
    env = Scripted(space, (good, {}), (bad, 0.0, False, False, {}), from_step=50)  # after the fully checked steps
    slot, block = make_slot(lambda: env)
    slot.start_episode(0)
    with pytest.raises(TrainingError, match=r"^Environment 3 failed in episode 0 .*ValueError"):
        play(slot, block, np.zeros((60, 1)))
