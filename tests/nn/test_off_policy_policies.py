"""The policies of SAC and DQN: densities against torch.distributions, frequencies and Q values in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.testing import assert_close

from unidle.algos.registry import new_policy
from unidle.config import DQNRecipe, SACRecipe, recipe_for
from unidle.errors import UsageError
from unidle.nn.ensemble import Ensemble
from unidle.nn.mlp import ACTIVATIONS
from unidle.nn.q_policy import QPolicy
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import EpsilonGreedy, Params, SquashedActions
from unidle.spaces.observations import ObservationLayout

LAYOUT = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (4,), np.float32))
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([4.0, 10.0], np.float32))
N = 200_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(observations: Tensor, mask: Tensor | None = None, layout: ObservationLayout = LAYOUT) -> Tensor:
    obs = torch.zeros(len(observations), layout.obs_bytes, dtype=torch.uint8)
    obs[:, : 4 * observations.shape[1]] = observations.contiguous().view(torch.uint8)
    if mask is not None:
        obs[:, layout.mask_offset : layout.mask_offset + layout.mask_width] = mask
    return obs


def gaussian_params(mean: Tensor, log_std: Tensor) -> Params:
    return Params(mean[..., :0], mean, log_std)


# -- the squashed Gaussian ---------------------------------------------------------------------------------------------


def test_log_prob_matches_torch_squashed_normal() -> None:
    actions = SquashedActions(ActionLayout.of(BOX))
    mean, log_std = torch.randn(500, 2, generator=seeded(1)), torch.randn(500, 2, generator=seeded(2)).clamp(-2, 0.5)
    noise = torch.randn(500, 2, generator=seeded(3))
    action, log_prob = actions.sample_with_log_prob(gaussian_params(mean, log_std), noise)
    normal = Normal(mean.double(), log_std.double().exp())
    squashed = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    # The cache of the transform saves the inversion of tanh.
    expected = squashed.transforms[0](mean.double() + log_std.double().exp() * noise)
    assert_close(action.double(), expected, atol=1e-6, rtol=1e-6)
    assert_close(log_prob.double(), squashed.log_prob(expected).sum(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("far", [8.0, 20.0, 60.0, -20.0, -60.0])
def test_log_prob_is_exact_where_tanh_rounds_to_1(far: float) -> None:
    actions = SquashedActions(ActionLayout.of(spaces.Box(-1, 1, (1,))))
    mean = torch.tensor([[far]], requires_grad=True)
    action, log_prob = actions.sample_with_log_prob(gaussian_params(mean, torch.zeros(1, 1)), torch.tensor([[0.5]]))
    assert abs(action.item()) == pytest.approx(1.0, abs=1e-5)
    # log(1 − tanh² u) → log 4 − 2 |u|
    expected = -0.125 - 0.5 * math.log(2 * math.pi) - (math.log(4) - 2 * abs(far + 0.5))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)
    (slope,) = torch.autograd.grad(log_prob.sum(), mean)
    assert slope.item() == pytest.approx(2 * math.copysign(1, far), rel=1e-4)


def test_squashed_density_integrates_to_1() -> None:
    mean, log_std = torch.tensor([[0.4]]), torch.tensor([[-0.3]])
    actions = SquashedActions(ActionLayout.of(spaces.Box(-1, 1, (1,))))
    u = torch.linspace(-8, 8, 20_001).unsqueeze(-1)
    action, log_prob = actions.sample_with_log_prob(gaussian_params(mean, log_std), (u - mean) / log_std.exp())
    assert torch.trapezoid(log_prob.exp(), action.squeeze(-1)).item() == pytest.approx(1.0, abs=1e-4)


def test_gradients_pass_through_sampled_action() -> None:
    actions = SquashedActions(ActionLayout.of(spaces.Box(-1, 1, (1,))))
    mean = torch.tensor([[0.3]], requires_grad=True)
    log_std = torch.tensor([[-0.5]], requires_grad=True)
    action, _ = actions.sample_with_log_prob(gaussian_params(mean, log_std), torch.tensor([[0.7]]))
    by_mean, by_log_std = torch.autograd.grad(action.sum(), (mean, log_std))
    slope = 1 - math.tanh(0.3 + math.exp(-0.5) * 0.7) ** 2
    assert by_mean.item() == pytest.approx(slope)
    assert by_log_std.item() == pytest.approx(slope * math.exp(-0.5) * 0.7)


def test_sample_matches_sample_for_learning_and_mode_is_tanh_of_mean() -> None:
    actions = SquashedActions(ActionLayout.of(BOX))
    params = gaussian_params(torch.randn(50, 2, generator=seeded(1)), torch.randn(50, 2, generator=seeded(2)))
    noise = actions.noise((50,), seeded(3))
    assert torch.equal(actions.sample(params, noise), actions.sample_with_log_prob(params, noise)[0])
    assert torch.equal(actions.mode(params), torch.tanh(params.mean))


def test_actions_reach_but_never_leave_the_space() -> None:
    actions = SquashedActions(ActionLayout.of(BOX))
    for mean in (-100.0, 100.0):
        action = actions.to_env(
            actions.sample(gaussian_params(torch.full((1, 2), mean), torch.zeros(1, 2)), torch.zeros(1))
        )
        assert action.tolist() == [[-2.0, 0.0] if mean < 0 else [4.0, 10.0]]
    assert actions.to_env(torch.zeros(1, 2)).tolist() == [[1.0, 5.0]]


def test_log_std_is_clamped() -> None:
    policy = new_policy(LAYOUT, ActionLayout.of(BOX), SACRecipe())
    obs = packed(torch.zeros(1, 4))
    for bias, log_std in ((50.0, 2.0), (-50.0, -20.0), (-1.0, -1.0)):
        with torch.no_grad():
            policy.actor_head.weight.zero_()
            policy.actor_head.bias.fill_(bias)
        assert policy.act(obs)[0].log_std.tolist() == [[log_std, log_std]]


# -- random actions during warm-up -------------------------------------------------------------------------------------


def uniform_distance(values: Tensor, low: float, high: float) -> float:
    """The Kolmogorov-Smirnov statistic against a uniform distribution."""
    place = (values.double().sort().values - low) / (high - low)
    rank = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return float((place - rank).abs().max())


def test_random_box_actions_are_uniform() -> None:
    actions = SquashedActions(ActionLayout.of(BOX))
    params = gaussian_params(torch.tensor([3.0, -5.0]).expand(N, 2), torch.tensor([-4.0, 1.0]).expand(N, 2))
    actions.at_random.fill_(1.0)
    drawn = actions.to_env(actions.sample(params, actions.noise((N,), seeded())))
    for real, (low, high) in enumerate(zip(BOX.low, BOX.high)):
        assert uniform_distance(drawn[:, real], float(low), float(high)) < 1.63 / math.sqrt(N)  # significance level 1 %
    assert abs(torch.corrcoef(drawn.T)[0, 1].item()) < 0.01
    actions.at_random.fill_(0.0)
    assert uniform_distance(actions.sample(params, actions.noise((N,), seeded()))[:, 0], -1.0, 1.0) > 0.5


def test_random_categories_are_uniform_over_allowed_ones() -> None:
    actions = SquashedActions(ActionLayout.of(spaces.Discrete(5)))
    mask = torch.tensor([1, 0, 1, 1, 0])
    logits = actions.masked(torch.tensor([9.0, 5.0, -9.0, 0.0, 2.0]), mask)
    params = Params(logits.expand(N, 5), torch.empty(N, 0), torch.empty(N, 0))
    actions.at_random.fill_(1.0)
    drawn = actions.sample(params, actions.noise((N,), seeded()))
    shares = torch.bincount(drawn[:, 0].long(), minlength=5) / N
    assert_close(shares, mask / 3, atol=5 * math.sqrt(2 / 9 / N), rtol=0)
    assert shares[mask == 0].sum() == 0
    actions.at_random.fill_(0.0)
    shares = torch.bincount(actions.sample(params, actions.noise((N,), seeded()))[:, 0].long(), minlength=5) / N
    assert_close(shares, torch.softmax(logits, -1), atol=5 * math.sqrt(0.25 / N), rtol=0)


def test_state_dict_includes_at_random() -> None:
    one, other = (new_policy(LAYOUT, ActionLayout.of(BOX), SACRecipe()) for _ in range(2))
    one.distribution.at_random.fill_(1.0)
    other.load_state_dict(one.state_dict())
    assert other.distribution.at_random == 1.0


# -- epsilon-greedy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.3, 1.0])
def test_epsilon_greedy_frequencies_match_closed_form(epsilon: float) -> None:
    layout = ActionLayout.of(spaces.MultiDiscrete([3, 5]))
    actions = EpsilonGreedy(layout)
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])
    values = torch.tensor([1.0, 1.5, 9.0, 8.0, -3.0, -1.0, -2.0, 7.0])  # the largest values are masked
    params = Params(actions.masked(values, mask).expand(N, 8), torch.empty(N, 0), torch.empty(0))
    actions.epsilon.fill_(epsilon)
    drawn = actions.sample(params, actions.noise((N,), seeded())).long()
    expected = {0: [epsilon / 2, 1 - epsilon / 2, 0], 1: [0, epsilon / 3, 1 - 2 * epsilon / 3, epsilon / 3, 0]}
    for head, shares in expected.items():
        found = torch.bincount(drawn[:, head], minlength=len(shares)) / N
        assert_close(found, torch.tensor(shares), atol=5 * math.sqrt(0.25 / N) * (epsilon > 0), rtol=0)
        assert found[torch.tensor(shares) == 0].sum() == 0
    explored = [(drawn[:, head] != best).double() for head, best in ((0, 1), (1, 2))]
    if 0 < epsilon < 1:  # heads explore independently of each other
        assert abs(torch.corrcoef(torch.stack(explored))[0, 1].item()) < 0.01
    assert actions.mode(params)[0].tolist() == [1.0, 2.0]


def test_extreme_noise_picks_first_and_last_allowed_action() -> None:
    actions = EpsilonGreedy(ActionLayout.of(spaces.Discrete(4)))
    params = Params(actions.masked(torch.arange(4.0), torch.tensor([0, 1, 1, 0])), torch.empty(0), torch.empty(0))
    for epsilon in (1e-6, 0.05, 0.3, 1.0):
        actions.epsilon.fill_(epsilon)
        below = torch.nextafter(actions.epsilon, torch.zeros(()))
        noise = torch.stack([torch.zeros(()), below]).unsqueeze(-1)
        both = actions.sample(Params(params.logits.expand(2, 4), torch.empty(2, 0), params.log_std), noise)
        assert both[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dueling", [False, True])
def test_q_values_match_layers_and_dueling_centres_advantages(dueling: bool) -> None:
    nvec = [2, 4, 3]
    recipe = DQNRecipe(net_arch=(6,), activation="tanh", dueling=dueling)
    policy = new_policy(LAYOUT, ActionLayout.of(spaces.MultiDiscrete(nvec)), recipe)
    assert isinstance(policy, QPolicy)
    observations = torch.randn(7, 4, generator=seeded())
    latent = torch.tanh(nn.functional.linear(observations, policy.trunk[0].weight, policy.trunk[0].bias))
    advantages = nn.functional.linear(latent, policy.head.weight, policy.head.bias)
    values, start = policy.values(packed(observations)), 0
    assert values.shape == (7, 3, 4)
    for head, n in enumerate(nvec):
        expected = advantages[:, start : start + n]
        if dueling:
            state = latent @ policy.value_head.weight[head] + policy.value_head.bias[head]
            expected = state.unsqueeze(1) + expected - expected.mean(1, keepdim=True)
            assert_close(values[:, head, :n].mean(1), state)
        assert_close(values[:, head, :n], expected)
        assert (values[:, head, n:] < -1e7).all()
        start += n


def test_action_mask_applies_in_both_policies() -> None:
    layout = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (4,), np.float32), 3)
    actions = ActionLayout.of(spaces.Discrete(3))
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.uint8)
    obs = packed(torch.randn(2, 4, generator=seeded()), mask, layout)
    for algo in ("sac", "dqn"):
        policy = new_policy(layout, actions, recipe_for(algo))  # type: ignore[arg-type]
        assert policy.masked
        logits = policy.act(obs)[0].logits
        assert ((logits > -1e7) == mask.bool()).all()
        assert policy.distribution.mode(policy.act(obs)[0])[1].item() == 2.0


# -- many networks as one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize(("members", "widths"), [(1, (8, 8)), (2, ()), (5, (7, 3, 9))])
def test_ensemble_matches_separate_networks(members: int, widths: tuple[int, ...], activation: str) -> None:
    torch.manual_seed(0)
    ensemble = Ensemble(members, 4, widths, 3, activation)
    inputs = torch.randn(11, 4)
    outputs = ensemble(inputs)
    assert outputs.shape == (members, 11, 3)
    probe = torch.randn(members, 11, 3)
    grads = torch.autograd.grad((outputs * probe).sum(), [*ensemble.weights, *ensemble.biases])
    for member in range(members):
        layers: list[nn.Module] = []
        for weight, bias in zip(ensemble.weights, ensemble.biases):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data.copy_(weight[member].T)
            linear.bias.data.copy_(bias[member, 0])
            layers += [linear, ACTIVATIONS[activation]()]
        network = nn.Sequential(*layers[:-1])
        assert_close(outputs[member], network(inputs))
        (network(inputs) * probe[member]).sum().backward()
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        for layer, linear in enumerate(linears):
            assert_close(grads[layer][member].T, linear.weight.grad, atol=1e-5, rtol=1e-4)
            assert_close(grads[len(linears) + layer][member, 0], linear.bias.grad, atol=1e-5, rtol=1e-4)


def test_ensemble_members_differ_and_use_torch_initialisation() -> None:
    torch.manual_seed(0)
    ensemble = Ensemble(3, 100, (64,), 1, "relu")
    weights = ensemble.weights[0]
    assert not torch.equal(weights[0], weights[1])
    for values in (weights, ensemble.biases[0]):
        assert values.abs().max() <= 0.1
        assert uniform_distance(values.detach().flatten(), -0.1, 0.1) < 1.63 / math.sqrt(values.numel())


# -- unsupported action spaces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "space", "message"),
    [
        ("sac", spaces.MultiDiscrete([3, 2]), "SAC needs a Box or Discrete action space"),
        ("sac", spaces.MultiBinary(2), "SAC needs a Box or Discrete action space"),
        (
            "sac",
            spaces.Dict(turn=spaces.Discrete(3), push=spaces.Box(-1, 1, (1,))),
            "for others use --algo ppo",
        ),
        ("dqn", spaces.Box(-1, 1, (2,)), "DQN needs discrete actions, not a Box; use --algo sac or --discretize"),
        ("dqn", spaces.Dict(turn=spaces.Discrete(3), push=spaces.Box(-1, 1, (1,))), "not a Box"),
    ],
)
def test_unsupported_action_space_is_rejected(algo: Any, space: spaces.Space, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        new_policy(LAYOUT, ActionLayout.of(space), recipe_for(algo))


@pytest.mark.parametrize("algo", ["sac", "dqn"])
def test_discretised_box_is_a_discrete_action(algo: Any) -> None:
    policy = new_policy(LAYOUT, ActionLayout.of(spaces.Box(-2, 2, (1,)), 5), recipe_for(algo))
    assert isinstance(policy, SACPolicy if algo == "sac" else QPolicy)
    assert policy.distribution.n_logits == 5
