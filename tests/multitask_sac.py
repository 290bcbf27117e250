"""A small SAC with several tasks and a replay buffer full of random transitions."""

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

TASKS, SEEN = 3, 5


def algo_of(**changes: Any) -> OffPolicy:
    """Whose memory holds as much of each task, all of it random."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"algo": "sac", "n_tasks": TASKS, "n_envs": 6, "n_steps": 1, "batch_size": 30}
    recipe = recipe_for(**{**given, "net_arch": (16, 16), "activation": "relu", "buffer_size": 600, **changes})
    policy = SACPolicy(
        ObservationLayout.of(spaces.Box(-9, 9, (SEEN,))), ActionLayout.of(spaces.Box(-1, 1, (2,))), recipe
    )
    algo = OffPolicy(SAC, policy, recipe)
    memory, none = algo.experience.sampler, torch.zeros(6, dtype=torch.bool)
    assert isinstance(memory, TaskReplay)
    memory.start(some_rows())
    for _ in range(20):
        obs = some_rows()
        memory.add(torch.rand(6, 2) * 2 - 1, torch.randn(6), none, none, obs, obs, torch.arange(6) % TASKS)
    return algo


def some_rows() -> torch.Tensor:
    numbers = torch.zeros(6, 6)  # a row is padded to 8 bytes
    numbers[:, : SEEN - TASKS] = torch.randn(6, SEEN - TASKS)
    numbers[torch.arange(6), SEEN - TASKS + torch.arange(6) % TASKS] = 1.0
    return numbers.view(torch.uint8)
