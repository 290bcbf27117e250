"""The noise of a rollout."""

from __future__ import annotations

import torch
from gymnasium import spaces

from unidle.buffers.rollout import Rollout
from unidle.engine.collect.rollout_noise import RolloutNoise
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, StateDependent


def test_noise_of_a_step_and_its_matrices_are_joined_in_the_same_memory() -> None:
    layout = ActionLayout.of(spaces.Box(-1, 1, (2,)))
    distribution = ActionDistribution(layout, StateDependent(3, 4, use_expln=False))
    noise = RolloutNoise(distribution, Rollout(8, 5, 8, 2, 0, torch.device("cpu")))
    noise.draw(torch.Generator().manual_seed(0))
    first = noise.at((1,))
    assert torch.equal(first, torch.cat((noise.steps[1], noise.matrices[0]), -1))
    envs = torch.arange(5)
    second = noise.at((torch.tensor([6, 2, 5, 0, 7]), envs))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second[0], torch.cat((noise.steps[6, 0], noise.matrices[1, 0])))
    assert torch.equal(second[1], torch.cat((noise.steps[2, 1], noise.matrices[0, 1])))
