"""The epsilon-greedy distribution."""

from __future__ import annotations

import torch
from gymnasium import spaces

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, EpsilonGreedy, Params


def test_probabilities_are_epsilon_greedy_over_allowed_actions() -> None:
    greedy = EpsilonGreedy(ActionLayout.of(spaces.MultiDiscrete([4, 2])))
    greedy.epsilon.fill_(0.3)
    values = torch.tensor([[5.0, -1.0, 9.0, 2.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    params = Params(greedy.masked(values, mask), torch.zeros(1, 0), torch.zeros(0))
    expected = torch.tensor([[[0.8, 0.1, 0.0, 0.1], [0.15, 0.85, 0.0, 0.0]]])
    torch.testing.assert_close(greedy.log_probs(params.logits).exp(), expected)
    log_prob = greedy.log_prob(params, torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(log_prob, torch.tensor([0.8 * 0.85]).log())
    probabilities = expected.clamp(min=1e-30)
    torch.testing.assert_close(greedy.entropy(params), -(probabilities * probabilities.log()).sum((-1, -2)))
    assert greedy.kl(params, params).item() == 0


def test_kernels_do_not_support_epsilon_greedy() -> None:
    assert EpsilonGreedy(ActionLayout.of(spaces.Discrete(3))).name not in KERNEL_DISTRIBUTIONS
