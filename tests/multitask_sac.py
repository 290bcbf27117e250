"""A small multi-task SAC whose replay buffer is full of random transitions."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces

from unidle.algos.off_policy import OffPolicy
from unidle.algos.sac import SAC
from unidle.buffers.multitask import TaskReplay
from unidle.config import recipe_for
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

N_TASKS, OBS_SIZE = 3, 5


def make_multitask_sac(**changes: Any) -> OffPolicy:
    """Its replay buffer holds as many transitions of each task."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"algo": "sac", "n_tasks": N_TASKS, "n_envs": 6, "n_steps": 1, "batch_size": 30}
    recipe = recipe_for(**{**given, "net_arch": (16, 16), "activation": "relu", "buffer_size": 600, **changes})
    policy = SACPolicy(
        ObservationLayout.of(spaces.Box(-9, 9, (OBS_SIZE,))), ActionLayout.of(spaces.Box(-1, 1, (2,))), recipe
    )
    algo = OffPolicy(SAC, policy, recipe)
    replay, no_ends = algo.experience.sampler, torch.zeros(6, dtype=torch.bool)
    assert isinstance(replay, TaskReplay)
    replay.start(random_observations())
    for _ in range(20):
        obs = random_observations()
        replay.add(torch.rand(6, 2) * 2 - 1, torch.randn(6), no_ends, no_ends, obs, obs, torch.arange(6) % N_TASKS)
    return algo


def random_observations() -> torch.Tensor:
    obs = torch.zeros(6, 6)  # a packed observation is padded to 8 bytes
    obs[:, : OBS_SIZE - N_TASKS] = torch.randn(6, OBS_SIZE - N_TASKS)
    obs[torch.arange(6), OBS_SIZE - N_TASKS + torch.arange(6) % N_TASKS] = 1.0
    return obs.view(torch.uint8)
