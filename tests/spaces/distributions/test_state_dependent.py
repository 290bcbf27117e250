"""State-dependent exploration (gSDE) in closed form, and against Stable-Baselines3's distribution in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.testing import assert_close

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, SquashedActions, SquashedStateDependent, StateDependent

LATENT, REALS = 5, 3
LAYOUT = ActionLayout.of(spaces.Box(-1, 1, (REALS,)))
SPREAD = (-3.0, 1.5)  # of log standard deviations, so that `use_expln` matters for some
both = pytest.mark.parametrize("squashed", [False, True], ids=["ppo", "sac"])
expln = pytest.mark.parametrize("use_expln", [False, True], ids=["exp", "expln"])


def new_distribution(squashed: bool, use_expln: bool = False) -> ActionDistribution:
    if squashed:
        return SquashedActions(LAYOUT, SquashedStateDependent(LATENT, use_expln=use_expln)).double()
    return ActionDistribution(LAYOUT, StateDependent(LATENT, use_expln=use_expln)).double()


def inputs(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Means within SAC's limits, learned parameters and latent features, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.rand(n, REALS, generator=generator, dtype=torch.float64) - 1.5
    free = SPREAD[0] + (SPREAD[1] - SPREAD[0]) * torch.rand(LATENT * REALS, generator=generator, dtype=torch.float64)
    latent = torch.randn(n, LATENT, generator=generator, dtype=torch.float64)
    return mean.requires_grad_(), free.requires_grad_(), latent.requires_grad_()


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@both
def test_noise_of_each_action_has_the_variance_of_the_formula(squashed: bool) -> None:
    distribution, (mean, free, latent) = new_distribution(squashed), inputs(1)
    n = 200_000
    wide = distribution.params(mean.detach().expand(n, -1), free.detach(), None, latent.detach().expand(n, -1))
    actions = distribution.real.sample(wide, distribution.all_noise((n,), seeded()).double())
    std = free.detach().exp().view(LATENT, REALS)
    variance = (latent.detach()[0].square().unsqueeze(1) * std.square()).sum(0)
    assert_close(actions.mean(0), mean.detach()[0], atol=float(4 * variance.max().sqrt() / math.sqrt(n)), rtol=0)
    assert_close(actions.var(0), variance, rtol=0.02, atol=0)
    assert_close(wide.log_std[0].exp().square(), variance, rtol=1e-3, atol=2e-6)


def test_noise_is_a_linear_function_of_the_features_given_by_the_matrix() -> None:
    distribution, (mean, free, latent) = new_distribution(squashed=False), inputs(4)
    noise = distribution.all_noise((1,), seeded()).double().expand(4, -1)  # the same matrix for all
    params = distribution.params(mean, free, None, latent)
    matrix = noise[0, REALS:].view(LATENT, REALS) * free.exp().view(LATENT, REALS)
    assert_close(distribution.sample(params, noise) - mean, latent @ matrix)
    other_steps = torch.cat((torch.randn(4, REALS, dtype=torch.float64), noise[:, REALS:]), 1)
    assert torch.equal(distribution.sample(params, other_steps), distribution.sample(params, noise))


@both
@expln
def test_log_prob_entropy_and_gradients_match_stable_baselines3(squashed: bool, use_expln: bool) -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.distributions")
    theirs: Any = sb3.StateDependentNoiseDistribution(
        REALS, use_expln=use_expln, squash_output=squashed, learn_features=squashed
    )
    if squashed:
        theirs.bijector.epsilon = 0.0  # it is added inside log(1 − tanh²); our formula does without
    theirs.latent_sde_dim = LATENT
    results: list[list[Tensor]] = []
    for side in ("unidle", "sb3"):
        mean, free, latent = inputs(6)
        generator = torch.Generator().manual_seed(7)
        u = mean.detach() + 0.5 * torch.randn(6, REALS, generator=generator, dtype=torch.float64)
        actions = torch.tanh(u) if squashed else u
        entropy = None
        if side == "unidle":
            distribution = new_distribution(squashed, use_expln)
            params = distribution.params(mean, free, None, latent)
            log_prob = distribution.log_prob(params, actions)
            entropy = None if squashed else distribution.entropy(params)
            mode = distribution.mode(params)
        else:
            of_mean = theirs.proba_distribution(mean, free.view(LATENT, REALS), latent)
            log_prob, entropy, mode = of_mean.log_prob(actions), of_mean.entropy(), of_mean.mode()
        weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
        total = (weights * (log_prob if entropy is None else log_prob + entropy)).sum()
        gradients = torch.autograd.grad(total, (mean, free, latent), materialize_grads=True)
        results.append([log_prob, mode, *([] if entropy is None else [entropy]), *gradients])
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    gradient_of_features = results[0][-1]
    assert bool(gradient_of_features.any()) is squashed  # only SAC's noise trains the features


def test_expln_grows_slowly_and_has_a_finite_gradient_everywhere() -> None:
    real = StateDependent(1, use_expln=True)
    free = torch.tensor([-2000.0, -1.0, 0.0, 1.0, 2000.0], requires_grad=True)
    std = real.std(free)
    assert_close(std.detach(), torch.tensor([0.0, math.exp(-1), 1.0, 1 + math.log(2), 1 + math.log(2001)]))
    (gradient,) = torch.autograd.grad(std.sum(), free)
    assert gradient.isfinite().all()


@both
def test_packed_parameters_keep_what_log_probabilities_need(squashed: bool) -> None:
    distribution, (mean, free, latent) = new_distribution(squashed), inputs(7)
    params = distribution.params(mean, free, None, latent)
    unpacked = distribution.unpack(distribution.pack(params), free)
    actions = torch.tanh(mean.detach() + 0.1)
    assert torch.equal(distribution.log_prob(unpacked, actions), distribution.log_prob(params, actions))
    assert torch.equal(distribution.mode(unpacked), distribution.mode(params))


def test_mean_of_sac_is_limited_before_tanh() -> None:
    distribution, (mean, free, latent) = new_distribution(squashed=True), inputs(2)
    params = distribution.params(100 * mean, free, None, latent)
    assert params.mean.abs().max() == 2.0
    assert distribution.mode(params).abs().max() < 0.97


def test_sac_actions_at_random_are_uniform_and_independent_of_the_matrix() -> None:
    distribution, (mean, free, latent) = new_distribution(squashed=True), inputs(1)
    distribution.at_random.fill_(1.0)
    n = 20_000
    params = distribution.params(mean.expand(n, -1), free, None, latent.expand(n, -1))
    noise = distribution.all_noise((n,), seeded()).double()
    noise[:, REALS:] = noise[:1, REALS:]
    actions = np.sort(distribution.sample(params, noise).detach().numpy().ravel())
    assert np.abs((actions + 1) / 2 - np.linspace(0, 1, len(actions))).max() < 0.01


def test_reparametrised_actions_of_sac_have_the_distribution_of_collected_ones() -> None:
    distribution, (mean, free, latent) = new_distribution(squashed=True), inputs(1)
    assert isinstance(distribution, SquashedActions)
    n = 100_000
    params = distribution.params(mean.expand(n, -1), free, None, latent.expand(n, -1))
    collected = distribution.sample(params, distribution.all_noise((n,), seeded(2)).double()).detach()
    drawn, log_prob = distribution.sample_with_log_prob(params, torch.randn(n, REALS, generator=seeded(3)).double())
    levels = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    assert_close(drawn.detach().quantile(levels, 0), collected.quantile(levels, 0), atol=0.02, rtol=0)
    inside = drawn.abs().amax(1) < 0.999  # atanh of values close to 1 loses digits
    assert_close(log_prob[inside], distribution.log_prob(params, drawn)[inside], rtol=1e-6, atol=1e-6)
