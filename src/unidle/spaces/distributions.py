"""The policy's distribution over flat actions: independent categorical heads and independent Gaussians.

One class serves every action space (see `actions.py`), so no caller asks which kind it is. All heads are one padded,
masked tensor [.., heads, most categories]: there is no loop over heads and no branch on a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unidle.spaces.actions import ActionLayout

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_ZERO = -1e8  # stands for log 0: exp gives exactly 0, and 0 × it is 0 where 0 × -inf would be NaN


class Params(NamedTuple):
    """What the network says about the next action."""

    logits: Tensor  # [.., Σ nvec] or, where a mask applies, already masked
    mean: Tensor  # [.., reals] in units where the action range is [-1, 1]
    log_std: Tensor  # [reals]


class ActionDistribution(torch.nn.Module):
    """Samples, scores and measures flat actions [.., heads + reals]. It has buffers but nothing to learn."""

    def __init__(self, layout: ActionLayout) -> None:
        super().__init__()
        self.heads, self.reals, self.width = layout.heads, layout.reals, layout.width
        self.nvec = tuple(layout.nvec)
        self.n_logits = sum(layout.nvec)
        self.most = max(layout.nvec, default=0)
        # Logits come packed, Σ nvec of them; `_place` says which packed logit stands at [head, category] of the padded
        # table, and where there is none it points at one extra logit that is log 0.
        place = torch.full((self.heads, self.most), self.n_logits)
        start = 0
        for head, n in enumerate(layout.nvec):
            place[head, :n] = torch.arange(start, start + n)
            start += n
        self.padded = bool((place == self.n_logits).any())
        low, high = torch.from_numpy(layout.low), torch.from_numpy(layout.high)
        bounded = torch.from_numpy(layout.bounded)
        scale = torch.where(bounded, (high.double() - low.double()) / 2, 1.0).float()
        shift = torch.where(bounded, (high.double() + low.double()) / 2, 0.0).float()
        for name, value in (("_place", place), ("_low", low), ("_high", high), ("_scale", scale), ("_shift", shift)):
            self.register_buffer(name, value, persistent=False)

    _place: Tensor
    _low: Tensor
    _high: Tensor
    _scale: Tensor
    _shift: Tensor

    def padded_logits(self, logits: Tensor) -> Tensor:
        """Packed logits → [.., heads, most], log 0 where a head has no such category."""
        if self.padded:
            return torch.nn.functional.pad(logits, (0, 1), value=LOG_ZERO)[..., self._place]
        return logits.unflatten(-1, (self.heads, self.most))

    def log_probs(self, logits: Tensor) -> Tensor:
        """Packed logits → normalised log-probabilities [.., heads, most], log 0 where a head has no such category."""
        return torch.log_softmax(self.padded_logits(logits), -1)

    @staticmethod
    def masked(logits: Tensor, mask: Tensor) -> Tensor:
        """Packed logits with log 0 where the mask [.., Σ nvec] is 0."""
        return torch.where(mask.bool(), logits, LOG_ZERO)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise to sample with, [*shape, heads + reals], drawn on the generator's device."""
        uniform = torch.rand((*shape, self.heads), generator=generator, device=generator.device)
        normal = torch.randn((*shape, self.reals), generator=generator, device=generator.device)
        return torch.cat([uniform, normal], -1)

    def sample(self, params: Params, noise: Tensor) -> Tensor:
        """The action that `noise` [.., heads + reals] picks: uniform in [0, 1) for heads, standard normal for reals."""
        parts = []
        if self.heads:
            # Inverse of the cumulative distribution: the first category that reaches beyond u. One without mass reaches
            # nothing, whatever rounding a parallel sum puts between it and its neighbour, so it is never drawn; and
            # u < 1 keeps the threshold below what the last category with mass reaches.
            # Categories first: torch's sum along the last, short dimension takes a GPU many times as long.
            mass = self.log_probs(params.logits).exp().movedim(-1, 0)
            reach = mass.contiguous().cumsum(0) * (mass > 0)
            threshold = noise[..., : self.heads] * reach.amax(0)
            parts.append((reach > threshold).to(torch.int8).argmax(0).to(noise.dtype))
        if self.reals:
            parts.append(params.mean + params.log_std.exp() * noise[..., self.heads :])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def mode(self, params: Params) -> Tensor:
        """The most likely action."""
        parts = []
        if self.heads:
            parts.append(self.log_probs(params.logits).argmax(-1).to(params.mean.dtype))
        if self.reals:
            parts.append(params.mean)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def score(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of `action` and the entropy, both [..], summed over heads and reals."""
        log_prob: Tensor | float = 0.0
        entropy: Tensor | float = 0.0
        if self.heads:
            table = self.log_probs(params.logits)
            chosen = action[..., : self.heads].long().unsqueeze(-1)
            log_prob = table.gather(-1, chosen).squeeze(-1).sum(-1)
            entropy = -(table.exp() * table).sum((-1, -2))
        if self.reals:
            z = (action[..., self.heads :] - params.mean) * (-params.log_std).exp()
            log_prob = log_prob - (0.5 * z.square() + params.log_std + LOG_SQRT_2PI).sum(-1)
            entropy = entropy + (params.log_std + 0.5 + LOG_SQRT_2PI).sum().expand(z.shape[:-1])
        assert isinstance(log_prob, Tensor)
        assert isinstance(entropy, Tensor)
        return log_prob, entropy

    def to_env(self, action: Tensor) -> Tensor:
        """What the environment gets: reals scaled to their range and clipped to it, categories as they are."""
        if not self.reals:
            return action
        reals = action[..., self.heads :] * self._scale + self._shift
        reals = torch.minimum(torch.maximum(reals, self._low), self._high)
        return reals if not self.heads else torch.cat((action[..., : self.heads], reals), -1)
