"""The Beta distribution against torch.distributions and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from torch.distributions import kl_divergence

from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, BetaParams, action_distribution

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([6.0, 1.0], np.float32))
BETA = action_distribution(ActionLayout.of(BOX), "beta")


def random_params(n: int, seed: int = 0) -> BetaParams:
    outputs = 4 * torch.randn(n, BETA.n_outputs, generator=torch.Generator().manual_seed(seed))
    params: BetaParams = BETA.params(outputs, torch.zeros(0), None)
    return params


def fixed_params(alpha: float, beta: float, n: int) -> BetaParams:
    return BetaParams(torch.zeros(n, 0), torch.full((n, 1), alpha), torch.full((n, 1), beta))


def as_torch(params: BetaParams) -> torch.distributions.Beta:
    return torch.distributions.Beta(params.alpha.double(), params.beta.double())


def test_alpha_and_beta_are_one_plus_softplus_of_outputs() -> None:
    outputs = torch.tensor([[0.0, -3.0, 5.0, 1.0]])
    params = BETA.params(outputs, torch.zeros(0), None)
    expected = 1 + torch.log1p(outputs.exp())
    torch.testing.assert_close(torch.cat((params.alpha, params.beta), -1), expected)


def test_log_prob_entropy_and_kl_match_torch() -> None:
    params, other = random_params(200), random_params(200, seed=1)
    action = BETA.sample(params, torch.randn(200, 2, generator=torch.Generator().manual_seed(2)))
    beta = as_torch(params)
    x = action.double().sigmoid()
    torch.testing.assert_close(BETA.log_prob(params, action).double(), beta.log_prob(x).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(BETA.entropy(params).double(), beta.entropy().sum(-1), rtol=1e-5, atol=1e-5)
    expected = kl_divergence(beta, as_torch(other)).sum(-1)
    torch.testing.assert_close(BETA.kl(params, other).double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_log_prob_and_entropy_match_torch() -> None:
    params, action = random_params(50), torch.randn(50, 2, generator=torch.Generator().manual_seed(3))
    alpha, beta = params.alpha.clone().requires_grad_(), params.beta.clone().requires_grad_()
    log_prob, entropy = BETA.log_prob_and_entropy(BetaParams(params.logits, alpha, beta), action)
    ours = torch.autograd.grad((log_prob + entropy).sum(), (alpha, beta))
    theirs = torch.distributions.Beta(alpha.double(), beta.double())
    total = theirs.log_prob(action.double().sigmoid()) + theirs.entropy()
    for one, other in zip(ours, torch.autograd.grad(total.sum(), (alpha, beta))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_log_prob_is_exact_where_x_rounds_to_0_or_1() -> None:
    log_prob = BETA.real.log_prob(fixed_params(3.0, 2.0, 2), torch.tensor([[-60.0], [60.0]]))
    # On the left, log x → u and log(1 − x) → 0; on the right, log x → 0 and log(1 − x) → −u. B(3, 2) is 1 / 12.
    expected = [2 * -60.0 + np.log(12), -60.0 + np.log(12)]
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-6)


# -- sampling ----------------------------------------------------------------------------------------------------------

SHAPES = [1.0, 1.0001, 1.3, 2.0, 5.0, 30.0, 300.0, 3000.0, 1e5]


@pytest.mark.parametrize("alpha", SHAPES)
@pytest.mark.parametrize("beta", SHAPES)
def test_sampling_inverts_scipy_cdf(alpha: float, beta: float) -> None:
    noise = torch.linspace(-6, 6, 241, dtype=torch.float64).unsqueeze(-1)
    params = BetaParams(torch.zeros(241, 0), torch.full_like(noise, alpha), torch.full_like(noise, beta))
    u = BETA.real.sample(params, noise).numpy()
    z = noise.numpy()
    # Computed in the nearer tail, so that neither side rounds to 1.
    probability = np.where(
        z <= 0, special.betainc(alpha, beta, special.expit(u)), special.betainc(beta, alpha, special.expit(-u))
    )
    np.testing.assert_allclose(probability, special.ndtr(-np.abs(z)), rtol=0, atol=3e-8)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_quantiles_match_scipy(alpha: float, beta: float) -> None:
    noise = torch.linspace(-4, 4, 33, dtype=torch.float64).unsqueeze(-1)
    params = BetaParams(torch.zeros(33, 0), torch.full_like(noise, alpha), torch.full_like(noise, beta))
    x = BETA.real.sample(params, noise).sigmoid().numpy()
    np.testing.assert_allclose(x, stats.beta.ppf(special.ndtr(noise.numpy()), alpha, beta), rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.7, 1.7), (1.0, 40.0), (9.0, 2.0), (200.0, 300.0)])
def test_samples_pass_kolmogorov_smirnov_test(alpha: float, beta: float) -> None:
    n = 100_000
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(5))
    x = BETA.real.sample(fixed_params(alpha, beta, n), noise).sigmoid().numpy().ravel()
    assert stats.kstest(x, stats.beta(alpha, beta).cdf).pvalue > 1e-3


def test_sample_does_not_depend_on_batch_size() -> None:
    params, noise = random_params(64), torch.randn(64, 2, generator=torch.Generator().manual_seed(6))
    whole = BETA.sample(params, noise)
    assert torch.equal(whole, BETA.sample(params, noise))
    part = BETA.sample(BetaParams(*(field[7:9] for field in params)), noise[7:9])
    assert torch.equal(whole[7:9], part)


def test_sample_is_monotonic_in_noise() -> None:
    noise = torch.linspace(-5, 5, 2001).unsqueeze(-1)
    u = BETA.real.sample(fixed_params(1.5, 4.0, 2001), noise)
    assert (u.diff(dim=0) >= 0).all()


# -- actions -----------------------------------------------------------------------------------------------------------


def test_mode_is_alpha_minus_1_over_alpha_plus_beta_minus_2() -> None:
    params = random_params(100)
    expected = (params.alpha - 1) / (params.alpha + params.beta - 2)
    torch.testing.assert_close(BETA.mode(params).sigmoid(), expected, rtol=1e-4, atol=5e-5)


def test_mode_of_uniform_distribution_is_the_middle() -> None:
    params = BetaParams(torch.zeros(1, 0), torch.ones(1, 2), torch.ones(1, 2))
    assert BETA.export(params).tolist() == [[2.0, 0.5]]


def test_actions_cover_the_range_and_never_leave_it() -> None:
    space = spaces.Box(-2.0, 6.0, (1,))
    beta = action_distribution(ActionLayout.of(space), "beta")
    n = 20_000
    noise = torch.randn(n, 1, generator=torch.Generator().manual_seed(7))
    env_actions = beta.to_env(beta.sample(fixed_params(1.0, 1.0, n), noise))
    assert all(space.contains(action) for action in env_actions.numpy())
    assert stats.kstest(env_actions.numpy().ravel(), stats.uniform(-2, 8).cdf).pvalue > 1e-3
    torch.testing.assert_close(
        beta.to_env(torch.tensor([[-90.0], [0.0], [90.0]])), torch.tensor([[-2.0], [2.0], [6.0]])
    )


def test_categories_come_before_reals() -> None:
    space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 10.0, (2,))))
    layout = ActionLayout.of(space)
    joint = action_distribution(layout, "beta")
    assert joint.n_outputs == 3 + 2 * 2
    params = joint.params(torch.randn(5, 7, generator=torch.Generator().manual_seed(8)), torch.zeros(0), None)
    action = joint.sample(params, joint.noise((5,), torch.Generator().manual_seed(9)))
    heads = torch.distributions.Categorical(logits=params.logits)
    expected = heads.log_prob(action[:, 0]) + as_torch(params).log_prob(action[:, 1:].double().sigmoid()).sum(-1)
    torch.testing.assert_close(joint.log_prob(params, action), expected.float(), rtol=1e-4, atol=1e-4)
    assert all(space.contains(layout.decode(row)) for row in joint.to_env(action).numpy())


def test_pack_and_unpack_parameters_round_trip() -> None:
    params = random_params(10)
    unpacked = BETA.unpack(BETA.pack(params), torch.zeros(0))
    assert all(torch.equal(one, other) for one, other in zip(params, unpacked))


@pytest.mark.parametrize("name", ["beta", "squashed"])
@pytest.mark.parametrize("box", [spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(0.0, np.inf, (1,))])
def test_unbounded_box_is_rejected(name: str, box: spaces.Box) -> None:
    with pytest.raises(UsageError, match=rf"^The {name} action distribution needs .* finite bounds; use .*\.$"):
        action_distribution(ActionLayout.of(box), name)


def test_kernels_do_not_support_beta() -> None:
    assert BETA.name == "beta"
    assert BETA.name not in KERNEL_DISTRIBUTIONS
    # Without real dimensions only categories are left, which kernels support.
    assert action_distribution(ActionLayout.of(spaces.Discrete(3)), "beta").name == "categorical"
