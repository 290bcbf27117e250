"""Action distributions against torch.distributions: sampling, masks and scaling to the environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Normal

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import ActionDistribution, Params

JUST_BELOW_ONE = 1 - 2.0**-24  # the largest number that torch.rand returns

SPACES = {
    "one head": spaces.Discrete(5),
    "equal heads": spaces.MultiDiscrete([3, 3, 3]),
    "heads of different sizes": spaces.MultiDiscrete([2, 7, 1, 4]),
    "bits": spaces.MultiBinary(4),
    "reals": spaces.Box(-2.0, 3.0, (3,)),
    "joint": spaces.Dict(
        {"go": spaces.MultiDiscrete([4, 2]), "how": spaces.Box(-1, 1, (2,)), "lamps": spaces.MultiBinary(2)}
    ),
}


def distribution_of(space: spaces.Space) -> tuple[ActionLayout, ActionDistribution]:
    layout = ActionLayout.of(space)
    return layout, ActionDistribution(layout)


def random_params(distribution: ActionDistribution, *lead: int, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*lead, distribution.n_logits, generator=generator)
    mean = torch.randn(*lead, distribution.reals, generator=generator)
    return Params(logits, mean, 0.5 * torch.randn(distribution.reals, generator=generator))


def random_noise(distribution: ActionDistribution, *lead: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(*lead, distribution.heads, generator=generator)
    return torch.cat([uniform, torch.randn(*lead, distribution.reals, generator=generator)], -1)


def torch_parts(layout: ActionLayout, params: Params) -> tuple[list[Categorical], Normal]:
    """The same distribution from torch.distributions."""
    return [Categorical(logits=logits) for logits in params.logits.split(layout.nvec, -1)], Normal(
        params.mean, params.log_std.exp().expand_as(params.mean)
    )


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_log_prob_and_entropy_match_torch_distributions(name: str, lead: tuple[int, ...]) -> None:
    layout, distribution = distribution_of(SPACES[name])
    params = random_params(distribution, *lead)
    action = distribution.sample(params, random_noise(distribution, *lead))
    heads, normal = torch_parts(layout, params)

    log_prob = normal.log_prob(action[..., layout.heads :]).sum(-1)
    log_prob = log_prob + sum(head.log_prob(action[..., i]) for i, head in enumerate(heads))
    entropy = normal.entropy().sum(-1) + sum(head.entropy() for head in heads)

    given_log_prob, given_entropy = distribution.log_prob_and_entropy(params, action)
    assert given_log_prob.shape == given_entropy.shape == lead
    torch.testing.assert_close(given_log_prob, log_prob)
    torch.testing.assert_close(given_entropy, entropy)


@pytest.mark.parametrize("name", SPACES)
def test_samples_are_actions_of_the_space(name: str) -> None:
    layout, distribution = distribution_of(SPACES[name])
    params = random_params(distribution, 200)
    obs = distribution.to_env(distribution.sample(params, random_noise(distribution, 200)))
    assert obs.shape == (200, layout.width)
    assert all(SPACES[name].contains(layout.decode(row)) for row in obs.numpy())


@pytest.mark.parametrize("name", SPACES)
def test_mode_is_most_likely_category_and_mean(name: str) -> None:
    layout, distribution = distribution_of(SPACES[name])
    params = random_params(distribution, 50)
    heads, normal = torch_parts(layout, params)
    expected = torch.cat([*(head.probs.argmax(-1, keepdim=True).float() for head in heads), normal.mean], -1)
    torch.testing.assert_close(distribution.mode(params), expected, rtol=0, atol=0)


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_noise_is_uniform_for_heads_then_normal_for_reals(name: str, shape: tuple[int, ...]) -> None:
    _, distribution = distribution_of(SPACES[name])
    noise = distribution.noise(shape, torch.Generator().manual_seed(1))
    assert noise.shape == (*shape, distribution.width)
    assert torch.equal(noise, random_noise(distribution, *shape, seed=1))


def test_category_frequencies_match_probabilities() -> None:
    layout, distribution = distribution_of(spaces.MultiDiscrete([3, 6, 2]))
    n = 100_000
    params = random_params(distribution, 1, seed=3)
    wide = Params(params.logits.expand(n, -1), params.mean.expand(n, -1), params.log_std)
    draws = distribution.sample(wide, random_noise(distribution, n, seed=4)).long()
    heads, _ = torch_parts(layout, params)
    # The 99.9 % points of chi-square with n - 1 degrees of freedom.
    limits = {2: 10.83, 3: 13.82, 6: 20.52}
    for i, head in enumerate(heads):
        size = layout.nvec[i]
        expected = head.probs[0] * n
        observed = torch.bincount(draws[:, i], minlength=size)
        assert ((observed - expected).square() / expected).sum() < limits[size]


def test_reals_are_mean_plus_std_times_noise() -> None:
    _, distribution = distribution_of(spaces.Box(-1, 1, (2,)))
    params = Params(torch.zeros(3, 0), torch.tensor([[0.5, -2.0]] * 3), torch.tensor([0.0, -1.0]))
    noise = torch.tensor([[0.0, 0.0], [1.0, 1.0], [-2.0, 3.0]])
    expected = torch.tensor([0.5, -2.0]) + noise * torch.tensor([1.0, np.exp(-1)])
    torch.testing.assert_close(distribution.sample(params, noise), expected.float())


def test_sample_does_not_depend_on_batch_size() -> None:
    _, distribution = distribution_of(SPACES["joint"])
    params, noise = random_params(distribution, 64), random_noise(distribution, 64)
    whole = distribution.sample(params, noise)
    part = distribution.sample(Params(params.logits[7:9], params.mean[7:9], params.log_std), noise[7:9])
    assert torch.equal(whole[7:9], part)


# -- masks -------------------------------------------------------------------------------------------------------------


@st.composite
def masked_heads(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """Head sizes, and a mask that allows at least one action per head."""
    nvec = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    mask: list[int] = []
    for n in nvec:
        head = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        head[draw(st.integers(0, n - 1))] = 1
        mask += head
    return tuple(nvec), mask


@given(masked_heads(), st.integers(0, 1000), st.sampled_from([1.0, 30.0, 1e4]))
def test_masked_actions_are_never_drawn_and_have_probability_zero(
    heads: tuple[tuple[int, ...], list[int]], seed: int, spread: float
) -> None:
    nvec, mask = heads
    _, distribution = distribution_of(spaces.MultiDiscrete(nvec))
    n = 64
    logits = spread * torch.randn(n, sum(nvec), generator=torch.Generator().manual_seed(seed))
    masked = distribution.masked(logits, torch.tensor(mask, dtype=torch.uint8).expand(n, -1))
    params = Params(masked, torch.zeros(n, 0), torch.zeros(0))
    noise = random_noise(distribution, n, seed=seed)
    noise[0], noise[1] = 0.0, JUST_BELOW_ONE

    table = distribution.log_probs(masked).exp()  # [n, heads, most]
    allowed = torch.zeros(len(nvec), max(nvec), dtype=torch.bool)
    for head, part in enumerate(torch.tensor(mask).split(nvec)):
        allowed[head, : nvec[head]] = part.bool()
    assert (table[:, ~allowed] == 0).all()
    torch.testing.assert_close(table.sum(-1), torch.ones(n, len(nvec)))

    for action in (distribution.sample(params, noise), distribution.mode(params)):
        for head in range(len(nvec)):
            assert allowed[head][action[:, head].long()].all()


def test_mask_renormalises_remaining_probabilities() -> None:
    _, distribution = distribution_of(spaces.Discrete(4))
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    masked = distribution.masked(logits, torch.tensor([[1, 0, 1, 0]], dtype=torch.uint8))
    expected = Categorical(logits=torch.tensor([1.0, 3.0]))
    table = distribution.log_probs(masked)[0, 0]
    torch.testing.assert_close(table[[0, 2]], expected.logits)
    params = Params(masked, torch.zeros(1, 0), torch.zeros(0))
    log_prob, entropy = distribution.log_prob_and_entropy(params, torch.tensor([[2.0]]))
    torch.testing.assert_close(log_prob, expected.log_prob(torch.tensor([1])))
    torch.testing.assert_close(entropy, expected.entropy().unsqueeze(0))


def test_gradients_are_finite_and_zero_for_masked_actions() -> None:
    _, distribution = distribution_of(spaces.MultiDiscrete([4, 2, 3]))
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 1, 1, 0]], dtype=torch.uint8)  # the middle head has one allowed action
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    params = Params(distribution.masked(logits, mask), torch.zeros(1, 0), torch.zeros(0))
    log_prob, entropy = distribution.log_prob_and_entropy(params, torch.tensor([[2.0, 1.0, 0.0]]))
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert torch.isfinite(gradient).all()
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[0, [0, 2, 6, 7]] != 0).all()


def test_head_with_one_allowed_action_has_no_entropy() -> None:
    _, distribution = distribution_of(spaces.Discrete(5))
    mask = torch.tensor([[0, 0, 0, 1, 0]], dtype=torch.uint8)
    params = Params(distribution.masked(torch.randn(1, 5), mask), torch.zeros(1, 0), torch.zeros(0))
    log_prob, entropy = distribution.log_prob_and_entropy(params, torch.tensor([[3.0]]))
    assert log_prob.item() == entropy.item() == 0


# -- actions for the environment ---------------------------------------------------------------------------------------


def test_plus_and_minus_one_map_to_the_bounds() -> None:
    _, distribution = distribution_of(spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([6.0, 1.0], np.float32)))
    env_action = distribution.to_env(torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(env_action, torch.tensor([[-2.0, 0.0], [2.0, 0.5], [6.0, 1.0]]))


def test_actions_beyond_the_range_are_clipped() -> None:
    _, distribution = distribution_of(spaces.Box(-2.0, 6.0, (1,)))
    assert distribution.to_env(torch.tensor([[-9.0], [9.0]])).tolist() == [[-2.0], [6.0]]


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_unbounded_range_is_not_scaled(dtype: type) -> None:
    _, distribution = distribution_of(spaces.Box(-np.inf, np.inf, (3,), dtype))
    action = torch.tensor([[-30.5, 0.0, 7.25]])
    assert torch.equal(distribution.to_env(action), action)


def test_half_bounded_range_is_clipped_but_not_scaled() -> None:
    _, distribution = distribution_of(spaces.Box(2.0, np.inf, (2,)))
    assert distribution.to_env(torch.tensor([[1.0, 50.0]])).tolist() == [[2.0, 50.0]]


def test_categories_are_sent_unchanged() -> None:
    _, distribution = distribution_of(spaces.Tuple((spaces.Discrete(9), spaces.Box(0.0, 10.0, (1,)))))
    assert distribution.to_env(torch.tensor([[8.0, 0.0]])).tolist() == [[8.0, 5.0]]


@given(st.floats(-1e5, 1e5), st.floats(0, 1e5), st.floats(-3, 3, width=32))
def test_scaled_action_is_always_inside_its_box(low: float, width: float, value: float) -> None:
    space = spaces.Box(low, low + width, (1,), np.float64)
    layout, distribution = distribution_of(space)
    assert space.contains(layout.decode(distribution.to_env(torch.tensor([value])).numpy()))
