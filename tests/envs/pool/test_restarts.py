"""Workers that die or hang are replaced; the block says what happened to each of their environments."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from action_faults import CHECKED_STEPS, ENV_SPEC, SEED, ActionFaultEnv, Do, expected_position, position, reward_of
from paths import SOURCE, TESTS
from processes import is_running, wait_until

from unidle.envs.make import env_maker
from unidle.envs.open_episode import OpenEpisode
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SEMAPHORE_BYTES, SharedDoorbell
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE, DONE_WITH_FAULTS, STEP, WorkerSignals
from unidle.envs.pool.worker_cores import WorkerCores
from unidle.envs.protocol import HostEnvs
from unidle.errors import TrainingError, UsageError

FIRST_INDEX = 40  # index of the first environment
Make = Callable[..., ProcessPool]


@pytest.fixture
def start_pool() -> Iterator[Make]:
    """Starts a pool, by default of four environments in two workers with one slice each."""
    pools: list[ProcessPool] = []

    def start_pool(
        env: Any = ActionFaultEnv, n_envs: int = 4, workers: int = 2, slices: int = 1, **kwargs: Any
    ) -> ProcessPool:
        pool = ProcessPool(env_maker(env), ENV_SPEC, n_envs, SEED, workers, FIRST_INDEX, slices, **kwargs)
        pools.append(pool)
        pool.start(np.zeros(n_envs, np.int64))
        return pool

    yield start_pool
    for pool in pools:
        pool.close()


def send(pool: ProcessPool, *actions: Do, slices: list[int] | None = None) -> None:
    chosen = list(range(len(pool.bounds))) if slices is None else slices
    env_ids = [env_id for number in chosen for env_id in range(*pool.bounds[number])]
    pool.block.actions[env_ids, 0] = actions or [Do.STEP] * len(env_ids)
    pool.send(chosen)


def step_all(pool: ProcessPool, *actions: Do) -> None:
    """One step of all environments."""
    send(pool, *actions)
    assert pool.recv(len(pool.bounds)) == list(range(len(pool.bounds)))


def positions(pool: ProcessPool) -> list[tuple[int, int]]:
    return [position(obs) for obs in pool.block.obs]


def worker_pid(pool: ProcessPool, worker: int) -> int:
    running = pool._processes[worker]._process
    assert running is not None
    return running.pid


def kill_worker(pool: ProcessPool, worker: int) -> None:
    """Kill the worker, and have the pool check its workers at the next call."""
    os.kill(worker_pid(pool, worker), signal.SIGKILL)
    os.waitid(os.P_PID, worker_pid(pool, worker), os.WEXITED | os.WNOWAIT)
    pool._next_check = 0.0


def wait_for_flags(pool: ProcessPool, *flags: int) -> None:
    """Wait until the slices have these flags, without receiving them."""
    assert wait_until(lambda: pool._signals.flags.tolist() == list(flags)), pool._signals.flags


def describe_episodes(envs: list[int], episodes: list[int]) -> str:
    texts = [f"{env} (episode {e}, seed {episode_seed(SEED, env, e)})" for env, e in zip(envs, episodes)]
    return ", ".join(texts)


DIED = "it was killed, ran out of memory, or the environment crashed the interpreter."


# -- during a step -----------------------------------------------------------------------------------------------------


def test_worker_killed_during_step_is_replaced_and_step_retried(start_pool: Make) -> None:
    pool = start_pool()
    before = worker_pid(pool, 0)
    step_all(pool)
    step_all(pool, Do.STEP, Do.TERMINATE, Do.STEP, Do.STEP)
    send(pool, Do.HANG, Do.STEP, Do.STEP, Do.TERMINATE)
    wait_for_flags(pool, STEP, DONE)
    kill_worker(pool, 0)
    assert pool.recv(2) == [0, 1]

    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (40, "killed")
    assert fault.text == (
        f"The worker of environments 40 to 41 exited unexpectedly (exit status -9): {DIED} "
        f"Steps were pending in environments {describe_episodes([40, 41], [0, 1])}."
    )
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert positions(pool) == [
        expected_position(40, 1, 0),
        expected_position(41, 2, 0),
        expected_position(42, 0, 3),
        expected_position(43, 1, 0),
    ]
    assert pool.block.episode.tolist() == [1, 2, 0, 1]
    assert pool.block.terminated[2:].tolist() == [False, True]
    assert pool.block.reward[2:].tolist() == [reward_of(*expected_position(env, 0, 3)) for env in (42, 43)]
    assert pool.restarted == []
    assert worker_pid(pool, 0) != before
    assert not is_running(before)

    step_all(pool)
    assert len(pool.faults) == 1
    assert not pool.block.retry.any()
    assert positions(pool) == [
        expected_position(40, 1, 1),
        expected_position(41, 2, 1),
        expected_position(42, 0, 4),
        expected_position(43, 1, 1),
    ]


def test_env_that_exits_its_process_is_restarted(start_pool: Make) -> None:
    pool = start_pool()
    step_all(pool, Do.STEP, Do.STEP, Do.STEP, Do.EXIT)
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(42, "killed")]
    assert pool.faults[0].text.startswith(
        "The worker of environments 42 to 43 exited unexpectedly (exit status 3): it was killed, "
    )
    assert pool.block.retry.tolist() == [False, False, True, True]
    assert positions(pool) == [
        expected_position(40, 0, 1),
        expected_position(41, 0, 1),
        expected_position(42, 1, 0),
        expected_position(43, 1, 0),
    ]


def test_skipped_env_of_dead_worker_restarts_without_retry(start_pool: Make) -> None:
    pool = start_pool()
    step_all(pool)
    pool.block.skip[:] = [True, False, False, False]
    last = pool.block.obs[0].copy()
    step_all(pool, Do.STEP, Do.EXIT, Do.STEP, Do.STEP)
    assert pool.block.retry.tolist() == [False, True, False, False]
    assert pool.restarted == [0]
    assert np.array_equal(pool.block.final_obs[0], last)
    assert positions(pool) == [
        expected_position(40, 1, 0),
        expected_position(41, 1, 0),
        expected_position(42, 0, 2),
        expected_position(43, 0, 2),
    ]
    assert f"environments {describe_episodes([41], [0])}." in pool.faults[0].text


# -- between steps -----------------------------------------------------------------------------------------------------


def test_worker_killed_between_steps_restarts_its_envs(start_pool: Make) -> None:
    pool = start_pool(workers=2, slices=2)
    step_all(pool, Do.TRUNCATE, Do.STEP, Do.STEP, Do.STEP)
    last = pool.block.obs.copy()
    kill_worker(pool, 0)
    send(pool, slices=[2, 3])
    assert pool.recv(2) == [2, 3]
    assert sorted(pool.restarted) == [0, 1]
    assert np.array_equal(pool.block.final_obs[:2], last[:2])
    assert [fault.env for fault in pool.faults] == [40]
    assert pool.faults[0].text.endswith(" No step was pending.")
    assert positions(pool) == [
        expected_position(40, 2, 0),
        expected_position(41, 1, 0),
        expected_position(42, 0, 2),
        expected_position(43, 0, 2),
    ]
    assert not pool.block.retry[2:].any()

    pool.restarted.clear()
    step_all(pool)
    assert positions(pool) == [
        expected_position(40, 2, 1),
        expected_position(41, 1, 1),
        expected_position(42, 0, 3),
        expected_position(43, 0, 3),
    ]
    assert pool.restarted == []
    assert not pool.block.retry.any()


def test_finished_step_of_dead_worker_is_kept_and_truncated(start_pool: Make) -> None:
    pool = start_pool(n_envs=8, workers=2, slices=1)
    step_all(pool)
    pool.block.skip[0] = True
    send(pool, Do.STEP, Do.STEP, Do.TERMINATE, Do.TRUNCATE, *[Do.STEP] * 4)
    wait_for_flags(pool, DONE, DONE)
    obs = pool.block.obs.copy()
    kill_worker(pool, 0)
    assert pool.recv(2) == [0, 1]
    block = pool.block
    assert pool.restarted == [0]
    assert not block.retry.any()
    assert block.terminated[1:].tolist() == [False, True, False, *[False] * 4]
    assert block.truncated[1:].tolist() == [True, False, True, *[False] * 4]
    assert block.episode_length[1:4].tolist() == [-1, 2, 2]
    assert block.reward[1:4].tolist() == [reward_of(*expected_position(40 + env, 0, 2)) for env in (1, 2, 3)]
    assert np.array_equal(block.final_obs[:2], obs[:2])
    assert position(block.final_obs[3]) == expected_position(43, 0, 2)
    expected = [
        expected_position(40, 1, 0),
        expected_position(41, 1, 0),
        expected_position(42, 2, 0),
        expected_position(43, 2, 0),
    ]
    assert positions(pool) == expected + [expected_position(44 + env, 0, 2) for env in range(4)]


def test_faults_reported_before_worker_died_are_received(start_pool: Make) -> None:
    pool = start_pool()
    send(pool, Do.RAISE, Do.STEP, Do.STEP, Do.STEP)
    wait_for_flags(pool, DONE_WITH_FAULTS, DONE)
    time.sleep(0.1)  # the message follows the flag
    kill_worker(pool, 0)
    assert pool.recv(2) == [0, 1]
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "exception"), (40, "killed")]
    assert pool.block.retry.tolist() == [True, False, False, False]
    assert pool.block.truncated.tolist() == [False, True, False, False]
    assert position(pool.block.final_obs[1]) == expected_position(41, 0, 1)
    assert positions(pool)[:2] == [expected_position(40, 2, 0), expected_position(41, 1, 0)]


def test_pool_does_not_wait_for_a_message_that_a_dead_worker_did_not_send(start_pool: Make) -> None:
    pool = start_pool()
    os.kill(worker_pid(pool, 0), signal.SIGSTOP)
    pool._signals.flags[0] = DONE_WITH_FAULTS  # as if it had been killed between the flag and the message
    pool.block.retry[0] = True
    pool._next_check = np.inf
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {worker_pid(pool, 0)}"])
    assert pool.recv(1) == [0]
    killer.wait()
    assert [fault.kind for fault in pool.faults] == ["killed"]
    assert pool.block.retry.tolist() == [True, False, False, False]
    assert pool.block.truncated.tolist() == [False, True, False, False]


@pytest.mark.parametrize("next_check", [0.0, np.inf])  # found by a check of the process, or by its pipe
def test_partial_message_of_dead_worker_is_dropped(start_pool: Make, next_check: float) -> None:
    pool = start_pool()
    send(pool, Do.RAISE_LONG_MESSAGE, Do.STEP, Do.STEP, Do.STEP)
    wait_for_flags(pool, DONE_WITH_FAULTS, DONE)
    time.sleep(0.2)  # the pipe is full by now
    kill_worker(pool, 0)
    pool._next_check = next_check
    assert pool.recv(2) == [0, 1]
    assert [fault.kind for fault in pool.faults] == ["killed"]
    assert pool.block.retry.tolist() == [True, False, False, False]


# -- signals and waiting -----------------------------------------------------------------------------------------------


def test_finished_step_without_post_is_received(start_pool: Make) -> None:
    pool = start_pool()
    os.kill(worker_pid(pool, 0), signal.SIGSTOP)
    pool._signals.flags[0] = DONE
    assert pool.recv(1) == [0]
    os.kill(worker_pid(pool, 0), signal.SIGCONT)
    step_all(pool)


def test_stale_posts_and_commands_do_not_reach_new_worker(start_pool: Make) -> None:
    pool = start_pool()
    os.kill(worker_pid(pool, 0), signal.SIGSTOP)
    pool._signals.commands[0] = 1
    for _ in range(5):
        pool._signals.go[0]._semaphore.post()
        pool._signals.ready._semaphore.post()
    send(pool)
    wait_for_flags(pool, STEP, DONE)
    kill_worker(pool, 0)
    assert pool.recv(2) == [0, 1]
    for _ in range(5):
        pool._signals.ready._semaphore.post()
    os.kill(worker_pid(pool, 0), signal.SIGSTOP)
    send(pool)
    assert pool.recv(1) == [1]
    os.kill(worker_pid(pool, 0), signal.SIGCONT)
    assert pool.recv(1) == [0]
    assert positions(pool) == [
        expected_position(40, 1, 1),
        expected_position(41, 1, 1),
        expected_position(42, 0, 2),
        expected_position(43, 0, 2),
    ]


def test_reset_worker_clears_only_its_signals() -> None:
    signals = WorkerSignals.over(mmap.mmap(-1, WorkerSignals.nbytes(4, 2)), 0, slices=4, workers=2, initialise=True)
    signals.commands[:] = 1
    for doorbell in (signals.ready, *signals.go):
        doorbell._semaphore.post()
        doorbell._memory[doorbell._asleep] = 1
    signals.reset_worker(0)
    assert signals.commands.tolist() == [0, 1]
    assert [doorbell._memory[doorbell._asleep] for doorbell in (signals.ready, *signals.go)] == [1, 0, 1]
    assert [doorbell._semaphore.take() for doorbell in (signals.ready, *signals.go)] == [True, False, True]


def test_semaphore_forgets_dead_waiter(start_pool: Make) -> None:
    pool = start_pool()
    signals = pool._signals
    # glibc's semaphore with 64-bit atomics: its value, then the number of waiters.
    posts, waiters = np.ndarray((2,), np.uint32, signals.memory, signals.begin + SEMAPHORE_BYTES)[:, np.newaxis]
    for _ in range(3):
        assert wait_until(lambda: waiters == 1)
        os.kill(worker_pid(pool, 0), signal.SIGSTOP)
        for _ in range(5):
            signals.go[0]._semaphore.post()
        kill_worker(pool, 0)
        pool.recv(1, seconds=0)
        assert wait_until(lambda: (posts, waiters) == (0, 1))


def test_recv_with_zero_timeout_returns_ready_slices(start_pool: Make) -> None:
    pool = start_pool()
    send(pool, Do.HANG, Do.STEP, Do.STEP, Do.STEP)
    wait_for_flags(pool, STEP, DONE)
    assert pool.recv(2, seconds=0) == [1]
    assert pool.recv(1, seconds=0) == []
    start_time = time.monotonic()
    assert pool.recv(1, seconds=0.7) == []
    assert 0.7 <= time.monotonic() - start_time < 5
    assert pool.recv(0) == []
    send(pool, slices=[1])
    assert pool.recv(1, seconds=60) == [1]
    assert time.monotonic() - start_time < 50
    kill_worker(pool, 0)
    assert pool.recv(1, seconds=60) == [0]


def test_dead_worker_is_found_by_nonblocking_recv(start_pool: Make) -> None:
    pool = start_pool()
    send(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    got: list[int] = []
    assert wait_until(lambda: len(got.extend(pool.recv(2, seconds=0)) or got) == 2, 10)
    assert sorted(got) == [0, 1]
    assert pool.block.retry.tolist() == [True, True, False, False]


# -- timeouts ----------------------------------------------------------------------------------------------------------


def test_hung_worker_is_killed_without_blocking_others(start_pool: Make) -> None:
    pool = start_pool(env_timeout=1.5)
    step_all(pool)
    hung_pid = worker_pid(pool, 1)
    start_time = time.monotonic()
    send(pool, Do.STEP, Do.STEP, Do.STEP, Do.HANG)
    for _ in range(3):
        assert pool.recv(1) == [0]
        send(pool, slices=[0])
    assert pool.recv(1) == [0]
    assert pool.recv(1) == [1]
    assert 1.5 <= time.monotonic() - start_time < 20
    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (42, "hung")
    assert fault.text == (
        "The worker of environments 42 to 43 did not respond for 1.5 seconds and was killed. "
        f"Steps were pending in environments {describe_episodes([42, 43], [0, 0])}."
    )
    assert not is_running(hung_pid)
    assert pool.block.retry.tolist() == [False, False, True, True]
    assert positions(pool) == [
        expected_position(40, 0, 5),
        expected_position(41, 0, 5),
        expected_position(42, 1, 0),
        expected_position(43, 1, 0),
    ]


def test_slice_queued_behind_others_does_not_count_as_hanging(start_pool: Make) -> None:
    pool = start_pool(n_envs=6, workers=1, slices=6, env_timeout=1.5)
    step_all(pool, *[Do.SLOW] * 6)  # 0.4 seconds each, 2.4 until the last
    assert pool.faults == []


def test_idle_worker_does_not_count_as_hanging(start_pool: Make) -> None:
    pool = start_pool(env_timeout=1.5)
    for _ in range(5):
        pool._next_check = 0.0
        assert pool.recv(1, seconds=0) == []
    step_all(pool)
    assert pool.faults == []


@pytest.fixture
def close_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close does not wait long for hung workers."""
    monkeypatch.setattr("unidle.envs.pool.process_pool._CLOSING_SECONDS", 0.2)


@pytest.mark.usefixtures("close_quickly")
def test_env_hanging_in_first_reset_raises_after_timeout(start_pool: Make, tmp_path: Path) -> None:
    (tmp_path / "reset hangs").touch()
    start_time = time.monotonic()
    with pytest.raises(TrainingError, match=r"^The worker of environments 4[02] to 4[13] did not respond"):
        start_pool(lambda: ActionFaultEnv(str(tmp_path)), env_timeout=0.5)
    assert time.monotonic() - start_time < 30


@pytest.mark.usefixtures("close_quickly")
def test_worker_hanging_at_startup_raises_after_timeout(start_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_forever() -> Any:
        time.sleep(600)

    monkeypatch.setattr("unidle.envs.pool.process_pool._STARTING_SECONDS", 2.0)
    with pytest.raises(TrainingError, match=r"did not respond for 2.5 seconds and was killed\.$"):
        start_pool(hang_forever, env_timeout=0.5)


def test_long_replay_does_not_count_as_hang(start_pool: Make) -> None:
    pool = start_pool(n_envs=1, workers=1, env_timeout=1.5)
    rewards = np.zeros(6, np.float32)
    for step in range(6):
        step_all(pool, Do.SLOW)
        rewards[step] = pool.block.reward[0]
    point = OpenEpisode(0, np.full((6, 1), Do.SLOW, np.float32), rewards, pool.block.obs[0].copy())
    start_time = time.monotonic()
    assert pool.resume([point]) == [None]
    assert time.monotonic() - start_time > 2


# -- repeated failures -------------------------------------------------------------------------------------------------


def test_worker_that_dies_during_restart_retries_with_other_seeds(start_pool: Make, tmp_path: Path) -> None:
    fatal = episode_seed(SEED, 41, 1)

    class KillsWorker(ActionFaultEnv):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            if seed == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reset(seed=seed)

    pool = start_pool(KillsWorker)
    step_all(pool, Do.STEP, Do.TERMINATE, Do.STEP, Do.STEP)  # starts the episode that kills the worker
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "killed")] * 2
    assert pool.faults[1].text.startswith(
        "The worker of environments 40 to 41 could not be restarted: The worker of environments 40 to 41 exited"
    )
    assert pool.block.retry.tolist() == [True, True, False, False]
    # Environment 40 had started episode 1 when 41 killed the worker again.
    assert positions(pool)[:2] == [expected_position(40, 3, 0), expected_position(41, 2, 0)]
    step_all(pool)
    assert len(pool.faults) == 2


def test_worker_that_cannot_be_restarted_raises_with_reason(start_pool: Make, tmp_path: Path) -> None:
    pool = start_pool(lambda: ActionFaultEnv(str(tmp_path)), max_env_restarts=2)
    (tmp_path / "creation kills").touch()
    send(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    with pytest.raises(TrainingError) as error:
        pool.recv(2)
    first, second, *_ = str(error.value).splitlines()
    assert first.startswith("Environment 40 failed 3 times without finishing an episode in between; max_env_restarts")
    assert second.startswith("The worker of environments 40 to 41 could not be restarted: ")
    assert "exit status -9" in second
    assert [fault.kind for fault in pool.faults] == ["killed"] * 3


def test_worker_death_counts_as_fault_of_all_its_envs(start_pool: Make) -> None:
    pool = start_pool(max_env_restarts=1)
    step_all(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    send(pool, Do.STEP, Do.RAISE, Do.STEP, Do.STEP)
    with pytest.raises(TrainingError, match=r"^Environment 41 failed 2 times"):
        pool.recv(2)


def test_failed_env_creation_in_new_worker_is_retried_each_step(start_pool: Make, tmp_path: Path) -> None:
    pool = start_pool(lambda: ActionFaultEnv(str(tmp_path)))
    (tmp_path / "creation fails").touch()
    step_all(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "killed"), (40, "exception"), (41, "exception")]
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert [step for _, step in positions(pool)[:2]] == [0, 0]  # a first observation
    (tmp_path / "creation fails").unlink()
    pool.faults.clear()
    step_all(pool)
    assert [fault.text.splitlines()[0].split(": ", 1)[1] for fault in pool.faults] == ["OSError: no such robot"] * 2
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert positions(pool)[:2] == [expected_position(40, 3, 0), expected_position(41, 3, 0)]
    step_all(pool)
    assert not pool.block.retry.any()


def test_nan_in_restarted_worker_is_a_fault_not_usage_error(start_pool: Make) -> None:
    pool = start_pool()
    with pytest.raises(UsageError, match=r"^step\(\) returned the reward nan"):
        step_all(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)
    pool = start_pool()
    for _ in range(CHECKED_STEPS):
        step_all(pool)
    step_all(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    step_all(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)
    assert [fault.kind for fault in pool.faults] == ["killed", "exception"]


def test_states_of_dead_worker_restarts_its_envs(
    start_pool: Make,
) -> None:
    pool = start_pool()
    kill_worker(pool, 1)
    assert pool.states() == [None] * 4
    assert sorted(pool.restarted) == [2, 3]
    assert [fault.kind for fault in pool.faults] == ["killed"]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_long_fault_messages_do_not_block_other_slices(start_pool: Make) -> None:
    pool = start_pool(workers=1, slices=4)
    step_all(pool, Do.RAISE_LONG_MESSAGE, Do.RAISE_LONG_MESSAGE, Do.STEP, Do.STEP)
    assert sorted(fault.env for fault in pool.faults) == [40, 41]


def test_command_larger_than_pipe_reaches_idle_worker(start_pool: Make) -> None:
    pool = start_pool(n_envs=1, workers=1)
    state = {"env": np.zeros(1_000_000), "length": 0, "return": 0.0, "episode": 0}  # the environment cannot load it
    actions, obs = np.zeros((0, 1), np.float32), pool.block.obs[0].copy()
    for _ in range(3):  # the worker checks its parent every second, which must not interrupt a message
        (difference,) = pool.resume([OpenEpisode(0, actions, np.zeros(0, np.float32), obs, state)])
        assert difference is not None
        assert difference.is_lost
        assert positions(pool) == [expected_position(40, 1, 0)]
        time.sleep(0.7)


def test_commands_are_rejected_while_slice_is_in_flight(start_pool: Make) -> None:
    pool = start_pool()
    send(pool, slices=[0])
    with pytest.raises(RuntimeError, match="in flight"):
        pool.states()
    pool.recv(1)
    assert pool.states() == [None] * 4


# -- cleanup -----------------------------------------------------------------------------------------------------------


def test_restarted_workers_end_when_trainer_is_killed(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        import numpy as np
        from action_faults import ENV_SPEC, ActionFaultEnv, Do
        from unidle.envs.make import env_maker
        from unidle.envs.pool.process_pool import ProcessPool

        pool = ProcessPool(env_maker(ActionFaultEnv), ENV_SPEC, 2, 0, 2)
        pool.start(np.zeros(2, np.int64))
        old = [worker._process.pid for worker in pool._processes]
        pool.block.actions[:, 0] = Do.EXIT
        pool.send([0, 1])
        pool.recv(2)
        new = [worker._process.pid for worker in pool._processes]
        pool.block.actions[:, 0] = [Do.HANG, Do.STEP]  # one during a step, one idle
        pool.send([0, 1])
        pool.recv(1)
        print(*old, *new, flush=True)
        time.sleep(600)
    """
    script = tmp_path / "train_here.py"
    script.write_text(textwrap.dedent(code))
    paths = os.pathsep.join([str(SOURCE), str(TESTS)])
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as trainer:
        try:
            assert trainer.stdout is not None
            pids = [int(pid) for pid in trainer.stdout.readline().split()]
            assert len(set(pids)) == 4
            assert [is_running(pid) for pid in pids] == [False, False, True, True]
        finally:
            trainer.kill()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


def resources() -> tuple[int, int]:
    """The numbers of open file descriptors and of shared-memory mappings."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:unidle")


def test_closed_pool_leaks_no_descriptors_or_mappings() -> None:
    gc.collect()
    before = resources()
    pool = ProcessPool(env_maker(ActionFaultEnv), ENV_SPEC, 2, SEED, 2)
    pool.start(np.zeros(2, np.int64))
    step_all(pool, Do.EXIT, Do.STEP)
    pool.close()
    del pool
    gc.collect()
    assert resources() == before


# -- random faults -----------------------------------------------------------------------------------------------------


class ExpectedState:
    """The expected state of each env id, computed from what was sent and received."""

    def __init__(self, envs: HostEnvs) -> None:
        self.block = envs.block
        self.episode, self.step = [0] * envs.n_envs, [0] * envs.n_envs
        self.truncated_by_fault = self.retried = 0

    def check_position(self, env_id: int) -> None:
        assert position(self.block.obs[env_id]) == expected_position(
            FIRST_INDEX + env_id, self.episode[env_id], self.step[env_id]
        )
        assert self.block.episode[env_id] == self.episode[env_id]

    def start_episode(self, env_id: int) -> None:
        """This env id starts a new episode, of any later number."""
        episode = int(self.block.episode[env_id])
        assert episode > self.episode[env_id]
        self.episode[env_id], self.step[env_id] = episode, 0
        self.check_position(env_id)

    def restart(self, env_id: int) -> None:
        """This env id starts a new episode although it was not being stepped."""
        assert position(self.block.final_obs[env_id]) == expected_position(
            FIRST_INDEX + env_id, self.episode[env_id], self.step[env_id]
        )
        self.start_episode(env_id)

    def receive(self, env_id: int, action: Do, *, has_died: bool) -> None:
        """This env id was received after a step with the action `action`."""
        block = self.block
        if block.skip[env_id]:
            self.check_position(env_id)
            return
        if block.retry[env_id]:
            assert has_died or action == Do.RAISE
            self.retried += action != Do.RAISE
            self.start_episode(env_id)
            return
        assert action != Do.RAISE
        seed, step = expected_position(FIRST_INDEX + env_id, self.episode[env_id], self.step[env_id] + 1)
        truncated_by_fault = bool(block.truncated[env_id]) and action != Do.TRUNCATE
        assert has_died or not truncated_by_fault
        self.truncated_by_fault += truncated_by_fault
        assert block.reward[env_id] == np.float32(reward_of(seed, step))
        assert block.terminated[env_id] == (action == Do.TERMINATE)
        assert block.truncated[env_id] == (action == Do.TRUNCATE or truncated_by_fault)
        if block.truncated[env_id]:
            assert position(block.final_obs[env_id]) == (seed, step)
        if block.terminated[env_id] or block.truncated[env_id]:
            assert block.episode_length[env_id] == (-1 if truncated_by_fault else step)
            self.start_episode(env_id)
        else:
            self.step[env_id] = step
            self.check_position(env_id)


def wait_until_idle(pool: ProcessPool) -> None:
    """Wait until no slice is in flight, for a limited time: a worker may be blocked on a message."""
    for _ in range(100):
        if STEP not in pool._signals.flags:
            return
        time.sleep(0.001)


@pytest.fixture
def pool_sockets(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes of all sockets that pools create from now on.

    Descriptors that threads of other tests open and close meanwhile must not be counted.
    """
    created: set[int] = set()

    def socketpair() -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        created.update(os.fstat(end.fileno()).st_ino for end in pair)
        return pair

    monkeypatch.setattr(process, "socket", SimpleNamespace(socketpair=socketpair))
    return created


def still_open(inodes: set[int]) -> set[int]:
    """Those of these inodes that this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.add(os.fstat(int(descriptor)).st_ino)
    return found & inodes


def step_at_random(
    envs: HostEnvs, rng: random.Random, exceptions: int, kills: int, sockets: set[int] | None = None
) -> None:
    """Step at random until enough faults have occurred; the block must be consistent after each `recv`.

    Of `sockets`, which pools created, no more than one per worker may be open.
    """
    envs.start(np.zeros(envs.n_envs, np.int64))
    expected, block, fault_counts, restarted = ExpectedState(envs), envs.block, Counter[str](), 0
    in_flight: dict[int, list[Do]] = {}  # the actions of each slice in flight
    per_worker = envs.n_envs // max(1, envs.workers)
    while fault_counts["exception"] < exceptions or fault_counts["killed"] < kills:
        victim = how = None
        if isinstance(envs, ProcessPool) and fault_counts["killed"] < kills and rng.random() < 0.1:
            victim = worker_pid(envs, rng.randrange(envs.workers))
            how = rng.choice(["during the step", "after the step", "before the step"])
        if victim is not None and how == "before the step":
            os.kill(victim, signal.SIGSTOP)
        for number, bounds in enumerate(envs.bounds):
            if number not in in_flight and rng.random() < 0.7:
                env_ids = range(*bounds)
                in_flight[number] = rng.choices(
                    [Do.STEP, Do.TERMINATE, Do.TRUNCATE, Do.RAISE], [20, 2, 2, 1], k=len(env_ids)
                )
                block.actions[env_ids, 0] = in_flight[number]
                block.skip[env_ids] = [rng.random() < 0.2 for _ in env_ids]
                envs.send([number])
        if victim is not None and isinstance(envs, ProcessPool):
            if how == "after the step":
                wait_until_idle(envs)  # and not received yet
            os.kill(victim, signal.SIGKILL)
            if how == "after the step":  # it must have died before the step is received
                os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
            envs._next_check = rng.choice([0.0, envs._next_check])
        stepped = envs.recv(
            rng.randint(1, max(1, len(in_flight))), rng.choice([None, 0.0, 0.001]) if in_flight else 0.0
        )
        died = {(fault.env - FIRST_INDEX) // per_worker for fault in envs.faults if fault.kind == "killed"}
        fault_counts.update(fault.kind for fault in envs.faults)
        for env_id in envs.restarted:
            assert env_id // per_worker in died
            expected.restart(env_id)
        for number in stepped:
            env_ids = range(*envs.bounds[number])
            for env_id, action in zip(env_ids, in_flight.pop(number)):
                expected.receive(env_id, action, has_died=env_id // per_worker in died)
            assert envs.faults or not block.retry[env_ids][~block.skip[env_ids]].any()
        for number in set(range(len(envs.bounds))) - set(in_flight):
            for env_id in range(*envs.bounds[number]):
                expected.check_position(env_id)
        restarted += len(envs.restarted)
        envs.faults.clear()
        envs.restarted.clear()
        if sockets is not None:
            assert len(still_open(sockets)) == envs.workers
    assert fault_counts.keys() <= {"exception", "killed"}
    assert (
        not kills or min(expected.truncated_by_fault, expected.retried, restarted) > 0
    )  # every kind of recovery was covered


def test_serial_envs_survive_200_random_faults() -> None:
    with closing(
        SerialEnvs(env_maker(ActionFaultEnv), ENV_SPEC, 12, SEED, FIRST_INDEX, max_env_restarts=10**6)
    ) as envs:
        step_at_random(envs, random.Random(1), exceptions=200, kills=0)


def test_process_pool_survives_200_random_faults(monkeypatch: pytest.MonkeyPatch, pool_sockets: set[int]) -> None:
    monkeypatch.setattr(process, "POLL_SECONDS", 0.02)
    pool = ProcessPool(env_maker(ActionFaultEnv), ENV_SPEC, 12, SEED, 2, FIRST_INDEX, slices=3, max_env_restarts=10**6)
    with closing(pool):
        gc.collect()
        mappings = resources()[1]
        step_at_random(pool, random.Random(2), exceptions=150, kills=50, sockets=pool_sockets)
        assert resources()[1] == mappings
    assert not still_open(pool_sockets)


# -- at the start ------------------------------------------------------------------------------------------------------


class DiesAtStart(ActionFaultEnv):
    """Kills its process in `moment`, as often as there are files in `folder`."""

    def __init__(self, folder: Path, moment: str) -> None:
        super().__init__()
        self._folder, self._moment = folder, moment
        self._die("create")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self._die("reset")
        return super().reset(seed=seed, options=options)

    def _die(self, moment: str) -> None:
        left = sorted(self._folder.iterdir()) if moment == self._moment else []
        if left:
            left[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["create", "reset"])
def test_worker_killed_while_it_starts_is_restarted_and_loses_no_episode(
    moment: str, start_pool: Make, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / str(number)).touch()
    pool = start_pool(lambda: DiesAtStart(tmp_path, moment), n_envs=2, workers=1)
    assert [fault.kind for fault in pool.faults] == ["killed", "killed"]
    assert pool.restarted == []
    assert positions(pool) == positions(start_pool(n_envs=2, workers=1))


def test_worker_that_always_dies_at_start_ends_with_an_error(start_pool: Make, tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / str(number)).touch()
    with pytest.raises(TrainingError, match="max_env_restarts allows 1"):
        start_pool(lambda: DiesAtStart(tmp_path, "reset"), n_envs=1, workers=1, max_env_restarts=1)


# -- sys.exit ----------------------------------------------------------------------------------------------------------


class Exits(ActionFaultEnv):
    """Calls sys.exit(0) on Do.RAISE."""

    def step(self, action: Any) -> Any:
        if action == Do.RAISE:
            sys.exit(0)
        return super().step(action)


@pytest.mark.parametrize("workers", [0, 1])
def test_sys_exit_in_an_env_is_a_fault(workers: int) -> None:
    maker = env_maker(Exits)
    envs: HostEnvs = ProcessPool(maker, ENV_SPEC, 2, SEED, 1) if workers else SerialEnvs(maker, ENV_SPEC, 2, SEED)
    with closing(envs):
        envs.start(np.zeros(2, np.int64))
        envs.block.actions[:, 0] = [Do.RAISE, Do.STEP]
        envs.send([0])
        envs.recv(1)
        (fault,) = envs.faults
        assert fault.kind == "exception"
        assert "it called sys.exit(0)" in fault.text
        assert envs.block.retry.tolist() == [True, False]


def test_pools_whose_workers_share_a_core_do_not_disturb_each_other(start_pool: Make) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shared = SharedPools(2, SharedDoorbell(), WorkerCores(cores[:1] * 2, 2))  # one core for all
    with closing(shared):
        first, second = (start_pool(workers=1, shared=shared) for _ in range(2))
        for _ in range(20):
            step_all(first)
            step_all(second)
        send(first, Do.HANG, Do.STEP, Do.STEP, Do.STEP)
        step_all(second)
        kill_worker(first, 0)
        assert first.recv(1) == [0]
        assert [fault.kind for fault in first.faults] == ["killed"]
        assert second.faults == []
        before = positions(second)
        step_all(first)
        step_all(second)
        assert [step for _, step in positions(second)] == [step + 1 for _, step in before]
