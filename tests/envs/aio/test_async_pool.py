"""`AsyncEnvs`: environments on an event loop equal serial ones, do not wait for each other, and leave nothing open."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from action_faults import CHECKED_STEPS, ENV_SPEC, SEED, ActionFaultEnv, Do, expected_position, position
from async_fault_env import AsyncFaultEnv
from processes import wait_until
from toy_envs import Walk

import unidle
from unidle.config import Engine
from unidle.engine.build import make_envs
from unidle.envs.aio.async_env import GymnasiumAsyncEnv, Threaded
from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.make import EnvMaker, env_maker
from unidle.envs.open_episode import Difference, OpenEpisode
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.errors import TrainingError, UsageError
from unidle.tasks.web.gym_env import SiteExploreEnv
from unidle.tasks.web.site.serve import SiteServer, SiteServerConfig, in_background

FIRST_INDEX = 40  # index of the first environment


Make = Callable[..., AsyncEnvs]


def make_pool(env: Any = AsyncFaultEnv, n_envs: int = 4, slices: int | None = None, **settings: Any) -> AsyncEnvs:
    maker = replace(env_maker(env, settings.pop("kwargs", None)), step_timeout=settings.pop("step_timeout", None))
    return AsyncEnvs(maker, settings.pop("env_spec", ENV_SPEC), n_envs, SEED, FIRST_INDEX, slices, **settings)


@pytest.fixture
def start_pool() -> Iterator[Make]:
    pools: list[AsyncEnvs] = []

    def start_pool(*args: Any, **settings: Any) -> AsyncEnvs:
        pools.append(make_pool(*args, **settings))
        pools[-1].start(np.zeros(pools[-1].n_envs, np.int64))
        return pools[-1]

    yield start_pool
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    AsyncFaultEnv.open, AsyncFaultEnv.closed_on = 0, set()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert wait_until(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    assert AsyncFaultEnv.open == 0
    gc.collect()
    # The test's own server notices a moment later that its clients have gone.
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def send(pool: HostEnvs, *actions: Do, slices: list[int] | None = None) -> None:
    chosen = list(range(len(pool.bounds))) if slices is None else slices
    env_ids = [env_id for number in chosen for env_id in range(*pool.bounds[number])]
    pool.block.actions[env_ids, 0] = actions or [Do.STEP] * len(env_ids)
    pool.send(chosen)


def step_all(pool: HostEnvs, *actions: Do) -> None:
    send(pool, *actions)
    assert pool.recv(len(pool.bounds)) == list(range(len(pool.bounds)))


def positions(pool: HostEnvs) -> list[tuple[int, int]]:
    return [position(obs) for obs in pool.block.obs]


# -- equality with serial envs -----------------------------------------------------------------------------------------

FAULTY_ACTIONS = [Do.STEP] * 8 + [
    Do.TERMINATE,
    Do.TRUNCATE,
    Do.RAISE,
    Do.TERMINATE_AND_FAIL_RESET,
    Do.NAN_REWARD,
    Do.INFINITE_OBSERVATION,
]
FAULTY_ACTIONS += [Do.TRUNCATE_WITH_NAN, Do.TERMINATE_WITH_NAN_REWARD, Do.TERMINATE_AND_NAN_RESET]


def play_with_faults(envs: HostEnvs, rounds: int = 90) -> list[Any]:
    """Everything observable in steps with random faults and skipped environments."""
    rng = np.random.default_rng(3)
    seen: list[Any] = []
    block = envs.block
    envs.start(np.arange(envs.n_envs))
    for number in range(rounds):
        block.actions[:, 0] = rng.choice(
            FAULTY_ACTIONS if number >= 3 * CHECKED_STEPS else FAULTY_ACTIONS[:11], envs.n_envs
        )
        block.skip[:] = rng.random(envs.n_envs) < 0.1
        done: list[int] = []
        envs.send(range(len(envs.bounds)))
        while len(done) < len(envs.bounds):
            done += envs.recv(1)
        assert sorted(done) == list(range(len(envs.bounds)))
        stepped = ~block.retry & ~block.skip
        ended = stepped & (block.terminated | block.truncated)
        seen += [block.obs.copy(), block.retry & ~block.skip, block.episode.copy()]
        seen += [block.reward[stepped], block.terminated[stepped], block.truncated[stepped]]
        seen += [block.episode_return[ended], block.episode_length[ended], block.final_obs[stepped & block.truncated]]
        seen.append(sorted((fault.env, fault.kind, fault.text.splitlines()[0]) for fault in envs.faults))
        envs.faults.clear()
    return seen


@pytest.fixture(scope="module")
def serial_history() -> list[Any]:
    return play_with_faults(
        SerialEnvs(env_maker(ActionFaultEnv), ENV_SPEC, 6, SEED, FIRST_INDEX, max_env_restarts=10**6)
    )


@pytest.mark.parametrize("slices", [None, 4, 1])
def test_steps_and_faults_equal_serial_envs(serial_history: list[Any], slices: int | None) -> None:
    pool = make_pool(n_envs=6, slices=slices, max_env_restarts=10**6)
    try:
        assert len(pool.bounds) == (slices or 6)
        seen = play_with_faults(pool)
    finally:
        pool.close()
    assert sum(bool(faults) for faults in seen[9::10]) > 20
    for ours, theirs in zip(seen, serial_history, strict=True):
        np.testing.assert_equal(ours, theirs)


def test_threaded_envs_equal_serial_envs(serial_history: list[Any]) -> None:
    pool = make_pool(partial(Threaded, ActionFaultEnv), n_envs=6, max_env_restarts=10**6)
    try:
        seen = play_with_faults(pool)
    finally:
        pool.close()
    for ours, theirs in zip(seen, serial_history, strict=True):
        np.testing.assert_equal(ours, theirs)


def test_event_loops_in_workers_equal_serial_envs(serial_history: list[Any]) -> None:
    maker = env_maker(AsyncFaultEnv)
    pool = ProcessPool(maker, ENV_SPEC, 6, SEED, 2, FIRST_INDEX, 3, max_env_restarts=10**6)
    try:
        assert len(pool.bounds) == 6
        seen = play_with_faults(pool)
    finally:
        pool.close()
    for ours, theirs in zip(seen, serial_history, strict=True):
        np.testing.assert_equal(ours, theirs)


# -- slow environments -------------------------------------------------------------------------------------------------


def test_slow_step_does_not_block_other_envs(start_pool: Make) -> None:
    pool = start_pool(n_envs=4)
    send(pool, Do.STEP, Do.SLOW, Do.STEP, Do.STEP)
    rounds, start_time = 0, time.monotonic()
    while 1 not in (done := pool.recv(1)):
        rounds += len(done)
        send(pool, slices=done)
    assert time.monotonic() - start_time >= 0.39
    assert rounds > 3 * 40
    assert position(pool.block.obs[1]) == expected_position(FIRST_INDEX + 1, 0, 1)


@pytest.mark.parametrize("action", [Do.TERMINATE, Do.RAISE, Do.TERMINATE_AND_FAIL_RESET])
def test_slow_reset_does_not_block_other_envs(start_pool: Make, tmp_path: Path, action: Do) -> None:
    pool = start_pool(kwargs={"folder": str(tmp_path)}, n_envs=3)
    (tmp_path / "reset slow").touch()
    send(pool, action, Do.STEP, Do.STEP)
    received_at = [time.monotonic()]
    while 0 not in (done := pool.recv(1)):
        received_at.append(time.monotonic())
        send(pool, slices=done)
    received_at.append(time.monotonic())
    assert received_at[-1] - received_at[0] >= 0.39
    assert np.diff(received_at).max() < 0.35
    assert positions(pool)[0] == expected_position(FIRST_INDEX, 2 if action == Do.TERMINATE_AND_FAIL_RESET else 1, 0)


def test_worker_steps_all_its_slices_concurrently() -> None:
    pool = ProcessPool(env_maker(AsyncFaultEnv), ENV_SPEC, 8, SEED, 1, FIRST_INDEX, 8)
    try:
        pool.start(np.zeros(8, np.int64))
        start_time = time.monotonic()
        send(pool, *[Do.SLOW] * 7, Do.STEP)
        assert pool.recv(1) == [7]
        assert time.monotonic() - start_time < 0.3
        assert pool.recv(7) == list(range(7))
        assert 0.39 < time.monotonic() - start_time < 1.2
    finally:
        pool.close()


def test_recv_waits_for_requested_slices_or_timeout(start_pool: Make) -> None:
    pool = start_pool(n_envs=3)
    assert pool.recv(1) == []  # nothing to wait for
    send(pool, Do.STEP, Do.SLOW, Do.SLOW)
    start_time = time.monotonic()
    assert pool.recv(3, 0.1) == [0]
    assert 0.09 < time.monotonic() - start_time < 0.3
    assert pool.recv(5) == [1, 2]


def test_skipped_env_in_slice_is_not_stepped(start_pool: Make) -> None:
    pool = start_pool(n_envs=4, slices=2)
    pool.block.skip[:] = [True, True, False, True]
    before = pool.block.obs.copy()
    step_all(pool, Do.HANG, Do.HANG, Do.STEP, Do.HANG)
    assert np.array_equal(pool.block.obs[[0, 1, 3]], before[[0, 1, 3]])
    assert position(pool.block.obs[2]) == expected_position(FIRST_INDEX + 2, 0, 1)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_step_past_timeout_is_retried_in_new_env(start_pool: Make) -> None:
    pool = start_pool(step_timeout=0.15)
    step_all(pool)
    send(pool, Do.STEP, Do.HANG, Do.STEP, Do.STEP)
    assert 1 not in pool.recv(3)
    start_time = time.monotonic()
    assert pool.recv(1) == [1]
    assert time.monotonic() - start_time < 0.5
    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (FIRST_INDEX + 1, "hung")
    assert fault.text.startswith(
        f"Environment {FIRST_INDEX + 1} failed in episode 0 (seed {episode_seed(SEED, FIRST_INDEX + 1, 0)}), step 1: "
        "TimeoutError: step() did not finish within 0.15 s (--env-timeout)\n"
    )
    assert "asyncio.sleep(600)" in fault.text
    assert pool.block.retry.tolist() == [False, True, False, False]
    assert positions(pool) == [
        expected_position(FIRST_INDEX, 0, 2),
        expected_position(FIRST_INDEX + 1, 1, 0),
        expected_position(FIRST_INDEX + 2, 0, 2),
        expected_position(FIRST_INDEX + 3, 0, 2),
    ]
    assert AsyncFaultEnv.open == 4
    pool.faults.clear()
    step_all(pool, Do.STEP, Do.RAISE, Do.STEP, Do.STEP)
    assert [fault.kind for fault in pool.faults] == ["exception"]


def test_step_timeout_applies_in_worker_processes() -> None:
    engine = Engine(workers=2, env_timeout=0.2)
    pool = make_envs(env_maker(AsyncFaultEnv), ENV_SPEC, 4, SEED, 2, engine, FIRST_INDEX, 1)
    try:
        assert isinstance(pool, ProcessPool)
        pool.start(np.zeros(4, np.int64))
        step_all(pool, Do.STEP, Do.HANG, Do.STEP, Do.STEP)
        assert [(fault.env, fault.kind) for fault in pool.faults] == [(FIRST_INDEX + 1, "hung")]
        assert pool.block.retry.tolist() == [False, True, False, False]
    finally:
        pool.close()


def test_dead_worker_is_replaced() -> None:
    pool = ProcessPool(env_maker(AsyncFaultEnv), ENV_SPEC, 4, SEED, 2, FIRST_INDEX, 2)
    try:
        pool.start(np.zeros(4, np.int64))
        step_all(pool)
        send(pool, Do.SLOW, Do.STEP, Do.STEP, Do.STEP)
        done = pool.recv(3)
        running = pool._processes[0]._process
        assert running is not None
        running.kill()
        pool._next_check = 0.0
        assert sorted(done + pool.recv(1)) == [0, 1, 2, 3]
        assert [(fault.env, fault.kind) for fault in pool.faults] == [(FIRST_INDEX, "killed")]
        assert pool.block.retry.tolist() == [True, False, False, False]
        assert pool.restarted == [1]
        assert positions(pool) == [
            expected_position(FIRST_INDEX, 1, 0),
            expected_position(FIRST_INDEX + 1, 1, 0),
            expected_position(FIRST_INDEX + 2, 0, 2),
            expected_position(FIRST_INDEX + 3, 0, 2),
        ]
        step_all(pool)
        assert positions(pool)[:2] == [expected_position(FIRST_INDEX, 1, 1), expected_position(FIRST_INDEX + 1, 1, 1)]
    finally:
        pool.close()


def test_hung_thread_does_not_block_close() -> None:
    release = threading.Event()

    class HangingStep(Walk):
        def step(self, action: Any) -> Any:
            release.wait(20)
            return super().step(action)

    maker = partial(Threaded, HangingStep)
    pool = make_pool(maker, n_envs=2, step_timeout=0.1, env_spec=probe(env_maker(Walk)))
    try:
        pool.start(np.zeros(2, np.int64))
        start_time = time.monotonic()
        pool.send([0, 1])
        assert pool.recv(2) == [0, 1]
        assert [fault.kind for fault in pool.faults] == ["hung"] * 2
    finally:
        pool.close()
        assert time.monotonic() - start_time < 1.0
        release.set()


def test_env_that_cannot_reset_is_retried_each_step(start_pool: Make, tmp_path: Path) -> None:
    pool = start_pool(kwargs={"folder": str(tmp_path)}, n_envs=2)
    (tmp_path / "reset fails").touch()
    step_all(pool, Do.STEP, Do.RAISE)
    assert [fault.text.count("the robot fell over") > 0 for fault in pool.faults] == [True]
    step_all(pool)
    assert [(fault.env, "stuck in the mud" in fault.text) for fault in pool.faults[1:]] == [(FIRST_INDEX + 1, True)]
    assert pool.block.retry.tolist() == [False, True]
    (tmp_path / "reset fails").unlink()
    step_all(pool)
    step_all(pool)
    assert len(pool.faults) == 3
    assert position(pool.block.obs[1])[1] == 1
    assert pool.block.episode[1] == 3


def test_too_many_faults_in_a_row_raise(start_pool: Make) -> None:
    pool = start_pool(max_env_restarts=2)
    for _ in range(2):
        step_all(pool, Do.STEP, Do.STEP, Do.RAISE, Do.STEP)
    with pytest.raises(TrainingError, match=f"Environment {FIRST_INDEX + 2} failed 3 times"):
        step_all(pool, Do.STEP, Do.STEP, Do.RAISE, Do.STEP)


def test_finished_episode_resets_fault_count(start_pool: Make) -> None:
    pool = start_pool(max_env_restarts=1, n_envs=2)
    for action in (Do.RAISE, Do.TERMINATE, Do.RAISE, Do.TERMINATE, Do.RAISE):
        step_all(pool, Do.STEP, action)
    assert len(pool.faults) == 3


def test_exit_and_cancellation_in_step_are_faults(start_pool: Make) -> None:
    class CancelledStep(AsyncFaultEnv):
        async def step(self, action: Any) -> Any:
            inner = asyncio.ensure_future(asyncio.sleep(5))
            inner.cancel()
            await inner

    pool = start_pool()
    step_all(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    assert "step() raised SystemExit(3)" in pool.faults[0].text
    other = start_pool(CancelledStep, n_envs=1)
    step_all(other)
    assert "step() was cancelled by a task that it awaited" in other.faults[0].text


def test_usage_error_is_raised(start_pool: Make) -> None:
    pool = start_pool()
    with pytest.raises(UsageError, match="rewards must be finite"):
        step_all(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)


def test_failed_env_creation_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "creation fails").touch()
    with pytest.raises(OSError, match="no such robot"):
        make_pool(kwargs={"folder": str(tmp_path)})


def test_gc_threshold_is_raised_until_last_pool_closes(start_pool: Make) -> None:
    usual = gc.get_threshold()
    first = start_pool(n_envs=2)
    second = start_pool(n_envs=2)
    first.close()
    first.close()
    assert gc.get_threshold()[0] > 10 * usual[0]
    second.close()
    assert gc.get_threshold() == usual


def test_close_cancels_steps_in_flight(start_pool: Make) -> None:
    pool = start_pool(n_envs=64)
    send(pool, *[Do.HANG] * 64)
    assert pool.recv(1, 0.05) == []
    tasks = pool._slots._tasks
    assert len(tasks) == 64
    start_time = time.monotonic()
    pool.close()
    assert time.monotonic() - start_time < 0.5
    assert not tasks
    assert AsyncFaultEnv.open == 0
    assert AsyncFaultEnv.closed_on == {"environments"}
    pool.close()


def test_uncancellable_step_does_not_block_close() -> None:
    class IgnoresCancellation(AsyncFaultEnv):
        async def step(self, action: Any) -> Any:
            for _ in range(2):
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
            await asyncio.sleep(0)
            raise RuntimeError

    pool = make_pool(IgnoresCancellation, n_envs=2)
    pool.start(np.zeros(2, np.int64))
    send(pool, Do.STEP, Do.STEP)
    pool.recv(1, 0.02)
    start_time = time.monotonic()
    pool.close()
    assert time.monotonic() - start_time < 4


# -- resume ------------------------------------------------------------------------------------------------------------


def test_deterministic_env_is_resumed_by_replay(start_pool: Make) -> None:
    env_spec = probe(env_maker(Walk))
    make = partial(start_pool, partial(Threaded, Walk), n_envs=3, env_spec=env_spec)
    pool = make()
    actions_taken: list[list[np.ndarray]] = [[], [], []]
    rewards: list[np.ndarray] = []
    for step in range(8):  # episodes have six steps
        pool.block.actions[:, 0] = [step % 3, 1, 2]
        pool.send([0, 1, 2])
        assert pool.recv(3) == [0, 1, 2]
        for env_id, actions in enumerate(actions_taken):
            actions.append(pool.block.actions[env_id].copy())
        rewards.append(pool.block.reward.copy())
    obs = pool.block.obs.copy()
    points = [
        OpenEpisode(1, np.array(actions[6:]), np.array(rewards[6:])[:, env_id], obs[env_id])
        for env_id, actions in enumerate(actions_taken)
    ]
    points[2] = replace(points[2], obs=obs[0])  # not the result of these actions
    other = make()
    assert other.resume(points) == [None, None, Difference("the observation after step 2 differed", is_lost=True)]
    assert np.array_equal(other.block.obs[:2], obs[:2])
    assert other.block.episode.tolist() == [1, 1, 2]
    for each in (pool, other):
        each.block.actions[:, 0] = 1
        each.send([0, 1])
        each.recv(2)
    assert np.array_equal(other.block.obs[:2], pool.block.obs[:2])
    assert np.array_equal(other.block.reward[:2], pool.block.reward[:2])


def test_nondeterministic_env_resumes_with_next_episode(start_pool: Make) -> None:
    pool = start_pool(n_envs=3)
    first = pool.block.obs.copy()
    no_actions, one_action = np.zeros((0, 1), np.float32), np.zeros((1, 1), np.float32)
    no_rewards = np.zeros(0, np.float32)
    assert pool.states() == [None] * 3
    step_all(pool)
    points = [
        OpenEpisode(0, one_action, pool.block.reward[:1].copy(), pool.block.obs[0].copy()),
        OpenEpisode(0, no_actions, no_rewards, first[1]),
        OpenEpisode(4, no_actions, no_rewards, first[2]),
    ]
    assert pool.resume(points) == [
        Difference("its pages are not fetched again", is_lost=True),
        None,
        Difference("its first observation differed", is_lost=True),
    ]
    assert positions(pool) == [
        expected_position(FIRST_INDEX, 1, 0),
        expected_position(FIRST_INDEX + 1, 0, 0),
        expected_position(FIRST_INDEX + 2, 4, 0),
    ]


# -- choice of backend -------------------------------------------------------------------------------------------------


def test_coroutine_step_makes_env_async() -> None:
    for env in (AsyncFaultEnv, partial(AsyncFaultEnv, folder=None), partial(Threaded, Walk)):
        maker = env_maker(env)
        assert maker.kind == "async"
        assert maker.on_host() is maker
        single_env = maker()
        assert isinstance(single_env, GymnasiumAsyncEnv)
        single_env.close()
    assert env_maker(Walk).kind == "gymnasium"
    with pytest.raises(UsageError, match="whose step is a coroutine; pass the class itself"):
        env_maker(lambda: AsyncFaultEnv())()
    AsyncFaultEnv.open -= 1  # the rejected one was never closed


def test_gymnasium_view_of_async_env_equals_original() -> None:
    env, single_env = Walk(), env_maker(partial(Threaded, Walk))()
    try:
        assert np.array_equal(env.reset(seed=3)[0], single_env.reset(seed=3)[0])
        for action in (-1, 1, 0):
            ours, theirs = single_env.step(action), env.step(action)
            assert np.array_equal(ours[0], theirs[0])
            assert ours[1:] == theirs[1:]
    finally:
        single_env.close()
        single_env.close()


@pytest.mark.parametrize(
    ("engine", "workers", "kind", "slices"),
    [
        (Engine(), 2, AsyncEnvs, 4),  # two workers would pay off, but were not requested
        (Engine(subproc=False, workers=2, slices=2), 0, AsyncEnvs, 2),
        (Engine(workers=2), 2, ProcessPool, 4),
    ],
)
def test_worker_processes_are_used_only_if_requested(engine: Engine, workers: int, kind: type, slices: int) -> None:
    envs = make_envs(env_maker(AsyncFaultEnv), ENV_SPEC, 4, SEED, workers, engine)
    try:
        assert isinstance(envs, kind)
        assert len(envs.bounds) == slices
    finally:
        envs.close()


# -- site exploration --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(
        SiteServerConfig(sites=2, pages=100, links=20, page_bytes=4000, latency=0.001, jitter=0.01)
    ) as running:
        yield running


def test_site_explore_id_creates_async_and_gymnasium_env(server: SiteServer) -> None:
    kwargs = {"site": server.urls, "topic": "comet orbit"}
    maker = env_maker("unidle/SiteExplore-v0", kwargs)
    assert maker.kind == "async"
    for single_env in (maker(), gymnasium.make("unidle/SiteExplore-v0", **kwargs)):
        assert isinstance(single_env.unwrapped, SiteExploreEnv)
        single_env.close()
    with pytest.raises(UsageError, match=r"needs more env_kwargs.*'site'"):
        env_maker("unidle/SiteExplore-v0")()
    with pytest.raises(UsageError, match=r"does not accept these env_kwargs.*colour"):
        env_maker("unidle/SiteExplore-v0", {**kwargs, "colour": "red"})()


def test_site_explore_episodes_equal_serial_envs(server: SiteServer) -> None:
    kwargs = {"site": server.urls, "topic": "comet orbit telescope", "budget": 6}
    maker = env_maker("unidle/SiteExplore-v0", kwargs)
    env_spec = probe(maker)
    seen = []
    for envs in (
        AsyncEnvs(maker, env_spec, 3, SEED),
        SerialEnvs(EnvMaker("site", SiteExploreEnv, kwargs, kind="gymnasium"), env_spec, 3, SEED),
    ):
        rng, obs = np.random.default_rng(0), []
        envs.start(np.zeros(3, np.int64))
        for _ in range(15):
            masks = env_spec.obs_layout.mask_view(envs.block.obs)
            envs.block.actions[:, 0] = [rng.choice(np.flatnonzero(mask)) for mask in masks]
            envs.send(range(len(envs.bounds)))
            envs.recv(len(envs.bounds))
            obs += [envs.block.obs.copy(), envs.block.reward.copy(), envs.block.episode.copy()]
        envs.close()
        seen.append(obs)
    assert seen[0][-1].max() >= 2
    for ours, theirs in zip(*seen, strict=True):
        assert np.array_equal(ours, theirs)


def test_page_arrival_order_does_not_change_learning(server: SiteServer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n_envs": 6, "n_steps": 8, "batch_size": 48, "n_epochs": 1, "net_arch": (16,)}
    weights = []
    for name, engine in (("one env per slice", {}), ("two slices", {"slices": 2})):
        run = unidle.train(
            "unidle/SiteExplore-v0",
            env_kwargs={"site": server.urls, "topic": "comet orbit telescope", "budget": 10},
            **settings,
            **engine,
            overlap="strict",
            timesteps=192,
            eval_every=0,
            runs_dir=str(tmp_path),
            run_name=name,
            device="cpu",
            tensorboard=False,
            quiet=True,
        )
        weights.append(run.agent.policy.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_ppo_trains_on_site_and_resume_reports_lost_episodes(
    server: SiteServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"n_envs": 8, "n_steps": 16, "batch_size": 64, "n_epochs": 2, "net_arch": (16,)}
    run = unidle.train(
        "unidle/SiteExplore-v0",
        env_kwargs={"site": server.urls, "topic": "comet orbit telescope", "budget": 10},
        **settings,
        timesteps=256,
        eval_episodes=4,
        runs_dir=str(tmp_path),
        run_name="crawl",
        device="cpu",
        tensorboard=False,
        quiet=True,
    )
    assert run.evaluate(episodes=2).episodes == 2
    weights = [value for value in run.agent.policy.state_dict().values() if value.is_floating_point()]
    assert all(bool(torch.isfinite(value).all()) for value in weights)
    capsys.readouterr()
    unidle.resume(tmp_path / "crawl", timesteps=384, quiet=True)
    output = capsys.readouterr()
    # All except those at the start of an episode.
    assert re.search(r"[5-8] of 8 environments did not repeat their open episode", output.err)


class InterruptsItself(gymnasium.Wrapper):
    """Sends SIGINT at the step where `steps_left` reaches 0."""

    steps_left = -1

    def step(self, action: Any) -> Any:
        InterruptsItself.steps_left -= 1
        if InterruptsItself.steps_left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)  # the rollout is still running when the signal arrives
        return self.env.step(action)


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_run_interrupted_in_rollout_resumes_exactly(tmp_path: Path, overlap: str) -> None:
    env = partial(Threaded, lambda: InterruptsItself(gymnasium.make("CartPole-v1")))
    settings: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 2, "net_arch": (16,)}
    settings |= {"eval_every": 0, "device": "cpu", "tensorboard": False, "quiet": True, "runs_dir": str(tmp_path)}

    def arm_interrupt(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 2:
            InterruptsItself.steps_left = 20

    uninterrupted = unidle.train(env, **settings, overlap=overlap, timesteps=640, run_name="uninterrupted")
    interrupted = unidle.train(
        env, **settings, overlap=overlap, timesteps=640, run_name="interrupted", after_iteration=[arm_interrupt]
    )
    assert InterruptsItself.steps_left <= 0
    assert 256 <= interrupted.agent.step < 640
    unidle.resume(tmp_path / "interrupted", env=env, quiet=True)
    resumed = unidle.load(tmp_path / "interrupted", env=env)
    assert resumed.agent.step == uninterrupted.agent.step == 640
    for name, value in uninterrupted.agent.policy.state_dict().items():
        assert torch.equal(value, resumed.agent.policy.state_dict()[name]), name
