"""Workers that die or hang: another takes their place, and the block says what became of every env_id."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import SOURCE, TESTS
from processes import is_running, wait_until
from troubled import CHECKED, ENV_SPEC, SEED, Do, Troubled, at, place, reward_of

from unidle.envs.make import env_maker
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.signals import SEMAPHORE_BYTES
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE, DONE_WITH_FAULTS, STEP, WorkerSignals
from unidle.envs.protocol import HostEnvs
from unidle.errors import TrainingError, UsageError

FIRST = 40  # number of the first environment
Make = Callable[..., ProcessPool]


@pytest.fixture
def started() -> Iterator[Make]:
    """A pool of four environments in two workers, of one slice each unless it is said otherwise."""
    made: list[ProcessPool] = []

    def started(env: Any = Troubled, n_envs: int = 4, workers: int = 2, slices: int = 1, **kwargs: Any) -> ProcessPool:
        pool = ProcessPool(env_maker(env), ENV_SPEC, n_envs, SEED, workers, FIRST, slices, **kwargs)
        made.append(pool)
        pool.start(np.zeros(n_envs, np.int64))
        return pool

    yield started
    for pool in made:
        pool.close()


def send(pool: ProcessPool, *what: Do, slices: list[int] | None = None) -> None:
    chosen = list(range(len(pool.bounds))) if slices is None else slices
    env_ids = [env_id for number in chosen for env_id in range(*pool.bounds[number])]
    pool.block.actions[env_ids, 0] = what or [Do.STEP] * len(env_ids)
    pool.send(chosen)


def do(pool: ProcessPool, *what: Do) -> None:
    """One step of all environments."""
    send(pool, *what)
    assert pool.recv(len(pool.bounds)) == list(range(len(pool.bounds)))


def places(pool: ProcessPool) -> list[tuple[int, int]]:
    return [place(row) for row in pool.block.obs]


def pid(pool: ProcessPool, worker: int) -> int:
    running = pool._processes[worker]._process
    assert running is not None
    return running.pid


def kill(pool: ProcessPool, worker: int) -> None:
    """Have the worker killed, and the pool look for it next time it is asked."""
    os.kill(pid(pool, worker), signal.SIGKILL)
    os.waitid(os.P_PID, pid(pool, worker), os.WEXITED | os.WNOWAIT)
    pool._next_check = 0.0


def when_flags_are(pool: ProcessPool, *flags: int) -> None:
    """Wait until the slices are so far, without taking them back."""
    assert wait_until(lambda: pool._signals.flags.tolist() == list(flags)), pool._signals.flags


def seeds(envs: list[int], episodes: list[int]) -> str:
    told = [f"{env} (episode {e}, seed {episode_seed(SEED, env, e)})" for env, e in zip(envs, episodes)]
    return ", ".join(told)


DIED = "it was killed, ran out of memory, or the environment crashed the interpreter."


# -- in the middle of a step -------------------------------------------------------------------------------------------


def test_a_worker_killed_in_a_step_is_replaced_and_its_step_did_not_happen(started: Make) -> None:
    pool = started()
    before = pid(pool, 0)
    do(pool)
    do(pool, Do.STEP, Do.END, Do.STEP, Do.STEP)
    send(pool, Do.HANG, Do.STEP, Do.STEP, Do.END)
    when_flags_are(pool, STEP, DONE)
    kill(pool, 0)
    assert pool.recv(2) == [0, 1]

    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (40, "killed")
    assert fault.text == (
        f"The worker of environments 40 to 41 exited unexpectedly (exit status -9): {DIED} "
        f"It had to step environments {seeds([40, 41], [0, 1])}."
    )
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert places(pool) == [at(40, 1, 0), at(41, 2, 0), at(42, 0, 3), at(43, 1, 0)]
    assert pool.block.episode.tolist() == [1, 2, 0, 1]
    assert pool.block.terminated[2:].tolist() == [False, True]
    assert pool.block.reward[2:].tolist() == [reward_of(*at(env, 0, 3)) for env in (42, 43)]
    assert pool.restarted == []
    assert pid(pool, 0) != before
    assert not is_running(before)

    do(pool)
    assert len(pool.faults) == 1
    assert not pool.block.retry.any()
    assert places(pool) == [at(40, 1, 1), at(41, 2, 1), at(42, 0, 4), at(43, 1, 1)]


def test_an_environment_that_ends_its_process_is_survived(started: Make) -> None:
    pool = started()
    do(pool, Do.STEP, Do.STEP, Do.STEP, Do.EXIT)
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(42, "killed")]
    assert pool.faults[0].text.startswith(
        "The worker of environments 42 to 43 exited unexpectedly (exit status 3): it was killed, "
    )
    assert pool.block.retry.tolist() == [False, False, True, True]
    assert places(pool) == [at(40, 0, 1), at(41, 0, 1), at(42, 1, 0), at(43, 1, 0)]


def test_lines_that_were_skipped_in_the_step_are_renewed_and_not_redone(started: Make) -> None:
    pool = started()
    do(pool)
    pool.block.skip[:] = [True, False, False, False]
    last = pool.block.obs[0].copy()
    do(pool, Do.STEP, Do.EXIT, Do.STEP, Do.STEP)
    assert pool.block.retry.tolist() == [False, True, False, False]
    assert pool.restarted == [0]
    assert np.array_equal(pool.block.final_obs[0], last)
    assert places(pool) == [at(40, 1, 0), at(41, 1, 0), at(42, 0, 2), at(43, 0, 2)]
    assert f"environments {seeds([41], [0])}." in pool.faults[0].text


# -- between steps -----------------------------------------------------------------------------------------------------


def test_a_worker_killed_while_its_slices_wait_renews_their_lines(started: Make) -> None:
    pool = started(workers=2, slices=2)
    do(pool, Do.CUT, Do.STEP, Do.STEP, Do.STEP)
    last = pool.block.obs.copy()
    kill(pool, 0)
    send(pool, slices=[2, 3])
    assert pool.recv(2) == [2, 3]
    assert sorted(pool.restarted) == [0, 1]
    assert np.array_equal(pool.block.final_obs[:2], last[:2])
    assert [fault.env for fault in pool.faults] == [40]
    assert pool.faults[0].text.endswith(" It was not stepping any of them.")
    assert places(pool) == [at(40, 2, 0), at(41, 1, 0), at(42, 0, 2), at(43, 0, 2)]
    assert not pool.block.retry[2:].any()

    pool.restarted.clear()
    do(pool)
    assert places(pool) == [at(40, 2, 1), at(41, 1, 1), at(42, 0, 3), at(43, 0, 3)]
    assert pool.restarted == []
    assert not pool.block.retry.any()


def test_a_slice_that_was_stepped_keeps_its_step_and_its_open_episodes_are_cut_off(started: Make) -> None:
    pool = started(n_envs=8, workers=2, slices=1)
    do(pool)
    pool.block.skip[0] = True
    send(pool, Do.STEP, Do.STEP, Do.END, Do.CUT, *[Do.STEP] * 4)
    when_flags_are(pool, DONE, DONE)
    obs = pool.block.obs.copy()
    kill(pool, 0)
    assert pool.recv(2) == [0, 1]
    block = pool.block
    assert pool.restarted == [0]
    assert not block.retry.any()
    assert block.terminated[1:].tolist() == [False, True, False, *[False] * 4]
    assert block.truncated[1:].tolist() == [True, False, True, *[False] * 4]
    assert block.episode_length[1:4].tolist() == [-1, 2, 2]
    assert block.reward[1:4].tolist() == [reward_of(*at(40 + env, 0, 2)) for env in (1, 2, 3)]
    assert np.array_equal(block.final_obs[:2], obs[:2])
    assert place(block.final_obs[3]) == at(43, 0, 2)
    expected = [at(40, 1, 0), at(41, 1, 0), at(42, 2, 0), at(43, 2, 0)]
    assert places(pool) == expected + [at(44 + env, 0, 2) for env in range(4)]


def test_faults_that_a_worker_told_before_it_died_are_heard(started: Make) -> None:
    pool = started()
    send(pool, Do.RAISE, Do.STEP, Do.STEP, Do.STEP)
    when_flags_are(pool, DONE_WITH_FAULTS, DONE)
    time.sleep(0.1)  # the message follows the flag
    kill(pool, 0)
    assert pool.recv(2) == [0, 1]
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "exception"), (40, "killed")]
    assert pool.block.retry.tolist() == [True, False, False, False]
    assert pool.block.truncated.tolist() == [False, True, False, False]
    assert place(pool.block.final_obs[1]) == at(41, 0, 1)
    assert places(pool)[:2] == [at(40, 2, 0), at(41, 1, 0)]


def test_a_message_that_was_never_sent_is_not_waited_for(started: Make) -> None:
    pool = started()
    os.kill(pid(pool, 0), signal.SIGSTOP)
    pool._signals.flags[0] = DONE_WITH_FAULTS  # as if it had been killed between the flag and the message
    pool.block.retry[0] = True
    pool._next_check = np.inf
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid(pool, 0)}"])
    assert pool.recv(1) == [0]
    killer.wait()
    assert [fault.kind for fault in pool.faults] == ["killed"]
    assert pool.block.retry.tolist() == [True, False, False, False]
    assert pool.block.truncated.tolist() == [False, True, False, False]


@pytest.mark.parametrize("next_look", [0.0, np.inf])  # whether the death is found by looking, or by listening
def test_half_a_message_is_given_up(started: Make, next_look: float) -> None:
    pool = started()
    send(pool, Do.SHOUT, Do.STEP, Do.STEP, Do.STEP)
    when_flags_are(pool, DONE_WITH_FAULTS, DONE)
    time.sleep(0.2)  # the pipe is full by now
    kill(pool, 0)
    pool._next_check = next_look
    assert pool.recv(2) == [0, 1]
    assert [fault.kind for fault in pool.faults] == ["killed"]
    assert pool.block.retry.tolist() == [True, False, False, False]


# -- posts and waiting -------------------------------------------------------------------------------------------------


def test_a_step_whose_post_was_never_made_is_seen_all_the_same(started: Make) -> None:
    pool = started()
    os.kill(pid(pool, 0), signal.SIGSTOP)
    pool._signals.flags[0] = DONE
    assert pool.recv(1) == [0]
    os.kill(pid(pool, 0), signal.SIGCONT)
    do(pool)


def test_posts_and_commands_that_a_dead_worker_did_not_take_mean_nothing_to_the_next(started: Make) -> None:
    pool = started()
    os.kill(pid(pool, 0), signal.SIGSTOP)
    pool._signals.commands[0] = 1
    for _ in range(5):
        pool._signals.go[0]._semaphore.post()
        pool._signals.ready._semaphore.post()
    send(pool)
    when_flags_are(pool, STEP, DONE)
    kill(pool, 0)
    assert pool.recv(2) == [0, 1]
    for _ in range(5):
        pool._signals.ready._semaphore.post()
    os.kill(pid(pool, 0), signal.SIGSTOP)
    send(pool)
    assert pool.recv(1) == [1]
    os.kill(pid(pool, 0), signal.SIGCONT)
    assert pool.recv(1) == [0]
    assert places(pool) == [at(40, 1, 1), at(41, 1, 1), at(42, 0, 2), at(43, 0, 2)]


def test_all_that_a_worker_was_told_can_be_taken_back() -> None:
    signals = WorkerSignals.over(mmap.mmap(-1, WorkerSignals.nbytes(4, 2)), 0, slices=4, workers=2, initialise=True)
    signals.commands[:] = 1
    for bell in (signals.ready, *signals.go):
        bell._semaphore.post()
        bell._memory[bell._asleep] = 1
    signals.reset_worker(0)
    assert signals.commands.tolist() == [0, 1]
    assert [bell._memory[bell._asleep] for bell in (signals.ready, *signals.go)] == [1, 0, 1]
    assert [bell._semaphore.take() for bell in (signals.ready, *signals.go)] == [True, False, True]


def test_the_semaphore_of_a_worker_that_died_waiting_does_not_count_it_any_more(started: Make) -> None:
    pool = started()
    signals = pool._signals
    # How glibc lays out a semaphore where there are 64-bit atomics: the posts, then the waiters.
    posts, waiters = np.ndarray((2,), np.uint32, signals.memory, signals.begin + SEMAPHORE_BYTES)[:, np.newaxis]
    for _ in range(3):
        assert wait_until(lambda: waiters == 1)
        os.kill(pid(pool, 0), signal.SIGSTOP)
        for _ in range(5):
            signals.go[0]._semaphore.post()
        kill(pool, 0)
        pool.recv(1, seconds=0)
        assert wait_until(lambda: (posts, waiters) == (0, 1))


def test_receiving_for_no_time_returns_what_is_there(started: Make) -> None:
    pool = started()
    send(pool, Do.HANG, Do.STEP, Do.STEP, Do.STEP)
    when_flags_are(pool, STEP, DONE)
    assert pool.recv(2, seconds=0) == [1]
    assert pool.recv(1, seconds=0) == []
    began = time.monotonic()
    assert pool.recv(1, seconds=0.7) == []
    assert 0.7 <= time.monotonic() - began < 5
    assert pool.recv(0) == []
    send(pool, slices=[1])
    assert pool.recv(1, seconds=60) == [1]
    assert time.monotonic() - began < 50
    kill(pool, 0)
    assert pool.recv(1, seconds=60) == [0]


def test_a_worker_that_died_is_found_by_who_never_waits(started: Make) -> None:
    pool = started()
    send(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    got: list[int] = []
    assert wait_until(lambda: len(got.extend(pool.recv(2, seconds=0)) or got) == 2, 10)
    assert sorted(got) == [0, 1]
    assert pool.block.retry.tolist() == [True, True, False, False]


# -- hanging -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_killed_after_its_time_and_nobody_waits_for_it(started: Make) -> None:
    pool = started(env_timeout=1.5)
    do(pool)
    hanging = pid(pool, 1)
    began = time.monotonic()
    send(pool, Do.STEP, Do.STEP, Do.STEP, Do.HANG)
    for _ in range(3):
        assert pool.recv(1) == [0]
        send(pool, slices=[0])
    assert pool.recv(1) == [0]
    assert pool.recv(1) == [1]
    assert 1.5 <= time.monotonic() - began < 20
    (fault,) = pool.faults
    assert (fault.env, fault.kind) == (42, "hung")
    assert fault.text == (
        "The worker of environments 42 to 43 did not respond for 1.5 seconds and was killed. "
        f"It had to step environments {seeds([42, 43], [0, 0])}."
    )
    assert not is_running(hanging)
    assert pool.block.retry.tolist() == [False, False, True, True]
    assert places(pool) == [at(40, 0, 5), at(41, 0, 5), at(42, 1, 0), at(43, 1, 0)]


def test_a_slice_that_waits_for_another_of_its_worker_is_not_taken_for_hanging(started: Make) -> None:
    pool = started(n_envs=6, workers=1, slices=6, env_timeout=1.5)
    do(pool, *[Do.SLOW] * 6)  # the last is done after 2.4 seconds, each after 0.4
    assert pool.faults == []


def test_nobody_hangs_while_nothing_is_asked_of_it(started: Make) -> None:
    pool = started(env_timeout=1.5)
    for _ in range(5):
        pool._next_check = 0.0
        assert pool.recv(1, seconds=0) == []
    do(pool)
    assert pool.faults == []


@pytest.fixture
def close_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that hang are not given long to end by themselves."""
    monkeypatch.setattr("unidle.envs.pool.process_pool._CLOSING_SECONDS", 0.2)


@pytest.mark.usefixtures("close_quickly")
def test_an_environment_that_hangs_in_its_first_reset_is_an_error_in_time(started: Make, tmp_path: Path) -> None:
    (tmp_path / "sleepy").touch()
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"^The worker of environments 4[02] to 4[13] did not respond"):
        started(lambda: Troubled(str(tmp_path)), env_timeout=0.5)
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("close_quickly")
def test_a_worker_that_hangs_while_it_is_started_is_an_error_in_time(
    started: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless() -> Any:
        time.sleep(600)

    monkeypatch.setattr("unidle.envs.pool.process_pool._STARTING_SECONDS", 2.0)
    with pytest.raises(TrainingError, match=r"did not respond for 2.5 seconds and was killed\.$"):
        started(endless, env_timeout=0.5)


def test_a_long_replay_is_not_taken_for_hanging(started: Make) -> None:
    pool = started(n_envs=1, workers=1, env_timeout=1.5)
    for _ in range(6):
        do(pool, Do.SLOW)
    point = (0, np.full((6, 1), Do.SLOW, np.float32), pool.block.obs[0].copy(), None)
    began = time.monotonic()
    assert pool.resume([point]) == [True]
    assert time.monotonic() - began > 2


# -- again and again ---------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_again_while_it_is_replaced_is_tried_again_from_other_seeds(
    started: Make, tmp_path: Path
) -> None:
    fatal = episode_seed(SEED, 41, 1)

    class Deadly(Troubled):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            if seed == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reset(seed=seed)

    pool = started(Deadly)
    do(pool, Do.STEP, Do.END, Do.STEP, Do.STEP)  # into the very episode that kills it
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "killed")] * 2
    assert pool.faults[1].text.startswith(
        "The worker of environments 40 to 41 could not be restarted: The worker of environments 40 to 41 exited"
    )
    assert pool.block.retry.tolist() == [True, True, False, False]
    # Environment 40 had begun episode 1 when 41 killed them both once more.
    assert places(pool)[:2] == [at(40, 3, 0), at(41, 2, 0)]
    do(pool)
    assert len(pool.faults) == 2


def test_a_worker_that_cannot_be_replaced_is_an_error_with_the_reason(started: Make, tmp_path: Path) -> None:
    pool = started(lambda: Troubled(str(tmp_path)), max_env_restarts=2)
    (tmp_path / "deadly").touch()
    send(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    with pytest.raises(TrainingError) as failure:
        pool.recv(2)
    first, second, *_ = str(failure.value).splitlines()
    assert first.startswith("Environment 40 failed 3 times without finishing an episode in between; max_env_restarts")
    assert second.startswith("The worker of environments 40 to 41 could not be restarted: ")
    assert "exit status -9" in second
    assert [fault.kind for fault in pool.faults] == ["killed"] * 3


def test_a_death_counts_for_every_environment_of_the_worker(started: Make) -> None:
    pool = started(max_env_restarts=1)
    do(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    send(pool, Do.STEP, Do.RAISE, Do.STEP, Do.STEP)
    with pytest.raises(TrainingError, match=r"^Environment 41 failed 2 times"):
        pool.recv(2)


def test_environments_that_a_new_worker_cannot_make_are_tried_again_at_each_step(started: Make, tmp_path: Path) -> None:
    pool = started(lambda: Troubled(str(tmp_path)))
    (tmp_path / "unmakeable").touch()
    do(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    assert [(fault.env, fault.kind) for fault in pool.faults] == [(40, "killed"), (40, "exception"), (41, "exception")]
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert [step for _, step in places(pool)[:2]] == [0, 0]  # some first observation
    (tmp_path / "unmakeable").unlink()
    pool.faults.clear()
    do(pool)
    assert [fault.text.splitlines()[0].split(": ", 1)[1] for fault in pool.faults] == ["OSError: no such robot"] * 2
    assert pool.block.retry.tolist() == [True, True, False, False]
    assert places(pool)[:2] == [at(40, 3, 0), at(41, 3, 0)]
    do(pool)
    assert not pool.block.retry.any()


def test_a_new_worker_takes_what_is_not_finite_for_a_fault_from_its_first_step_on(started: Make) -> None:
    pool = started()
    with pytest.raises(UsageError, match=r"^step\(\) returned the reward nan"):
        do(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)
    pool = started()
    for _ in range(CHECKED):
        do(pool)
    do(pool, Do.EXIT, Do.STEP, Do.STEP, Do.STEP)
    do(pool, Do.NAN_REWARD, Do.STEP, Do.STEP, Do.STEP)
    assert [fault.kind for fault in pool.faults] == ["killed", "exception"]


def test_a_worker_that_is_dead_when_it_is_asked_for_states_is_replaced_and_its_environments_are_renewed(
    started: Make,
) -> None:
    pool = started()
    kill(pool, 1)
    assert pool.states() == [None] * 4
    assert sorted(pool.restarted) == [2, 3]
    assert [fault.kind for fault in pool.faults] == ["killed"]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_worker_with_much_to_tell_holds_up_nobody_who_waits_for_its_other_slices(started: Make) -> None:
    pool = started(workers=1, slices=4)
    do(pool, Do.SHOUT, Do.SHOUT, Do.STEP, Do.STEP)
    assert sorted(fault.env for fault in pool.faults) == [40, 41]


def test_a_command_longer_than_a_pipe_holds_arrives_at_an_idle_worker(started: Make) -> None:
    pool = started(n_envs=1, workers=1)
    state = {"env": np.zeros(1_000_000), "length": 0, "return": 0.0, "episode": 0}  # which it cannot take
    actions, row = np.zeros((0, 1), np.float32), pool.block.obs[0].copy()
    for _ in range(3):  # the worker looks around every second, and must not do so while the message is on its way
        assert pool.resume([(0, actions, row, state)]) == [False]
        assert places(pool) == [at(40, 1, 0)]
        time.sleep(0.7)


def test_commands_are_refused_while_a_slice_is_under_way(started: Make) -> None:
    pool = started()
    send(pool, slices=[0])
    with pytest.raises(RuntimeError, match="in flight"):
        pool.states()
    pool.recv(1)
    assert pool.states() == [None] * 4


# -- nothing is left behind --------------------------------------------------------------------------------------------


def test_when_the_trainer_is_killed_workers_that_were_started_again_end_too(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        import numpy as np
        from troubled import ENV_SPEC, Do, Troubled
        from unidle.envs.make import env_maker
        from unidle.envs.pool.process_pool import ProcessPool

        pool = ProcessPool(env_maker(Troubled), ENV_SPEC, 2, 0, 2)
        pool.start(np.zeros(2, np.int64))
        old = [worker._process.pid for worker in pool._processes]
        pool.block.actions[:, 0] = Do.EXIT
        pool.send([0, 1])
        pool.recv(2)
        new = [worker._process.pid for worker in pool._processes]
        pool.block.actions[:, 0] = [Do.HANG, Do.STEP]  # one in the middle of a step, one idle
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
    """Open descriptors, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:unidle")


def test_a_pool_that_is_gone_has_given_back_all_it_had() -> None:
    gc.collect()
    before = resources()
    pool = ProcessPool(env_maker(Troubled), ENV_SPEC, 2, SEED, 2)
    pool.start(np.zeros(2, np.int64))
    do(pool, Do.EXIT, Do.STEP)
    pool.close()
    del pool
    gc.collect()
    assert resources() == before


# -- everything at once ------------------------------------------------------------------------------------------------


class Ledger:
    """What each env_id must show, worked out from what was sent and what came back."""

    def __init__(self, envs: HostEnvs) -> None:
        self.block = envs.block
        self.episode, self.step = [0] * envs.n_envs, [0] * envs.n_envs
        self.cut = self.redone = 0

    def check_place(self, env_id: int) -> None:
        assert place(self.block.obs[env_id]) == at(FIRST + env_id, self.episode[env_id], self.step[env_id])
        assert self.block.episode[env_id] == self.episode[env_id]

    def begin(self, env_id: int) -> None:
        """A new episode, of any later number, begins in this env_id."""
        episode = int(self.block.episode[env_id])
        assert episode > self.episode[env_id]
        self.episode[env_id], self.step[env_id] = episode, 0
        self.check_place(env_id)

    def restart(self, env_id: int) -> None:
        """This env_id was not being stepped, and begins a new episode all the same."""
        assert place(self.block.final_obs[env_id]) == at(FIRST + env_id, self.episode[env_id], self.step[env_id])
        self.begin(env_id)

    def take(self, env_id: int, what: Do, *, has_died: bool) -> None:
        """This env_id comes back from a step in which it was told to do `what`."""
        block = self.block
        if block.skip[env_id]:
            self.check_place(env_id)
            return
        if block.retry[env_id]:
            assert has_died or what == Do.RAISE
            self.redone += what != Do.RAISE
            self.begin(env_id)
            return
        assert what != Do.RAISE
        seed, step = at(FIRST + env_id, self.episode[env_id], self.step[env_id] + 1)
        cut = bool(block.truncated[env_id]) and what != Do.CUT
        assert has_died or not cut
        self.cut += cut
        assert block.reward[env_id] == np.float32(reward_of(seed, step))
        assert block.terminated[env_id] == (what == Do.END)
        assert block.truncated[env_id] == (what == Do.CUT or cut)
        if block.truncated[env_id]:
            assert place(block.final_obs[env_id]) == (seed, step)
        if block.terminated[env_id] or block.truncated[env_id]:
            assert block.episode_length[env_id] == (-1 if cut else step)
            self.begin(env_id)
        else:
            self.step[env_id] = step
            self.check_place(env_id)


def wait_until_done(pool: ProcessPool) -> None:
    """Until no worker has a slice under way; one may be in the middle of a message, so not for ever."""
    for _ in range(100):
        if STEP not in pool._signals.flags:
            return
        time.sleep(0.001)


def soak(envs: HostEnvs, rng: random.Random, exceptions: int, kills: int) -> None:
    """Go on at random until so many faults were seen; the block must be consistent after each `recv`."""
    envs.start(np.zeros(envs.n_envs, np.int64))
    ledger, block, seen, restarted = Ledger(envs), envs.block, Counter[str](), 0
    told: dict[int, list[Do]] = {}  # what the env_ids of each slice under way were told to do
    per_worker = envs.n_envs // max(1, envs.workers)
    opened: tuple[int, int] | None = None
    while seen["exception"] < exceptions or seen["killed"] < kills:
        victim = how = None
        if isinstance(envs, ProcessPool) and seen["killed"] < kills and rng.random() < 0.1:
            victim = pid(envs, rng.randrange(envs.workers))
            how = rng.choice(["at once", "when it is done", "before it begins"])
        if victim is not None and how == "before it begins":
            os.kill(victim, signal.SIGSTOP)
        for number, bounds in enumerate(envs.bounds):
            if number not in told and rng.random() < 0.7:
                env_ids = range(*bounds)
                told[number] = rng.choices([Do.STEP, Do.END, Do.CUT, Do.RAISE], [20, 2, 2, 1], k=len(env_ids))
                block.actions[env_ids, 0] = told[number]
                block.skip[env_ids] = [rng.random() < 0.2 for _ in env_ids]
                envs.send([number])
        if victim is not None and isinstance(envs, ProcessPool):
            if how == "when it is done":
                wait_until_done(envs)  # and not taken back yet
            os.kill(victim, signal.SIGKILL)
            envs._next_check = rng.choice([0.0, envs._next_check])
        stepped = envs.recv(rng.randint(1, max(1, len(told))), rng.choice([None, 0.0, 0.001]) if told else 0.0)
        died = {(fault.env - FIRST) // per_worker for fault in envs.faults if fault.kind == "killed"}
        seen.update(fault.kind for fault in envs.faults)
        for env_id in envs.restarted:
            assert env_id // per_worker in died
            ledger.restart(env_id)
        for number in stepped:
            env_ids = range(*envs.bounds[number])
            for env_id, what in zip(env_ids, told.pop(number)):
                ledger.take(env_id, what, has_died=env_id // per_worker in died)
            assert envs.faults or not block.retry[env_ids][~block.skip[env_ids]].any()
        for number in set(range(len(envs.bounds))) - set(told):
            for env_id in range(*envs.bounds[number]):
                ledger.check_place(env_id)
        restarted += len(envs.restarted)
        envs.faults.clear()
        envs.restarted.clear()
        if seen["killed"]:
            opened = opened or resources()
            assert resources() == opened
    assert seen.keys() <= {"exception", "killed"}
    assert not kills or min(ledger.cut, ledger.redone, restarted) > 0  # everything happened


def test_two_hundred_faults_at_random_in_this_process() -> None:
    with closing(SerialEnvs(env_maker(Troubled), ENV_SPEC, 12, SEED, FIRST, max_env_restarts=10**6)) as envs:
        soak(envs, random.Random(1), exceptions=200, kills=0)


def test_two_hundred_faults_at_random_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "POLL_SECONDS", 0.02)
    pool = ProcessPool(env_maker(Troubled), ENV_SPEC, 12, SEED, 2, FIRST, slices=3, max_env_restarts=10**6)
    with closing(pool):
        soak(pool, random.Random(2), exceptions=150, kills=50)
