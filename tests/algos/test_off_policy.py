"""What off-policy learning remembers, and how often it learns, against plain lists kept step by step."""

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
from off_policy_runs import learned, off_policy_run
from small_envs import Choosy, Counting, Fickle, counting_steps
from small_runs import CPU, SmallRun, floats
from torch import Tensor

from unidle.algos.capturing import as_it_is
from unidle.algos.dqn import DQN
from unidle.algos.experience_replay import ExperienceReplay
from unidle.algos.off_policy import OffPolicy
from unidle.algos.registry import new_policy
from unidle.algos.sac import SAC
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay
from unidle.buffers.rollout import Rollout
from unidle.config import DQNRecipe, recipe_for
from unidle.rng import keyed_generator
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def replay_of(memory: Replay | Prioritised) -> Replay:
    return memory.replay if isinstance(memory, Prioritised) else memory


def held(memory: Replay | Prioritised, line: int) -> Any:
    """All transitions that one environment's line holds, oldest first."""
    replay = replay_of(memory)
    n_envs = len(replay.cursor)
    numbers = torch.arange(int(replay.left[line]), int(replay.entered[line]))
    places = replay.n_cells // n_envs
    return replay.at(replay.order[numbers % places * n_envs + line].long())


# -- a model: each environment's line as a list of observations --------------------------------------------------------


@dataclass
class Seen:
    """An observation, and the step that was taken from it; no step where it is final or open."""

    row: Any
    action: list[float] | None = None
    reward: float = 0.0
    terminated: bool = False
    ended: bool = False


@dataclass
class Line:
    """One environment's past."""

    past: list[Seen] = field(default_factory=list)

    def begin(self, row: Any) -> None:
        """With another episode, wherever the last one stood: that observation is the final one."""
        if len(self.past) > 1 and self.past[-2].action:
            self.past[-2].ended = True
            self.past.append(Seen(row))
        else:  # the last episode had ended already, and no step led to the open observation
            self.past[-1] = Seen(row)

    def step(self, action: list[float], reward: float, terminated: bool, truncated: bool, final: Any, row: Any) -> None:
        here = self.past[-1]
        here.action, here.reward, here.terminated, here.ended = action, reward, terminated, terminated or truncated
        if here.ended:
            self.past.append(Seen(final))
        self.past.append(Seen(row))

    def expected(self, places: int, n_steps: int, gamma: float) -> list[tuple[Any, ...]]:
        """(row, action, return, discount, next row or None) of the transitions among the newest `places` cells."""
        first = max(0, len(self.past) - places)
        return [self._outcome(i, n_steps, gamma) for i in range(first, len(self.past)) if self.past[i].action]

    def _outcome(self, i: int, n_steps: int, gamma: float) -> tuple[Any, ...]:
        start, total, discount = self.past[i], 0.0, 1.0
        for _ in range(n_steps):
            here = self.past[i]
            total += discount * here.reward
            discount *= gamma
            i += 1
            if here.terminated:
                return start.row, start.action, total, 0.0, None
            if here.ended or self.past[i].action is None:
                break
        return start.row, start.action, total, discount, self.past[i].row


def assert_remembered(memory: Replay | Prioritised, lines: list[Line], n_steps: int, gamma: float, name: Any) -> None:
    """`name` makes of rows [B, bytes] a list of what the model calls them."""
    replay = replay_of(memory)
    places = replay.n_cells // len(lines)
    for number, line in enumerate(lines):
        batch = held(memory, number)
        found = zip(
            name(batch.obs),
            batch.actions.tolist(),
            [pytest.approx(value, rel=1e-6) for value in batch.returns.tolist()],
            batch.discounts.tolist(),
            [None if d == 0 else row for d, row in zip(batch.discounts.tolist(), name(batch.next_obs))],
        )
        assert list(found) == line.expected(places, n_steps, gamma)
    if isinstance(memory, Prioritised):
        assert torch.equal(memory.tree.leaves > 0, replay.acted)


# -- what is remembered ------------------------------------------------------------------------------------------------


def counted(obs: Tensor) -> list[tuple[int, int]]:
    return [(int(seed), int(step)) for seed, step in obs.contiguous().view(torch.int64)]


@pytest.mark.parametrize("prioritised", [False, True], ids=["uniform", "prioritised"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_replay_holds_what_a_real_environment_did_step_by_step(prioritised: bool, n_step: int) -> None:
    n_envs, n_steps, seed = 3, 11, 7  # episodes of 1 to 7 steps: borders fall into them
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
    records = [counting_steps(seed, env, 8 * n_steps + 1) for env in range(n_envs)]
    lines = [Line([Seen(records[env][0]["observation"])]) for env in range(n_envs)]
    ends = set()
    for fragment in range(8):
        rollout = run.collect()
        for env, line in enumerate(lines):
            for step in range(n_steps):
                now = records[env][fragment * n_steps + step]
                then = records[env][fragment * n_steps + step + 1]
                action = rollout.actions[step, env].tolist()
                ended = now["terminated"], now["truncated"]
                line.step(action, now["reward"], *ended, now["next"], then["observation"])
                ends.add(ended)
        learned(run.algo, rollout, run.shuffle(), fragment / 8)
        assert_remembered(run.algo.experience.sampler, lines, n_step, 0.5, counted)
        run.collector.open_rollout()
    assert ends == {(False, False), (True, False), (False, True)}
    assert replay_of(run.algo.experience.sampler).left.min() > 0  # the ring was written round


def test_an_episode_that_had_to_begin_anew_after_a_resume_is_cut_off_where_it_was() -> None:
    before = off_policy_run(Fickle, "dqn", n_steps=6, n_step=3)
    for _ in range(3):
        rollout = before.collect()
        learned(before.algo, rollout, before.shuffle())
        before.collector.read_episode_stats()
        last_obs, last_rewards = rollout.obs[-1].clone(), rollout.rewards[-2:].clone()
        before.collector.open_rollout()
    file = io.BytesIO()
    torch.save({"algo": before.algo.state_dict(), "collector": before.collector.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    after = off_policy_run(Fickle, "dqn", n_steps=6, n_step=3)
    after.algo.load_state_dict(state["algo"])
    assert len(after.collector.load_state_dict(state["collector"])) == 2  # no seed repeats it
    rollout = after.collect()
    assert rollout.starts[0].all()
    assert not torch.equal(rollout.obs[0], last_obs)
    learned(after.algo, rollout, after.shuffle())
    for env in range(2):
        batch = held(after.algo.experience.sampler, env)
        assert len(batch.obs) == 24
        old = slice(16, 18)  # the last two steps before the border
        for row in batch.next_obs[old]:
            assert torch.equal(row, last_obs[env])
        assert batch.discounts[old].tolist() == [0.25, 0.5]  # two steps and one were made: none terminated
        assert batch.returns[old].tolist() == [float(last_rewards[:, env] @ torch.tensor([1.0, 0.5])), 1.0]
        assert torch.equal(floats(batch.obs[18], 1), floats(rollout.obs[0, env], 1))


@st.composite
def fragments(draw: st.DrawFn) -> tuple[int, int, int, int, bool, list[list[list[int]]], list[list[bool]]]:
    """(n_envs, n_steps, return steps, spare places, prioritised, ends [F, T, N], anew [F, N])."""
    n_envs, n_steps, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    end = st.sampled_from([0, 0, 0, 1, 2, 3])  # bit 0 terminated, bit 1 truncated
    step = st.lists(end, min_size=n_envs, max_size=n_envs)
    ends = draw(st.lists(st.lists(step, min_size=n_steps, max_size=n_steps), min_size=1, max_size=6))
    anew = [[draw(st.sampled_from([False, False, True])) for _ in range(n_envs)] for _ in ends]
    return n_envs, n_steps, n_step, draw(st.integers(0, 20)), draw(st.booleans()), ends, anew


def names_of(obs: Tensor) -> list[int]:
    return obs.view(torch.int64)[:, 0].tolist()


@given(fragments())
def test_fragments_of_any_kind_are_remembered_as_a_list_would(
    drawn: tuple[int, int, int, int, bool, list[list[list[int]]], list[list[bool]]],
) -> None:
    n_envs, n_steps, n_step, spare, prioritised, ends, anew = drawn
    places = n_step + 2 + spare
    recipe = DQNRecipe(
        n_envs=n_envs,
        n_steps=n_steps,
        buffer_size=places * n_envs,
        n_step=n_step,
        gamma=0.5,
        per=prioritised,
    )
    experience = ExperienceReplay(recipe, 8, 1, CPU, as_it_is)
    rollout = Rollout(n_steps, n_envs, 8, 1, 0, CPU)
    names = iter(range(1, 10_000))

    def write(obs: Tensor, name: int) -> int:
        obs.copy_(torch.tensor([name]).view(torch.uint8))
        return name

    lines = [Line() for _ in range(n_envs)]
    for number, (fragment, begins) in enumerate(zip(ends, anew)):
        finals: list[tuple[int, Tensor]] = []
        over = [number and bool(end) for end in ends[number - 1][-1]]
        again = [not number or (begun and not end) for begun, end in zip(begins, over)]
        for env, line in enumerate(lines):
            if number == 0:
                line.past.append(Seen(write(rollout.obs[0, env], next(names))))
            elif again[env]:
                line.begin(write(rollout.obs[0, env], next(names)))
            else:
                rollout.obs[0, env] = rollout.obs[-1, env]
            rollout.starts[0, env] = bool(again[env] or over[env])
        for t, step in enumerate(fragment):
            for env, end in enumerate(step):
                action, reward, final = float(next(names)), float(next(names) % 16), -7
                terminated, truncated = bool(end & 1), bool(end & 2)
                rollout.actions[t, env, 0], rollout.rewards[t, env] = action, reward
                rollout.terminated[t, env], rollout.truncated[t, env] = terminated, truncated
                if truncated:
                    row = torch.zeros(8, dtype=torch.uint8)
                    final = write(row, next(names))
                    finals.append((t * n_envs + env, row))
                following = write(rollout.obs[t + 1, env], next(names))
                lines[env].step([action], reward, terminated, truncated, final, following)
        finals.append((n_steps * n_envs, torch.full((8,), 255, dtype=torch.uint8)))  # as the device's collector does
        rollout.final_at = torch.tensor([at for at, _ in finals])
        rollout.final_obs = torch.stack([row for _, row in finals])
        experience.store(rollout)
        assert_remembered(experience.sampler, lines, n_step, 0.5, names_of)


def test_the_mask_of_every_observation_is_remembered_with_it() -> None:
    run = off_policy_run(Choosy, "dqn", learning_starts=1000)  # its masks are those of each observation
    obs = []
    for _ in range(3):
        obs.append(run.collect().obs[:-1].clone())
        learned(run.algo, run.rollout, run.shuffle())
        run.collector.open_rollout()
    seen, layout = torch.cat(obs), run.policy.obs_layout
    for env in range(2):
        batch = held(run.algo.experience.sampler, env)
        masks = batch.obs[:, layout.mask_offset : layout.mask_offset + 8]
        assert torch.equal(batch.obs, seen[:, env])
        for head, part in enumerate((masks[:, :3], masks[:, 3:])):
            assert part.gather(1, batch.actions[:, head : head + 1].long()).all()  # and only such were chosen


# -- how often it is learned from --------------------------------------------------------------------------------------


class Counted(OffPolicy):
    """Counts its updates."""

    calls = 0

    def update(self, generator: torch.Generator, phase: int = 0) -> None:
        self.calls += 1
        super().update(generator, phase)


def nothing_but_noise(rollout: Rollout, seed: int) -> None:
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
def test_after_every_fragment_exactly_so_many_updates_were_made(
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
    algo = Counted(kind, new_policy(obs, actions, recipe), recipe)
    rollout = Rollout(n_steps, n_envs, obs.obs_bytes, 1, 0, CPU)
    made = 0
    for number in range(1, 6):
        nothing_but_noise(rollout, number)
        metrics = learned(algo, rollout, keyed_generator(CPU, number), progress=0.5)
        due = math.floor(Fraction(str(ratio)) * max(0, number * n_steps * n_envs - learning_starts))
        assert algo.calls == due
        assert algo.experience.updates == due
        assert metrics["updates"] == due - made
        assert metrics["updates_in_all"] == due
        made = due
        random = number * n_steps * n_envs < learning_starts
        explores = algo.policy.distribution.epsilon if kind is DQN else algo.policy.distribution.at_random
        assert (explores == 1.0) == random


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_a_checkpoint_in_the_middle_changes_no_later_update(algo: str) -> None:
    env = "CartPole-v1"
    straight = off_policy_run(env, algo, per=True, utd_ratio=0.7)
    fragment = [straight.collect()]
    for number in range(4):
        if number:
            straight.collector.open_rollout()
            straight.collect()
        if number == 2:
            file = io.BytesIO()
            torch.save(straight.algo.state_dict(), file)
            file.seek(0)
            resumed = off_policy_run(env, algo, seed=1, per=True, utd_ratio=0.7)
            resumed.algo.load_state_dict(torch.load(file, weights_only=True))
        if number >= 2:
            learned(resumed.algo, fragment[0], keyed_generator(CPU, number), number / 4)
        learned(straight.algo, fragment[0], keyed_generator(CPU, number), number / 4)
    assert straight.algo.experience.updates == math.floor(0.7 * 96)
    mine, others = flat(resumed.algo.state_dict()), flat(straight.algo.state_dict())
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[name])), name


def flat(state: dict[str, Any], above: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in state.items():
        leaves |= flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return leaves


def test_importance_weights_correct_in_full_at_the_end_of_the_run() -> None:
    recipe = DQNRecipe(n_envs=2, n_steps=4, buffer_size=64, per=True, per_beta=0.4)
    experience = ExperienceReplay(recipe, 8, 1, CPU, as_it_is)
    for progress, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        experience.set_progress(progress)
        assert float(experience.sampler.beta) == pytest.approx(beta)


def test_without_its_memory_a_run_collects_anew_before_it_learns_on() -> None:
    run = off_policy_run("CartPole-v1", "dqn", n_steps=4, learning_starts=16)
    for _ in range(2):  # stopped twice before anything was learned
        take_up_without_memory(run, fragments=1)
        assert run.algo.experience.updates == 0
        assert run.algo.experience.is_warm_up
    take_up_without_memory(run, fragments=3)
    assert run.algo.experience.updates == 8  # 24 steps since, of which 16 do not count
    assert not run.algo.experience.is_warm_up
    take_up_without_memory(run, fragments=4)
    assert run.algo.experience.updates == 8 + 16
    assert not run.algo.experience.is_warm_up  # it has learned something already
    assert int(run.algo.experience.sampler.count) == 32


def take_up_without_memory(run: SmallRun, fragments: int) -> None:
    """Go on from a checkpoint that holds everything but the replay."""
    state = run.algo.state_dict()
    state["experience"] = {name: value for name, value in state["experience"].items() if name != "memory"}
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
    for number in range(fragments):
        nothing_but_noise(rollout, number)
        learned(run.algo, rollout, keyed_generator(CPU, number))
