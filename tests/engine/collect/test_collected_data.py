"""Rollouts of environments that fail: what happened is there once, in its place, and what did not happen is not there.

Each environment says where it is and what was done to it (`Echo`), so that every column can be checked in every step.
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
from fault_envs import IN_RESET, LONGEST, Break, Echo, EchoReals, Place, SavedEcho, echo_place, echo_reward
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from small_envs import counting_length, counting_terminates
from small_runs import SmallRun, floats, frozen, small_run
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
from unidle.envs.protocol import Fault
from unidle.envs.spec import probe
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.timeline import Timeline

SEED = 3
CHECKED = 8  # first steps in which what is not finite is still the user's mistake
Plan = dict[tuple[int, int, int], Break]  # (environment, episode, step or IN_RESET) → how it fails there
FIELDS = ("obs", "starts", "actions", "rewards", "terminated", "truncated", "states", "final_obs", "final_at")


@pytest.fixture(scope="module", autouse=True)
def _quick_to_notice() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "POLL_SECONDS", 0.02)
        yield


# -- what must be there ------------------------------------------------------------------------------------------------


class Life:
    """Where one environment stands, worked out from its plan and the actions it got."""

    def __init__(self, env: int, plan: Plan) -> None:
        self._env, self._plan = env, plan
        self.faults = 0  # that it must have told of so far
        self._good_steps = 0
        self._begin_after(-1)

    @property
    def place(self) -> Place:
        return self.seed, self.step, self.actions[-1] if self.actions else -1

    def _begin_after(self, episode: int) -> None:
        """The first later episode that can be reset; each that cannot is a fault."""
        episode += 1
        while self._breaks(episode, IN_RESET):
            self.faults += 1
            episode += 1
        self.episode, self.step = episode, 0
        self.seed = episode_seed(SEED, self._env, episode)
        self.actions: list[int] = []  # of the open episode
        self.total = 0.0

    def _breaks(self, episode: int, step: int) -> Break | None:
        return self._plan.get((self._env, episode, step))

    @property
    def _is_last(self) -> bool:
        return self.step + 1 == counting_length(self.seed, LONGEST)

    def fail(self) -> bool:
        """Whether the step that comes next does not happen; if so, another episode begins."""
        how = self._breaks(self.episode, self.step)
        if how == "nan observation" and self._is_last and counting_terminates(self.seed):
            how = None  # nobody looks at what comes after the end
        if how is not None and how != "raise" and self._good_steps < CHECKED:
            reject()
        if how == "raise":
            self.faults += 1
            self._begin_after(self.episode)
        elif self._is_last and self._breaks(self.episode + 1, IN_RESET):
            self._begin_after(self.episode)  # which counts the fault
        elif how is not None:  # it is seen when the next episode has begun already
            self.faults += 1
            self._begin_after(self.episode + self._is_last)
        else:
            return False
        return True

    def act(self, action: int) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated; the next episode is begun by `go_on`."""
        last, self._good_steps = self._is_last, self._good_steps + 1
        self.step += 1
        self.actions.append(action)
        reward = echo_reward(self.seed, self.step, action)
        self.total += reward
        terminates = counting_terminates(self.seed)
        return reward, last and terminates, last and not terminates

    def go_on(self) -> None:
        self._begin_after(self.episode)


@dataclass
class Column:
    """What one environment must have in one rollout."""

    obs: list[Place] = field(default_factory=list)
    starts: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    finals: dict[int, Place] = field(default_factory=dict)
    ended: list[tuple[int, float, int]] = field(default_factory=list)  # step, return and length of whole episodes

    def stand(self, life: Life) -> None:
        self.obs.append(life.place)
        self.starts.append(life.step == 0)


def expected_column(life: Life, actions: Sequence[int]) -> Column:
    column = Column()
    for t, action in enumerate(actions):
        before = life.place
        while life.fail():
            if t > 0 and not (column.terminated[-1] or column.truncated[-1]):
                column.truncated[-1] = True
                column.finals[t - 1] = before
        column.stand(life)
        reward, terminated, truncated = life.act(action)
        column.rewards.append(reward)
        column.terminated.append(terminated)
        column.truncated.append(truncated)
        if truncated:
            column.finals[t] = life.place
        if terminated or truncated:
            column.ended.append((t, life.total, life.step))
            life.go_on()
    column.stand(life)
    return column


# -- what is there -----------------------------------------------------------------------------------------------------


def places(obs: Tensor) -> list[Place]:
    """[n, obs_bytes] → where each row was seen."""
    return [echo_place(row) for row in floats(obs, 5).double().numpy()] if len(obs) else []


def column_of(rollout: Rollout, env: int) -> Column:
    n_envs = rollout.shape[1]
    at = rollout.final_at.tolist()
    assert len(set(at)) == len(at), "two last observations of one step"
    finals = {i // n_envs: place for i, place in zip(at, places(rollout.final_obs)) if i % n_envs == env}
    columns = [getattr(rollout, name)[:, env].tolist() for name in ("starts", "rewards", "terminated", "truncated")]
    return Column(places(rollout.obs[:, env]), *columns, finals)


def actions_of(rollout: Rollout, env: int) -> list[int]:
    taken: list[int] = rollout.actions[:, env, 0].int().tolist()
    return taken


def copied(rollout: Rollout) -> dict[str, Tensor]:
    return {name: getattr(rollout, name).clone() for name in FIELDS}


def echo_run(plan: Plan, **settings: Any) -> SmallRun:
    breaks = {(episode_seed(SEED, env, episode), step): how for (env, episode, step), how in plan.items()}
    batch_size = settings["n_envs"] * settings["n_steps"]
    env = settings.pop("env", Echo)
    return small_run(env, seed=SEED, kwargs={"breaks": breaks}, batch_size=batch_size, **settings)


def next_slot(run: SmallRun) -> RolloutSlot:
    """The next whole rollout, after which the other one, if there is one, has gone on for a bit."""
    collector = run.collector
    while collector.schedule.newest < collector.schedule.oldest + collector.n_slots - 1:
        collector.open_rollout()
    slot = collector.finish()
    for _ in range(3 * (collector.n_slots - 1)):
        collector.poll(0.001)
    return slot


def assert_acted_on_what_is_recorded(slot: RolloutSlot, carried: Tensor) -> None:
    """Every action is the policy's for the row beside it, with the state that the step before it left behind."""
    rollout, policy = slot.rollout, slot.policy
    assert torch.equal(rollout.states[0], carried)
    for t in range(rollout.shape[0]):
        with torch.no_grad():
            state = rollout.states[t] * ~rollout.starts[t].unsqueeze(-1)
            obs = rollout.obs[t].clone()  # aligned in memory as the block is, which the last bit depends on
            params, after = policy.act(obs, state if policy.state_size else None)
            action = policy.distribution.sample(params, slot.inference.noise[t])
        assert torch.equal(rollout.actions[t], action)
        # So the value of what was seen last before a cut is asked with the state that came out of the last whole step.
        assert after is None or torch.equal(rollout.states[t + 1], after)


# -- faults that come the same each time -------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn, n_envs: int) -> Plan:
    """Up to eight faults; few enough never to be too many in a row."""
    plan: Plan = {}
    envs = st.integers(0, n_envs - 1)
    for env, episode, offset in draw(st.lists(st.tuples(envs, st.integers(0, 9), st.integers(0, 4)), max_size=5)):
        plan[env, episode, offset % counting_length(episode_seed(SEED, env, episode), LONGEST)] = "raise"
    for env, episode in draw(st.lists(st.tuples(envs, st.integers(1, 9)), max_size=3)):
        plan[env, episode, IN_RESET] = "raise"
    nans = st.sampled_from(["nan reward", "nan observation"])
    for env, episode, offset, how in draw(
        st.lists(st.tuples(envs, st.integers(6, 12), st.integers(0, 4), nans), max_size=2)
    ):
        plan[env, episode, offset % counting_length(episode_seed(SEED, env, episode), LONGEST)] = how
    return plan


def check_rollouts(run: SmallRun, plan: Plan, rollouts: int) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Collect, and compare everything with what must be there; returns the rollouts and a checkpoint at each end."""
    collector, n_envs = run.collector, run.envs.n_envs
    collector.schedule.n_rollouts = rollouts
    for env in range(n_envs):  # whatever the actions: it passes plans over that are not faults but mistakes
        expected_column(Life(env, plan), [0] * rollouts * run.rollout.shape[0])
    told: list[Fault] = []
    collector.faults.on_fault = lambda fault, rollout: told.append(fault)
    lives = [Life(env, plan) for env in range(n_envs)]
    taken, checkpoints, returns, lengths = [], [], [], []
    carried = torch.zeros(n_envs, run.policy.state_size)
    for _ in range(rollouts):
        slot = next_slot(run)
        rollout = slot.rollout
        columns = [expected_column(life, actions_of(rollout, env)) for env, life in enumerate(lives)]
        for env, column in enumerate(columns):
            ended, column.ended = column.ended, []
            assert column_of(rollout, env) == column, f"environment {env}"
            column.ended = ended
        assert_acted_on_what_is_recorded(slot, carried)
        carried = rollout.states[-1].clone()
        # Whole episodes alone are results, by time, then environment.
        for t in range(rollout.shape[0]):
            for column in columns:
                returns += [total for step, total, _ in column.ended if step == t]
                lengths += [length for step, _, length in column.ended if step == t]
        assert list(collector.stats.recent_returns) == returns[-100:]
        assert list(collector.stats.recent_lengths) == lengths[-100:]
        assert collector.stats.episodes == len(returns)
        # A fault counts with the rollout it was in, whichever was being learned from.
        assert collector.stats.faults["exception"] == sum(life.faults for life in lives)
        # And the way back to where each environment stands.
        state = collector.state_dict()
        for env, life in enumerate(lives):
            assert collector.log.actions(env)[:, 0].tolist() == life.actions
            assert state["episode"][env] == life.episode
        assert places(state["obs"]) == [life.place for life in lives]
        assert state["starts"].tolist() == [life.step == 0 for life in lives]
        taken.append(copied(rollout))
        checkpoints.append(frozen(state))
    while collector.poll(1.0):
        pass
    assert Counter(fault.env for fault in told) == {env: life.faults for env, life in enumerate(lives) if life.faults}
    assert collector.stats.faults == Counter(fault.kind for fault in told)
    assert collector.stats.faults.keys() <= {"exception"}
    return taken, checkpoints


def check_going_on(run: SmallRun, state: Any, rest: list[dict[str, Tensor]]) -> None:
    """A collector that takes up `state` brings the rest of the rollouts, bit for bit."""
    assert run.collector.load_state_dict(state) == []
    run.collector.schedule.n_rollouts = run.collector.schedule.oldest + len(rest)
    for expected in rest:
        rollout = copied(next_slot(run).rollout)
        for name in FIELDS:
            assert torch.equal(rollout[name], expected[name]), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_each_environment_got_what_is_recorded_and_nothing_else_though_some_fail(device: str, overlap: str) -> None:
    place, shape = torch.device(device), (8, 6)
    maker = env_maker(EchoReals)
    env_spec = probe(maker)
    torch.manual_seed(SEED)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(net_arch=(32, 32))).to(place)
    FlatParameters(policy)
    sizes = env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0
    rollouts = [Rollout(*shape, *sizes, place) for _ in range(2 if overlap == "strict" else 1)]
    pool = ProcessPool(maker, env_spec, shape[1], SEED, workers=2, slices=2)
    collector = HostCollector(pool, policy, rollouts, SEED, Timeline(), Capture(place, print))
    with closing(collector):
        collector.start()
        for _ in range(12):
            slot = collector.finish()
            rollout = slot.rollout
            seen = floats(rollout.obs.cpu(), 3)
            got = rollout.actions[..., 0].cpu().clamp(-1, 1)
            ended = (rollout.terminated | rollout.truncated).cpu()
            assert torch.equal(rollout.rewards.cpu(), got)
            after = torch.stack([seen[:-1, :, 0], seen[:-1, :, 1] + 1, got], -1)  # [T, N] what each step led to
            assert torch.equal(seen[1:][~ended], after[~ended])
            assert torch.equal(floats(rollout.final_obs.cpu(), 3), after.flatten(0, 1)[rollout.final_at.cpu()])
            assert torch.equal(rollout.starts[1:].cpu(), ended)
            assert torch.equal(rollout.starts.cpu(), seen[..., 1] == 0)
            assert slot.inference._is_staged == (device == "cpu")  # on a GPU the kernel puts them where they are read
            collector.open_rollout()
        assert collector.stats.faults["exception"] > 10
        assert collector.stats.episodes > 30


# (steps, plan) of two environments. The first steps of all; the first of a rollout, when the last one ended with a
# whole episode and when it did not; resets that fail, also the first and several in a row; a fault in most episodes.
BY_HAND: dict[str, tuple[int, Plan]] = {
    "at the very beginning": (4, {(0, 0, IN_RESET): "raise", (1, 0, 0): "raise", (1, 1, 0): "raise"}),
    "one-step rollouts": (1, {(env, episode, step): "raise" for env in range(2) for episode, step in ((0, 0), (2, 1))}),
    "at each first observation": (3, {(env, episode, 0): "raise" for env in range(2) for episode in (1, 3, 5)}),
    "resets": (5, {(0, episode, IN_RESET): "raise" for episode in (2, 3, 4, 8)} | {(1, 6, IN_RESET): "raise"}),
    "often": (7, {(env, episode, 1): "raise" for env in range(2) for episode in range(16) if episode % 4}),
}
OVERLAP = pytest.mark.parametrize("overlap", ["off", "strict"])


@OVERLAP
@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.sampled_from(["none", "gru"]))
def test_a_fault_leaves_every_transition_in_its_place(
    overlap: str, data: st.DataObject, n_envs: int, n_steps: int, rollouts: int, recurrent: str
) -> None:
    plan = data.draw(plans(n_envs))
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run, again = (echo_run(plan, **shape) for _ in range(2))
    with closing(run.envs), closing(again.envs):
        taken, checkpoints = check_rollouts(run, plan, rollouts)
        if all(how == "raise" for how in plan.values()):  # what is not finite is a mistake in the first steps
            first = data.draw(st.integers(0, rollouts - 1))
            check_going_on(again, checkpoints[first], taken[first + 1 :])


@OVERLAP
@pytest.mark.parametrize("case", BY_HAND)
def test_a_fault_at_an_edge_leaves_every_transition_in_its_place(case: str, overlap: str) -> None:
    n_steps, plan = BY_HAND[case]
    shape = {"n_envs": 2, "n_steps": n_steps, "overlap": overlap, "recurrent": "gru"}
    run, again = (echo_run(plan, **shape) for _ in range(2))
    with closing(run.envs), closing(again.envs):
        taken, checkpoints = check_rollouts(run, plan, 8)
        assert run.collector.stats.faults["exception"] >= 3
        check_going_on(again, checkpoints[2], taken[3:])


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
def test_a_fault_in_a_worker_leaves_every_transition_in_its_place(
    data: st.DataObject, n_envs: int, workers: int, slices: int, n_steps: int, overlap: str, recurrent: str
) -> None:
    plan = data.draw(plans(n_envs))
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run, here = echo_run(plan, workers=workers, slices=slices, **shape), echo_run(plan, **shape)
    with closing(run.envs), closing(here.envs):
        taken, _ = check_rollouts(run, plan, 6)
        same, _ = check_rollouts(here, plan, 6)
    for one, other in zip(taken, same):
        assert all(torch.equal(one[name], other[name]) for name in FIELDS)


# -- workers that die --------------------------------------------------------------------------------------------------


class Ledger:
    """Follows one environment through its rollouts, whatever breaks its episodes off, and keeps count of it."""

    def __init__(self, env: int) -> None:
        self._episodes = {episode_seed(SEED, env, episode): episode for episode in range(500)}
        self._env = env
        self.seed = episode_seed(SEED, env, 0)
        self.step, self.total = 0, 0.0
        self.actions: list[int] = []
        self.breaks = 0  # episodes that are missing, or have no end
        self.cut_where: Counter[str] = Counter()
        self.results: list[tuple[int, int, float, int]] = []  # rollout, step, return and length of whole episodes

    @property
    def episode(self) -> int:
        return self._episodes[self.seed]

    @property
    def place(self) -> Place:
        return self.seed, self.step, self.actions[-1] if self.actions else -1

    def begin(self, place: Place, after: int) -> None:
        """The first observation of an episode later than the one given."""
        seed, step, action = place
        assert (step, action) == (0, -1)
        assert self._episodes[seed] > after
        self.breaks += self._episodes[seed] - after - 1
        self.seed, self.step, self.total, self.actions = seed, 0, 0.0, []

    def take(self, number: int, column: Column, actions: Sequence[int]) -> None:
        if column.obs[0] != self.place:  # broken off between two rollouts: the last one ended with what was seen last
            self.breaks += 1
            self.cut_where["at the start of a rollout"] += self.step > 0
            self.begin(column.obs[0], self.episode)
        finals = dict(column.finals)
        for t, action in enumerate(actions):
            assert column.obs[t] == self.place
            assert column.starts[t] == (self.step == 0)
            self.step += 1
            self.actions.append(action)
            reward = echo_reward(self.seed, self.step, action)
            self.total += reward
            over, terminates = self.step == counting_length(self.seed, LONGEST), counting_terminates(self.seed)
            assert column.rewards[t] == reward
            assert column.terminated[t] == (over and terminates)
            if column.truncated[t]:
                assert finals.pop(t) == self.place
            if over:
                assert column.truncated[t] != column.terminated[t]
                self.results.append((number, t, self.total, self.step))
                self.begin(column.obs[t + 1], self.episode)
            elif column.truncated[t]:
                self.breaks += 1
                self.cut_where["in a rollout" if t + 1 < len(actions) else "with a rollout"] += 1
                self.begin(column.obs[t + 1], self.episode)
        assert not finals
        assert column.obs[-1] == self.place
        assert column.starts[-1] == (self.step == 0)


def check_with_deaths(
    run: SmallRun, rollouts: int, before: Callable[[], None] = lambda: None
) -> tuple[list[Counter[str]], Counter[str]]:
    """Collect, and follow every environment; returns the faults counted by each rollout, and where episodes are cut."""
    collector, envs = run.collector, run.envs
    told: list[Fault] = []
    collector.faults.on_fault = lambda fault, rollout: told.append(fault)
    collector.schedule.n_rollouts = rollouts
    ledgers = [Ledger(env) for env in range(envs.n_envs)]
    carried = torch.zeros(envs.n_envs, run.policy.state_size)
    before()
    counted = []
    for number in range(rollouts):
        slot = next_slot(run)
        counted.append(collector.stats.faults.copy())
        for env, ledger in enumerate(ledgers):
            ledger.take(number, column_of(slot.rollout, env), actions_of(slot.rollout, env))
            assert collector.log.actions(env)[:, 0].tolist() == ledger.actions
        assert_acted_on_what_is_recorded(slot, carried)
        carried = slot.rollout.states[-1].clone()
    while collector.poll(1.0):
        pass
    results = sorted(
        (number, t, env, *rest) for env, ledger in enumerate(ledgers) for number, t, *rest in ledger.results
    )
    assert list(collector.stats.recent_returns) == [total for *_, total, _ in results][-100:]
    assert list(collector.stats.recent_lengths) == [length for *_, length in results][-100:]
    assert collector.stats.episodes == len(results)
    assert isinstance(envs, ProcessPool)
    for lines in (job.env_ids for job in envs._jobs()):
        deaths = sum(fault.kind == "killed" and fault.env == lines[0] for fault in told)
        for env in lines:
            # Nothing is missing but for a reason: each fault is worth one episode that broke, or two where the one that
            # broke had begun within the very step that did not happen.
            own = deaths + sum(fault.kind == "exception" and fault.env == env for fault in told)
            missing = int(envs.block.episode[env]) - len(ledgers[env].results)
            assert own <= missing <= 2 * own
            assert ledgers[env].breaks <= missing
    assert collector.stats.faults == Counter(fault.kind for fault in told)
    return counted, sum((ledger.cut_where for ledger in ledgers), Counter())


def test_an_environment_whose_worker_dies_while_it_waits_for_others_of_its_slice_is_cut_after_its_step() -> None:
    # Environment 0 fails in its second step, and kills the worker when it takes it again; 1 and 2 had taken theirs.
    plan: Plan = {(0, 0, 1): "raise", (0, 1, 0): "exit"}
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
    """Have a worker killed, and the pool look for it next time it is asked."""
    signal_to(pool, worker, signal.SIGKILL)
    pool._next_look = 0.0


def test_a_step_that_was_whole_when_its_worker_died_counts_and_its_episode_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = echo_run({}, n_envs=4, n_steps=9, workers=2, recurrent="gru")
    pool = run.envs
    assert isinstance(pool, ProcessPool)
    recv, flags, died = pool.recv, pool._signals.flags, []

    def recv_after_a_death(at_least: int, seconds: float | None = None) -> list[int]:
        if not died and run.collector.schedule.step.tolist() == [4, 4]:
            while flags[0] != DONE:
                time.sleep(0.001)
            kill(pool, 0)
            died.append(0)
        return recv(2, seconds if died else None)  # always both, however long one takes

    monkeypatch.setattr(pool, "recv", recv_after_a_death)
    with closing(pool):
        faults, cuts = check_with_deaths(run, 2)
    assert faults[-1] == {"killed": 1}
    assert cuts["in a rollout"] > 0


@pytest.mark.parametrize("fails", [False, True], ids=["waits for its actions", "waits to take a step again"])
def test_a_slice_that_waits_while_an_older_rollout_is_served_is_cut_where_it_stands(fails: bool) -> None:
    """Environments 0 and 1 are a rollout ahead of 2 and 3, which are served first, when their worker dies."""
    plan: Plan = {(0, episode, 1): "raise" for episode in range(0, 20, 2)} if fails else {}
    run = echo_run(plan, n_envs=4, n_steps=8, workers=2, overlap="strict", recurrent="gru")
    collector, pool = run.collector, run.envs
    assert isinstance(pool, ProcessPool)

    def is_next() -> bool:
        """Whether the next step of the slice ahead is one to stop after."""
        seed, step, _ = places(torch.from_numpy(pool.block.obs[:1]))[0]
        at_fault = step == 1 and seed in [episode_seed(SEED, 0, episode) for episode in range(0, 20, 2)]
        return collector.schedule.rollout == [1, 0] and collector.schedule.step[0] > 1 and at_fault == fails

    def have_it_die() -> None:
        signal_to(pool, 1, signal.SIGSTOP)
        while not is_next():
            collector.poll()
        collector._min_ready = 2
        signal_to(pool, 1, signal.SIGCONT)
        collector.poll()
        assert sorted(collector.schedule.waiting) == [0, 1]
        assert collector.schedule.rollout == [1, 0]
        assert list(collector.faults.retry) == ([0] if fails else [])
        kill(pool, 0)
        collector.poll()

    with closing(pool):
        faults, _ = check_with_deaths(run, 3, before=have_it_die)
    # The exception that it came with counts with the rollout ahead, though another was to be finished first.
    first = Life(0, plan)
    expected_column(first, [0] * 8)
    assert faults[0] == Counter({"exception": first.faults, "killed": 1})
    assert faults[1]["exception"] > first.faults or not fails


@pytest.mark.parametrize("kind", [Echo, SavedEcho])
def test_a_checkpoint_after_a_death_at_the_end_of_a_rollout_leads_back_to_that_end(kind: type[Echo]) -> None:
    """One slice has taken its last step in the rollout when their worker dies in that of the other one."""
    lives = [Life(env, {}) for env in range(2)]
    for life in lives:
        expected_column(life, [0] * 8)
    plan: Plan = {(env, life.episode, life.step): "slow" for env, life in enumerate(lives)}  # their ninth step
    shape = {"n_envs": 2, "n_steps": 9, "workers": 1, "slices": 2, "env": kind}
    run, again = echo_run(plan, **shape), echo_run({}, **shape)
    ledgers = [Ledger(index) for index in range(2)]
    with closing(run.envs), closing(again.envs):
        assert isinstance(run.envs, ProcessPool)
        while not run.collector.schedule.parked:
            run.collector.poll()
        kill(run.envs, 0)
        rollout = run.collector.finish().rollout
        assert run.collector.stats.faults == {"killed": 1}
        again.collector.load_state_dict(frozen(run.collector.state_dict()))
        for number in range(3):
            for index, ledger in enumerate(ledgers):
                ledger.take(number, column_of(rollout, index), actions_of(rollout, index))
            rollout = again.collect()


@pytest.mark.parametrize("kind", [Echo, SavedEcho])
def test_a_checkpoint_while_a_step_is_to_be_taken_again_leads_back_to_the_end_of_the_rollout(kind: type[Echo]) -> None:
    """Environment 0 fails in the first step of the next rollout, which environment 1 then has behind it already."""
    life = Life(0, {})
    expected_column(life, [0] * 8)
    shape = {"n_envs": 2, "n_steps": 8, "workers": 1, "slices": 1, "overlap": "strict", "env": kind}
    run, again = echo_run({(0, life.episode, life.step): "raise"}, **shape), echo_run({}, **shape)
    ledgers = [Ledger(index) for index in range(2)]
    with closing(run.envs), closing(again.envs):
        rollout = run.collector.finish().rollout
        while not run.collector.faults.retry:
            run.collector.poll()
        assert run.collector.schedule.step.tolist() == [0]
        again.collector.load_state_dict(frozen(run.collector.state_dict()))
        for number in range(3):
            for index, ledger in enumerate(ledgers):
                ledger.take(number, column_of(rollout, index), actions_of(rollout, index))
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
def test_a_worker_that_dies_leaves_every_transition_in_its_place(
    data: st.DataObject, n_envs: int, workers: int, slices: int, n_steps: int, overlap: str, recurrent: str
) -> None:
    plan = data.draw(plans(n_envs))
    deaths = st.lists(st.tuples(st.integers(0, n_envs - 1), st.integers(1, 5)), min_size=1, max_size=3)
    for env, episode in data.draw(deaths):
        plan[env, episode, data.draw(st.sampled_from([0, 0, IN_RESET]))] = "exit"
    plan = {where: how for where, how in plan.items() if how in ("raise", "exit")}
    shape = {"n_envs": n_envs, "n_steps": n_steps, "overlap": overlap, "recurrent": recurrent}
    run = echo_run(plan, workers=workers, slices=slices, **shape)
    with closing(run.envs):
        check_with_deaths(run, 5)
