"""Environments on an event loop: the same episodes as anywhere else, none waits for another, nothing is left behind."""

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
from processes import wait_until
from toy_envs import Walk
from troubled import CHECKED, ENV_SPEC, SEED, Do, Troubled, at, place
from waiting import Waiting

import unidle
from unidle.config import Engine
from unidle.engine.build import make_envs
from unidle.envs.aio.async_env import GymnasiumAsyncEnv, Threaded
from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.make import EnvMaker, env_maker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import probe
from unidle.errors import TrainingError, UsageError
from unidle.tasks.web.gym_env import SiteExploreEnv
from unidle.tasks.web.site.serve import Serving, SiteServer, in_background

FIRST = 40  # number of the first environment


Make = Callable[..., AsyncEnvs]


def made(env: Any = Waiting, n_envs: int = 4, slices: int | None = None, **settings: Any) -> AsyncEnvs:
    maker = replace(env_maker(env, settings.pop("kwargs", None)), deadline=settings.pop("deadline", None))
    return AsyncEnvs(maker, settings.pop("env_spec", ENV_SPEC), n_envs, SEED, FIRST, slices, **settings)


@pytest.fixture
def started() -> Iterator[Make]:
    pools: list[AsyncEnvs] = []

    def started(*args: Any, **settings: Any) -> AsyncEnvs:
        pools.append(made(*args, **settings))
        pools[-1].start(np.zeros(pools[-1].n_envs, np.int64))
        return pools[-1]

    yield started
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    Waiting.open, Waiting.closed_on = 0, set()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert wait_until(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    assert Waiting.open == 0
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def send(pool: HostEnvs, *what: Do, slices: list[int] | None = None) -> None:
    chosen = list(range(len(pool.bounds))) if slices is None else slices
    env_ids = [env_id for number in chosen for env_id in range(*pool.bounds[number])]
    pool.block.actions[env_ids, 0] = what or [Do.STEP] * len(env_ids)
    pool.send(chosen)


def do(pool: HostEnvs, *what: Do) -> None:
    send(pool, *what)
    assert pool.recv(len(pool.bounds)) == list(range(len(pool.bounds)))


def places(pool: HostEnvs) -> list[tuple[int, int]]:
    return [place(row) for row in pool.block.obs]


# -- the same episodes as anywhere else --------------------------------------------------------------------------------

SURVIVED = [Do.STEP] * 8 + [Do.END, Do.CUT, Do.RAISE, Do.END_AND_FAIL_RESET, Do.NAN_REWARD, Do.INFINITE_OBSERVATION]
SURVIVED += [Do.CUT_WITH_NAN, Do.END_WITH_NAN_REWARD, Do.END_AND_NAN_RESET]


def story(envs: HostEnvs, rounds: int = 90) -> list[Any]:
    """All that is to be seen of some steps, of which some fail and some skip a few env_ids."""
    rng = np.random.default_rng(3)
    seen: list[Any] = []
    block = envs.block
    envs.start(np.arange(envs.n_envs))
    for number in range(rounds):
        block.actions[:, 0] = rng.choice(SURVIVED if number >= 3 * CHECKED else SURVIVED[:11], envs.n_envs)
        block.skip[:] = rng.random(envs.n_envs) < 0.1
        done: list[int] = []
        envs.send(range(len(envs.bounds)))
        while len(done) < len(envs.bounds):
            done += envs.recv(1)
        assert sorted(done) == list(range(len(envs.bounds)))
        happened = ~block.retry & ~block.skip
        ended = happened & (block.terminated | block.truncated)
        seen += [block.obs.copy(), block.retry & ~block.skip, block.episode.copy()]
        seen += [block.reward[happened], block.terminated[happened], block.truncated[happened]]
        seen += [block.episode_return[ended], block.episode_length[ended], block.final_obs[happened & block.truncated]]
        seen.append(sorted((fault.env, fault.kind, fault.text.splitlines()[0]) for fault in envs.faults))
        envs.faults.clear()
    return seen


@pytest.fixture(scope="module")
def as_it_should_be() -> list[Any]:
    return story(SerialEnvs(env_maker(Troubled), ENV_SPEC, 6, SEED, FIRST, max_env_restarts=10**6))


@pytest.mark.parametrize("slices", [None, 4, 1])
def test_steps_and_faults_are_those_of_the_same_environment_stepped_serially(
    as_it_should_be: list[Any], slices: int | None
) -> None:
    pool = made(n_envs=6, slices=slices, max_env_restarts=10**6)
    try:
        assert len(pool.bounds) == (slices or 6)
        seen = story(pool)
    finally:
        pool.close()
    assert sum(bool(faults) for faults in seen[9::10]) > 20
    for ours, theirs in zip(seen, as_it_should_be, strict=True):
        np.testing.assert_equal(ours, theirs)


def test_a_thread_for_each_makes_no_difference(as_it_should_be: list[Any]) -> None:
    pool = made(partial(Threaded, Troubled), n_envs=6, max_env_restarts=10**6)
    try:
        seen = story(pool)
    finally:
        pool.close()
    for ours, theirs in zip(seen, as_it_should_be, strict=True):
        np.testing.assert_equal(ours, theirs)


def test_nor_do_event_loops_in_worker_processes(as_it_should_be: list[Any]) -> None:
    maker = env_maker(Waiting)
    pool = ProcessPool(maker, ENV_SPEC, 6, SEED, 2, FIRST, 3, max_env_restarts=10**6)
    try:
        assert len(pool.bounds) == 6
        seen = story(pool)
    finally:
        pool.close()
    for ours, theirs in zip(seen, as_it_should_be, strict=True):
        np.testing.assert_equal(ours, theirs)


# -- first come, first served ------------------------------------------------------------------------------------------


def test_one_slow_environment_keeps_nobody_waiting(started: Make) -> None:
    pool = started(n_envs=4)
    send(pool, Do.STEP, Do.SLOW, Do.STEP, Do.STEP)
    rounds, came = 0, time.monotonic()
    while 1 not in (done := pool.recv(1)):
        rounds += len(done)
        send(pool, slices=done)
    assert time.monotonic() - came >= 0.39
    assert rounds > 3 * 40
    assert place(pool.block.obs[1]) == at(FIRST + 1, 0, 1)


@pytest.mark.parametrize("what", [Do.END, Do.RAISE, Do.END_AND_FAIL_RESET])
def test_nor_does_one_whose_next_episode_is_slow_to_begin(started: Make, tmp_path: Path, what: Do) -> None:
    pool = started(kwargs={"folder": str(tmp_path)}, n_envs=3)
    (tmp_path / "drowsy").touch()
    send(pool, what, Do.STEP, Do.STEP)
    came = [time.monotonic()]
    while 0 not in (done := pool.recv(1)):
        came.append(time.monotonic())
        send(pool, slices=done)
    came.append(time.monotonic())
    assert came[-1] - came[0] >= 0.39
    assert np.diff(came).max() < 0.35
    assert places(pool)[0] == at(FIRST, 2 if what == Do.END_AND_FAIL_RESET else 1, 0)


def test_a_worker_process_has_all_its_slices_under_way() -> None:
    pool = ProcessPool(env_maker(Waiting), ENV_SPEC, 8, SEED, 1, FIRST, 8)
    try:
        pool.start(np.zeros(8, np.int64))
        began = time.monotonic()
        send(pool, *[Do.SLOW] * 7, Do.STEP)
        assert pool.recv(1) == [7]
        assert time.monotonic() - began < 0.3
        assert pool.recv(7) == list(range(7))
        assert 0.39 < time.monotonic() - began < 1.2
    finally:
        pool.close()


def test_recv_waits_for_as_many_as_it_was_asked_or_for_so_long(started: Make) -> None:
    pool = started(n_envs=3)
    assert pool.recv(1) == []  # nothing was sent, so there is nothing to wait for
    send(pool, Do.STEP, Do.SLOW, Do.SLOW)
    began = time.monotonic()
    assert pool.recv(3, 0.1) == [0]
    assert 0.09 < time.monotonic() - began < 0.3
    assert pool.recv(5) == [1, 2]


def test_an_environment_of_a_slice_that_is_skipped_is_left_alone(started: Make) -> None:
    pool = started(n_envs=4, slices=2)
    pool.block.skip[:] = [True, True, False, True]
    before = pool.block.obs.copy()
    do(pool, Do.HANG, Do.HANG, Do.STEP, Do.HANG)
    assert np.array_equal(pool.block.obs[[0, 1, 3]], before[[0, 1, 3]])
    assert place(pool.block.obs[2]) == at(FIRST + 2, 0, 1)


# -- what fails --------------------------------------------------------------------------------------------------------


def test_a_step_past_its_deadline_did_not_happen_and_its_environment_is_made_anew(started: Make) -> None:
    pool = started(deadline=0.15)
    do(pool)
    send(pool, Do.STEP, Do.HANG, Do.STEP, Do.STEP)
    assert 1 not in pool.recv(3)
    began = time.monotonic()
    assert pool.recv(1) == [1]
    assert time.monotonic() - began < 0.5
    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (FIRST + 1, "hung")
    assert fault.text.startswith(
        f"Environment {FIRST + 1} failed in episode 0 (seed {episode_seed(SEED, FIRST + 1, 0)}), step 1: "
        "TimeoutError: step() did not finish within 0.15 s (--env-timeout)\n"
    )
    assert "asyncio.sleep(600)" in fault.text
    assert pool.block.retry.tolist() == [False, True, False, False]
    assert places(pool) == [at(FIRST, 0, 2), at(FIRST + 1, 1, 0), at(FIRST + 2, 0, 2), at(FIRST + 3, 0, 2)]
    assert Waiting.open == 4
    pool.faults.clear()
    do(pool, Do.STEP, Do.RAISE, Do.STEP, Do.STEP)
    assert [fault.kind for fault in pool.faults] == ["exception"]


def test_a_deadline_is_kept_in_worker_processes_too() -> None:
    engine = Engine(workers=2, env_timeout=0.2)
    pool = make_envs(env_maker(Waiting), ENV_SPEC, 4, SEED, 2, engine, FIRST, 1)
    try:
        assert isinstance(pool, ProcessPool)
        pool.start(np.zeros(4, np.int64))
        do(pool, Do.STEP, Do.HANG, Do.STEP, Do.STEP)
        assert [(fault.env, fault.kind) for fault in pool.faults] == [(FIRST + 1, "hung")]
        assert pool.block.retry.tolist() == [False, True, False, False]
    finally:
        pool.close()


def test_a_worker_process_that_dies_is_replaced() -> None:
    pool = ProcessPool(env_maker(Waiting), ENV_SPEC, 4, SEED, 2, FIRST, 2)
    try:
        pool.start(np.zeros(4, np.int64))
        do(pool)
        send(pool, Do.SLOW, Do.STEP, Do.STEP, Do.STEP)
        done = pool.recv(3)
        running = pool._processes[0]._process
        assert running is not None
        running.kill()
        pool._next_check = 0.0
        assert sorted(done + pool.recv(1)) == [0, 1, 2, 3]
        assert [(fault.env, fault.kind) for fault in pool.faults] == [(FIRST, "killed")]
        assert pool.block.retry.tolist() == [True, False, False, False]
        assert pool.restarted == [1]
        assert places(pool) == [at(FIRST, 1, 0), at(FIRST + 1, 1, 0), at(FIRST + 2, 0, 2), at(FIRST + 3, 0, 2)]
        do(pool)
        assert places(pool)[:2] == [at(FIRST, 1, 1), at(FIRST + 1, 1, 1)]
    finally:
        pool.close()


def test_a_thread_that_hangs_is_left_to_itself() -> None:
    release = threading.Event()

    class Stuck(Walk):
        def step(self, action: Any) -> Any:
            release.wait(20)
            return super().step(action)

    maker = partial(Threaded, Stuck)
    pool = made(maker, n_envs=2, deadline=0.1, env_spec=probe(env_maker(Walk)))
    try:
        pool.start(np.zeros(2, np.int64))
        began = time.monotonic()
        pool.send([0, 1])
        assert pool.recv(2) == [0, 1]
        assert [fault.kind for fault in pool.faults] == ["hung"] * 2
    finally:
        pool.close()
        assert time.monotonic() - began < 1.0
        release.set()


def test_an_environment_that_cannot_begin_again_says_why_and_comes_back_when_it_can(
    started: Make, tmp_path: Path
) -> None:
    pool = started(kwargs={"folder": str(tmp_path)}, n_envs=2)
    (tmp_path / "unresettable").touch()
    do(pool, Do.STEP, Do.RAISE)
    assert [fault.text.count("the robot fell over") > 0 for fault in pool.faults] == [True]
    do(pool)
    assert [(fault.env, "stuck in the mud" in fault.text) for fault in pool.faults[1:]] == [(FIRST + 1, True)]
    assert pool.block.retry.tolist() == [False, True]
    (tmp_path / "unresettable").unlink()
    do(pool)
    do(pool)
    assert len(pool.faults) == 3
    assert place(pool.block.obs[1])[1] == 1
    assert pool.block.episode[1] == 3


def test_too_many_failures_in_a_row_end_it(started: Make) -> None:
    pool = started(max_env_restarts=2)
    for _ in range(2):
        do(pool, Do.STEP, Do.STEP, Do.RAISE, Do.STEP)
    with pytest.raises(TrainingError, match=f"Environment {FIRST + 2} failed 3 times"):
        do(pool, Do.STEP, Do.STEP, Do.RAISE, Do.STEP)


def test_an_episode_that_ends_by_itself_is_a_new_start(started: Make) -> None:
    pool = started(max_env_restarts=1, n_envs=2)
    for what in (Do.RAISE, Do.END, Do.RAISE, Do.END, Do.RAISE):
        do(pool, Do.STEP, what)
    assert len(pool.faults) == 3


def test_an_exit_and_a_cancellation_within_are_failures_like_any_other(started: Make) -> None:
    class Cancelling(Waiting):
        async def step(self, action: Any) -> Any:
            inner = asyncio.ensure_future(asyncio.sleep(5))
            inner.cancel()
            await inner

    pool = started()
    do(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    assert "step() raised SystemExit(3)" in pool.faults[0].text
    other = started(Cancelling, n_envs=1)
    do(other)
    assert "step() was cancelled by a task that it awaited" in other.faults[0].text


def test_a_mistake_of_the_user_goes_through(started: Make) -> None:
    pool = started()
    with pytest.raises(UsageError, match="rewards must be finite"):
        do(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)


def test_a_failure_while_they_are_made_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "unmakeable").touch()
    with pytest.raises(OSError, match="no such robot"):
        made(kwargs={"folder": str(tmp_path)})


def test_garbage_is_collected_less_often_until_the_last_pool_is_closed(started: Make) -> None:
    usual = gc.get_threshold()
    first = started(n_envs=2)
    second = started(n_envs=2)
    first.close()
    first.close()
    assert gc.get_threshold()[0] > 10 * usual[0]
    second.close()
    assert gc.get_threshold() == usual


def test_close_cancels_what_is_in_flight_at_once(started: Make) -> None:
    pool = started(n_envs=64)
    send(pool, *[Do.HANG] * 64)
    assert pool.recv(1, 0.05) == []
    tasks = pool._slots._tasks
    assert len(tasks) == 64
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 0.5
    assert not tasks
    assert Waiting.open == 0
    assert Waiting.closed_on == {"environments"}
    pool.close()


def test_one_that_will_not_be_cancelled_does_not_hold_up_the_end() -> None:
    class Stubborn(Waiting):
        async def step(self, action: Any) -> Any:
            for _ in range(2):
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
            await asyncio.sleep(0)
            raise RuntimeError

    pool = made(Stubborn, n_envs=2)
    pool.start(np.zeros(2, np.int64))
    send(pool, Do.STEP, Do.STEP)
    pool.recv(1, 0.02)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 4


# -- coming back -------------------------------------------------------------------------------------------------------


def test_an_environment_that_repeats_itself_is_brought_back_by_replaying(started: Make) -> None:
    env_spec = probe(env_maker(Walk))
    make = partial(started, partial(Threaded, Walk), n_envs=3, env_spec=env_spec)
    pool = make()
    taken: list[list[np.ndarray]] = [[], [], []]
    for step in range(8):  # episodes have six steps
        pool.block.actions[:, 0] = [step % 3, 1, 2]
        pool.send([0, 1, 2])
        assert pool.recv(3) == [0, 1, 2]
        for env_id, actions in enumerate(taken):
            actions.append(pool.block.actions[env_id].copy())
    obs = pool.block.obs.copy()
    points = [(1, np.array(actions[6:]), row, None) for actions, row in zip(taken, obs)]
    points[2] = (1, points[2][1], obs[0], None)  # not what comes of these actions
    other = make()
    assert other.resume(points) == [True, True, False]
    assert np.array_equal(other.block.obs[:2], obs[:2])
    assert other.block.episode.tolist() == [1, 1, 2]
    for each in (pool, other):
        each.block.actions[:, 0] = 1
        each.send([0, 1])
        each.recv(2)
    assert np.array_equal(other.block.obs[:2], pool.block.obs[:2])
    assert np.array_equal(other.block.reward[:2], pool.block.reward[:2])


def test_of_others_an_open_episode_is_lost_and_the_next_one_begins(started: Make) -> None:
    pool = started(n_envs=3)
    first = pool.block.obs.copy()
    none, one = np.zeros((0, 1), np.float32), np.zeros((1, 1), np.float32)
    assert pool.states() == [None] * 3
    do(pool)
    points = [(0, one, pool.block.obs[0].copy(), None), (0, none, first[1], None), (4, none, first[2], None)]
    assert pool.resume(points) == [False, True, False]
    assert places(pool) == [at(FIRST, 1, 0), at(FIRST + 1, 0, 0), at(FIRST + 2, 4, 0)]


# -- who gets it -------------------------------------------------------------------------------------------------------


def test_the_kind_of_step_decides_how_it_is_made() -> None:
    for env in (Waiting, partial(Waiting, folder=None), partial(Threaded, Walk)):
        maker = env_maker(env)
        assert maker.kind == "async"
        assert maker.on_host() is maker
        single_env = maker()
        assert isinstance(single_env, GymnasiumAsyncEnv)
        single_env.close()
    assert env_maker(Walk).kind == "gymnasium"
    with pytest.raises(UsageError, match="whose step is a coroutine; pass the class itself"):
        env_maker(lambda: Waiting())()
    Waiting.open -= 1  # the one that was refused


def test_the_twin_of_any_of_them_steps_as_it_does() -> None:
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
        (Engine(), 2, AsyncEnvs, 4),  # two would pay, but were not asked for
        (Engine(subproc=False, workers=2, slices=2), 0, AsyncEnvs, 2),
        (Engine(workers=2), 2, ProcessPool, 4),
    ],
)
def test_worker_processes_have_a_loop_each_where_they_are_asked_for(
    engine: Engine, workers: int, kind: type, slices: int
) -> None:
    envs = make_envs(env_maker(Waiting), ENV_SPEC, 4, SEED, workers, engine)
    try:
        assert isinstance(envs, kind)
        assert len(envs.bounds) == slices
    finally:
        envs.close()


# -- on a site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(Serving(sites=2, pages=100, links=20, page_bytes=4000, latency=0.001, jitter=0.01)) as running:
        yield running


def test_the_id_of_the_site_explorer_leads_to_it_and_to_its_twin(server: SiteServer) -> None:
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


def test_episodes_on_a_site_are_those_of_the_twin_stepped_serially(server: SiteServer) -> None:
    kwargs = {"site": server.urls, "topic": "comet orbit telescope", "budget": 6}
    maker = env_maker("unidle/SiteExplore-v0", kwargs)
    env_spec = probe(maker)
    seen = []
    for envs in (
        AsyncEnvs(maker, env_spec, 3, SEED),
        SerialEnvs(EnvMaker("single_env", SiteExploreEnv, kwargs, kind="gymnasium"), env_spec, 3, SEED),
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


def test_which_page_came_first_changes_nothing_that_is_learned(server: SiteServer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n_envs": 6, "n_steps": 8, "batch_size": 48, "n_epochs": 1, "net_arch": (16,)}
    weights = []
    for name, engine in (("each alone", {}), ("in two groups", {"slices": 2})):
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


def test_ppo_trains_on_a_site_and_says_that_open_episodes_cannot_be_resumed(
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
    said = capsys.readouterr()
    # All but those that had just begun an episode.
    assert re.search(r"[5-8] of 8 environments are not deterministic", said.err)


class Interrupting(gymnasium.Wrapper):
    """Presses Ctrl-C at the twentieth step after it was armed."""

    steps_left = -1

    def step(self, action: Any) -> Any:
        Interrupting.steps_left -= 1
        if Interrupting.steps_left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)  # so that the rollout is still under way when it is heard
        return self.env.step(action)


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_a_run_that_is_broken_off_in_a_rollout_goes_on_as_if_it_had_not_been(tmp_path: Path, overlap: str) -> None:
    env = partial(Threaded, lambda: Interrupting(gymnasium.make("CartPole-v1")))
    settings: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 2, "net_arch": (16,)}
    settings |= {"eval_every": 0, "device": "cpu", "tensorboard": False, "quiet": True, "runs_dir": str(tmp_path)}

    def arm(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 2:
            Interrupting.steps_left = 20

    whole = unidle.train(env, **settings, overlap=overlap, timesteps=640, run_name="whole")
    broken = unidle.train(env, **settings, overlap=overlap, timesteps=640, run_name="broken", after_iteration=[arm])
    assert Interrupting.steps_left <= 0
    assert 256 <= broken.agent.step < 640
    unidle.resume(tmp_path / "broken", env=env, quiet=True)
    again = unidle.load(tmp_path / "broken", env=env)
    assert again.agent.step == whole.agent.step == 640
    for name, value in whole.agent.policy.state_dict().items():
        assert torch.equal(value, again.agent.policy.state_dict()[name]), name
