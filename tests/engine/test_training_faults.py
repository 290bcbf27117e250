"""Training with failing environments: runs survive faults and report them, or stop so that they can be resumed."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fault_envs import IN_RESET, MAX_EPISODE_LENGTH, Echo, FailsOnce, FailsWhileFileExists, RandomFaults
from resumed_runs import StopAfter, assert_same, final_state
from small_envs import counting_length
from small_runs import SmallRun, small_run
from toy_envs import Masked

import unidle
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, play
from unidle.envs.pool import worker_process as process
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker import DONE
from unidle.envs.protocol import Fault, HostEnvs
from unidle.errors import TrainingError, UsageError, WriteError
from unidle.timeline import Timeline

SEED = 5
SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 4,
    "n_steps": 50,
    "batch_size": 100,
    "n_epochs": 2,
    "net_arch": (16,),
    "normalize_obs": True,
    "normalize_reward": True,
    "eval_every": 0,
    "tensorboard": False,
    "seed": SEED,
    "quiet": True,
}
SERIAL: dict[str, Any] = {"subproc": False}
WORKERS: dict[str, Any] = {"subproc": True, "workers": 2, "slices": 1}
OVERLAP = pytest.mark.parametrize("overlap", ["off", "strict"])


_earlier_children: set[int] = set()  # of other tests in this process


def children() -> set[int]:
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in pids} - _earlier_children


@pytest.fixture(autouse=True)
def _remember_earlier_children() -> None:
    _earlier_children.clear()
    _earlier_children.update(children())


def records(run: unidle.TrainedRun, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == kind]


def assert_run_completed(run: unidle.TrainedRun, timesteps: int, faults: dict[str, int], first_at: set[int]) -> None:
    """All iterations were recorded, and count `faults` from an iteration on that ends at a step in `first_at`."""
    iterations = records(run, "iteration")
    batch = run.config.recipe.total_batch
    assert [record["step"] for record in iterations] == list(range(batch, timesteps + 1, batch))
    assert final_state(run.path)["step"] == timesteps
    counts = {
        record["step"]: {name.partition("/")[2]: n for name, n in record.items() if name.startswith("faults/")}
        for record in iterations
    }
    first = min(step for step, count in counts.items() if count)
    assert first in first_at
    assert all(count == (faults if step >= first else {}) for step, count in counts.items())
    assert all(np.isfinite(record["train/value_loss"]) for record in iterations)
    assert iterations[-1]["rollout/episodes"] > iterations[-5]["rollout/episodes"]
    assert run.summary()["step"] == timesteps
    assert run.report.exists()


# -- one fault ---------------------------------------------------------------------------------------------------------

# Environment 2 fails in its 1001st step, the first of its episode 25, in iteration 21 (of 50 steps each).
FAILING_ENV, AFTER, TIMESTEPS, ITERATION = 2, 1000, 4600, 21
WHERE = f"episode 25 (seed {episode_seed(SEED, FAILING_ENV, 25)}), step"
WORKER = "The worker of environments 2 to 3"
ENVS_OF_WORKER = ", ".join(f"{env} (episode 25, seed {episode_seed(SEED, env, 25)})" for env in (2, 3))


@OVERLAP
@pytest.mark.parametrize(
    ("injected", "engine", "kind", "expected"),
    [
        ("raise", SERIAL, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "Traceback"]),
        ("raise", WORKERS, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "fault_envs.py"]),
        ("nan reward", SERIAL, "exception", [f"Environment 2 returned a NaN or infinite reward in {WHERE} 1."]),
        ("nan observation", WORKERS, "exception", [f"returned a NaN or infinite observation in {WHERE} 1."]),
        (
            "kill",
            WORKERS,
            "killed",
            [f"{WORKER} exited unexpectedly (exit status -9)", f"environments {ENVS_OF_WORKER}"],
        ),
        ("hang", WORKERS, "hung", [f"{WORKER} did not respond for 1 seconds", f"environments {ENVS_OF_WORKER}"]),
    ],
    ids=["raise", "raise in a worker", "nan reward", "nan observation in a worker", "kill", "hang"],
)
def test_run_survives_fault_and_reports_it(
    injected: str,
    engine: dict[str, Any],
    kind: str,
    expected: list[str],
    overlap: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kwargs = {"fault": injected, "after": AFTER, "seed": episode_seed(SEED, FAILING_ENV, 0)}
    settings = {**SMALL, **engine, "overlap": overlap, "timesteps": TIMESTEPS, "env_timeout": 1.0}
    run = unidle.train(FailsOnce, env_kwargs=kwargs, runs_dir=str(tmp_path), **settings)
    (fault,) = records(run, "fault")
    assert fault.keys() == {"kind", "step", "env", "fault", "text"}
    assert (fault["env"], fault["fault"]) == (FAILING_ENV, kind)
    before = (ITERATION - 1) * 200
    # With overlap, this rollout began during the update from the previous one.
    assert fault["step"] in ([before + 200] if overlap == "off" else [before, before + 200])
    for text in expected:
        assert text in fault["text"]
    assert fault["text"].splitlines()[0] in capsys.readouterr().err
    # A dead worker counts for the rollout that finishes next after it is noticed.
    early = {before} if overlap == "strict" and kind != "exception" else set()
    assert_run_completed(run, TIMESTEPS, {kind: 1}, {ITERATION * 200, *early})
    assert not children()


class KillWorker:
    """A callback that kills one of the run's workers after some iterations."""

    def __init__(self, iterations: int) -> None:
        self._left = iterations

    def __call__(self, context: unidle.CallbackContext) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(max(children()), signal.SIGKILL)


@OVERLAP
def test_run_survives_killed_worker(overlap: str, tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_iteration=[KillWorker(4)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert_run_completed(run, 2000, {"killed": 1}, {1000} if overlap == "off" else {1000, 1200})
    assert not children()


def test_run_survives_worker_killed_before_checkpoint(tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "timesteps": 2000, "checkpoint_every": 200}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_iteration=[KillWorker(4)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert final_state(run.path)["step"] == 2000


def test_run_survives_worker_killed_between_evaluations(tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "timesteps": 2000, "eval_every": 400, "eval_episodes": 4, "eval_workers": 0}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_evaluation=[KillWorker(2)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert len(records(run, "evaluation")) == 5


def test_nan_right_after_resume_is_fault_rather_than_user_error(tmp_path: Path) -> None:
    faults = {(episode_seed(SEED, 1, episode), 0): "nan reward" for episode in range(17, 40, 2)}
    env = lambda: Echo(faults)  # noqa: E731
    settings = {**SMALL, **SERIAL, "n_steps": 20, "batch_size": 40, "timesteps": 80 * 6, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(env, run_name="uninterrupted", **settings)
    unidle.train(env, run_name="resumed", after_iteration=[StopAfter(3)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", env=env, quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))
    assert records(uninterrupted, "iteration")[-1]["faults/exception"] > records(uninterrupted, "iteration")[2].get(
        "faults/exception", 0
    )


# -- reproducible faults -----------------------------------------------------------------------------------------------

FAULTS = {(0, 1, 0), (1, 2, 1), (1, 3, IN_RESET), (2, 5, 2), (3, 0, 0), (3, 9, IN_RESET), (0, 30, 1), (2, 31, 0)}
FAULT_KINDS = {
    (
        episode_seed(SEED, env, episode),
        step % counting_length(episode_seed(SEED, env, episode), MAX_EPISODE_LENGTH),
    ): "raise"
    for env, episode, step in FAULTS
    if step != IN_RESET
} | {(episode_seed(SEED, env, episode), IN_RESET): "raise" for env, episode, step in FAULTS if step == IN_RESET}


def records_without_timings(run: unidle.TrainedRun, kind: str) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in record.items()
            if "time/" not in name and "second" not in name and name != "wall"
        }
        for record in records(run, kind)
    ]


@OVERLAP
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_final_weights_with_faults_do_not_depend_on_engine_or_resume(
    recurrent: str, overlap: str, tmp_path: Path
) -> None:
    settings = {**SMALL, "n_steps": 20, "batch_size": 40, "timesteps": 80 * 12, "checkpoint_every": 80}
    settings |= {"recurrent": recurrent, "recurrent_size": 8, "overlap": overlap}
    settings["runs_dir"] = str(tmp_path)
    env = lambda: Echo(FAULT_KINDS)  # noqa: E731
    uninterrupted = unidle.train(env, run_name="serial", **settings, **SERIAL)
    runs = [
        unidle.train(env, run_name="one worker", workers=1, slices=3, **settings),
        unidle.train(env, run_name="two workers", workers=2, **settings),
    ]
    interrupted = unidle.train(env, run_name="interrupted", after_iteration=[StopAfter(2)], **settings, **SERIAL)
    for stop in (1, 3):
        unidle.resume(interrupted.path, env=env, quiet=True, after_iteration=[StopAfter(stop)])
    runs.append(unidle.resume(interrupted.path, env=env, quiet=True))
    for run in runs:
        assert_same(final_state(run.path), final_state(uninterrupted.path), run.path.name)
        assert records_without_timings(run, "iteration") == records_without_timings(uninterrupted, "iteration")
        # A fault in a rollout that was open at the stop happens again, so texts are compared as sets.
        assert {record["text"].splitlines()[0] for record in records(run, "fault")} == {
            record["text"].splitlines()[0] for record in records(uninterrupted, "fault")
        }
    assert records(uninterrupted, "iteration")[-1]["faults/exception"] == len(FAULTS)


class FailsInEpisode(gymnasium.Env):
    """Episodes of 40 steps; the episode with the given seed always fails in its 22nd step."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, seed: int) -> None:
        self._failing_seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed, self._step = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        if self._step == 22 and self._seed == self._failing_seed:
            raise OSError("always here")
        return np.full(1, self._step / 40, np.float32), float(action), self._step == 40, False, {}


@OVERLAP
def test_fault_repeated_after_resume_is_recorded_once(overlap: str, tmp_path: Path) -> None:
    """The run is stopped before the rollout with the fault is complete; with overlap, after the fault."""
    kwargs = {"seed": episode_seed(SEED, FAILING_ENV, 2)}  # its 102nd step, early in the third rollout of 50
    settings = {**SMALL, **SERIAL, "overlap": overlap, "timesteps": 1000, "env_kwargs": kwargs}

    def stop(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 2:
            context.stop()

    stopped = unidle.train(FailsInEpisode, run_name="r", runs_dir=str(tmp_path), after_iteration=[stop], **settings)
    n_before = len(records(stopped, "fault"))
    run = unidle.resume(tmp_path / "r", quiet=True)
    (fault,) = records(run, "fault")
    assert fault["step"] == 600
    assert n_before == (0 if overlap == "off" else 1)


# -- permanent faults --------------------------------------------------------------------------------------------------


class BreakEnvs:
    """A callback that keeps the weights after each iteration, and makes the environments fail after one of them."""

    def __init__(self, broken: Path, after: int) -> None:
        self._broken, self._after = broken, after
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # step → weights

    def __call__(self, context: unidle.CallbackContext) -> None:
        step = context.record["step"]
        self.weights[step] = {name: value.clone() for name, value in context.policy.state_dict().items()}
        if context.record["iteration"] == self._after:
            self._broken.touch()


@pytest.mark.parametrize(("overlap", "n_epochs"), [("off", 2), ("strict", 2), ("strict", 30)])
@pytest.mark.parametrize("engine", [SERIAL, WORKERS], ids=["serial", "workers"])
@pytest.mark.parametrize("restarts", [0, 10])
def test_aborted_run_resumes_from_last_update_once_env_is_fixed(
    restarts: int, engine: dict[str, Any], overlap: str, n_epochs: int, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **engine, "overlap": overlap, "n_epochs": n_epochs, "timesteps": 2000}
    settings |= {"env_kwargs": {"fail_file": str(broken)}, "runs_dir": str(tmp_path), "max_env_restarts": restarts}
    settings["checkpoint_every"] = 2000
    callback = BreakEnvs(broken, after=4)
    with pytest.raises(TrainingError) as failure:
        unidle.train(FailsWhileFileExists, run_name="r", after_iteration=[callback], **settings)
    first, second, *rest = str(failure.value).splitlines()
    assert re.fullmatch(
        rf"Environment [0-3] failed {restarts + 1} times without finishing an episode in between; "
        rf"max_env_restarts allows {restarts}. The last fault:",
        first,
    )
    assert re.match(
        r"Environment [0-3] failed in episode \d+ \(seed \d+\), step 3: OSError: the cable is loose", second
    )
    assert str(tmp_path / "r") in rest[-1]  # the command to resume
    assert not children()

    # No update is lost.
    step, saved = max(callback.weights), final_state(tmp_path / "r")
    assert 800 <= step < 2000
    if restarts == 0 and engine is SERIAL:
        # During 30 epochs the next rollout is completed, so the one after it fails.
        assert step == (1000 if n_epochs == 30 else 800)
    assert saved["step"] == step
    for name, value in callback.weights[step].items():
        assert torch.equal(saved["algo"]["policy"][name], value), name

    broken.unlink()
    run = unidle.resume(tmp_path / "r", quiet=True)
    assert final_state(run.path)["step"] == 2000
    assert [record["step"] for record in records(run, "iteration")] == list(range(200, 2001, 200))
    if restarts == 0:  # no rollout with a fault was learned from
        uninterrupted = unidle.train(FailsWhileFileExists, run_name="uninterrupted", **settings)
        assert_same(final_state(run.path)["algo"], final_state(uninterrupted.path)["algo"])
        assert_same(final_state(run.path)["collector"], final_state(uninterrupted.path)["collector"])


@OVERLAP
def test_aborted_evaluation_loses_no_update(overlap: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **SERIAL, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000, "eval_every": 800}
    settings |= {"env_kwargs": {"fail_file": str(broken)}, "runs_dir": str(tmp_path)}
    with pytest.raises(TrainingError, match=r"^Environment 10485\d\d failed 11 times"):
        unidle.train(FailsWhileFileExists, run_name="r", after_iteration=[BreakEnvs(broken, after=4)], **settings)
    assert final_state(tmp_path / "r")["step"] == 800
    broken.unlink()
    run = unidle.resume(tmp_path / "r", quiet=True)
    uninterrupted = unidle.train(FailsWhileFileExists, run_name="uninterrupted", **settings)
    assert_same(final_state(run.path)["algo"], final_state(uninterrupted.path)["algo"])


class InvalidMask(Masked):
    """Masks every action once the file exists."""

    def __init__(self, fail_file: str) -> None:
        super().__init__()
        self._fail_file = Path(fail_file)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self._fail_file.exists():
            info["action_mask"] = np.zeros_like(info["action_mask"])
        return observation, reward, terminated, truncated, info


@OVERLAP
@pytest.mark.parametrize("engine", [SERIAL, WORKERS], ids=["serial", "workers"])
def test_late_user_error_loses_no_update(engine: dict[str, Any], overlap: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **engine, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000}
    settings |= {"env_kwargs": {"fail_file": str(broken)}, "runs_dir": str(tmp_path), "normalize_obs": False}
    callback = BreakEnvs(broken, after=4)
    with pytest.raises(TrainingError, match=r"(?s)mask.*Fix it, then resume with: unidle train --resume"):
        unidle.train(InvalidMask, run_name="r", after_iteration=[callback], **settings)
    step, saved = max(callback.weights), final_state(tmp_path / "r")
    assert saved["step"] == step >= 800
    for name, value in callback.weights[step].items():
        assert torch.equal(saved["algo"]["policy"][name], value), name


def test_early_user_error_is_raised_as_usage_error(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    settings = {**SMALL, **SERIAL, "timesteps": 2000, "normalize_obs": False, "runs_dir": str(tmp_path)}
    with pytest.raises(UsageError, match="mask"):
        unidle.train(InvalidMask, run_name="r", env_kwargs={"fail_file": str(tmp_path / "broken")}, **settings)


def test_failed_write_of_best_policy_is_raised_as_write_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint written afterwards would name a best policy whose file does not exist."""

    def fail(*_: object) -> None:
        raise WriteError("best.pt cannot be written")

    monkeypatch.setattr(RunFolder, "save_best", fail)
    settings = {**SMALL, **SERIAL, "timesteps": 2000, "runs_dir": str(tmp_path)}
    settings |= {"checkpoint_every": 400, "eval_every": 600}
    with pytest.raises(WriteError, match=r"^best\.pt cannot be written$"):
        unidle.train(Echo, run_name="r", **settings)
    assert (final_state(tmp_path / "r")["step"], final_state(tmp_path / "r")["best_step"]) == (400, -1)
    monkeypatch.undo()
    run = unidle.resume(tmp_path / "r", quiet=True)
    assert run.folder.best.exists()
    assert [record["step"] for record in records(run, "evaluation")] == [600, 1200, 1800, 2000]


class FailsToClose(Echo):
    fails_on_close = False

    def close(self) -> None:
        if self.fails_on_close:
            raise OSError("the door is stuck")


def test_run_completes_if_env_fails_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, **SERIAL, "timesteps": 400, "runs_dir": str(tmp_path)}
    fail_on_close = lambda context: monkeypatch.setattr(FailsToClose, "fails_on_close", True)  # noqa: E731
    run = unidle.train(FailsToClose, run_name="r", after_iteration=[fail_on_close], **settings)
    assert (run.path / "report.html").exists()


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluation_envs(run: SmallRun, n_envs: int, workers: int) -> HostEnvs:
    maker, env_spec = run.maker, run.envs.env_spec
    if workers:
        return ProcessPool(maker, env_spec, n_envs, run.seed, workers, FIRST_EVALUATION_ENV)
    return SerialEnvs(maker, env_spec, n_envs, run.seed, FIRST_EVALUATION_ENV)


def play_by_hand(run: SmallRun, index: int, episode: int) -> tuple[float, int]:
    """Return and length of one complete episode with deterministic actions."""
    env, obs, policy = Echo(), run.envs.env_spec.obs_layout, run.policy
    observation, _ = env.reset(seed=episode_seed(run.seed, FIRST_EVALUATION_ENV + index, episode))
    state = torch.zeros(1, policy.state_size)
    total, length, ended = 0.0, 0, False
    while not ended:
        with torch.no_grad():
            params, after = policy.act(torch.from_numpy(obs.pack(observation)).unsqueeze(0), state)
        state = state if after is None else after
        observation, reward, terminated, truncated, _ = env.step(policy.distribution.mode(params).item())
        total, length, ended = total + reward, length + 1, terminated or truncated
    return total, length


# Per environment: episodes with a fault and its step, and the episodes that count. 7 episodes on 3 envs: 3, 2 and 2.
EVALUATED = [({0: 0, 2: IN_RESET}, [3, 4, 5]), ({1: 1, 2: 0}, [0, 3]), ({}, [0, 1])]


@pytest.mark.parametrize("recurrent", ["none", "gru"])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_counts_exactly_the_requested_complete_episodes(workers: int, recurrent: str) -> None:
    faults = {
        (episode_seed(0, FIRST_EVALUATION_ENV + env, episode), step): "raise"
        for env, (faults_at, _) in enumerate(EVALUATED)
        for episode, step in faults_at.items()
    }
    run = small_run(Echo, kwargs={"faults": faults}, recurrent=recurrent)
    torch.nn.init.normal_(run.policy.actor_head.weight)  # so that actions depend on observation and state
    envs = evaluation_envs(run, 3, workers)
    with closing(run.envs), closing(envs):
        reported: list[Fault] = []
        result = play(run.policy, envs, 7, on_fault=reported.append)
    # The episode before a failed reset is incomplete too: its last step, which includes the reset, is lost.
    expected = [
        play_by_hand(run, env, episode) for env, (_, completed) in enumerate(EVALUATED) for episode in completed
    ]
    assert result.lengths == [length for _, length in expected]
    assert result.returns == pytest.approx([total for total, _ in expected])
    assert Counter(fault.env - FIRST_EVALUATION_ENV for fault in reported) == {0: 2, 1: 2}


def test_evaluation_discards_episode_cut_by_worker_death(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(
        s for s in range(99) if counting_length(episode_seed(s, FIRST_EVALUATION_ENV, 0), MAX_EPISODE_LENGTH) > 1
    )
    run = small_run(Echo, seed=seed)
    pool = evaluation_envs(run, 2, 2)
    assert isinstance(pool, ProcessPool)
    recv, flags, worker = pool.recv, pool._signals.flags, pool._processes[0]._process
    assert worker is not None

    def recv_after_worker_death(at_least: int, seconds: float | None = None) -> list[int]:
        while flags[0] != DONE:
            time.sleep(0.001)
        if worker.returncode is None:  # in the first step
            worker.kill()
            worker.wait()
            pool._next_look = 0.0
        return recv(at_least, seconds)

    monkeypatch.setattr(pool, "recv", recv_after_worker_death)
    with closing(run.envs), closing(pool):
        reported: list[Fault] = []
        result = play(run.policy, pool, 5, on_fault=reported.append)
    expected = [play_by_hand(run, 0, episode) for episode in (1, 2, 3)]
    expected += [play_by_hand(run, 1, episode) for episode in (0, 1)]
    assert result.lengths == [length for _, length in expected]
    assert result.returns == pytest.approx([total for total, _ in expected])
    assert [fault.kind for fault in reported] == ["killed"]


# -- soak test ---------------------------------------------------------------------------------------------------------

KILLS, HANGS, TOTAL_FAULTS = 15, 3, 1000


class Soak:
    """A callback that spreads kills and hangs over the run, measures the trainer, and stops after 1,000 faults."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._triggered: Counter[str] = Counter()
        # faults so far → resident bytes, file descriptors, children
        self.measured: dict[int, tuple[int, int, int]] = {}
        self.returns: list[float] = []

    def __call__(self, context: unidle.CallbackContext) -> None:
        faults = sum(n for name, n in context.record.items() if name.startswith("faults/"))
        for what, number in (("kill", KILLS), ("hang", HANGS)):
            while self._triggered[what] < number and faults >= 50 + self._triggered[what] * 900 / number:
                (self._folder / f"{what}-{self._triggered[what]}").touch()
                self._triggered[what] += 1
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.measured[faults] = resident, len(os.listdir("/proc/self/fd")), len(children())
        self.returns.append(context.record.get("rollout/return_mean", 0.0))
        if faults >= TOTAL_FAULTS:
            context.stop()


def test_run_with_thousand_faults_learns_and_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 faults: 15 worker deaths, 3 hangs, and about as many exceptions as NaN values."""
    monkeypatch.setattr(process, "POLL_SECONDS", 0.1)
    monkeypatch.setattr("unidle.engine.trainer.Timeline", lambda: Timeline(1 << 10))  # soon full
    settings = {**SMALL, **WORKERS, "n_envs": 8, "n_steps": 64, "batch_size": 128, "n_epochs": 4, "gamma": 0.5}
    settings |= {"learning_rate": 3e-3, "normalize_obs": False, "normalize_reward": False, "timesteps": 200_000}
    settings |= {"env_timeout": 1.0, "max_env_restarts": 30, "env_kwargs": {"folder": str(tmp_path), "odds": 40}}
    soak = Soak(tmp_path)
    run = unidle.train(RandomFaults, runs_dir=str(tmp_path), after_iteration=[soak], **settings)
    counts = Counter(record["fault"] for record in records(run, "fault"))
    assert counts["killed"] == KILLS
    assert counts["hung"] == HANGS
    assert counts["exception"] >= TOTAL_FAULTS - KILLS - HANGS
    texts = [record["text"] for record in records(run, "fault")]
    assert sum("NaN or infinite" in text for text in texts) > 300
    assert {n: c for n, c in records(run, "iteration")[-1].items() if n.startswith("faults/")} == {
        f"faults/{kind}": count for kind, count in counts.items()
    }
    # The policy is close to optimal.
    assert records(run, "iteration")[-1]["rollout/return_mean"] > 15.5
    (tmp_path / "no-faults").touch()
    assert run.evaluate(20).mean_return > 15.5  # the maximum is 16
    # The trainer leaks less than a kilobyte per fault, no file descriptor and no process.
    early = soak.measured[min(faults for faults in soak.measured if faults >= 200)]
    late = soak.measured[max(soak.measured)]
    assert late[0] - early[0] < 800 * 1024
    assert late[1] == early[1]
    assert {workers for _, _, workers in soak.measured.values()} == {2}
    assert not children()


def test_workers_exit_if_trainer_construction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> str:
        assert len(children()) >= 2
        raise RuntimeError("no such driver")

    monkeypatch.setattr("unidle.engine.trainer.kernels_on", fail)
    with pytest.raises(RuntimeError, match="no such driver"):
        unidle.train("CartPole-v1", runs_dir=str(tmp_path), **{**SMALL, **WORKERS, "timesteps": 200})
    assert not children()
