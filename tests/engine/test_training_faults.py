"""Whole runs over environments that fail: they go on and say what happened, or can be taken up again."""

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
from fault_envs import IN_RESET, LONGEST, Broken, Echo, Once, Trial
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
HERE: dict[str, Any] = {"subproc": False}
WORKERS: dict[str, Any] = {"subproc": True, "workers": 2, "slices": 1}
OVERLAP = pytest.mark.parametrize("overlap", ["off", "strict"])


_strangers: set[int] = set()  # children that were there before the test: of other tests in this process


def children() -> set[int]:
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return {int(pid) for pid in found} - _strangers


@pytest.fixture(autouse=True)
def _know_the_strangers() -> None:
    _strangers.clear()
    _strangers.update(children())


def records(run: unidle.TrainedRun, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == kind]


def assert_goes_on(run: unidle.TrainedRun, timesteps: int, faults: dict[str, int], at: set[int]) -> None:
    """All iterations are there, and count those faults from one that ends at a step in `at` on."""
    iterations = records(run, "iteration")
    batch = run.config.recipe.total_batch
    assert [record["step"] for record in iterations] == list(range(batch, timesteps + 1, batch))
    assert final_state(run.path)["step"] == timesteps
    counts = {
        record["step"]: {name.partition("/")[2]: n for name, n in record.items() if name.startswith("faults/")}
        for record in iterations
    }
    first = min(step for step, count in counts.items() if count)
    assert first in at
    assert all(count == (faults if step >= first else {}) for step, count in counts.items())
    assert all(np.isfinite(record["train/value_loss"]) for record in iterations)
    assert iterations[-1]["rollout/episodes"] > iterations[-5]["rollout/episodes"]
    assert run.summary()["step"] == timesteps
    assert run.report.exists()


# -- one fault ---------------------------------------------------------------------------------------------------------

# Environment 2 does it in its 1001st step, the first of its episode 25, which is in iteration 21: each takes 50 steps.
VICTIM, AFTER, TIMESTEPS, ITERATION = 2, 1000, 4600, 21
WHERE = f"episode 25 (seed {episode_seed(SEED, VICTIM, 25)}), step"
WORKER = "The worker of environments 2 to 3"
IN_HAND = ", ".join(f"{env} (episode 25, seed {episode_seed(SEED, env, 25)})" for env in (2, 3))


@OVERLAP
@pytest.mark.parametrize(
    ("how", "engine", "kind", "says"),
    [
        ("raise", HERE, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "Traceback"]),
        ("raise", WORKERS, "exception", [f"Environment 2 failed in {WHERE} 0: ZeroDivisionError", "fault_envs.py"]),
        ("nan reward", HERE, "exception", [f"Environment 2 returned a NaN or infinite reward in {WHERE} 1."]),
        ("nan observation", WORKERS, "exception", [f"returned a NaN or infinite observation in {WHERE} 1."]),
        ("kill", WORKERS, "killed", [f"{WORKER} exited unexpectedly (exit status -9)", f"environments {IN_HAND}"]),
        ("hang", WORKERS, "hung", [f"{WORKER} did not respond for 1 seconds", f"environments {IN_HAND}"]),
    ],
    ids=["raise", "raise in a worker", "nan reward", "nan observation in a worker", "kill", "hang"],
)
def test_a_run_survives_one_fault_and_says_what_it_was(
    how: str,
    engine: dict[str, Any],
    kind: str,
    says: list[str],
    overlap: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kwargs = {"how": how, "after": AFTER, "seed": episode_seed(SEED, VICTIM, 0)}
    settings = {**SMALL, **engine, "overlap": overlap, "timesteps": TIMESTEPS, "env_timeout": 1.0}
    run = unidle.train(Once, env_kwargs=kwargs, runs_dir=str(tmp_path), **settings)
    (fault,) = records(run, "fault")
    assert fault.keys() == {"kind", "step", "env", "fault", "text"}
    assert (fault["env"], fault["fault"]) == (VICTIM, kind)
    before = (ITERATION - 1) * 200
    # With overlap, that rollout was begun while the one before it was learned from.
    assert fault["step"] in ([before + 200] if overlap == "off" else [before, before + 200])
    for words in says:
        assert words in fault["text"]
    assert fault["text"].splitlines()[0] in capsys.readouterr().err
    # A death counts with the rollout that is to be finished next when it is noticed.
    early = {before} if overlap == "strict" and kind != "exception" else set()
    assert_goes_on(run, TIMESTEPS, {kind: 1}, {ITERATION * 200, *early})
    assert not children()


class KillAWorker:
    """A callback that kills one of the run's workers after some iterations."""

    def __init__(self, iterations: int) -> None:
        self._left = iterations

    def __call__(self, context: unidle.CallbackContext) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(max(children()), signal.SIGKILL)


@OVERLAP
def test_a_run_survives_a_worker_killed_from_outside(overlap: str, tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_iteration=[KillAWorker(4)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert_goes_on(run, 2000, {"killed": 1}, {1000} if overlap == "off" else {1000, 1200})
    assert not children()


def test_a_run_survives_a_worker_killed_just_before_a_checkpoint(tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "timesteps": 2000, "checkpoint_every": 200}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_iteration=[KillAWorker(4)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert final_state(run.path)["step"] == 2000


def test_a_run_survives_a_worker_killed_between_two_evaluations(tmp_path: Path) -> None:
    settings = {**SMALL, **WORKERS, "timesteps": 2000, "eval_every": 400, "eval_episodes": 4}
    run = unidle.train("CartPole-v1", runs_dir=str(tmp_path), after_evaluation=[KillAWorker(2)], **settings)
    (fault,) = records(run, "fault")
    assert fault["fault"] == "killed"
    assert len(records(run, "evaluation")) == 5


def test_a_number_that_is_none_just_after_a_resume_is_a_fault_and_no_mistake(tmp_path: Path) -> None:
    breaks = {(episode_seed(SEED, 1, episode), 0): "nan reward" for episode in range(17, 40, 2)}
    env = lambda: Echo(breaks)  # noqa: E731
    settings = {**SMALL, **HERE, "n_steps": 20, "batch_size": 40, "timesteps": 80 * 6, "runs_dir": str(tmp_path)}
    whole = unidle.train(env, run_name="whole", **settings)
    unidle.train(env, run_name="parts", after_iteration=[StopAfter(3)], **settings)
    parts = unidle.resume(tmp_path / "parts", env=env, quiet=True)
    assert_same(final_state(parts.path), final_state(whole.path))
    assert records(whole, "iteration")[-1]["faults/exception"] > records(whole, "iteration")[2].get(
        "faults/exception", 0
    )


# -- the same faults, the same weights ---------------------------------------------------------------------------------

FAULTS = {(0, 1, 0), (1, 2, 1), (1, 3, IN_RESET), (2, 5, 2), (3, 0, 0), (3, 9, IN_RESET), (0, 30, 1), (2, 31, 0)}
BREAKS = {
    (episode_seed(SEED, env, episode), step % counting_length(episode_seed(SEED, env, episode), LONGEST)): "raise"
    for env, episode, step in FAULTS
    if step != IN_RESET
} | {(episode_seed(SEED, env, episode), IN_RESET): "raise" for env, episode, step in FAULTS if step == IN_RESET}


def timeless(run: unidle.TrainedRun, kind: str) -> list[dict[str, Any]]:
    """Records without what a clock wrote."""
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
def test_faults_that_repeat_change_no_weight_from_one_engine_to_another_or_through_a_resume(
    recurrent: str, overlap: str, tmp_path: Path
) -> None:
    settings = {**SMALL, "n_steps": 20, "batch_size": 40, "timesteps": 80 * 12, "checkpoint_every": 80}
    settings |= {"recurrent": recurrent, "recurrent_size": 8, "overlap": overlap}
    settings["runs_dir"] = str(tmp_path)
    env = lambda: Echo(BREAKS)  # noqa: E731
    whole = unidle.train(env, run_name="here", **settings, **HERE)
    runs = [
        unidle.train(env, run_name="one worker", workers=1, slices=3, **settings),
        unidle.train(env, run_name="two workers", workers=2, **settings),
    ]
    parts = unidle.train(env, run_name="parts", after_iteration=[StopAfter(2)], **settings, **HERE)
    for stop in (1, 3):
        unidle.resume(parts.path, env=env, quiet=True, after_iteration=[StopAfter(stop)])
    runs.append(unidle.resume(parts.path, env=env, quiet=True))
    for run in runs:
        assert_same(final_state(run.path), final_state(whole.path), run.path.name)
        assert timeless(run, "iteration") == timeless(whole, "iteration")
        # One in a rollout that was begun when the run was stopped happens again.
        assert {record["text"].splitlines()[0] for record in records(run, "fault")} == {
            record["text"].splitlines()[0] for record in records(whole, "fault")
        }
    assert records(whole, "iteration")[-1]["faults/exception"] == len(FAULTS)


class FailsIn(gymnasium.Env):
    """Episodes of 40 steps; it fails at the 22nd of the one that begins with `seed`, whenever it is played."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, seed: int) -> None:
        self._bad = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._now, self._step = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        if self._step == 22 and self._now == self._bad:
            raise OSError("always here")
        return np.full(1, self._step / 40, np.float32), float(action), self._step == 40, False, {}


@OVERLAP
def test_a_fault_that_a_resumed_run_sees_again_is_told_once(overlap: str, tmp_path: Path) -> None:
    """The run is stopped before the rollout with the fault is whole; with overlap, after it was seen."""
    kwargs = {"seed": episode_seed(SEED, VICTIM, 2)}  # in its 102nd step, so early in the third rollout of 50
    settings = {**SMALL, **HERE, "overlap": overlap, "timesteps": 1000, "env_kwargs": kwargs}

    def stop(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == 2:
            context.stop()

    stopped = unidle.train(FailsIn, run_name="r", runs_dir=str(tmp_path), after_iteration=[stop], **settings)
    seen = len(records(stopped, "fault"))
    run = unidle.resume(tmp_path / "r", quiet=True)
    (fault,) = records(run, "fault")
    assert fault["step"] == 600
    assert seen == (0 if overlap == "off" else 1)


# -- faults without end ------------------------------------------------------------------------------------------------


class Watch:
    """A callback that keeps the weights after each iteration, and breaks the environments after one of them."""

    def __init__(self, broken: Path, after: int) -> None:
        self._broken, self._after = broken, after
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # step → what was learned by then

    def __call__(self, context: unidle.CallbackContext) -> None:
        step = context.record["step"]
        self.weights[step] = {name: value.clone() for name, value in context.policy.state_dict().items()}
        if context.record["iteration"] == self._after:
            self._broken.touch()


@pytest.mark.parametrize(("overlap", "n_epochs"), [("off", 2), ("strict", 2), ("strict", 30)])
@pytest.mark.parametrize("engine", [HERE, WORKERS], ids=["here", "workers"])
@pytest.mark.parametrize("restarts", [0, 10])
def test_a_run_that_cannot_go_on_is_taken_up_where_it_ended_once_the_environment_is_mended(
    restarts: int, engine: dict[str, Any], overlap: str, n_epochs: int, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **engine, "overlap": overlap, "n_epochs": n_epochs, "timesteps": 2000}
    settings |= {"env_kwargs": {"broken": str(broken)}, "runs_dir": str(tmp_path), "max_env_restarts": restarts}
    settings["checkpoint_every"] = 2000
    watch = Watch(broken, after=4)
    with pytest.raises(TrainingError) as failure:
        unidle.train(Broken, run_name="r", after_iteration=[watch], **settings)
    first, second, *rest = str(failure.value).splitlines()
    assert re.fullmatch(
        rf"Environment [0-3] failed {restarts + 1} times without finishing an episode in between; "
        rf"max_env_restarts allows {restarts}. The last fault:",
        first,
    )
    assert re.match(
        r"Environment [0-3] failed in episode \d+ \(seed \d+\), step 3: OSError: the cable is loose", second
    )
    assert str(tmp_path / "r") in rest[-1]  # how to go on
    assert not children()

    # Nothing that was learned is lost.
    step, saved = max(watch.weights), final_state(tmp_path / "r")
    assert 800 <= step < 2000
    if restarts == 0 and engine is HERE:
        # With so much to learn, the next rollout was whole already, and it is the one after it that fails meanwhile.
        assert step == (1000 if n_epochs == 30 else 800)
    assert saved["step"] == step
    for name, value in watch.weights[step].items():
        assert torch.equal(saved["algo"]["policy"][name], value), name

    broken.unlink()
    run = unidle.resume(tmp_path / "r", quiet=True)
    assert final_state(run.path)["step"] == 2000
    assert [record["step"] for record in records(run, "iteration")] == list(range(200, 2001, 200))
    if restarts == 0:  # then no rollout was learned from that had a fault in it
        whole = unidle.train(Broken, run_name="whole", **settings)
        assert_same(final_state(run.path)["algo"], final_state(whole.path)["algo"])
        assert_same(final_state(run.path)["collector"], final_state(whole.path)["collector"])


@OVERLAP
def test_an_evaluation_that_cannot_go_on_loses_nothing_that_was_learned(overlap: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **HERE, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000, "eval_every": 800}
    settings |= {"env_kwargs": {"broken": str(broken)}, "runs_dir": str(tmp_path)}
    with pytest.raises(TrainingError, match=r"^Environment 10485\d\d failed 11 times"):
        unidle.train(Broken, run_name="r", after_iteration=[Watch(broken, after=4)], **settings)
    assert final_state(tmp_path / "r")["step"] == 800
    broken.unlink()
    run = unidle.resume(tmp_path / "r", quiet=True)
    whole = unidle.train(Broken, run_name="whole", **settings)
    assert_same(final_state(run.path)["algo"], final_state(whole.path)["algo"])


class Speechless(Masked):
    """Allows no action at all once the file is there."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = Path(broken)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self._broken.exists():
            info["action_mask"] = np.zeros_like(info["action_mask"])
        return observation, reward, terminated, truncated, info


@OVERLAP
@pytest.mark.parametrize("engine", [HERE, WORKERS], ids=["here", "workers"])
def test_a_mistake_that_shows_late_loses_nothing_that_was_learned(
    engine: dict[str, Any], overlap: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    settings = {**SMALL, **engine, "overlap": overlap, "timesteps": 2000, "checkpoint_every": 2000}
    settings |= {"env_kwargs": {"broken": str(broken)}, "runs_dir": str(tmp_path), "normalize_obs": False}
    watch = Watch(broken, after=4)
    with pytest.raises(TrainingError, match=r"(?s)mask.*Fix it, then resume with: unidle train --resume"):
        unidle.train(Speechless, run_name="r", after_iteration=[watch], **settings)
    step, saved = max(watch.weights), final_state(tmp_path / "r")
    assert saved["step"] == step >= 800
    for name, value in watch.weights[step].items():
        assert torch.equal(saved["algo"]["policy"][name], value), name


def test_a_mistake_that_shows_at_once_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    settings = {**SMALL, **HERE, "timesteps": 2000, "normalize_obs": False, "runs_dir": str(tmp_path)}
    with pytest.raises(UsageError, match="mask"):
        unidle.train(Speechless, run_name="r", env_kwargs={"broken": str(tmp_path / "broken")}, **settings)


def test_a_file_that_cannot_be_written_is_not_taken_for_a_failed_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after it, a run would take the policy for the best whose file is not there."""

    def full(*_: object) -> None:
        raise WriteError("best.pt cannot be written")

    monkeypatch.setattr(RunFolder, "save_best", full)
    settings = {**SMALL, **HERE, "timesteps": 2000, "runs_dir": str(tmp_path)}
    settings |= {"checkpoint_every": 400, "eval_every": 600}
    with pytest.raises(WriteError, match=r"^best\.pt cannot be written$"):
        unidle.train(Echo, run_name="r", **settings)
    assert (final_state(tmp_path / "r")["step"], final_state(tmp_path / "r")["best_step"]) == (400, -1)
    monkeypatch.undo()
    run = unidle.resume(tmp_path / "r", quiet=True)
    assert run.folder.best.exists()
    assert [record["step"] for record in records(run, "evaluation")] == [600, 1200, 1800, 2000]


class Slamming(Echo):
    is_stuck = False

    def close(self) -> None:
        if self.is_stuck:
            raise OSError("the door is stuck")


def test_an_environment_that_does_not_close_takes_nothing_from_a_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, **HERE, "timesteps": 400, "runs_dir": str(tmp_path)}
    stick = lambda context: monkeypatch.setattr(Slamming, "is_stuck", True)  # noqa: E731
    run = unidle.train(Slamming, run_name="r", after_iteration=[stick], **settings)
    assert (run.path / "report.html").exists()


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluation_envs(run: SmallRun, n_envs: int, workers: int) -> HostEnvs:
    maker, env_spec = run.maker, run.envs.env_spec
    if workers:
        return ProcessPool(maker, env_spec, n_envs, run.seed, workers, FIRST_EVALUATION_ENV)
    return SerialEnvs(maker, env_spec, n_envs, run.seed, FIRST_EVALUATION_ENV)


def play_by_hand(run: SmallRun, index: int, episode: int) -> tuple[float, int]:
    """Return and length of one whole episode with the mode action."""
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


# How each environment's episodes go: those that break, and those that are results then; 7 among 3: 3, 2 and 2.
EVALUATED = [({0: 0, 2: IN_RESET}, [3, 4, 5]), ({1: 1, 2: 0}, [0, 3]), ({}, [0, 1])]


@pytest.mark.parametrize("recurrent", ["none", "gru"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_counts_whole_episodes_alone_and_as_many_as_it_was_asked_for(
    workers: int, recurrent: str
) -> None:
    breaks = {
        (episode_seed(0, FIRST_EVALUATION_ENV + env, episode), step): "raise"
        for env, (broken, _) in enumerate(EVALUATED)
        for episode, step in broken.items()
    }
    run = small_run(Echo, kwargs={"breaks": breaks}, recurrent=recurrent)
    torch.nn.init.normal_(run.policy.actor_head.weight)  # so that it minds what it sees and remembers
    envs = evaluation_envs(run, 3, workers)
    with closing(run.envs), closing(envs):
        told: list[Fault] = []
        result = play(run.policy, envs, 7, on_fault=told.append)
    # The episode before a reset that fails is not whole either: its last step, which came with it, did not happen.
    expected = [play_by_hand(run, env, episode) for env, (_, whole) in enumerate(EVALUATED) for episode in whole]
    assert result.lengths == [length for _, length in expected]
    assert result.returns == pytest.approx([total for total, _ in expected])
    assert Counter(fault.env - FIRST_EVALUATION_ENV for fault in told) == {0: 2, 1: 2}


def test_an_episode_that_a_death_cuts_after_a_whole_step_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(s for s in range(99) if counting_length(episode_seed(s, FIRST_EVALUATION_ENV, 0), LONGEST) > 1)
    run = small_run(Echo, seed=seed)
    pool = evaluation_envs(run, 2, 2)
    assert isinstance(pool, ProcessPool)
    recv, flags, worker = pool.recv, pool._signals.flags, pool._processes[0]._process
    assert worker is not None

    def recv_after_a_death(at_least: int, seconds: float | None = None) -> list[int]:
        while flags[0] != DONE:
            time.sleep(0.001)
        if worker.returncode is None:  # in the first step
            worker.kill()
            worker.wait()
            pool._next_look = 0.0
        return recv(at_least, seconds)

    monkeypatch.setattr(pool, "recv", recv_after_a_death)
    with closing(run.envs), closing(pool):
        told: list[Fault] = []
        result = play(run.policy, pool, 5, on_fault=told.append)
    expected = [play_by_hand(run, 0, episode) for episode in (1, 2, 3)]
    expected += [play_by_hand(run, 1, episode) for episode in (0, 1)]
    assert result.lengths == [length for _, length in expected]
    assert result.returns == pytest.approx([total for total, _ in expected])
    assert [fault.kind for fault in told] == ["killed"]


# -- a thousand of them ------------------------------------------------------------------------------------------------

KILLS, HANGS, FAULTS_IN_ALL = 15, 3, 1000


class Soak:
    """A callback that hands out deaths and hangs evenly, measures the trainer, and ends the run after a thousand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handed_out: Counter[str] = Counter()
        self.measured: dict[int, tuple[int, int, int]] = {}  # faults so far → resident bytes, descriptors, children
        self.returns: list[float] = []

    def __call__(self, context: unidle.CallbackContext) -> None:
        faults = sum(n for name, n in context.record.items() if name.startswith("faults/"))
        for what, number in (("kill", KILLS), ("hang", HANGS)):
            while self._handed_out[what] < number and faults >= 50 + self._handed_out[what] * 900 / number:
                (self._folder / f"{what}-{self._handed_out[what]}").touch()
                self._handed_out[what] += 1
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.measured[faults] = resident, len(os.listdir("/proc/self/fd")), len(children())
        self.returns.append(context.record.get("rollout/return_mean", 0.0))
        if faults >= FAULTS_IN_ALL:
            context.stop()


def test_a_run_with_a_thousand_faults_learns_what_it_should_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 faults: 15 workers that die, 3 that hang, the rest exceptions and, about as many, numbers that are none."""
    monkeypatch.setattr(process, "POLL_SECONDS", 0.1)
    monkeypatch.setattr("unidle.engine.trainer.Timeline", lambda: Timeline(1 << 10))  # which soon is full
    settings = {**SMALL, **WORKERS, "n_envs": 8, "n_steps": 64, "batch_size": 128, "n_epochs": 4, "gamma": 0.5}
    settings |= {"learning_rate": 3e-3, "normalize_obs": False, "normalize_reward": False, "timesteps": 200_000}
    settings |= {"env_timeout": 1.0, "max_env_restarts": 30, "env_kwargs": {"folder": str(tmp_path), "odds": 40}}
    soak = Soak(tmp_path)
    run = unidle.train(Trial, runs_dir=str(tmp_path), after_iteration=[soak], **settings)
    counts = Counter(record["fault"] for record in records(run, "fault"))
    assert counts["killed"] == KILLS
    assert counts["hung"] == HANGS
    assert counts["exception"] >= FAULTS_IN_ALL - KILLS - HANGS
    texts = [record["text"] for record in records(run, "fault")]
    assert sum("NaN or infinite" in text for text in texts) > 300
    assert {n: c for n, c in records(run, "iteration")[-1].items() if n.startswith("faults/")} == {
        f"faults/{kind}": count for kind, count in counts.items()
    }
    # What it learned is as good as it can be.
    assert records(run, "iteration")[-1]["rollout/return_mean"] > 15.5
    (tmp_path / "calm").touch()
    assert run.evaluate(20).mean_return > 15.5  # of 16
    # And nothing piled up in the trainer: not a kilobyte for each fault, no descriptor, no process.
    early = soak.measured[min(faults for faults in soak.measured if faults >= 200)]
    late = soak.measured[max(soak.measured)]
    assert late[0] - early[0] < 800 * 1024
    assert late[1] == early[1]
    assert {workers for _, _, workers in soak.measured.values()} == {2}
    assert not children()


def test_no_worker_outlives_a_trainer_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> str:
        assert len(children()) >= 2
        raise RuntimeError("no such driver")

    monkeypatch.setattr("unidle.engine.trainer.kernels_on", fail)
    with pytest.raises(RuntimeError, match="no such driver"):
        unidle.train("CartPole-v1", runs_dir=str(tmp_path), **{**SMALL, **WORKERS, "timesteps": 200})
    assert not children()
