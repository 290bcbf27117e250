"""Runs that train together in one process: each is exactly what it would be alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from resumed_runs import assert_same, final_state

import unidle
from unidle.cli.main import run as command_line
from unidle.engine.other_trainers import OtherTrainers
from unidle.engine.sharing import Sharing
from unidle.envs.pool.shared import SharedPools
from unidle.envs.pool.signals import SharedDoorbell
from unidle.envs.pool.slot import episode_seed
from unidle.envs.pool.worker_cores import WorkerCores
from unidle.groups.folder import GroupFolder

SMALL: dict[str, Any] = {
    "n_envs": 4,
    "n_steps": 16,
    "batch_size": 32,
    "net_arch": (8,),
    "timesteps": 256,
    "eval_every": 0,
    "tensorboard": False,
    "quiet": True,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {"preset": "classic", "n_epochs": 2}),
    "overlap, workers": ("CartPole-v1", {"preset": "classic", "n_epochs": 2, "overlap": "strict", "workers": 2}),
    "recurrent": ("CartPole-v1", {"preset": "classic", "n_epochs": 1, "recurrent": "gru", "recurrent_size": 8}),
    "normalised": ("Pendulum-v1", {"preset": "classic", "normalize_obs": True, "normalize_reward": True}),
    "sac": ("Pendulum-v1", {"algo": "sac", "learning_starts": 64, "buffer_size": 1000}),
    "td3": ("Pendulum-v1", {"algo": "td3", "learning_starts": 64, "buffer_size": 1000}),
    "dqn": ("CartPole-v1", {"algo": "dqn", "learning_starts": 64, "buffer_size": 1000}),
    "on the device": ("unidle/Trading-v0", {"preset": "classic"}),
}
ON_CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings_of(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    env, own = SETTINGS[name]
    return env, {**SMALL, **own, **changes}


def assert_members_equal_runs_alone(name: str, **changes: Any) -> None:
    env, settings = settings_of(name, **changes)
    group = unidle.train(env, seeds=[3, 5, 4], **settings)
    assert [run.config.run.seed for run in group.runs] == [3, 5, 4]
    for run in group.runs:
        alone = unidle.train(env, seed=run.config.run.seed, **settings)
        ours, theirs = final_state(run.path), final_state(alone.path)
        # Python's, NumPy's and torch's own generators belong to the process; nothing here draws from them.
        del ours["random"], theirs["random"]
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_run_of_a_group_equals_the_run_alone(name: str) -> None:
    assert_members_equal_runs_alone(name, **ON_CPU)


def test_workers_that_share_their_cores_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the trainer has a core and the workers of several runs share each of the others."""

    def among(members: int, device: torch.device, others: OtherTrainers) -> Sharing:
        cores = sorted(os.sched_getaffinity(0))
        return Sharing(SharedPools(members, SharedDoorbell(), WorkerCores(cores[:1] * 2, 2)), [], others)

    monkeypatch.setattr(Sharing, "among", among)
    assert_members_equal_runs_alone("ppo", subproc=True, overlap="strict", **ON_CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_each_run_of_a_group_equals_the_run_alone_on_a_gpu(name: str) -> None:
    assert_members_equal_runs_alone(name, device="cuda")


@pytest.mark.parametrize("at_once", [1, 4])
def test_runs_on_the_device_train_side_by_side(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.engine.sharing._BURSTS_AT_ONCE", at_once)
    env, settings = settings_of("on the device", **ON_CPU)
    order: list[str] = []
    unidle.train(env, seeds=[1, 2, 3], after_iteration=[lambda context: order.append(context.folder.name)], **settings)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 4
    assert all(len(set(names)) == 3 for names in rounds)


class StopEachAfter:
    """A callback that stops every run once all together have done some iterations."""

    def __init__(self, iterations: int) -> None:
        self._left = iterations

    def __call__(self, context: unidle.CallbackContext) -> None:
        self._left -= 1
        if self._left <= 0:
            context.stop()


def group_arguments(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    env, settings = settings_of(name, **ON_CPU, **changes)
    return env, settings


# -- stopping and failing ----------------------------------------------------------------------------------------------


class FailsAfter(CartPoleEnv):
    """Fails for good after some steps of one process, if it belongs to the run with that seed."""

    def __init__(self, seed: int, steps: int = 20) -> None:
        super().__init__()
        self._bad_seed, self._left, self._is_bad = seed, steps, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        first = episode_seed(self._bad_seed, 0, 0)
        self._is_bad |= seed == first
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._left -= self._is_bad
        if self._left < 0:
            raise unidle.UsageError("This simulator needs a licence.")
        return super().step(action)


def test_failed_run_leaves_the_others_as_they_would_be_alone() -> None:
    _, settings = group_arguments("ppo", env_kwargs={"seed": 2}, max_env_restarts=0)
    with pytest.raises(unidle.TrainingError, match=r"1 of 3 runs in runs/failing failed\.\nseed-2: .*licence"):
        unidle.train(FailsAfter, seeds=[1, 2, 3], run_name="failing", **settings)
    for seed in (1, 3):
        alone = unidle.train(FailsAfter, seed=seed, **settings)
        ours, theirs = final_state(Path(f"runs/failing/seed-{seed}")), final_state(alone.path)
        assert_same(ours["algo"], theirs["algo"])
        assert ours["step"] == 256


def test_run_that_reaches_its_target_ends_without_the_others() -> None:
    env, settings = group_arguments("ppo", target_return=1.0, eval_every=64, eval_episodes=1, timesteps=512)
    group = unidle.train(env, seeds=2, **settings)
    for run in group.runs:
        alone = unidle.train(env, seed=run.config.run.seed, **settings)
        assert final_state(run.path)["step"] == final_state(alone.path)["step"] < 512


@pytest.mark.parametrize("name", ["ppo", "sac", "overlap, workers"])
def test_interrupted_group_resumes_exactly(name: str) -> None:
    env, settings = group_arguments(name)
    whole = unidle.train(env, seeds=[1, 2], run_name="whole", **settings)
    unidle.train(env, seeds=[1, 2], run_name="parts", after_iteration=[StopEachAfter(3)], **settings)
    steps = [final_state(Path(f"runs/parts/seed-{seed}"))["step"] for seed in (1, 2)]
    assert min(steps) < 256
    unidle.resume_group("runs/parts", quiet=True)
    for run in whole.runs:
        assert_same(final_state(run.path), final_state(Path("runs/parts") / run.path.name))


def test_killed_group_resumes_exactly(tmp_path: Path) -> None:
    env, settings = group_arguments("ppo", timesteps=1024, checkpoint_every=64)
    command = [sys.executable, "-m", "unidle", "train", "--env", env, "--seeds", "2", "--run-name", "killed"]
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else flag.replace("--", "--no-"))
        else:
            command += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/killed/seed-*/checkpoints/step-*"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert unidle.resume_group("runs/killed", quiet=True).summary()["n_runs"] == 2
    whole = unidle.train(env, seeds=2, run_name="whole", **settings)
    for run in whole.runs:
        ours, theirs = final_state(run.path), final_state(Path("runs/killed") / run.path.name)
        assert_same(ours["algo"], theirs["algo"])
        assert ours["step"] == theirs["step"] == 1024


def test_error_of_a_callback_is_told_at_once_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    env, settings = group_arguments("ppo")

    def fails(context: unidle.CallbackContext) -> None:
        if context.folder.name == "seed-2":
            raise KeyError("reward")

    with pytest.raises(unidle.TrainingError, match="seed-2: KeyError: 'reward'"):
        unidle.train(env, seeds=[1, 2], run_name="a", after_iteration=[fails], **settings)
    assert "seed-2: Failed, and the other runs continue: Traceback" in capsys.readouterr().err
    assert final_state(Path("runs/a/seed-1"))["step"] == 256
    assert GroupFolder.open(Path("runs/a")).failures == {"seed-2": "KeyError: 'reward'"}


def test_group_that_cannot_be_built_leaves_its_name_and_locks_free() -> None:
    env, settings = group_arguments("ppo", subproc=False)

    class Broken(CartPoleEnv):
        made = 0

        def __init__(self) -> None:
            Broken.made += 1
            if Broken.made > 8:  # the probes and the environments of the first run
                raise unidle.UsageError("no more licences")
            super().__init__()

    with pytest.raises((unidle.UsageError, unidle.TrainingError), match="no more licences"):
        unidle.train(Broken, seeds=3, run_name="a", **settings)
    assert not Path("runs").exists()
    assert len(unidle.train(env, seeds=2, run_name="a", **settings).runs) == 2


def test_factory_without_a_name_can_be_evaluated_and_resumed() -> None:
    _, settings = group_arguments("ppo", subproc=False)
    group = unidle.train(lambda: CartPoleEnv(), seeds=2, run_name="a", **settings)
    assert group.runs[0].evaluate(episodes=1).returns
    resumed = unidle.resume_group("runs/a", env=lambda: CartPoleEnv(), timesteps=512, quiet=True)
    assert final_state(resumed.runs[1].path)["step"] == 512


def test_run_with_a_damaged_config_does_not_keep_the_others_from_resuming(capsys: pytest.CaptureFixture[str]) -> None:
    env, settings = group_arguments("ppo")
    whole = unidle.train(env, seeds=[1, 2, 3], run_name="whole", **settings)
    unidle.train(env, seeds=[1, 2, 3], run_name="parts", after_iteration=[StopEachAfter(4)], **settings)
    Path("runs/parts/seed-1/config.yaml").write_text("recipe: {")
    assert command_line(["train", "--resume", "runs/parts", "--quiet"]) == 1
    told = capsys.readouterr().err
    assert "1 of 3 runs in runs/parts failed.\nseed-1: " in told
    assert "runs/parts/seed-1/config.yaml is not valid YAML" in told
    for run in whole.runs[1:]:
        assert_same(final_state(run.path), final_state(Path("runs/parts") / run.path.name))
    assert list(GroupFolder.open(Path("runs/parts")).failures) == ["seed-1"]
    assert "is not valid YAML" in Path("runs/parts/report.html").read_text()
    with pytest.raises(unidle.UsageError, match="would change it"):  # a mistake in the call is no run's failure
        unidle.resume_group("runs/parts", gamma=0.5)


def test_group_stopped_before_it_had_saved_a_run_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed right after its start: its name is taken, and nothing can be resumed."""
    env, settings = group_arguments("ppo", timesteps=64)
    Path("runs/a").mkdir(parents=True)
    GroupFolder.create(tmp_path / "runs/a", [1, 2])
    sentence = "runs/a was stopped before it had saved a run; remove the folder, and start the group again."
    with pytest.raises(unidle.UsageError, match=re.escape(sentence)):
        unidle.resume_group("runs/a")
    assert command_line(["train", "--resume", "runs/a"]) == 2
    assert sentence in capsys.readouterr().err
    group = unidle.train(env, seeds=[1, 2], run_name="a", resume="auto", **settings)  # or like this
    assert group.summary()["finished"] == 2


def test_same_command_starts_and_resumes_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    env, settings = group_arguments("ppo")
    whole = unidle.train(env, seeds=2, run_name="whole", **settings)
    settings |= {"resume": "auto", "quiet": False}
    stopped = unidle.train(env, seeds=2, after_iteration=[StopEachAfter(3)], **settings)
    capsys.readouterr()
    resumed = unidle.train(env, seeds=2, **settings)
    assert resumed.path == stopped.path
    assert f"Resuming runs/{stopped.path.name}." in capsys.readouterr().err
    for run, again in zip(whole.runs, resumed.runs, strict=True):
        assert_same(final_state(run.path), final_state(again.path))
    with pytest.raises(unidle.UsageError, match=r"has other seeds \(0, 1\); give these, or choose another `run_name`"):
        unidle.train(env, seeds=3, **settings)
    with pytest.raises(unidle.UsageError, match="A resumed run keeps its recipe, but gamma would change it"):
        unidle.train(env, seeds=2, gamma=0.5, **settings)


def test_group_stopped_at_once_keeps_its_failures_and_its_reports() -> None:
    env, settings = group_arguments("ppo", checkpoint_every=64)
    seen: list[int] = []

    def fails_or_stops(context: unidle.CallbackContext) -> None:
        if context.folder.name == "seed-2":
            raise KeyError("reward")
        seen.append(context.record["step"])
        if len(seen) == 3:
            raise KeyboardInterrupt  # as the second Ctrl-C

    with pytest.raises(KeyboardInterrupt, match="the last checkpoints are kept"):
        unidle.train(env, seeds=[1, 2], run_name="a", after_iteration=[fails_or_stops], **settings)
    assert GroupFolder.open(Path("runs/a")).failures == {"seed-2": "KeyError: 'reward'"}
    assert "KeyError" in Path("runs/a/report.html").read_text()
    assert Path("runs/a/seed-1/report.html").is_file()
    assert unidle.resume_group("runs/a", quiet=True).summary()["finished"] == 2


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (0, "`seeds` is 0; train 1 to 1,024 runs at a time"),
        ("1,1", "`seeds` lists 1 twice; each run needs a seed of its own"),
        ("two", "--seeds is 'two'; use a number of runs (8) or a list of seeds (1,2,5)"),
        ([-1], "`seed` is -1; it must be between 0 and"),
        (True, "`seeds` is True; use a number of runs (8) or a list of seeds ([1, 2, 5])"),
        (1.5, "`seeds` is 1.5; use a number of runs"),
    ],
)
def test_bad_seeds_are_refused_before_a_folder_is_created(seeds: Any, message: str, tmp_path: Path) -> None:
    env, settings = group_arguments("ppo")
    with pytest.raises(unidle.UsageError, match=re.escape(message)):
        unidle.train(env, seeds=seeds, **settings)
    assert not list(tmp_path.iterdir())


def test_group_is_not_started_twice_in_one_folder() -> None:
    env, settings = group_arguments("ppo", timesteps=64)
    unidle.train(env, seeds=2, run_name="a", **settings)
    with pytest.raises(unidle.UsageError, match=r"There is already a run in runs/a"):
        unidle.train(env, seeds=2, run_name="a", **settings)


@pytest.mark.parametrize(
    ("seeds", "names"), [(np.int64(2), ["seed-0", "seed-1"]), (np.arange(1, 3), ["seed-1", "seed-2"])]
)
def test_seeds_may_be_of_numpy(seeds: Any, names: list[str]) -> None:
    env, settings = group_arguments("ppo", timesteps=64)
    assert [run.path.name for run in unidle.train(env, seeds=seeds, **settings).runs] == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wandb": True}, "W&B has one run per process; leave out `seeds`, or `wandb`"),
        ({"writers": [object()]}, "`writers` cannot tell the runs of a group apart; leave out `seeds`, or the writers"),
    ],
)
def test_what_a_group_cannot_have_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    env, settings = group_arguments("ppo")
    with pytest.raises(unidle.UsageError, match=re.escape(message)):
        unidle.train(env, seeds=2, **settings, **arguments)
    assert not list(tmp_path.iterdir())
