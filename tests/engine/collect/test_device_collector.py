"""The device collector gives the same rollouts as the host collector."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import StopAfter, assert_same, final_state

import unidle
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.envs.device.host_view import TensorEnvs
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.tasks.classic_control import TASKS, Classic
from unidle.timeline import Timeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("recurrent", ["none", "gru"])
@pytest.mark.parametrize(
    ("name", "limit", "steps"),
    [("unidle/CartPole-v1", 7, 16), ("unidle/Pendulum-v1", 3, 10), ("unidle/Acrobot-v1", 50, 8)],
)
def test_device_rollouts_equal_host_rollouts(name: str, limit: int, steps: int, recurrent: str) -> None:
    n_envs, seed = 5, 3
    task = dataclasses.replace(TASKS[name], limit=limit)
    env_spec = EnvSpec(
        ObservationLayout.of(task.observation_space), ActionLayout.of(task.action_space), 0.0, on_device=True
    )
    torch.manual_seed(0)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(recurrent=recurrent, recurrent_size=8))  # type: ignore[arg-type]

    def rollout() -> Rollout:
        return Rollout(
            steps, n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size, CPU
        )

    on_device = DeviceCollector(Classic(task, n_envs, seed), env_spec, policy, rollout(), seed, Timeline())
    on_host = HostCollector(TensorEnvs(Classic(task, n_envs, seed), env_spec), policy, [rollout()], seed, Timeline())
    inference = on_host._slots[0].inference
    inference._numpy_actor, inference._is_verified = None, True  # both use torch; NumPy rounds differently
    on_device.start()
    on_host.start()
    n_truncated = 0
    for _ in range(4):
        device_rollout, host_rollout = on_device.finish().rollout, on_host.finish().rollout
        on_device.read_episode_stats()
        for field in ("obs", "starts", "actions", "rewards", "terminated", "truncated", "states"):
            assert torch.equal(getattr(device_rollout, field), getattr(host_rollout, field)), field
        used = device_rollout.final_at < steps * n_envs
        order = device_rollout.final_at[used].argsort()
        assert torch.equal(device_rollout.final_at[used][order], host_rollout.final_at)
        assert torch.equal(device_rollout.final_obs[used][order], host_rollout.final_obs)
        n_truncated += len(host_rollout.final_at)
        assert on_device.episodes == on_host.stats.episodes
        on_device.open_rollout()
        on_host.open_rollout()
    assert n_truncated > 0 or "Acrobot" in name


def test_mean_return_and_length_are_over_finished_episodes() -> None:
    task = dataclasses.replace(TASKS["unidle/CartPole-v1"], limit=4)
    env_spec = EnvSpec(
        ObservationLayout.of(task.observation_space), ActionLayout.of(task.action_space), 0.0, on_device=True
    )
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe())
    rollout = Rollout(9, 3, env_spec.obs_layout.obs_bytes, 1, 0, CPU)
    collector = DeviceCollector(Classic(task, 3, 0), env_spec, policy, rollout, 0, Timeline())
    collector.start()
    assert collector.recent_returns == []
    collector.finish()
    collector.read_episode_stats()
    assert collector.episodes == 6  # two per environment, after 4 and 8 steps
    assert collector.recent_returns == [4.0]
    assert collector.recent_lengths == [4.0]


SMALL: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 16,
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 2,
    "net_arch": (16,),
    "normalize_obs": True,
    "normalize_reward": True,
    "eval_episodes": 4,
    "tensorboard": False,
    "quiet": True,
}


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_resumed_run_equals_uninterrupted_run(recurrent: str, tmp_path: Path) -> None:
    settings = {**SMALL, "recurrent": recurrent, "recurrent_size": 8, "timesteps": 2560, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train("unidle/CartPole-v1", run_name="uninterrupted", **settings)
    unidle.train("unidle/CartPole-v1", run_name="resumed", after_iteration=[StopAfter(4)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))
    other = unidle.train("unidle/CartPole-v1", run_name="other", seed=1, **settings)
    weights = [final_state(run.path)["algo"]["policy"]["actor_head.weight"] for run in (uninterrupted, other)]
    assert not torch.equal(*weights)


@pytest.mark.learning
def test_ppo_solves_device_cartpole(tmp_path: Path) -> None:
    settings = {**SMALL, "n_envs": 256, "n_steps": 32, "batch_size": 1024, "n_epochs": 4, "net_arch": (64, 64)}
    run = unidle.train(
        "unidle/CartPole-v1",
        timesteps=600_000,
        target_return=490,
        learning_rate=1e-3,
        runs_dir=str(tmp_path),
        **{**settings, "eval_episodes": 20, "eval_every": 50_000, "normalize_reward": False},
    )
    assert run.evaluate(episodes=100).mean_return >= 475


@pytest.mark.parametrize("workers", [None, 1])
def test_resume_cannot_move_envs_between_device_and_workers(workers: int | None, tmp_path: Path) -> None:
    """The device environment and its host counterpart are different environments."""
    settings = {**SMALL, "workers": workers, "runs_dir": str(tmp_path), "timesteps": 512}
    unidle.train("unidle/CartPole-v1", run_name="r", **settings)
    before = (tmp_path / "r/config.yaml").read_text()
    for _ in range(2):  # a rejected resume must unlock the folder
        with pytest.raises(UsageError, match="leave out --workers" if workers is None else "resume it with --subproc"):
            unidle.resume(tmp_path / "r", workers=None if workers else 1, timesteps=1024, quiet=True)
    assert (tmp_path / "r/config.yaml").read_text() == before
    assert unidle.resume(tmp_path / "r", timesteps=1024, quiet=True).summary()["step"] == 1024


def test_run_with_few_iterations_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unidle.train("unidle/CartPole-v1", runs_dir=str(tmp_path), timesteps=512, **SMALL)
    assert "512 steps are only 2 iterations of 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        ("unidle/CartPol-v1", {}, "did you mean `unidle/CartPole-v1`"),
        ("unidle/CartPole-v1", {"overlap": "strict"}, "nothing to overlap"),
        ("unidle/Pendulum-v1", {"discretize": 5}, "`discretize` does not apply"),
        ("unidle/CartPole-v1", {"env_kwargs": {"gravity": 1}}, "gravity"),
        (
            "unidle/CartPole-v1",
            {"env_kwargs": {"n_envs": 1}},
            "`n_envs` is set by `n_envs`; leave it out of the env_kwargs",
        ),
        ("unidle/Trading-v0", {"env_kwargs": {"seed": 1}}, "`seed`; leave it out"),
    ],
)
def test_settings_unsupported_by_device_envs_are_rejected(
    env: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        unidle.train(env, timesteps=256, runs_dir=str(tmp_path), **{**SMALL, **settings})
