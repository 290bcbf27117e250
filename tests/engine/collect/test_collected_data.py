"""Rollouts with failing environments: every transition is recorded exactly once and in the right place.

An `Echo` observation encodes the environment's state and last action, so every field of every step can be checked.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fault_envs import (
    IN_RESET,
    MAX_EPISODE_LENGTH,
    CheckpointableEcho,
    ContinuousEcho,
    Echo,
    EchoFault,
    EchoState,
    decode_echo,
    echo_reward,
)
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from small_envs import counting_length, counting_terminates
from small_runs import SmallRun, floats, save_and_load, small_run
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.engine.collect.host import HostCollector
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.cuda_graphs import Capture
from unidle.envs.make import env_maker
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE
from unidle.envs.probe import probe
from unidle.envs.protocol import Fault
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.timeline import Timeline

SEED = 3
N_CHECKED_STEPS = 8  # first steps, in which a NaN or infinite value is a user error
FaultPlan = dict[tuple[int, int, int], EchoFault]  # (environment, episode, step or IN_RESET) → the fault there
FIELDS = ("obs", "starts", "actions", "rewards", "terminated", "truncated", "states", "final_obs", "final_at")


@pytest.fixture(scope="module", autouse=True)
def _short_poll_interval() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "POLL_SECONDS", 0.02)
        yield


# -- expected rollouts -------------------------------------------------------------------------------------------------


class EnvModel:
    """Reference model of one environment, computed from its plan and the actions it received."""

    def __init__(self, env: int, plan: FaultPlan) -> None:
        self._env, self._plan = env, plan
        self.faults = 0  # that must have been reported so far
        self._good_steps = 0
        self._begin_episode_after(-1)

    @property
    def state(self) -> EchoState:
        return self.seed, self.step, self.actions[-1] if self.actions else -1

    def _begin_episode_after(self, episode: int) -> None:
        """Begin the first later episode whose reset succeeds; each failed reset is a fault."""
        episode += 1
        while self._fault_at(episode, IN_RESET):
            self.faults += 1
            episode += 1
        self.episode, self.step = episode, 0
        self.seed = episode_seed(SEED, self._env, episode)
        self.actions: list[int] = []  # of the open episode
        self.total = 0.0

    def _fault_at(self, episode: int, step: int) -> EchoFault | None:
        return self._plan.get((self._env, episode, step))

    @property
    def _is_last(self) -> bool:
        return self.step + 1 == counting_length(self.seed, MAX_EPISODE_LENGTH)

    def fail_next_step(self) -> bool:
        """Whether the next step is lost to a fault; if so, another episode begins."""
        fault = self._fault_at(self.episode, self.step)
        if fault == "nan observation" and self._is_last and counting_terminates(self.seed):
            fault = None  # the observation after a termination is not used
        if fault is not None and fault != "raise" and self._good_steps < N_CHECKED_STEPS:
            reject()
        if fault == "raise":
            self.faults += 1
            self._begin_episode_after(self.episode)
        elif self._is_last and self._fault_at(self.episode + 1, IN_RESET):
            self._begin_episode_after(self.episode)  # counts the fault
        elif fault is not None:  # noticed after the automatic reset
            self.faults += 1
            self._begin_episode_after(self.episode + self._is_last)
        else:
            return False
        return True

    def act(self, action: int) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated; `begin_next_episode` must follow the end of an episode."""
        last, self._good_steps = self._is_last, self._good_steps + 1
        self.step += 1
        self.actions.append(action)
        reward = echo_reward(self.seed, self.step, action)
        self.total += reward
        terminates = counting_terminates(self.seed)
        return reward, last and terminates, last and not terminates

    def begin_next_episode(self) -> None:
        self._begin_episode_after(self.episode)


@dataclass
class EnvTrajectory:
    """The transitions of one environment in one rollout."""

    obs: list[EchoState] = field(default_factory=list)
    starts: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    finals: dict[int, EchoState] = field(default_factory=dict)
    ended: list[tuple[int, float, int]] = field(default_factory=list)  # step, return and length of complete episodes

    def append_observation(self, model: EnvModel) -> None:
        self.obs.append(model.state)
        self.starts.append(model.step == 0)


def expected_trajectory(model: EnvModel, actions: Sequence[int]) -> EnvTrajectory:
    trajectory = EnvTrajectory()
    for t, action in enumerate(actions):
        before = model.state
        while model.fail_next_step():
            if t > 0 and not (trajectory.terminated[-1] or trajectory.truncated[-1]):
                trajectory.truncated[-1] = True
                trajectory.finals[t - 1] = before
        trajectory.append_observation(model)
        reward, terminated, truncated = model.act(action)
        trajectory.rewards.append(reward)
        trajectory.terminated.append(terminated)
        trajectory.truncated.append(truncated)
        if truncated:
            trajectory.finals[t] = model.state
        if terminated or truncated:
            trajectory.ended.append((t, model.total, model.step))
            model.begin_next_episode()
    trajectory.append_observation(model)
    return trajectory


# -- recorded rollouts -------------------------------------------------------------------------------------------------


def decode_states(obs: Tensor) -> list[EchoState]:
    """[n, obs_bytes] → the state that each observation encodes."""
    return [decode_echo(row) for row in floats(obs, 5).double().numpy()] if len(obs) else []


def recorded_trajectory(rollout: Rollout, env: int) -> EnvTrajectory:
    n_envs = rollout.shape[1]
    at = rollout.final_at.tolist()
    assert len(set(at)) == len(at), "two final observations for one step"
    finals = {i // n_envs: state for i, state in zip(at, decode_states(rollout.final_obs)) if i % n_envs == env}
    fields = [getattr(rollout, name)[:, env].tolist() for name in ("starts", "rewards", "terminated", "truncated")]
    return EnvTrajectory(decode_states(rollout.obs[:, env]), *fields, finals)


def actions_of(rollout: Rollout, env: int) -> list[int]:
    actions: list[int] = rollout.actions[:, env, 0].int().tolist()
    return actions


def clone_fields(rollout: Rollout) -> dict[str, Tensor]:
    return {name: getattr(rollout, name).clone() for name in FIELDS}


def echo_run(plan: FaultPlan, **settings: Any) -> SmallRun:
    faults = {(episode_seed(SEED, env, episode), step): fault for (env, episode, step), fault in plan.items()}
    batch_size = settings["n_envs"] * settings["n_steps"]
    env = settings.pop("env", Echo)
    return small_run(env, seed=SEED, kwargs={"faults": faults}, batch_size=batch_size, **settings)


def next_slot(run: SmallRun) -> RolloutSlot:
    """The next finished rollout; with overlap, the other slot is filled a bit further."""
    collector = run.collector
    while collector.schedule.newest < collector.schedule.oldest + collector.n_slots - 1:
        collector.open_rollout()
    slot = collector.finish()
    for _ in range(3 * (collector.n_slots - 1)):
        collector.poll(0.001)
    return slot


def assert_actions_match_recorded_observations(slot: RolloutSlot, carried_state: Tensor) -> None:
    """Every action is the policy's for the recorded observation and the recurrent state after the previous step."""
    rollout, policy = slot.rollout, slot.policy
    assert torch.equal(rollout.states[0], carried_state)
    for t in range(rollout.shape[0]):
        with torch.no_grad():
            state = rollout.states[t] * ~rollout.starts[t].unsqueeze(-1)
            obs = rollout.obs[t].clone()  # aligned like the block, which affects the last bit
            params, after = policy.act(obs, state if policy.state_size else None)
            action = policy.distribution.sample(params, slot.inference.noise.at((t,)))
        assert torch.equal(rollout.actions[t], action)
        # So the value of the last observation before a truncation uses the state after the last complete step.
        assert after is None or torch.equal(rollout.states[t + 1], after)


# -- deterministic faults ----------------------------------------------------------------------------------------------


@st.composite
def fault_plans(draw: st.DrawFn, n_envs: int) -> FaultPlan:
    """Up to eight faults, too few to exceed the limit on consecutive faults."""
    plan: FaultPlan = {}
    envs = st.integers(0, n_envs - 1)
    for env, episode, offset in draw(st.lists(st.tuples(envs, st.integers(0, 9), st.integers(0, 4)), max_size=5)):
        plan[env, episode, offset % counting_length(episode_seed(SEED, env, episode), MAX_EPISODE_LENGTH)] = "raise"
    for env, episode in draw(st.lists(st.tuples(envs, st.integers(1, 9)), max_size=3)):
        plan[env, episode, IN_RESET] = "raise"
    nans = st.sampled_from(["nan reward", "nan observation"])
    for env, episode, offset, fault in draw(
        st.lists(st.tuples(envs, st.integers(6, 12), st.integers(0, 4), nans), max_size=2)
    ):
        plan[env, episode, offset % counting_length(episode_seed(SEED, env, episode), MAX_EPISODE_LENGTH)] = fault
    return plan


def check_rollouts(run: SmallRun, plan: FaultPlan, rollouts: int) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Collect rollouts and compare every field with the model; returns the rollouts and a checkpoint after each."""
    collector, n_envs = run.collector, run.envs.n_envs
    collector.schedule.n_rollouts = rollouts
    for env in range(n_envs):  # rejects plans with user errors; the actions do not matter
        expected_trajectory(EnvModel(env, plan), [0] * rollouts * run.rollout.shape[0])
    reported: list[Fault] = []
    collector.faults.on_fault = lambda fault, rollout: reported.append(fault)
    models = [EnvModel(env, plan) for env in range(n_envs)]
    recorded, checkpoints, returns, lengths = [], [], [], []
    carried_state = torch.zeros(n_envs, run.policy.state_size)
    for _ in range(rollouts):
        slot = next_slot(run)
        rollout = slot.rollout
        trajectories = [expected_trajectory(model, actions_of(rollout, env)) for env, model in enumerate(models)]
        for env, trajectory in enumerate(trajectories):
            ended, trajectory.ended = trajectory.ended, []
            assert recorded_trajectory(rollout, env) == trajectory, f"environment {env}"
            trajectory.ended = ended
        assert_actions_match_recorded_observations(slot, carried_state)
        carried_state = rollout.states[-1].clone()
        # Only complete episodes count, ordered by time, then environment.
        for t in range(rollout.shape[0]):
            for trajectory in trajectories:
                returns += [total for step, total, _ in trajectory.ended if step == t]
                lengths += [length for step, _, length in trajectory.ended if step == t]
        assert list(collector.stats.recent_returns) == returns[-100:]
        assert list(collector.stats.recent_lengths) == lengths[-100:]
        assert collector.stats.episodes == len(returns)
        # A fault counts for the rollout it happened in.
        assert collector.stats.faults["exception"] == sum(model.faults for model in models)
        # The checkpoint leads back to the current state of each environment.
        state = collector.state_dict()
        for env, model in enumerate(models):
            assert collector.boundary.log.open_episode(env)[0][:, 0].tolist() == model.actions
            assert state["episode"][env] == model.episode
        assert decode_states(state["obs"]) == [model.state for model in models]
        assert state["starts"].tolist() == [model.step == 0 for model in models]
        recorded.append(clone_fields(rollout))
        checkpoints.append(save_and_load(state))
    while collector.poll(1.0):
        pass
    assert Counter(fault.env for fault in reported) == {
        env: model.faults for env, model in enumerate(models) if model.faults
    }
    assert collector.stats.faults == Counter(fault.kind for fault in reported)
    assert collector.stats.faults.keys() <= {"exception"}
    return recorded, checkpoints


def check_continuation(run: SmallRun, state: Any, remaining: list[dict[str, Tensor]]) -> None:
    """A collector that loads `state` collects the remaining rollouts bit for bit."""
    assert run.collector.load_state_dict(state) == {}
    run.collector.schedule.n_rollouts = run.collector.schedule.oldest + len(remaining)
    for expected in remaining:
        rollout = clone_fields(next_slot(run).rollout)
        for name in FIELDS:
            assert torch.equal(rollout[name], expected[name]), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_recorded_actions_match_those_received_by_failing_envs(device: str, overlap: str) -> None:
    torch_device, shape = torch.device(device), (8, 6)
    maker = env_maker(ContinuousEcho)
    env_spec = probe(maker)
    torch.manual_seed(SEED)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(net_arch=(32, 32))).to(torch_device)
    FlatParameters(policy)
    sizes = env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0
    rollouts = [Rollout(*shape, *sizes, torch_device) for _ in range(2 if overlap == "strict" else 1)]
    pool = ProcessPool(maker, env_spec, shape[1], SEED, workers=2, slices=2)
    collector = HostCollector(pool, policy, rollouts, SEED, Timeline(), Capture(torch_device, print))
    with closing(collector):
        collector.start()
        for _ in range(12):
            slot = collector.finish()
            rollout = slot.rollout
            observations = floats(rollout.obs.cpu(), 3)
            actions = rollout.actions[..., 0].cpu().clamp(-1, 1)
            ended = (rollout.terminated | rollout.truncated).cpu()
            assert torch.equal(rollout.rewards.cpu(), actions)
            episodes, steps = observations[:-1, :, 0], observations[:-1, :, 1]
            after = torch.stack([episodes, steps + 1, actions], -1)  # [T, N, 3] the expected next observation
            assert torch.equal(observations[1:][~ended], after[~ended])
            assert torch.equal(floats(rollout.final_obs.cpu(), 3), after.flatten(0, 1)[rollout.final_at.cpu()])
            assert torch.equal(rollout.starts[1:].cpu(), ended)
            assert torch.equal(rollout.starts.cpu(), observations[..., 1] == 0)
            assert slot.inference._is_staged == (device == "cpu")  # on a GPU the fused kernel writes to the block
            collector.open_rollout()
        assert collector.stats.faults["exception"] > 10
        assert collector.stats.episodes > 30


# name: (n_steps, plan) for two environments. Faults in the first steps of training; in the first step of a rollout,
# after a complete and after an open episode; in resets, including the first one and several in a row; in most episodes.
EDGE_CASES: dict[str, tuple[int, FaultPlan]] = {
    "start of training": (4, {(0, 0, IN_RESET): "raise", (1, 0, 0): "raise", (1, 1, 0): "raise"}),
    "one-step rollouts": (1, {(env, episode, step): "raise" for env in range(2) for episode, step in ((0, 0), (2, 1))}),
    "first steps of episodes": (3, {(env, episode, 0): "raise" for env in range(2) for episode in (1, 3, 5)}),
    "resets": (5, {(0, episode, IN_RESET): "raise" for episode in (2, 3, 4, 8)} | {(1, 6, IN_RESET): "raise"}),
    "most episodes": (7, {(env, episode, 1): "raise" for env in range(2) for episode in range(16) if episode % 4}),
}
OVERLAP = pytest.mark.parametrize("overlap", ["off", "strict"])


@OVERLAP
@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.sampled_from(["none", "gru"]))
def test_rollouts_are_correct_with_random_faults(
    overlap: str, data: st.DataObject, n_envs: int, n_steps: int, rollouts: int, recurrent: str
) -> None:
    plan = data.draw(fault_plans(n_envs))
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run, again = (echo_run(plan, **shape) for _ in range(2))
    with closing(run.envs), closing(again.envs):
        recorded, checkpoints = check_rollouts(run, plan, rollouts)
        if all(fault == "raise" for fault in plan.values()):  # a NaN in the first steps is a user error
            first = data.draw(st.integers(0, rollouts - 1))
            check_continuation(again, checkpoints[first], recorded[first + 1 :])


@OVERLAP
@pytest.mark.parametrize("case", EDGE_CASES)
def test_rollouts_are_correct_with_faults_in_edge_cases(case: str, overlap: str) -> None:
    n_steps, plan = EDGE_CASES[case]
    shape = {"n_envs": 2, "n_steps": n_steps, "overlap": overlap, "recurrent": "gru"}
    run, again = (echo_run(plan, **shape) for _ in range(2))
    with closing(run.envs), closing(again.envs):
        recorded, checkpoints = check_rollouts(run, plan, 8)
        assert run.collector.stats.faults["exception"] >= 3
        check_continuation(again, checkpoints[2], recorded[3:])


@settings(max_examples=8)
@given(
    st.data(),
    st.integers(2, 5),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(2, 9),
    st.sampled_from(["off", "strict"]),
    st.sampled_from(["none", "gru"]),
)
def test_rollouts_are_correct_with_faults_in_workers(
    data: st.DataObject, n_envs: int, workers: int, slices: int, n_steps: int, overlap: str, recurrent: str
) -> None:
    plan = data.draw(fault_plans(n_envs))
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run, serial = echo_run(plan, workers=workers, slices=slices, **shape), echo_run(plan, **shape)
    with closing(run.envs), closing(serial.envs):
        recorded, _ = check_rollouts(run, plan, 6)
        recorded_serially, _ = check_rollouts(serial, plan, 6)
    for actual, expected in zip(recorded, recorded_serially):
        assert all(torch.equal(actual[name], expected[name]) for name in FIELDS)


# -- worker deaths -----------------------------------------------------------------------------------------------------


class TransitionChecker:
    """Checks the transitions of one environment across rollouts and counts the episodes that faults cut short."""

    def __init__(self, env: int) -> None:
        self._episodes = {episode_seed(SEED, env, episode): episode for episode in range(500)}
        self._env = env
        self.seed = episode_seed(SEED, env, 0)
        self.step, self.total = 0, 0.0
        self.actions: list[int] = []
        self.n_broken = 0  # episodes that are missing or did not end
        self.truncations: Counter[str] = Counter()
        self.results: list[tuple[int, int, float, int]] = []  # rollout, step, return and length of complete episodes

    @property
    def episode(self) -> int:
        return self._episodes[self.seed]

    @property
    def state(self) -> EchoState:
        return self.seed, self.step, self.actions[-1] if self.actions else -1

    def begin_episode(self, state: EchoState, after: int) -> None:
        """Check the first observation of an episode that comes after episode `after`."""
        seed, step, action = state
        assert (step, action) == (0, -1)
        assert self._episodes[seed] > after
        self.n_broken += self._episodes[seed] - after - 1
        self.seed, self.step, self.total, self.actions = seed, 0, 0.0, []

    def check(self, number: int, trajectory: EnvTrajectory, actions: Sequence[int]) -> None:
        if trajectory.obs[0] != self.state:  # cut off between two rollouts, after the previous one's last observation
            self.n_broken += 1
            self.truncations["at the start of a rollout"] += self.step > 0
            self.begin_episode(trajectory.obs[0], self.episode)
        finals = dict(trajectory.finals)
        for t, action in enumerate(actions):
            assert trajectory.obs[t] == self.state
            assert trajectory.starts[t] == (self.step == 0)
            self.step += 1
            self.actions.append(action)
            reward = echo_reward(self.seed, self.step, action)
            self.total += reward
            done = self.step == counting_length(self.seed, MAX_EPISODE_LENGTH)
            terminates = counting_terminates(self.seed)
            assert trajectory.rewards[t] == reward
            assert trajectory.terminated[t] == (done and terminates)
            if trajectory.truncated[t]:
                assert finals.pop(t) == self.state
            if done:
                assert trajectory.truncated[t] != trajectory.terminated[t]
                self.results.append((number, t, self.total, self.step))
                self.begin_episode(trajectory.obs[t + 1], self.episode)
            elif trajectory.truncated[t]:
                self.n_broken += 1
                self.truncations["in a rollout" if t + 1 < len(actions) else "at the end of a rollout"] += 1
                self.begin_episode(trajectory.obs[t + 1], self.episode)
        assert not finals
        assert trajectory.obs[-1] == self.state
        assert trajectory.starts[-1] == (self.step == 0)


def check_with_deaths(
    run: SmallRun, rollouts: int, prepare: Callable[[], None] = lambda: None
) -> tuple[list[Counter[str]], Counter[str]]:
    """Collect and check every environment; returns the fault counts after each rollout, and truncations by position."""
    collector, envs = run.collector, run.envs
    reported: list[Fault] = []
    collector.faults.on_fault = lambda fault, rollout: reported.append(fault)
    collector.schedule.n_rollouts = rollouts
    checkers = [TransitionChecker(env) for env in range(envs.n_envs)]
    carried_state = torch.zeros(envs.n_envs, run.policy.state_size)
    prepare()
    fault_counts = []
    for number in range(rollouts):
        slot = next_slot(run)
        fault_counts.append(collector.stats.faults.copy())
        for env, checker in enumerate(checkers):
            checker.check(number, recorded_trajectory(slot.rollout, env), actions_of(slot.rollout, env))
            assert collector.boundary.log.open_episode(env)[0][:, 0].tolist() == checker.actions
        assert_actions_match_recorded_observations(slot, carried_state)
        carried_state = slot.rollout.states[-1].clone()
    while collector.poll(1.0):
        pass
    results = sorted(
        (number, t, env, *rest) for env, checker in enumerate(checkers) for number, t, *rest in checker.results
    )
    assert list(collector.stats.recent_returns) == [total for *_, total, _ in results][-100:]
    assert list(collector.stats.recent_lengths) == [length for *_, length in results][-100:]
    assert collector.stats.episodes == len(results)
    assert isinstance(envs, ProcessPool)
    for env_ids in (job.env_ids for job in envs._jobs()):
        deaths = sum(fault.kind == "killed" and fault.env == env_ids[0] for fault in reported)
        for env in env_ids:
            # Every missing episode has a cause: each fault breaks one episode, or two if the broken one had begun in
            # the lost step itself.
            n_faults = deaths + sum(fault.kind == "exception" and fault.env == env for fault in reported)
            missing = int(envs.block.episode[env]) - len(checkers[env].results)
            assert n_faults <= missing <= 2 * n_faults
            assert checkers[env].n_broken <= missing
    assert collector.stats.faults == Counter(fault.kind for fault in reported)
    return fault_counts, sum((checker.truncations for checker in checkers), Counter())


def test_worker_death_truncates_envs_that_wait_for_their_slice() -> None:
    # Environment 0 fails in its second step and kills the worker in the retry; 1 and 2 have completed theirs.
    plan: FaultPlan = {(0, 0, 1): "raise", (0, 1, 0): "exit"}
    run = echo_run(plan, n_envs=3, n_steps=9, workers=1, recurrent="gru")
    with closing(run.envs):
        faults, cuts = check_with_deaths(run, 2)
    assert faults[-1] == {"exception": 1, "killed": 1}
    assert cuts["in a rollout"] == 3


def signal_to(pool: ProcessPool, worker: int, number: int) -> None:
    running = pool._processes[worker]._process
    assert running is not None
    running.send_signal(number)
    if number == signal.SIGKILL:
        running.wait()


def kill(pool: ProcessPool, worker: int) -> None:
    """Kill a worker, and have the pool check for dead workers at the next poll."""
    signal_to(pool, worker, signal.SIGKILL)
    pool._next_look = 0.0


def test_step_completed_before_worker_death_is_kept_and_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = echo_run({}, n_envs=4, n_steps=9, workers=2, recurrent="gru")
    pool = run.envs
    assert isinstance(pool, ProcessPool)
    recv, flags, killed = pool.recv, pool._signals.flags, []

    def recv_after_worker_death(at_least: int, seconds: float | None = None) -> list[int]:
        if not killed and run.collector.schedule.step == [4, 4]:
            while flags[0] != DONE:
                time.sleep(0.001)
            kill(pool, 0)
            killed.append(0)
        return recv(2, seconds if killed else None)  # always waits for both

    monkeypatch.setattr(pool, "recv", recv_after_worker_death)
    with closing(pool):
        faults, cuts = check_with_deaths(run, 2)
    assert faults[-1] == {"killed": 1}
    assert cuts["in a rollout"] > 0


@pytest.mark.parametrize("fails", [False, True], ids=["waiting for actions", "waiting for a retry"])
def test_worker_death_truncates_slice_that_is_one_rollout_ahead(fails: bool) -> None:
    """The worker of environments 0 and 1 dies while they wait one rollout ahead of environments 2 and 3."""
    plan: FaultPlan = {(0, episode, 1): "raise" for episode in range(0, 20, 2)} if fails else {}
    run = echo_run(plan, n_envs=4, n_steps=8, workers=2, overlap="strict", recurrent="gru")
    collector, pool = run.collector, run.envs
    assert isinstance(pool, ProcessPool)

    def is_stop_reached() -> bool:
        """Whether the slice that is ahead has reached the step to stop after."""
        seed, step, _ = decode_states(torch.from_numpy(pool.block.obs[:1]))[0]
        at_fault = step == 1 and seed in [episode_seed(SEED, 0, episode) for episode in range(0, 20, 2)]
        return collector.schedule.rollout == [1, 0] and collector.schedule.step[0] > 1 and at_fault == fails

    def kill_slice_ahead() -> None:
        signal_to(pool, 1, signal.SIGSTOP)
        while not is_stop_reached():
            collector.poll()
        collector._min_ready = 2
        signal_to(pool, 1, signal.SIGCONT)
        collector.poll(20.0)  # until both are ready
        assert sorted(collector.schedule.waiting) == [0, 1]
        assert collector.schedule.rollout == [1, 0]
        assert list(collector.faults.retry) == ([0] if fails else [])
        kill(pool, 0)
        collector.poll()

    with closing(pool):
        faults, _ = check_with_deaths(run, 3, prepare=kill_slice_ahead)
    # The exception counts for the rollout ahead, not for the one that is finished first.
    first = EnvModel(0, plan)
    expected_trajectory(first, [0] * 8)
    assert faults[0] == Counter({"exception": first.faults, "killed": 1})
    assert faults[1]["exception"] > first.faults or not fails


@pytest.mark.parametrize("kind", [Echo, CheckpointableEcho])
def test_checkpoint_after_worker_death_restores_end_of_rollout(kind: type[Echo]) -> None:
    """The worker dies in the last step of one slice, after the other slice has completed its last step."""
    models = [EnvModel(env, {}) for env in range(2)]
    for model in models:
        expected_trajectory(model, [0] * 8)
    plan: FaultPlan = {(env, model.episode, model.step): "slow" for env, model in enumerate(models)}  # their ninth step
    shape = {"n_envs": 2, "n_steps": 9, "workers": 1, "slices": 2, "env": kind}
    run, again = echo_run(plan, **shape), echo_run({}, **shape)
    checkers = [TransitionChecker(index) for index in range(2)]
    with closing(run.envs), closing(again.envs):
        assert isinstance(run.envs, ProcessPool)
        while not run.collector.schedule.parked:
            run.collector.poll()
        kill(run.envs, 0)
        rollout = run.collector.finish().rollout
        assert run.collector.stats.faults == {"killed": 1}
        again.collector.load_state_dict(save_and_load(run.collector.state_dict()))
        for number in range(3):
            for index, checker in enumerate(checkers):
                checker.check(number, recorded_trajectory(rollout, index), actions_of(rollout, index))
            rollout = again.collect()


@pytest.mark.parametrize("kind", [Echo, CheckpointableEcho])
def test_checkpoint_with_pending_retry_restores_end_of_rollout(kind: type[Echo]) -> None:
    """Environment 0 fails in the first step of the next rollout, which environment 1 has already completed."""
    model = EnvModel(0, {})
    expected_trajectory(model, [0] * 8)
    shape = {"n_envs": 2, "n_steps": 8, "workers": 1, "slices": 1, "overlap": "strict", "env": kind}
    run, again = echo_run({(0, model.episode, model.step): "raise"}, **shape), echo_run({}, **shape)
    checkers = [TransitionChecker(index) for index in range(2)]
    with closing(run.envs), closing(again.envs):
        rollout = run.collector.finish().rollout
        while not run.collector.faults.retry:
            run.collector.poll()
        assert run.collector.schedule.step == [0]
        again.collector.load_state_dict(save_and_load(run.collector.state_dict()))
        for number in range(3):
            for index, checker in enumerate(checkers):
                checker.check(number, recorded_trajectory(rollout, index), actions_of(rollout, index))
            rollout = again.collect()


@settings(max_examples=10)
@given(
    st.data(),
    st.integers(2, 6),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(2, 9),
    st.sampled_from(["off", "strict"]),
    st.sampled_from(["none", "gru"]),
)
def test_rollouts_are_correct_with_random_worker_deaths(
    data: st.DataObject, n_envs: int, workers: int, slices: int, n_steps: int, overlap: str, recurrent: str
) -> None:
    plan = data.draw(fault_plans(n_envs))
    deaths = st.lists(st.tuples(st.integers(0, n_envs - 1), st.integers(1, 5)), min_size=1, max_size=3)
    for env, episode in data.draw(deaths):
        plan[env, episode, data.draw(st.sampled_from([0, 0, IN_RESET]))] = "exit"
    plan = {where: fault for where, fault in plan.items() if fault in ("raise", "exit")}
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run = echo_run(plan, workers=workers, slices=slices, **shape)
    with closing(run.envs):
        check_with_deaths(run, 5)
