"""Compiled steps of an environment on the device against eager ones; fails if they differ or cannot be compiled."""

from __future__ import annotations

import torch

from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.engine.collect.device import DeviceCollector
from unidle.envs.spec import EnvSpec
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.tasks.classic_control import TASKS, Classic
from unidle.timeline import Timeline


def main() -> None:
    """Episode ends must be equal; rewards and actions almost, as a compiler may round differently."""
    task, n_envs, steps = TASKS["unidle/Pendulum-v1"], 6, 5
    env_spec = EnvSpec(
        ObservationLayout.of(task.observation_space), ActionLayout.of(task.action_space), 0.0, on_device=True
    )
    torch.manual_seed(0)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, PPORecipe(net_arch=(8,)))
    rollouts = []
    for use_compile in (False, True):
        rollout = Rollout(
            steps, n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0, torch.device("cpu")
        )
        messages: list[str] = []
        collector = DeviceCollector(
            Classic(task, n_envs, 1), env_spec, policy, rollout, 1, Timeline(), say=messages.append
        )
        if use_compile:
            collector.compile_steps()
        collector.start()
        rollouts.append(collector.finish().rollout)
        assert messages == []
    plain, compiled = rollouts
    for field in ("rewards", "actions"):
        torch.testing.assert_close(getattr(compiled, field), getattr(plain, field), rtol=1e-5, atol=1e-5)
    assert torch.equal(compiled.starts, plain.starts)
    assert plain.rewards.std() > 0.1


if __name__ == "__main__":
    main()
