"""The noise of a rollout: exploration matrices that several steps share, and independent noise of every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.engine.collect.rollout_noise import RolloutNoise
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, StateDependent

CPU = torch.device("cpu")
N_ENVS, REALS, LATENT = 3, 2, 4
LAYOUT = ActionLayout.of(spaces.Box(-1, 1, (REALS,)))


def drawn(n_steps: int, matrix_steps: int | None, seed: int = 0) -> RolloutNoise:
    distribution = ActionDistribution(LAYOUT, StateDependent(LATENT, matrix_steps))
    noise = RolloutNoise(distribution, Rollout(n_steps, N_ENVS, 4, REALS, 0, CPU))
    noise.draw(torch.Generator().manual_seed(seed))
    return noise


@pytest.mark.parametrize(
    ("n_steps", "matrix_steps", "windows"),
    [
        (8, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (7, 3, [0, 0, 0, 1, 1, 1, 2]),
        (5, None, [0, 0, 0, 0, 0]),
        (5, 64, [0, 0, 0, 0, 0]),
        (4, 1, [0, 1, 2, 3]),
    ],
)
def test_matrix_is_kept_inside_a_window_and_differs_in_the_next(
    n_steps: int, matrix_steps: int | None, windows: list[int]
) -> None:
    noise = drawn(n_steps, matrix_steps)
    matrices = torch.stack([noise.at((t,))[:, REALS:] for t in range(n_steps)])
    assert matrices.shape == (n_steps, N_ENVS, LATENT * REALS)
    for t, window in enumerate(windows):
        assert torch.equal(matrices[t], matrices[windows.index(window)])
    distinct = matrices[[windows.index(window) for window in sorted(set(windows))]]
    assert distinct.unique().numel() == distinct.numel()  # of each window, environment and entry
    steps = torch.stack([noise.at((t,))[:, :REALS] for t in range(n_steps)])
    assert steps.unique().numel() == steps.numel()


def test_noise_of_ready_environments_does_not_depend_on_which_are_ready() -> None:
    n_steps = 6
    noise = drawn(n_steps, 2)
    envs = torch.arange(N_ENVS)
    positions = torch.tensor([5, n_steps, 2])  # environment 1 is not ready
    found = noise.at((positions, envs))
    for env in (0, 2):
        assert torch.equal(found[env], noise.at((int(positions[env]),))[env])


def test_noise_is_a_function_of_the_generators_seed() -> None:
    def values(seed: int) -> Tensor:
        return torch.stack([drawn(6, 4, seed).at((t,)) for t in range(6)])

    assert torch.equal(values(3), values(3))
    assert not np.isin(values(4).numpy(), values(3).numpy()).any()


def test_other_distributions_have_no_matrices() -> None:
    distribution = ActionDistribution(LAYOUT)
    noise = RolloutNoise(distribution, Rollout(4, N_ENVS, 4, REALS, 0, CPU))
    noise.draw(torch.Generator().manual_seed(1))
    expected = distribution.noise((4, N_ENVS), torch.Generator().manual_seed(1))
    assert torch.equal(torch.stack([noise.at((t,)) for t in range(4)]), expected)
    assert not noise.matrices.numel()
