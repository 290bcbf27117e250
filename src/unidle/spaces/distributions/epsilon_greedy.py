"""ε-greedy actions, for DQN."""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions.action import LOG_ZERO, MASKED_BELOW, ActionDistribution
from unidle.spaces.distributions.gaussian import Params


class EpsilonGreedy(ActionDistribution):
    """In every head the category with the highest value; with probability `epsilon` a random allowed one."""

    def __init__(self, layout: ActionLayout) -> None:
        super().__init__(layout)
        self.register_buffer("epsilon", torch.zeros(()))

    epsilon: Tensor

    @property
    def name(self) -> str:
        """A separate name, because the logits are Q values, not inputs of a softmax."""
        return "epsilon-greedy"

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """One uniform number u decides both: if u < ε the action is random, and u / ε selects it."""
        explores = noise < self.epsilon
        uniform = torch.where(explores, noise / self.epsilon.clamp(min=1e-9), 0.5)
        random = self.sample_categories(torch.where(params.logits > MASKED_BELOW, 0.0, params.logits), uniform)
        return torch.where(explores, random, self.mode(params))

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities: 1 − ε for the category with the highest value, and ε shared by all allowed ones."""
        values = self.padded_logits(logits)
        allowed = (values > MASKED_BELOW).to(values.dtype)
        best = torch.nn.functional.one_hot(values.argmax(-1), self.max_categories)
        probs = (1 - self.epsilon) * best + self.epsilon * allowed / allowed.sum(-1, keepdim=True)
        return probs.log().clamp(min=LOG_ZERO)
