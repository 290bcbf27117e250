"""`ProcessPool` gives the same results as stepping in one process; lifetime of its workers."""

from __future__ import annotations

import gc
import math
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import SOURCE, TESTS
from processes import is_running, wait_until
from small_envs import Nondeterministic
from toy_envs import CheckpointableWalk, ImageEnv, Masked, MixedDictEnv, ProcessInfoEnv, Walk

from unidle.envs.make import env_maker
from unidle.envs.open_episode import OpenEpisode
from unidle.envs.pool.process_pool import ProcessPool, split_envs
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.worker import Worker, WorkerSignals
from unidle.envs.probe import probe
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError, UsageError

EnvFactory = Callable[[], gymnasium.Env]
WALK = probe(env_maker(Walk))


def make_pool(
    env: Any, n_envs: int = 3, workers: int = 2, env_spec: EnvSpec | None = None, **kwargs: Any
) -> ProcessPool:
    maker = env_maker(env)
    return ProcessPool(maker, env_spec or probe(maker), n_envs, kwargs.pop("seed", 5), workers, **kwargs)


def random_actions(env_spec: EnvSpec, n_envs: int, rng: np.random.Generator) -> np.ndarray:
    layout = env_spec.action_layout
    heads = [rng.integers(n, size=(n_envs, 1)) for n in layout.nvec]
    return np.concatenate([*heads, rng.uniform(layout.low, layout.high, (n_envs, layout.reals))], 1)


def contents(envs: ProcessPool | SerialEnvs) -> dict[str, bytes]:
    """All arrays of the block except the heartbeats."""
    arrays = {name: value for name, value in vars(envs.block).items() if isinstance(value, np.ndarray)}
    return {name: value.tobytes() for name, value in arrays.items() if name != "heartbeats"}


def worker_pids(pool: ProcessPool) -> list[int]:
    """The process of each environment (a `ProcessInfoEnv`)."""
    pool.start(np.zeros(pool.n_envs, np.int64))
    return [int(pool.env_spec.obs_layout.unpack(obs)["pid"][0]) for obs in pool.block.obs]


# -- equality with one process -----------------------------------------------------------------------------------------

TASKS: dict[str, EnvFactory] = {
    "vector": lambda: gymnasium.make("CartPole-v1", max_episode_steps=30),
    "dict": MixedDictEnv,
    "image": ImageEnv,
}


@pytest.mark.parametrize("task", TASKS)
def test_pool_block_equals_serial_envs_bit_for_bit(task: str) -> None:
    maker = env_maker(TASKS[task])
    env_spec = probe(maker)
    n_envs, steps, rng = 5, 300, np.random.default_rng(0)
    with (
        closing(ProcessPool(maker, env_spec, n_envs, 5, workers=2, first_index=10)) as pool,
        closing(SerialEnvs(maker, env_spec, n_envs, 5, first_index=10)) as serial,
    ):
        ended = 0
        for envs in (pool, serial):
            envs.start(np.arange(n_envs))
        assert contents(pool) == contents(serial)
        for _ in range(steps):
            actions = random_actions(env_spec, n_envs, rng)
            for envs in (pool, serial):
                envs.block.actions[:] = actions
                envs.send(range(len(envs.bounds)))
                envs.recv(len(envs.bounds))
            assert contents(pool) == contents(serial)
            ended += int((pool.block.terminated | pool.block.truncated).sum())
        assert ended > 20  # episode ends are covered


def test_results_do_not_depend_on_number_of_workers() -> None:
    seen = []
    for workers in (1, 3):
        with closing(make_pool(MixedDictEnv, n_envs=3, workers=workers)) as pool:
            assert pool.workers == workers
            pool.start(np.zeros(3, np.int64))
            rng = np.random.default_rng(1)
            for _ in range(20):
                pool.block.actions[:] = random_actions(pool.env_spec, 3, rng)
                pool.send(range(len(pool.bounds)))
                pool.recv(len(pool.bounds))
            seen.append(contents(pool))
    assert seen[0] == seen[1]


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 4))
def test_envs_are_split_evenly_into_workers_and_slices(n_envs: int, workers: int, slices: int) -> None:
    workers = min(workers, n_envs)
    shares = split_envs(n_envs, workers, slices)
    bounds = [bounds for share in shares for bounds in share]
    assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == n_envs
    sizes = [[end - first for first, end in share] for share in shares]
    assert [len(share) for share in sizes] == [min(slices, sum(share)) for share in sizes]
    for parts in ([sum(share) for share in sizes], *sizes):
        assert 0 < min(parts) <= max(parts) <= min(parts) + 1


def test_action_masks_are_written_to_block() -> None:
    with closing(make_pool(Masked)) as pool:
        pool.start(np.zeros(3, np.int64))
        for step in range(6):
            masks = pool.env_spec.obs_layout.mask_view(pool.block.obs)
            assert masks.tolist() == [[int(i == step % 4) for i in range(4)]] * 3
            pool.block.actions[:] = step % 4
            pool.send(range(len(pool.bounds)))
            pool.recv(len(pool.bounds))


def test_new_workers_resume_by_state_or_replay() -> None:
    actions = np.ones((4, 3, 1), np.float32)

    def play(envs: ProcessPool, steps: np.ndarray) -> np.ndarray:
        rewards = np.zeros(steps.shape[:2], np.float32)
        for number, action in enumerate(steps):
            envs.block.actions[:] = action
            envs.send(range(len(envs.bounds)))
            envs.recv(len(envs.bounds))
            rewards[number] = envs.block.reward
        return rewards

    for env, by_state, resumable in (
        (CheckpointableWalk, True, True),
        (Walk, False, True),
        (Nondeterministic, False, False),
    ):
        env_spec = probe(env_maker(env))
        with closing(make_pool(env, env_spec=env_spec)) as first, closing(make_pool(env, env_spec=env_spec)) as second:
            first.start(np.zeros(3, np.int64))
            rewards = play(first, actions)
            states = first.states()
            assert [state is not None for state in states] == [by_state] * 3
            obs = first.block.obs.copy()
            points = [OpenEpisode(0, actions[:, i], rewards[:, i], obs[i], states[i]) for i in range(3)]
            assert [difference is None for difference in second.resume(points)] == [resumable] * 3
            if resumable:
                assert np.array_equal(second.block.obs, obs)
                play(first, actions[:1])
                play(second, actions[:1])
                assert np.array_equal(second.block.obs, first.block.obs)
                assert np.array_equal(second.block.reward, first.block.reward)


# -- failures ----------------------------------------------------------------------------------------------------------


def step(pool: ProcessPool, times: int) -> None:
    for _ in range(times):
        pool.block.actions[:] = 1
        pool.send(range(len(pool.bounds)))
        pool.recv(len(pool.bounds))


def test_usage_error_in_worker_reaches_trainer() -> None:
    env_spec = probe(env_maker(Masked))
    message = r"^action_mask allows no action for head 0"
    with (
        closing(make_pool(lambda: Masked(allow=0), env_spec=env_spec)) as pool,
        pytest.raises(UsageError, match=message),
    ):
        pool.start(np.zeros(3, np.int64))


def test_failing_factory_raises_and_leaves_no_worker() -> None:
    def broken() -> gymnasium.Env:
        raise OSError("no such robot")

    before = children()
    with pytest.raises(TrainingError, match=r"^Environment 0 failed in episode 0 .*OSError: no such robot"):
        make_pool(broken, env_spec=WALK)
    assert children() == before


def test_unpicklable_factory_raises_usage_error() -> None:
    lock = threading.Lock()

    def unpicklable() -> gymnasium.Env:
        with lock:
            return Walk()

    with pytest.raises(UsageError, match=r"^The environment factory cannot be sent .* or --no-subproc\."):
        make_pool(unpicklable, env_spec=WALK)


# -- worker lifetime ---------------------------------------------------------------------------------------------------


def children() -> set[int]:
    """Running child processes of this one."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if is_running(int(pid))}


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[tuple[ProcessPool, list[int]]]:
    """A pool of three environments in two workers, and the process of each environment."""
    import torch  # noqa: F401  loaded, as in the trainer

    with closing(make_pool(ProcessInfoEnv)) as pool:
        yield pool, worker_pids(pool)


def test_each_worker_gets_consecutive_envs(shared_pool: tuple[ProcessPool, list[int]]) -> None:
    _, pids = shared_pool
    assert pids[0] == pids[1] != pids[2]
    assert os.getpid() not in pids


def test_workers_do_not_import_torch(shared_pool: tuple[ProcessPool, list[int]]) -> None:
    pool, _ = shared_pool
    assert "torch" in sys.modules
    assert [pool.env_spec.obs_layout.unpack(obs)["has_torch"] for obs in pool.block.obs] == [0, 0, 0]


def test_pool_has_at_most_one_worker_per_env() -> None:
    with closing(make_pool(ProcessInfoEnv, n_envs=2, workers=9)) as pool:
        assert pool.workers == len(set(worker_pids(pool))) == 2


def test_close_ends_workers_and_closes_envs(tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool = make_pool(lambda: ProcessInfoEnv(folder))
    (tmp_path / str(os.getpid())).unlink()  # the probe's
    pids = worker_pids(pool)
    pool.close()
    assert not any(is_running(pid) for pid in pids)
    assert {file.name for file in tmp_path.iterdir()} == {str(pid) for pid in pids}
    pool.close()  # may be repeated


def test_closed_pool_leaks_no_descriptor() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pool = make_pool(ProcessInfoEnv)
    pool.close()
    del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_ctrl_c_does_not_end_workers(shared_pool: tuple[ProcessPool, list[int]]) -> None:
    pool, pids = shared_pool
    for pid in set(pids):
        os.kill(pid, signal.SIGINT)
    pool.send(range(len(pool.bounds)))
    pool.recv(len(pool.bounds))
    assert all(is_running(pid) for pid in pids)


def run_script(tmp_path: Path, code: str, **kwargs: Any) -> subprocess.Popen[str]:
    script = tmp_path / "train_here.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)])}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment, **kwargs)


def test_workers_end_when_trainer_is_killed(tmp_path: Path) -> None:
    code = """
        import time
        import numpy as np
        from toy_envs import ProcessInfoEnv
        from unidle.envs.probe import probe
        from unidle.envs.make import env_maker
        from unidle.envs.pool.process_pool import ProcessPool

        maker = env_maker(ProcessInfoEnv)
        pool = ProcessPool(maker, probe(maker), 3, 0, 2)
        pool.start(np.zeros(3, np.int64))
        print(*[int(pool.env_spec.obs_layout.unpack(obs)["pid"][0]) for obs in pool.block.obs], flush=True)
        time.sleep(600)
    """
    with run_script(tmp_path, code) as trainer:
        try:
            pids = [int(pid) for pid in trainer.stdout.readline().split()]
            assert len(set(pids)) == 2
            assert all(is_running(pid) for pid in pids)
        finally:
            trainer.kill()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_script_without_main_guard_may_define_env_and_lambda(tmp_path: Path) -> None:
    code = """
        import gymnasium, numpy as np
        from unidle.envs.probe import probe
        from unidle.envs.make import env_maker
        from unidle.envs.pool.process_pool import ProcessPool

        open("times_run", "a").write("once ")
        OFFSET = 30

        class CustomEnv(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
            action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.array([OFFSET], np.float32), {}
            def step(self, action):
                return np.array([OFFSET + 1], np.float32), 2.0, False, False, {}

        maker = env_maker(lambda: CustomEnv())
        pool = ProcessPool(maker, probe(maker), 2, 0, 2)
        pool.start(np.zeros(2, np.int64))
        pool.send(range(len(pool.bounds))); pool.recv(len(pool.bounds))
        print(pool.block.obs.view(np.float32)[:, 0].tolist(), pool.block.reward.tolist())
        pool.close()
    """
    with run_script(tmp_path, code, cwd=tmp_path) as script:
        stdout, _ = script.communicate(timeout=60)
    assert script.returncode == 0
    assert stdout == "[31.0, 31.0] [2.0, 2.0]\n"
    assert (tmp_path / "times_run").read_text() == "once "


def test_local_file_does_not_shadow_stdlib_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('the wrong signal module')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with closing(make_pool(ImageEnv, n_envs=1, workers=1)) as pool:
        pool.start(np.zeros(1, np.int64))
        assert pool.block.obs.any()


def test_no_wakeup_is_lost_in_any_slice_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.envs.pool.worker_process.POLL_SECONDS", 100.0)  # a lost wake-up would hang the test
    maker = env_maker("CartPole-v1")
    env_spec = probe(maker)
    rng = np.random.default_rng(0)
    with closing(ProcessPool(maker, env_spec, 12, seed=1, workers=3, slices=4)) as pool:
        pool.start(np.zeros(12, np.int64))
        assert [end - first for first, end in pool.bounds] == [1] * 12
        waiting, in_flight, steps = list(range(12)), 0, np.zeros(12, int)
        for _ in range(3000):
            pool.send(waiting)
            in_flight += len(waiting)
            ready = pool.recv(int(rng.integers(1, in_flight + 1)))
            in_flight -= len(ready)
            steps[ready] += 1
            waiting = ready
        while in_flight:
            in_flight -= len(pool.recv(in_flight))
        assert steps.min() > 0


class StartsSubprocess(Walk):
    """Starts a subprocess in each step, which must end on SIGTERM."""

    def step(self, action: Any) -> Any:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.terminate()
        child.wait(10)
        return super().step(action)


class ForksChild(Walk):
    """Forks a process in each step, which must end on SIGTERM."""

    def step(self, action: Any) -> Any:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        return super().step(action)


@pytest.mark.parametrize("env", [StartsSubprocess, ForksChild])
def test_child_of_env_still_ends_on_sigterm(env: EnvFactory) -> None:
    with closing(make_pool(env, env_spec=WALK)) as pool:
        pool.start(np.zeros(pool.n_envs, np.int64))
        step(pool, times=1)
        assert pool.faults == []


def test_env_may_print_when_nobody_reads_the_output(tmp_path: Path) -> None:
    code = """
        import numpy as np
        from toy_envs import Walk
        from unidle.envs.make import env_maker
        from unidle.envs.pool.process_pool import ProcessPool
        from unidle.envs.probe import probe

        class Printing(Walk):
            def step(self, action):
                print("x" * 10_000, flush=True)
                return super().step(action)

        pool = ProcessPool(env_maker(Printing), probe(env_maker(Walk)), 2, 0, 2)
        pool.start(np.zeros(2, np.int64))
        pool.send([0, 1])
        pool.recv(2)
        print(pool.faults)
        pool.close()
    """
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread, run_script(tmp_path, code, stderr=unread) as trainer:
        assert trainer.communicate(timeout=30)[0] == "[]\n"


@pytest.mark.parametrize(("cores", "yields_core"), [(2, True), (3, False)])
def test_waiting_yields_core_unless_each_process_has_one(
    monkeypatch: pytest.MonkeyPatch, cores: int, yields_core: bool
) -> None:
    monkeypatch.setattr("unidle.envs.pool.process_pool.available_cores", lambda: cores)
    maker = env_maker("CartPole-v1")
    with closing(ProcessPool(maker, probe(maker, None), 4, 0, workers=2)) as pool:
        assert all(yields == yields_core for yields in (pool.yields_core, *(job.yields_core for job in pool._jobs())))
        pool.start(np.zeros(4, np.int64))
        step(pool, times=3)  # stepping works either way


def test_pinned_workers_have_own_cores_and_rotate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unidle.envs.pool.process_pool.ROTATE_SECONDS", math.inf)
    cores = sorted(os.sched_getaffinity(0))
    maker = env_maker("CartPole-v1")
    with closing(ProcessPool(maker, probe(maker, None), 3, 0, workers=3, pin_cores=True)) as pool:
        pool.start(np.zeros(3, np.int64))
        seen: dict[int, set[int]] = {number: set() for number in range(3)}
        for _ in range(6):
            pool._next_rotation = 0.0
            step(pool, times=1)
            now = [os.sched_getaffinity(worker._process.pid) for worker in pool._processes if worker._process]
            assert all(len(own) == 1 for own in now)
            assert len(set.union(*now)) == min(3, len(cores))
            for number, own in enumerate(now):
                seen[number] |= own
        assert all(len(own) == min(3, len(cores)) for own in seen.values())


class CommandAfterPoll(Worker):
    """Receives a command just after it has looked for one."""

    def __init__(self, pipe: Connection, trainers: Connection, signals: WorkerSignals) -> None:
        self._pipe, self._trainers, self._signals, self._number, self._yields_core = pipe, trainers, signals, 0, False
        self._envs, self._own_flags, self._sent, self._spin_seconds = self, signals.flags, False, 0.0

    def _step_next(self) -> bool:
        if not self._sent:
            self._sent = True
            self._signals.commands[0] = 1
            self._signals.go[0].ring()
            self._trainers.send_bytes(cloudpickle.dumps(("states", ())))
        return False

    def states(self) -> list[Any]:
        return ["here"]

    def take_faults(self) -> list[Any]:
        return []


def test_command_sent_after_poll_is_executed() -> None:
    trainers, workers = Pipe()
    memory = mmap.mmap(-1, WorkerSignals.nbytes(0, 1))
    signals = WorkerSignals.over(memory, 0, 0, 1, initialise=True)
    errors: list[type[BaseException]] = []

    def serve() -> None:
        try:
            CommandAfterPoll(workers, trainers, signals).run()
        except EOFError:
            errors.append(EOFError)

    worker = threading.Thread(target=serve, daemon=True)
    worker.start()
    assert trainers.poll(10)
    assert cloudpickle.loads(trainers.recv_bytes()) == ("ok", ["here"], [])
    trainers.close()
    worker.join(10)
    assert errors == [EOFError]
