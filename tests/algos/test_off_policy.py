"""Off-policy learning: stored transitions and due updates, against plain lists kept step by step."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from off_policy_runs import learn_from, off_policy_run
from small_envs import Counting, MaskedMultiDiscrete, Nondeterministic, counting_steps
from small_runs import CPU, SmallRun, floats
from torch import Tensor

from unidle.algos.capturing import no_capture
from unidle.algos.dqn import DQN
from unidle.algos.experience_replay import ExperienceReplay
from unidle.algos.off_policy import OffPolicy
from unidle.algos.registry import new_algorithm, new_policy
from unidle.algos.sac import SAC
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay
from unidle.buffers.rollout import Rollout
from unidle.config import DQNRecipe, recipe_for
from unidle.kernels.dispatch import no_report
from unidle.rng import keyed_generator
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def replay_of(buffer: Replay | Prioritised) -> Replay:
    return buffer.replay if isinstance(buffer, Prioritised) else buffer


def stored_transitions(buffer: Replay | Prioritised, env: int) -> Any:
    """All stored transitions of one environment, oldest first."""
    replay = replay_of(buffer)
    n_envs = len(replay.cursor)
    numbers = torch.arange(int(replay.n_overwritten[env]), int(replay.n_added[env]))
    places = replay.n_cells // n_envs
    return replay.gather(replay.order[numbers % places * n_envs + env].long())


# -- a model: each environment's history as a list of observations -----------------------------------------------------


@dataclass
class Record:
    """An observation and the step taken from it; final and open observations have no step."""

    obs: Any
    action: list[float] | None = None
    reward: float = 0.0
    terminated: bool = False
    ended: bool = False


@dataclass
class EnvHistory:
    """The observations and steps of one environment."""

    records: list[Record] = field(default_factory=list)

    def restart(self, obs: Any) -> None:
        """Starts another episode; the open observation becomes the final one of the last episode."""
        if len(self.records) > 1 and self.records[-2].action:
            self.records[-2].ended = True
            self.records.append(Record(obs))
        else:  # the last episode had already ended, and the open observation had no step yet
            self.records[-1] = Record(obs)

    def step(self, action: list[float], reward: float, terminated: bool, truncated: bool, final: Any, obs: Any) -> None:
        record = self.records[-1]
        record.action, record.reward, record.terminated, record.ended = (
            action,
            reward,
            terminated,
            terminated or truncated,
        )
        if record.ended:
            self.records.append(Record(final))
        self.records.append(Record(obs))

    def expected(self, places: int, n_steps: int, gamma: float) -> list[tuple[Any, ...]]:
        """(obs, action, return, discount, next obs or None) of the transitions in the newest `places` cells."""
        first = max(0, len(self.records) - places)
        return [self._outcome(i, n_steps, gamma) for i in range(first, len(self.records)) if self.records[i].action]

    def _outcome(self, i: int, n_steps: int, gamma: float) -> tuple[Any, ...]:
        start, total, discount = self.records[i], 0.0, 1.0
        for _ in range(n_steps):
            record = self.records[i]
            total += discount * record.reward
            discount *= gamma
            i += 1
            if record.terminated:
                return start.obs, start.action, total, 0.0, None
            if record.ended or self.records[i].action is None:
                break
        return start.obs, start.action, total, discount, self.records[i].obs


def assert_stored(
    buffer: Replay | Prioritised, histories: list[EnvHistory], n_steps: int, gamma: float, identify: Any
) -> None:
    """`identify` turns observations [B, bytes] into a list of the identifiers that the model uses."""
    replay = replay_of(buffer)
    places = replay.n_cells // len(histories)
    for env, history in enumerate(histories):
        batch = stored_transitions(buffer, env)
        transitions = zip(
            identify(batch.obs),
            batch.actions.tolist(),
            [pytest.approx(value, rel=1e-6) for value in batch.returns.tolist()],
            batch.discounts.tolist(),
            [None if d == 0 else obs for d, obs in zip(batch.discounts.tolist(), identify(batch.next_obs))],
        )
        assert list(transitions) == history.expected(places, n_steps, gamma)
    if isinstance(buffer, Prioritised):
        assert torch.equal(buffer.tree.leaves > 0, replay.has_transition)


# -- stored transitions ------------------------------------------------------------------------------------------------


def seed_and_step(obs: Tensor) -> list[tuple[int, int]]:
    return [(int(seed), int(step)) for seed, step in obs.contiguous().view(torch.int64)]


@pytest.mark.parametrize("prioritised", [False, True], ids=["uniform", "prioritised"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_buffer_stores_real_environment_steps(prioritised: bool, n_step: int) -> None:
    n_envs, n_steps, seed = 3, 11, 7  # episodes of 1 to 7 steps, so that rollouts begin and end within them
    run = off_policy_run(
        Counting,
        "dqn",
        seed=seed,
        n_envs=n_envs,
        n_steps=n_steps,
        buffer_size=3 * 40,
        learning_starts=40,
        per=prioritised,
        n_step=n_step,
    )
    steps = [counting_steps(seed, env, 8 * n_steps + 1) for env in range(n_envs)]
    histories = [EnvHistory([Record(steps[env][0]["observation"])]) for env in range(n_envs)]
    ends = set()
    for iteration in range(8):
        rollout = run.collect()
        for env, history in enumerate(histories):
            for step in range(n_steps):
                now = steps[env][iteration * n_steps + step]
                after = steps[env][iteration * n_steps + step + 1]
                action = rollout.actions[step, env].tolist()
                ended = now["terminated"], now["truncated"]
                history.step(action, now["reward"], *ended, now["next"], after["observation"])
                ends.add(ended)
        learn_from(run.algo, rollout, run.shuffle(), iteration / 8)
        assert_stored(run.algo.experience.sampler, histories, n_step, 0.5, seed_and_step)
        run.collector.open_rollout()
    assert ends == {(False, False), (True, False), (False, True)}
    assert replay_of(run.algo.experience.sampler).n_overwritten.min() > 0  # the ring wrapped around


def test_episode_that_cannot_be_restored_is_truncated_on_resume() -> None:
    before = off_policy_run(Nondeterministic, "dqn", n_steps=6, n_step=3)
    for _ in range(3):
        rollout = before.collect()
        learn_from(before.algo, rollout, before.shuffle())
        before.collector.read_episode_stats()
        last_obs, last_rewards = rollout.obs[-1].clone(), rollout.rewards[-2:].clone()
        before.collector.open_rollout()
    file = io.BytesIO()
    torch.save({"algo": before.algo.state_dict(), "collector": before.collector.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    after = off_policy_run(Nondeterministic, "dqn", n_steps=6, n_step=3)
    after.algo.load_state_dict(state["algo"])
    # Episodes of this environment cannot be repeated from their seeds.
    assert len(after.collector.load_state_dict(state["collector"])) == 2
    rollout = after.collect()
    assert rollout.starts[0].all()
    assert not torch.equal(rollout.obs[0], last_obs)
    learn_from(after.algo, rollout, after.shuffle())
    for env in range(2):
        batch = stored_transitions(after.algo.experience.sampler, env)
        assert len(batch.obs) == 24
        old = slice(16, 18)  # the last two steps before the resume
        for obs in batch.next_obs[old]:
            assert torch.equal(obs, last_obs[env])
        assert batch.discounts[old].tolist() == [0.25, 0.5]  # returns of two steps and of one, neither terminated
        assert batch.returns[old].tolist() == [float(last_rewards[:, env] @ torch.tensor([1.0, 0.5])), 1.0]
        assert torch.equal(floats(batch.obs[18], 1), floats(rollout.obs[0, env], 1))


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[int, int, int, int, bool, list[list[list[int]]], list[list[bool]]]:
    """(n_envs, n_steps, n_step, spare places, prioritised, ends [rollout, T, N], restarts [rollout, N])."""
    n_envs, n_steps, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    end = st.sampled_from([0, 0, 0, 1, 2, 3])  # bit 0 terminated, bit 1 truncated
    step = st.lists(end, min_size=n_envs, max_size=n_envs)
    ends = draw(st.lists(st.lists(step, min_size=n_steps, max_size=n_steps), min_size=1, max_size=6))
    restarts = [[draw(st.sampled_from([False, False, True])) for _ in range(n_envs)] for _ in ends]
    return n_envs, n_steps, n_step, draw(st.integers(0, 20)), draw(st.booleans()), ends, restarts


def ids_of(obs: Tensor) -> list[int]:
    return obs.view(torch.int64)[:, 0].tolist()


@given(rollouts())
def test_stored_transitions_match_list_model(
    case: tuple[int, int, int, int, bool, list[list[list[int]]], list[list[bool]]],
) -> None:
    n_envs, n_steps, n_step, spare, prioritised, ends, restarts = case
    places = n_step + 2 + spare
    recipe = DQNRecipe(
        n_envs=n_envs,
        n_steps=n_steps,
        buffer_size=places * n_envs,
        n_step=n_step,
        gamma=0.5,
        per=prioritised,
    )
    experience = ExperienceReplay(recipe, 8, 1, CPU, no_capture)
    rollout = Rollout(n_steps, n_envs, 8, 1, 0, CPU)
    numbers = iter(range(1, 10_000))

    def write(obs: Tensor, number: int) -> int:
        obs.copy_(torch.tensor([number]).view(torch.uint8))
        return number

    histories = [EnvHistory() for _ in range(n_envs)]
    for number, (rollout_ends, env_restarts) in enumerate(zip(ends, restarts)):
        finals: list[tuple[int, Tensor]] = []
        ended = [number and bool(end) for end in ends[number - 1][-1]]
        restarted = [not number or (restart and not end) for restart, end in zip(env_restarts, ended)]
        for env, history in enumerate(histories):
            if number == 0:
                history.records.append(Record(write(rollout.obs[0, env], next(numbers))))
            elif restarted[env]:
                history.restart(write(rollout.obs[0, env], next(numbers)))
            else:
                rollout.obs[0, env] = rollout.obs[-1, env]
            rollout.starts[0, env] = bool(restarted[env] or ended[env])
        for t, step_ends in enumerate(rollout_ends):
            for env, end in enumerate(step_ends):
                action, reward, final = float(next(numbers)), float(next(numbers) % 16), -7
                terminated, truncated = bool(end & 1), bool(end & 2)
                rollout.actions[t, env, 0], rollout.rewards[t, env] = action, reward
                rollout.terminated[t, env], rollout.truncated[t, env] = terminated, truncated
                if truncated:
                    final_obs = torch.zeros(8, dtype=torch.uint8)
                    final = write(final_obs, next(numbers))
                    finals.append((t * n_envs + env, final_obs))
                next_obs = write(rollout.obs[t + 1, env], next(numbers))
                histories[env].step([action], reward, terminated, truncated, final, next_obs)
        # Padding, as from the device collector.
        finals.append((n_steps * n_envs, torch.full((8,), 255, dtype=torch.uint8)))
        rollout.final_at = torch.tensor([at for at, _ in finals])
        rollout.final_obs = torch.stack([obs for _, obs in finals])
        experience.store(rollout)
        assert_stored(experience.sampler, histories, n_step, 0.5, ids_of)


def test_action_masks_are_stored_with_observations() -> None:
    run = off_policy_run(MaskedMultiDiscrete, "dqn", learning_starts=1000)  # a new mask at each step
    obs = []
    for _ in range(3):
        obs.append(run.collect().obs[:-1].clone())
        learn_from(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    collected, layout = torch.cat(obs), run.policy.obs_layout
    for env in range(2):
        batch = stored_transitions(run.algo.experience.sampler, env)
        masks = batch.obs[:, layout.mask_offset : layout.mask_offset + 8]
        assert torch.equal(batch.obs, collected[:, env])
        for head, part in enumerate((masks[:, :3], masks[:, 3:])):
            assert part.gather(1, batch.actions[:, head : head + 1].long()).all()  # every stored action was allowed


# -- updates -----------------------------------------------------------------------------------------------------------


class CountingOffPolicy(OffPolicy):
    """Counts its updates."""

    calls = 0

    def update(self, generator: torch.Generator, phase: int = 0) -> None:
        self.calls += 1
        super().update(generator, phase)


def fill_with_noise(rollout: Rollout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (rollout.obs.view(torch.float32), rollout.rewards):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    rollout.terminated.copy_(torch.rand(rollout.rewards.shape, generator=generator) < 0.1)


@settings(max_examples=25)
@given(
    kind=st.sampled_from([DQN, SAC]),
    ratio=st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.5]), st.floats(0.0, 2.0, allow_subnormal=False)),
    n_envs=st.integers(1, 4),
    n_steps=st.integers(1, 6),
    learning_starts=st.integers(0, 40),
)
def test_update_count_follows_utd_ratio_and_learning_starts(
    kind: Any, ratio: float, n_envs: int, n_steps: int, learning_starts: int
) -> None:
    recipe = recipe_for(
        "dqn" if kind is DQN else "sac",
        n_envs=n_envs,
        n_steps=n_steps,
        batch_size=2,
        net_arch=(4,),
        buffer_size=200,
        learning_starts=learning_starts,
        utd_ratio=ratio,
    )
    obs, actions = ObservationLayout.of(spaces.Box(-1, 1, (2,))), ActionLayout.of(spaces.Discrete(2))
    algo = CountingOffPolicy(kind, new_policy(obs, actions, recipe), recipe)
    rollout = Rollout(n_steps, n_envs, obs.obs_bytes, 1, 0, CPU)
    made = 0
    for number in range(1, 6):
        fill_with_noise(rollout, number)
        metrics = learn_from(algo, rollout, keyed_generator(CPU, number), progress=0.5)
        due = math.floor(Fraction(str(ratio)) * max(0, number * n_steps * n_envs - learning_starts))
        assert algo.calls == due
        assert algo.experience.updates == due
        assert metrics["updates"] == due - made
        assert metrics["n_updates"] == due
        made = due
        random = number * n_steps * n_envs < learning_starts
        explores = algo.policy.distribution.epsilon if kind is DQN else algo.policy.distribution.at_random
        assert (explores == 1.0) == random


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_loaded_checkpoint_continues_bit_for_bit(algo: str) -> None:
    env = "CartPole-v1"
    uninterrupted = off_policy_run(env, algo, per=True, utd_ratio=0.7)
    rollout = uninterrupted.collect()
    for number in range(4):
        if number:
            uninterrupted.collector.open_rollout()
            uninterrupted.collect()
        if number == 2:
            file = io.BytesIO()
            torch.save(uninterrupted.algo.state_dict(), file)
            file.seek(0)
            resumed = off_policy_run(env, algo, seed=1, per=True, utd_ratio=0.7)
            resumed.algo.load_state_dict(torch.load(file, weights_only=True))
        if number >= 2:
            learn_from(resumed.algo, rollout, keyed_generator(CPU, number), number / 4)
        learn_from(uninterrupted.algo, rollout, keyed_generator(CPU, number), number / 4)
    assert uninterrupted.algo.experience.updates == math.floor(0.7 * 96)
    actual, expected = flattened(resumed.algo.state_dict()), flattened(uninterrupted.algo.state_dict())
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[key])), key


def flattened(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        leaves |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def test_per_beta_anneals_to_one() -> None:
    recipe = DQNRecipe(n_envs=2, n_steps=4, buffer_size=64, per=True, per_beta=0.4)
    experience = ExperienceReplay(recipe, 8, 1, CPU, no_capture)
    for progress, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        experience.set_progress(progress)
        assert float(experience.sampler.beta) == pytest.approx(beta)


def test_resume_without_replay_buffer_refills_before_learning() -> None:
    run = off_policy_run("CartPole-v1", "dqn", n_steps=4, learning_starts=16)
    for _ in range(2):  # stopped twice before the first update
        resume_without_replay_buffer(run, rollouts=1)
        assert run.algo.experience.updates == 0
        assert run.algo.experience.is_warm_up
    resume_without_replay_buffer(run, rollouts=3)
    assert run.algo.experience.updates == 8  # 24 steps since the resume, the first 16 without updates
    assert not run.algo.experience.is_warm_up
    resume_without_replay_buffer(run, rollouts=4)
    assert run.algo.experience.updates == 8 + 16
    assert not run.algo.experience.is_warm_up  # a trained policy does not act at random again
    assert int(run.algo.experience.sampler.count) == 32


def resume_without_replay_buffer(run: SmallRun, rollouts: int) -> None:
    """Continues from a checkpoint without the replay buffer."""
    state = run.algo.state_dict()
    state["experience"] = {key: value for key, value in state["experience"].items() if key != "memory"}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    policy, recipe = (
        new_policy(run.policy.obs_layout, run.envs.env_spec.action_layout, run.algo.recipe),
        run.algo.recipe,
    )
    run.algo = OffPolicy(DQN, policy, recipe)
    run.algo.load_state_dict(torch.load(file, weights_only=True))
    rollout = Rollout(recipe.n_steps, recipe.n_envs, policy.obs_layout.obs_bytes, 1, 0, CPU)
    for number in range(rollouts):
        fill_with_noise(rollout, number)
        learn_from(run.algo, rollout, keyed_generator(CPU, number))


@pytest.mark.parametrize(("algo", "optimisers"), [("sac", 3), ("td3", 2), ("dqn", 1)])
def test_after_gradient_sees_every_gradient_before_its_step(algo: str, optimisers: int) -> None:
    """The hook zeroes every gradient, so the weights stay, though every optimiser steps."""
    recipe = recipe_for(algo, n_envs=2, n_steps=8, batch_size=4, net_arch=(4,), buffer_size=64, learning_starts=0)
    action_space = spaces.Discrete(2) if algo == "dqn" else spaces.Box(-1, 1, (1,))
    obs, actions = ObservationLayout.of(spaces.Box(-1, 1, (2,))), ActionLayout.of(action_space)
    shapes: list[tuple[int, ...]] = []

    def hook(gradient: Tensor) -> None:
        shapes.append(tuple(gradient.shape))
        gradient.zero_()

    policy = new_policy(obs, actions, recipe)
    hooked = new_algorithm(policy, recipe, no_capture, no_report, hook)
    before = [tensor.clone() for tensor in hooked.policy.state_dict().values()]
    rollout = Rollout(8, 2, obs.obs_bytes, 1, 0, CPU)
    fill_with_noise(rollout, 1)
    metrics = learn_from(hooked, rollout, keyed_generator(CPU, 1))
    updates = int(metrics["updates"])
    assert updates == 16
    assert all(torch.equal(a, b) for a, b in zip(before, hooked.policy.state_dict().values()))
    delayed = updates // 2 if algo == "td3" else 0  # skipped updates of the actor
    assert len(shapes) == optimisers * updates - delayed
    assert {members for members, _ in shapes} == {1}
