"""The device loop: a rollout and its update as one captured iteration, in bursts of any length."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compiled_steps
import pytest
import torch
from resumed_runs import assert_same, final_state
from torch import Tensor

import unidle
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.learn import device_loop
from unidle.engine.learn.device_loop import DeviceLoop
from unidle.envs.device.device_env import State, Step
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec
from unidle.errors import TrainingError
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.tasks.classic_control import TASKS, Classic
from unidle.timeline import Timeline

SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 8,
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 2,
    "net_arch": (16, 16),
    "normalize_obs": True,
    "normalize_reward": True,
    "lr_schedule": "linear",
    "timesteps": 2048,
    "eval_every": 0,
    "checkpoint_every": 1024,
    "tensorboard": False,
    "quiet": True,
}
ENV = "unidle/CartPole-v1"


def set_burst_length(monkeypatch: pytest.MonkeyPatch, iterations: int) -> None:
    """Fix the number of iterations per burst, which the loop otherwise measures."""
    init = DeviceLoop.__init__

    def with_burst(self: DeviceLoop, *arguments: Any) -> None:
        init(self, *arguments)
        self._burst_length = iterations

    monkeypatch.setattr(DeviceLoop, "__init__", with_burst)


@pytest.mark.parametrize("env", [ENV, "unidle/Pendulum-v1"])
@pytest.mark.parametrize("burst", [1, 3])
def test_device_loop_equals_separate_rollout_and_update(
    env: str, burst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("unidle.engine.build.can_capture_iteration", lambda env, recipe: False)
        separate = unidle.train(env, run_name="separate", runs_dir=str(tmp_path), **SMALL)
    set_burst_length(monkeypatch, burst)
    looped = unidle.train(env, run_name="looped", runs_dir=str(tmp_path), **SMALL)
    actual, expected = final_state(looped.path), final_state(separate.path)
    for state in (actual, expected):
        # Episode statistics cover the last rollout or the last burst, so they differ.
        state["collector"].pop("last")
        state["collector"]["moving"] = [t for t in state["collector"]["moving"] if t.dtype != torch.float64]
    assert_same(actual, expected)
    assert len(looped.records) < len(separate.records) or burst == 1


def test_burst_ends_where_checkpoint_or_evaluation_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_burst_length(monkeypatch, 1000)
    settings = {**SMALL, "timesteps": 2000, "eval_every": 700, "eval_episodes": 2}
    run = unidle.train(ENV, runs_dir=str(tmp_path), **settings)
    # 128 steps per iteration: the first multiples of 128 from 700, 1024, 1400 and 2000 on.
    assert [r["step"] for r in run.records if r["kind"] == "iteration"] == [768, 1024, 1408, 2048]
    assert [r["step"] for r in run.records if r["kind"] == "evaluation"] == [768, 1408, 2048]


def test_episodes_of_entire_burst_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for burst in (1, 8):
        with monkeypatch.context() as patch:
            set_burst_length(patch, burst)
            run = unidle.train(ENV, run_name=str(burst), runs_dir=str(tmp_path), **SMALL)
        counts.append(run.records[-1]["rollout/episodes"])
    assert counts[0] == counts[1] > 20


class NonFinite(Classic):
    """Environment 5 returns a NaN observation or an infinite reward in the third step of its second episode."""

    def __init__(self, broken: str, **arguments: Any) -> None:
        super().__init__(TASKS[ENV], **arguments)
        self._broken = broken

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        now = (self.indices == 5) & (state["episode"] == 1) & (state["length"] == 2)
        state, step = super().step(state, action)
        if self._broken == "reward":
            return state, step._replace(reward=torch.where(now, torch.inf, step.reward))
        return state, step._replace(observation=torch.where(now.unsqueeze(-1), torch.nan, step.observation))


@pytest.mark.parametrize("broken", ["reward", "observation"])
@pytest.mark.parametrize("burst", [1, 6])
def test_non_finite_value_is_reported_with_env_and_step(
    broken: str, burst: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_burst_length(monkeypatch, burst)
    monkeypatch.setattr(
        "unidle.api.job.env_maker", lambda *_: EnvMaker(ENV, NonFinite, {"broken": broken}, kind="device")
    )
    with pytest.raises(TrainingError, match=f"Environment 5 returned a NaN or infinite {broken} near step") as raised:
        unidle.train(ENV, runs_dir=str(tmp_path), **SMALL)
    reported_step = int(str(raised.value).split("near step ")[1].split(";")[0])
    run = unidle.load(next(tmp_path.iterdir()))
    finished = [r for r in run.records if r["kind"] == "iteration"]
    assert reported_step % 8 == 0
    assert reported_step >= 8 * 2
    assert not finished or reported_step >= finished[-1]["step"]  # reported with the burst it happened in


def test_device_loop_rejects_recurrent_policies_and_long_rollouts() -> None:
    env = Classic(TASKS[ENV], 4, 0)
    recipe = PPORecipe(n_envs=4, n_steps=16, batch_size=64)
    assert device_loop.can_capture_iteration(env, recipe)
    assert not device_loop.can_capture_iteration(env, PPORecipe(n_envs=4, n_steps=1024, batch_size=64))
    assert not device_loop.can_capture_iteration(env, PPORecipe(n_envs=4, n_steps=16, batch_size=64, recurrent="gru"))


class HostSync(Classic):
    """Copies a value to the host in each step, which cannot be captured."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(TASKS[ENV], **arguments)

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        if state["length"].sum().item() < 0:
            raise AssertionError
        return super().step(state, action)


@pytest.mark.gpu
def test_env_with_host_sync_runs_eagerly_and_names_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unidle.api.job.env_maker", lambda *_: EnvMaker(ENV, HostSync, kind="device"))
    unidle.train(ENV, runs_dir=str(tmp_path), **SMALL, device="cuda")
    assert 'state["length"].sum().item()' in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("env", [ENV, "unidle/Pendulum-v1"])
def test_captured_iterations_equal_eager_iterations_bit_for_bit(
    env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "n_envs": 64, "timesteps": 10 * 64 * 16, "device": "cuda", "runs_dir": str(tmp_path)}
    captured = unidle.train(env, run_name="captured", **settings)
    monkeypatch.setattr("unidle.engine.cuda_graphs.Capture.__call__", lambda self, name, function, *_, **__: function)
    eager = unidle.train(env, run_name="eager", **settings)
    assert_same(final_state(captured.path)["algo"], final_state(eager.path)["algo"])


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_steps_match_eager_steps(tmp_path: Path) -> None:
    """In a process of its own: what other tests leave behind in this one must not decide whether a compiler works."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, compiled_steps.__file__], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_failed_compilation_falls_back_to_eager_steps_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_compile(*_: Any, **__: Any) -> Any:
        def fail() -> None:
            raise RuntimeError("no compiler here\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", failing_compile)
    task = TASKS["unidle/Pendulum-v1"]
    env_spec = EnvSpec(
        ObservationLayout.of(task.observation_space), ActionLayout.of(task.action_space), 0.0, on_device=True
    )
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(net_arch=(8,)))
    rollout, messages = Rollout(4, 2, env_spec.obs_layout.obs_bytes, 1, 0, torch.device("cpu")), []
    collector = DeviceCollector(Classic(task, 2, 1), env_spec, policy, rollout, 1, Timeline(), say=messages.append)
    collector.compile_steps()
    collector.start()
    rewards = collector.finish().rollout.rewards
    assert (rewards != 0).all()
    assert len(messages) == 1
    assert messages[0].endswith("slower: no compiler here")
