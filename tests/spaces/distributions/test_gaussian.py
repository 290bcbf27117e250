"""Gaussian and squashed Gaussian actions against torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, Params, action_distribution

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([6.0, 1.0], np.float32))
GAUSSIAN, SQUASHED = (action_distribution(ActionLayout.of(BOX), name) for name in ("gaussian", "squashed"))


def random_params(n: int, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = torch.randn(n, 2, generator=generator), 0.5 * torch.randn(2, generator=generator)
    return Params(torch.zeros(n, 0), mean, log_std)


@pytest.mark.parametrize("distribution", [GAUSSIAN, SQUASHED], ids=["gaussian", "squashed"])
def test_kl_matches_torch_normals(distribution: torch.nn.Module) -> None:
    """The KL divergence does not change if both are squashed."""
    params, other = random_params(50), random_params(50, seed=1)
    normals = [Normal(p.mean, p.log_std.exp().expand_as(p.mean)) for p in (params, other)]
    torch.testing.assert_close(distribution.kl(params, other), kl_divergence(*normals).sum(-1))


def test_squashed_log_prob_matches_torch_transformed_normal() -> None:
    params = random_params(500)
    u = SQUASHED.sample(params, torch.randn(500, 2, generator=torch.Generator().manual_seed(2)))
    normal = Normal(params.mean.double(), params.log_std.double().exp())
    expected = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    action = expected.transforms[0](u.double())  # its cache saves the inversion of tanh
    torch.testing.assert_close(
        SQUASHED.log_prob(params, u).double(), expected.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("far", [20.0, -60.0])
def test_squashed_log_prob_is_exact_where_tanh_rounds_to_1(far: float) -> None:
    params = Params(torch.zeros(1, 0), torch.full((1, 1), far), torch.zeros(1))
    log_prob = SQUASHED.real.log_prob(params, torch.full((1, 1), far))
    # log(1 − tanh² u) → log 4 − 2 |u|
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - math.log(4) + 2 * abs(far), rel=1e-6)


def test_squashed_entropy_is_mean_negative_log_prob() -> None:
    means = torch.tensor([[0.0], [0.7], [-2.0], [4.0]])
    for log_std in (-2.0, 0.0, 1.0):
        params = Params(torch.zeros(4, 0), means, torch.tensor([log_std]))
        # By the midpoint rule over the normal's quantiles, as an independent reference.
        quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
        u = means.double() + math.exp(log_std) * torch.special.ndtri(quantiles)
        log_prob = Normal(means.double(), math.exp(log_std)).log_prob(u)
        slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
        expected = -(log_prob - slope).mean(-1)
        torch.testing.assert_close(SQUASHED.real.entropy(params).double(), expected, rtol=2e-3, atol=2e-3)


def test_squashed_actions_are_tanh_scaled_to_range() -> None:
    u = torch.tensor([[-50.0, 50.0], [0.0, 0.0], [0.5, -1.0]])
    expected = torch.tanh(u) * torch.tensor([4.0, 0.5]) + torch.tensor([2.0, 0.5])
    torch.testing.assert_close(SQUASHED.to_env(u), expected)
    params = random_params(3)
    torch.testing.assert_close(SQUASHED.export(params), SQUASHED.to_env(params.mean))


def test_kernels_support_gaussian_but_not_squashed() -> None:
    assert GAUSSIAN.name in KERNEL_DISTRIBUTIONS
    assert SQUASHED.name not in KERNEL_DISTRIBUTIONS
