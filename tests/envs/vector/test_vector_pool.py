"""Vector environments in processes of their own: the same values as in the trainer's process, at the same time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from c_loop_on_cpu import use_c_loop
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation
from paths import ROOT
from processes import is_running, restore_sigint, wait_until
from small_runs import small_run
from toy_envs import Failing, ProcessInfoEnv, Walk
from vector_envs import SAME, TASKS, VECTOR_ENVS, N

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.collect.host import HostCollector
from unidle.envs.make import EnvMaker, env_maker
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import random_flat_action
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.envs.vector.pool import VectorPool
from unidle.errors import TrainingError, UsageError
from unidle.timeline import Timeline

SEED = 5
KINDS = [
    "sync, same step",
    "sync, next step",
    "sync, disabled",
    "async, same step",
    "async, next step",
    "unidle's processes, next step",
    "sb3, one process",
    "sb3, processes",
]


class Slow(Walk):
    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return super().step(action)


def factory(kind: str, env: Callable[[], gymnasium.Env]) -> EnvMaker:
    return EnvMaker("mine:make", lambda: VECTOR_ENVS[kind](env))


def step_all(envs: HostEnvs) -> None:
    slices = list(range(len(envs.bounds)))
    envs.send(slices)
    done: list[int] = []
    while len(done) < len(slices):
        done += envs.recv(1)
    assert sorted(done) == slices


def in_both_places(maker: EnvMaker, n_envs: int, parts: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """The blocks after each of `steps` random steps, of a run in worker processes and in this one."""
    env_spec, rng = probe(maker), np.random.default_rng(0)
    with (
        closing(make_vector_envs(maker, env_spec, n_envs, SEED, 40)) as here,
        closing(VectorPool(maker, env_spec, n_envs, SEED, parts, 40)) as apart,
    ):
        assert (len(here.bounds), len(apart.bounds), apart.workers) == (1, parts, parts)
        for envs in (here, apart):
            envs.start(np.zeros(n_envs, np.int64))
        yield here.block, apart.block
        layout = env_spec.action_layout
        masks = env_spec.obs_layout.mask_view(here.block.obs) if env_spec.obs_layout.mask_width else [None] * n_envs
        for _ in range(steps):
            here.block.actions[:] = [random_flat_action(layout, rng, mask) for mask in masks]
            apart.block.actions[:] = here.block.actions
            for envs in (here, apart):
                step_all(envs)
            yield here.block, apart.block


def assert_equal_blocks(here: Any, apart: Any) -> None:
    for name in ("obs", "reward", "terminated", "truncated", "episode", "episode_return", "episode_length", "retry"):
        assert np.array_equal(getattr(here, name), getattr(apart, name)), name
    cut = here.truncated
    assert np.array_equal(here.final_obs[cut], apart.final_obs[cut])


@pytest.mark.parametrize(
    ("kind", "task"), [(kind, "Dict") for kind in KINDS] + [("sync, next step", task) for task in TASKS]
)
def test_own_process_writes_what_this_process_writes(kind: str, task: str) -> None:
    ends = 0
    for here, apart in in_both_places(factory(kind, TASKS[task]), N, 1, 40):
        assert_equal_blocks(here, apart)
        ends += int(here.truncated.sum())
    assert ends > 5  # episode ends are covered


def test_halves_of_envpool_equal_one_pool_in_this_process() -> None:
    pytest.importorskip("envpool")
    maker = env_maker("envpool:CartPole-v1", {"max_episode_steps": 12})
    ends = 0
    for here, apart in in_both_places(maker, 6, 2, 40):
        assert_equal_blocks(here, apart)
        ends += int(here.truncated.sum())
    assert ends > 5


def test_vector_env_steps_while_this_process_goes_on() -> None:
    maker = factory("sync, same step", Slow)
    with closing(VectorPool(maker, probe(maker), N, SEED, 1)) as envs:
        envs.start(np.zeros(N, np.int64))
        envs.send([0])
        began = time.perf_counter()
        assert envs.recv(1, 0.0) == []
        assert time.perf_counter() - began < 0.1  # the step takes four times 50 ms
        assert envs.recv(1) == [0]
        assert time.perf_counter() - began > 0.2


def test_process_of_vector_env_does_not_import_torch() -> None:
    maker = factory("sync, same step", ProcessInfoEnv)
    env_spec = probe(maker)
    with closing(VectorPool(maker, env_spec, N, SEED, 1)) as envs:
        envs.start(np.zeros(N, np.int64))
        records = envs.block.obs.view(env_spec.obs_layout.dtype)
        by_path = {leaf.path: records[str(index)] for index, leaf in enumerate(env_spec.obs_layout.leaves)}
        assert not by_path["has_torch",].any()
        assert set(by_path["pid",].ravel().tolist()) != {os.getpid()}


# -- training ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "preset": "classic",
    "overlap": "strict",
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 2,
    "net_arch": (8,),
    "timesteps": 512,
    "eval_every": 256,
    "eval_episodes": 3,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
    "runs_dir": "runs",
}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Jittery(gymnasium.Wrapper):
    """Each step takes a random time, up to `longest` seconds."""

    def __init__(self, longest: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=20))
        self._longest, self._rng = longest, np.random.default_rng()

    def step(self, action: Any) -> Any:
        time.sleep(self._longest * self._rng.random())
        return self.env.step(action)


def outcome(run: unidle.TrainedRun) -> tuple[list[Any], dict[str, Any]]:
    """What a run learned: its metrics, evaluations and statistics, without times."""
    timing = ("time/", "rollout/steps_per_second", "eval/seconds_behind")
    metrics = [
        {k: v for k, v in record.items() if "/" in k and not k.startswith(timing)}
        for record in sorted(run.records, key=lambda record: (record["step"], record["kind"]))
    ]
    state = load_checkpoint(run.folder.latest())
    return metrics, {"weights": state["algo"]["policy"], "statistics": state.get("env_statistics", {})}


def assert_same_outcome(run: unidle.TrainedRun, other: unidle.TrainedRun) -> None:
    (metrics, state), (other_metrics, other_state) = outcome(run), outcome(other)
    assert metrics == other_metrics
    assert state["weights"].keys() == other_state["weights"].keys()
    assert all(torch.equal(tensor, other_state["weights"][name]) for name, tensor in state["weights"].items())
    assert state["statistics"] == other_state["statistics"]


def normalised(longest: float) -> Any:
    return NormalizeObservation(SyncVectorEnv([lambda: Jittery(longest)] * N))


TIMED: dict[str, Callable[[float], Any]] = {
    **{
        kind: (lambda longest, kind=kind: VECTOR_ENVS[kind](lambda: Jittery(longest)))
        for kind in ("sync, same step", "async, next step", "sb3, one process")
    },
    "normalised": normalised,
}


@pytest.mark.parametrize("kind", TIMED)
def test_strict_overlap_learns_the_same_whatever_the_timing(kind: str) -> None:
    make = TIMED[kind]
    quick = unidle.train(lambda: make(0.0), run_name="quick", **SMALL)
    slow = unidle.train(lambda: make(0.002), run_name="slow", **SMALL)
    here = unidle.train(lambda: make(0.0), run_name="here", **SMALL, subproc=False)
    assert quick.config.recipe.overlap == "strict"
    assert_same_outcome(quick, slow)
    assert_same_outcome(quick, here)


def test_envpool_with_strict_overlap_learns_the_same_in_any_number_of_processes() -> None:
    pytest.importorskip("envpool")
    runs = [
        unidle.train("envpool:CartPole-v1", n_envs=6, run_name=name, **{**SMALL, "timesteps": 576}, **engine)
        for name, engine in (("auto", {}), ("three", {"workers": 3}), ("here", {"subproc": False}))
    ]
    assert_same_outcome(runs[0], runs[1])
    assert_same_outcome(runs[0], runs[2])


def test_rollouts_equal_the_vector_env_stepped_by_hand() -> None:
    make = lambda: SyncVectorEnv([lambda: Walk(length=5)] * N, autoreset_mode=SAME)  # noqa: E731
    by_hand = make()
    seen, _ = by_hand.reset(seed=episode_seed(0, 0, 0))
    steps = 0

    def compare(context: unidle.CallbackContext) -> None:
        nonlocal seen, steps
        rollout = context.rollout
        assert rollout is not None
        for t in range(rollout.shape[0]):
            assert np.array_equal(rollout.obs[t].numpy().view(np.float32), seen)
            actions = rollout.actions[t, :, 0].numpy().astype(np.int64) - 1  # Discrete(3, start=-1)
            seen, rewards, terminated, truncated, infos = by_hand.step(actions)
            assert np.array_equal(rollout.rewards[t].numpy(), rewards.astype(np.float32))
            assert np.array_equal(rollout.terminated[t].numpy(), terminated)
            assert np.array_equal(rollout.truncated[t].numpy(), truncated)
            for env in np.flatnonzero(truncated):
                (index,) = np.flatnonzero(rollout.final_at.numpy() == t * N + env)
                assert rollout.final_obs[index].numpy().view(np.float32).tolist() == infos["final_obs"][env].tolist()
            steps += 1

    unidle.train(make, after_iteration=[compare], seed=0, **{**SMALL, "eval_every": 0})
    assert steps == 512 // N


def test_run_with_overlap_resumes_with_new_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    make = lambda: VECTOR_ENVS["sync, same step"](lambda: Jittery(0.0))  # noqa: E731
    run = unidle.train(make, run_name="first", **SMALL)
    more = unidle.resume(run.path, env=make, timesteps=640, quiet=True)
    assert "this run will differ from an uninterrupted one" in capsys.readouterr().err
    assert more.summary()["step"] == 640


def test_statistics_are_those_at_the_end_of_the_rollout() -> None:
    run = small_run(lambda: Walk(), n_envs=N, n_steps=8, overlap="strict")
    run.collector.close()
    make = lambda: NormalizeObservation(SyncVectorEnv([lambda: Walk(length=99)] * N))  # noqa: E731
    maker = EnvMaker("mine:make", make)
    envs = VectorPool(maker, probe(maker), N, 0, 1)
    rollouts = [run.rollout, type(run.rollout)(8, N, run.rollout.obs.shape[2], 1, 0, run.rollout.obs.device)]
    with closing(HostCollector(envs, run.policy, rollouts, 0, Timeline())) as collector:
        collector.start()
        [before] = collector.env_statistics().values()
        collector.finish()
        while collector.poll(0.01):  # the next rollout is collected meanwhile
            pass
        [after] = collector.env_statistics().values()
        assert after["count"] - before["count"] == pytest.approx(8 * N)
        [current] = envs.statistics().values()
        assert current["count"] - before["count"] == pytest.approx(16 * N)


def test_loop_in_c_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: NormalizeObservation(SyncVectorEnv([lambda: Walk(length=50)] * N))  # noqa: E731
    settings = {**SMALL, "n_steps": 64, "timesteps": 1024, "eval_every": 512}
    in_python = unidle.train(make, run_name="python", **settings)
    launchers = use_c_loop(monkeypatch)
    in_c = unidle.train(make, run_name="c", **settings)
    assert launchers[0].launches > 50
    assert_same_outcome(in_python, in_c)


def test_runs_of_a_group_learn_the_same_as_alone() -> None:
    make = lambda: VECTOR_ENVS["sync, same step"](lambda: Jittery(0.0))  # noqa: E731
    alone = [unidle.train(make, run_name=f"alone-{seed}", seed=seed, **SMALL) for seed in (0, 1)]
    group = unidle.train(make, run_name="group", seeds=[0, 1], **SMALL)
    for run, other in zip(alone, group.runs):
        assert_same_outcome(run, other)


@pytest.mark.gpu
def test_on_a_gpu_overlap_is_the_default_and_learns_the_same_whatever_the_timing() -> None:
    def make(longest: float) -> Any:
        return SyncVectorEnv([lambda: Jittery(longest)] * 48, autoreset_mode=SAME)

    settings = {**SMALL, "overlap": "auto", "device": "cuda", "timesteps": 48 * 16 * 6, "eval_every": 48 * 16 * 3}
    quick = unidle.train(lambda: make(0.0), run_name="quick", **settings)
    slow = unidle.train(lambda: make(0.0002), run_name="slow", **settings)
    here = unidle.train(lambda: make(0.0), run_name="here", **{**settings, "overlap": "strict"}, subproc=False)
    assert quick.config.recipe.overlap == "strict"
    assert_same_outcome(quick, slow)
    assert_same_outcome(quick, here)


def test_halves_share_the_work_of_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("envpool")
    unidle.train("envpool:CartPole-v1", n_envs=6, **{**SMALL, "quiet": False, "timesteps": 192, "slices": 2})
    assert "envpool:CartPole-v1, 2 worker processes" in capsys.readouterr().err


# -- failures ----------------------------------------------------------------------------------------------------------


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if is_running(child.pid)}


@pytest.mark.parametrize("kind", ["sync, same step", "async, same step", "sb3, one process"])
def test_exception_reaches_the_user_with_its_traceback_and_leaves_no_process(kind: str) -> None:
    before = children()
    with pytest.raises(TrainingError) as error:
        unidle.train(lambda: VECTOR_ENVS[kind](FailingLate), **SMALL)
    first, *rest = str(error.value).splitlines()
    assert re.match(r"The vector environment failed in step \d+: ZeroDivisionError: the robot fell over", first)
    assert any("FailingLate" in line or "in step" in line for line in rest)
    assert wait_until(lambda: children() <= before)


class FailingLate(Walk):
    """Fails long after the test steps before training."""

    def __init__(self) -> None:
        super().__init__()
        self._in_all = 0

    def step(self, action: Any) -> Any:
        self._in_all += 1
        if self._in_all > 60:
            raise ZeroDivisionError("the robot fell over")
        return super().step(action)


def test_failure_in_reset_is_reported() -> None:
    class NoReset(Walk):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            raise ValueError("no simulator")

    env_spec = probe(factory("sync, same step", Walk))
    message = r"^The vector environment failed in reset\(\): ValueError: no simulator"
    with (
        closing(VectorPool(factory("sync, same step", NoReset), env_spec, N, SEED, 1)) as envs,
        pytest.raises(TrainingError, match=message),
    ):
        envs.start(np.zeros(N, np.int64))


def test_factory_that_cannot_be_sent_is_used_in_this_process_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lock = __import__("threading").Lock()

    def make() -> Any:
        assert lock is not None
        return VECTOR_ENVS["sync, same step"](Walk)

    run = unidle.train(make, **{**SMALL, "quiet": False, "eval_every": 0})
    assert run.summary()["step"] == 512
    assert "the factory cannot be sent to worker processes" in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be sent to worker processes"):
        unidle.train(make, **SMALL, subproc=True, run_name="forced")


class KillsItsProcess(Walk):
    """Kills its process once, in the step after the file `armed` appears."""

    def step(self, action: Any) -> Any:
        if Path("armed").exists():
            Path("armed").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_process_that_dies_is_replaced_and_its_successor_keeps_the_statistics() -> None:
    make = lambda: NormalizeObservation(SyncVectorEnv([KillsItsProcess] * N))  # noqa: E731
    maker = EnvMaker("mine:make", make)
    with closing(VectorPool(maker, probe(maker), N, SEED, 1)) as envs:
        envs.start(np.zeros(N, np.int64))
        for _ in range(10):
            step_all(envs)
        [before] = envs.statistics().values()
        Path("armed").touch()
        episodes = envs.block.episode.copy()
        step_all(envs)
        assert [fault.kind for fault in envs.faults] == ["killed"]
        assert envs.block.retry.all()
        assert (envs.block.episode > episodes).all()
        step_all(envs)
        assert not envs.block.retry.any()
        [after] = envs.statistics().values()
        assert after["count"] == pytest.approx(before["count"] + 2 * N)  # the new first observations, and one step


def test_process_that_replaces_another_does_not_change_frozen_statistics() -> None:
    make = lambda: NormalizeObservation(SyncVectorEnv([KillsItsProcess] * N))  # noqa: E731
    maker = EnvMaker("mine:make", make)
    with closing(VectorPool(maker, probe(maker), N, SEED, 1)) as envs:
        envs.start(np.zeros(N, np.int64))
        step_all(envs)
        [before] = envs.statistics().values()
        envs.load_statistics(envs.statistics(), freeze=True)
        Path("armed").touch()
        step_all(envs)
        assert [fault.kind for fault in envs.faults] == ["killed"]
        step_all(envs)
        [after] = envs.statistics().values()
        assert after["count"] == before["count"]


class HangsOnce(Walk):
    """Does not return from the step after the file `armed` appears."""

    def step(self, action: Any) -> Any:
        if Path("armed").exists():
            Path("armed").unlink()
            time.sleep(600)
        return super().step(action)


def test_process_that_hangs_is_replaced() -> None:
    maker = factory("sync, same step", HangsOnce)
    with closing(VectorPool(maker, probe(maker), N, SEED, 1, env_timeout=1.0)) as envs:
        envs.start(np.zeros(N, np.int64))
        step_all(envs)
        Path("armed").touch()
        step_all(envs)
        assert [fault.kind for fault in envs.faults] == ["hung"]
        step_all(envs)
        assert not envs.block.retry.any()


def test_training_goes_on_when_the_process_dies() -> None:
    def arm(context: unidle.CallbackContext) -> None:
        if context.record["step"] == 128:
            Path("armed").touch()

    make = lambda: VECTOR_ENVS["sync, same step"](KillsItsProcess)  # noqa: E731
    run = unidle.train(make, after_iteration=[arm], **{**SMALL, "eval_every": 0})
    assert run.summary()["step"] == 512
    assert [record["fault"] for record in run.records if record["kind"] == "fault"] == ["killed"]


def test_always_failing_process_ends_the_run() -> None:
    env_spec = probe(factory("sync, same step", Walk))
    maker = factory("sync, same step", lambda: Failing("kill"))
    with closing(VectorPool(maker, env_spec, N, SEED, 1, max_env_restarts=1)) as envs:
        envs.start(np.zeros(N, np.int64))
        with pytest.raises(TrainingError, match=r"failed 2 times without finishing an episode in between"):
            step_often(envs)


def step_often(envs: HostEnvs) -> None:
    for _ in range(9):
        step_all(envs)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync, same step", "async, same step", "sb3, processes"])
def test_close_leaves_no_process(kind: str) -> None:
    before = children()
    maker = factory(kind, Slow)
    envs = VectorPool(maker, probe(maker), N, SEED, 1)
    envs.start(np.zeros(N, np.int64))
    envs.send([0])  # closed in the middle of a step
    assert children() > before
    envs.close()
    assert wait_until(lambda: children() <= before)


SCRIPT = """
    import sys, time, unidle
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode
    from toy_envs import Walk

    class Slow(Walk):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    def make():
        return AsyncVectorEnv([Slow] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    def say(context):
        print("iteration", flush=True)

    settings = dict(preset="classic", overlap="strict", n_steps=8, batch_size=16, net_arch=(8,), device="cpu")
    unidle.train(make, timesteps=10**6, eval_every=0, tensorboard=False, after_iteration=[say], **settings)
"""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGKILL]])
def test_interrupted_training_leaves_no_process(signals: list[signal.Signals], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "iteration\n"
            started = [child.pid for child in psutil.Process(program.pid).children(recursive=True)]
            assert len(started) >= 3  # the process of the vector environment, and those of its environments
            for number in signals:
                program.send_signal(number)
                time.sleep(0.2)
            program.wait(30)
        finally:
            program.kill()
    assert wait_until(lambda: not any(map(is_running, started)))


def test_modes_that_need_an_extra_step_are_refused_as_before() -> None:
    make = lambda: AsyncVectorEnv([Walk] * 2, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False)  # noqa: E731
    with pytest.raises(UsageError, match="resets by an extra step"):
        unidle.train(make, **SMALL)
