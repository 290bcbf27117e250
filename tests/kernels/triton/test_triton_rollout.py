"""The rollout kernel against single steps, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from unidle.buffers.rollout import Rollout
from unidle.config import recipe_for
from unidle.engine.collect.device import DeviceCollector
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.optim.flat_parameters import FlatParameters
from unidle.tasks.classic_control import TASKS, Classic
from unidle.timeline import Timeline

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

STEPS, ENVS = 6, 40  # not a multiple of the block size
FIELDS = ("obs", "starts", "actions", "rewards", "terminated", "truncated", "final_obs", "final_at")


def make_collector(name: str, limit: int, **changes: Any) -> DeviceCollector:
    """A collector in mid-run: environments have taken some steps, and weights differ from their initial values."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(3)
    env_spec = probe(env_maker(name))
    recipe = recipe_for(**{"net_arch": (32, 32), "n_envs": ENVS, "n_steps": STEPS, "batch_size": ENVS, **changes})
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, recipe).to(DEVICE)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if policy.encoder.norm is not None:
        numbers = policy.encoder.n_numbers
        policy.encoder.norm.update(1 + 3 * torch.randn(100, numbers, device=DEVICE))
    FlatParameters(policy)
    rollout = Rollout(STEPS, ENVS, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0, DEVICE)
    env = Classic(dataclasses.replace(TASKS[name], limit=limit), ENVS, 2**40 + 7, DEVICE, first_index=5)
    collector = DeviceCollector(env, env_spec, policy, rollout, 0, Timeline(), say=pytest.fail)
    collector._kernel_unverified = False
    # Episodes end in the middle of a rollout, each at its own time.
    collector._state["length"].copy_(torch.arange(ENVS, device=DEVICE) % limit)
    return collector


def collect_rollouts(collector: DeviceCollector, count: int) -> list[dict[str, torch.Tensor]]:
    rollouts = []
    for number in range(count):
        collector.reset_episode_stats()
        collector.collect(torch.Generator(DEVICE).manual_seed(number))
        tensors = {name: getattr(collector._rollout, name).clone() for name in FIELDS}
        # Only single steps use the last two, `_at` and `_cut`.
        tensors |= {f"moving {i}": tensor.clone() for i, tensor in enumerate(collector.carried_state()[:-2])}
        tensors = {
            field: tensor.view(torch.float32) if tensor.dtype == torch.uint8 else tensor
            for field, tensor in tensors.items()
        }
        rollouts.append(tensors)
    return rollouts


@pytest.mark.parametrize("limit", [3, 50], ids=["truncated twice", "seldom truncated"])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("changes", [{}, {"normalize_obs": True, "activation": "relu"}], ids=["plain", "normalised"])
def test_rollout_kernel_matches_single_steps(name: str, limit: int, changes: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    steps, kernel = make_collector(name, limit, **changes), make_collector(name, limit, **changes)
    kernel._kernel = kernel._choose_kernel()
    assert kernel._kernel is not None
    for ours, theirs in zip(collect_rollouts(kernel, 2), collect_rollouts(steps, 2)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
