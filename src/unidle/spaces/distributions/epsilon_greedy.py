"""ε-greedy actions, for DQN."""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions.action import ALLOWED, LOG_ZERO, ActionDistribution
from unidle.spaces.distributions.gaussian import Params


class EpsilonGreedy(ActionDistribution):
    """In every head the category with the highest value; with probability `epsilon` any allowed one."""

    def __init__(self, layout: ActionLayout) -> None:
        super().__init__(layout)
        self.register_buffer("epsilon", torch.zeros(()))

    epsilon: Tensor

    @property
    def name(self) -> str:
        """Not a softmax of the logits: these are values."""
        return "epsilon-greedy"

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """One uniform number decides both: below ε it explores, and its place below ε selects the category."""
        explores = noise < self.epsilon
        within = torch.where(explores, noise / self.epsilon.clamp(min=1e-9), 0.5)
        anything = self.sample_categories(torch.where(params.logits > ALLOWED, 0.0, params.logits), within)
        return torch.where(explores, anything, self.mode(params))

    def log_probs(self, logits: Tensor) -> Tensor:
        """1 − ε for the category with the highest value, and ε shared by the allowed ones, as logarithms."""
        values = self.padded_logits(logits)
        allowed = (values > ALLOWED).to(values.dtype)
        best = torch.nn.functional.one_hot(values.argmax(-1), self.most)
        probs = (1 - self.epsilon) * best + self.epsilon * allowed / allowed.sum(-1, keepdim=True)
        return probs.log().clamp(min=LOG_ZERO)
