"""The policy's distribution over flat actions: independent categorical heads and independent real dimensions.

One class covers every action space (see `spaces/actions.py`). All heads are one padded, masked tensor
[.., heads, max_categories]: there is no loop over heads and no branch on a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unidle.errors import UsageError
from unidle.spaces.actions import ActionLayout
from unidle.spaces.distributions.beta import Beta
from unidle.spaces.distributions.gaussian import Gaussian, SquashedGaussian
from unidle.spaces.distributions.protocol import Parameters, RealDistribution

LOG_ZERO = -1e8  # used for log 0: exp of it is exactly 0, and 0 × LOG_ZERO is 0 where 0 × -inf would be NaN
MASKED_BELOW = -1e7  # a category whose logit or log-probability is below this is masked
_REAL_DISTRIBUTIONS: dict[str, type[Gaussian | Beta]] = {cls.name: cls for cls in (Gaussian, SquashedGaussian, Beta)}


class ActionDistribution(nn.Module):
    """Categorical heads, and a distribution over the real dimensions; implements `Distribution`."""

    def __init__(self, layout: ActionLayout, real: RealDistribution | None = None) -> None:
        """`real` is the distribution of the real dimensions; default: Gaussian."""
        super().__init__()
        self.real: RealDistribution = Gaussian() if real is None else real
        if self.real.bounded and not layout.bounded.all():
            raise UsageError(
                f"The {self.real.name} action distribution needs an action space with finite bounds; "
                "use --action-distribution gaussian or bound the action space."
            )
        self.heads, self.reals, self.width = layout.heads, layout.reals, layout.width
        self.nvec = tuple(layout.nvec)
        self.n_logits = sum(layout.nvec)
        self.n_outputs = self.n_logits + self.real.n_outputs * self.reals
        self.n_packed = self.n_logits + self.real.n_packed * self.reals
        self.n_free = self.real.n_free * self.reals
        self.n_matrix = self.real.n_matrix * self.reals
        self.max_categories = max(layout.nvec, default=0)
        # Logits come packed, [.., Σ nvec]. `_packed_index` [heads, max_categories] is the index of each head's category
        # among them; for padding, that of an extra logit, which is log 0.
        packed_index = torch.full((self.heads, self.max_categories), self.n_logits)
        start = 0
        for head, n in enumerate(layout.nvec):
            packed_index[head, :n] = torch.arange(start, start + n)
            start += n
        self.padded = bool((packed_index == self.n_logits).any())
        low, high = torch.from_numpy(layout.low), torch.from_numpy(layout.high)
        bounded = torch.from_numpy(layout.bounded)
        scale = torch.where(bounded, (high.double() - low.double()) / 2, 1.0).float()
        shift = torch.where(bounded, (high.double() + low.double()) / 2, 0.0).float()
        buffers = {"_packed_index": packed_index, "scale": scale, "shift": shift, "low": low, "high": high}
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    _packed_index: Tensor
    # [reals] `to_env` computes clip(scale × action + shift, low, high).
    scale: Tensor
    shift: Tensor
    low: Tensor
    high: Tensor

    @property
    def name(self) -> str:
        """Name of the formulas; without real dimensions all distributions are "categorical"."""
        return self.real.name if self.reals else "categorical"

    # -- parameters ----------------------------------------------------------------------------------------------------

    def params(self, outputs: Tensor, free: Tensor, mask: Tensor | None, latent: Tensor | None = None) -> Parameters:
        """Parameters from the network's outputs [.., n_outputs], `free` [n_free] and an action mask [.., Σ nvec].

        `latent` [.., features] is what the output layer computed the outputs from.
        """
        logits, *columns = self._split(outputs, self.real.n_outputs)
        if mask is not None:
            logits = self.masked(logits, mask)
        return self.real.params(logits, tuple(columns), self._free(free), latent)

    def pack(self, params: Parameters) -> Tensor:
        """The parameters that depend on the observation, as one tensor [.., n_packed]."""
        return torch.cat(params[: 1 + self.real.n_packed], -1)

    def unpack(self, packed: Tensor, free: Tensor) -> Parameters:
        """The inverse of `pack`."""
        logits, *columns = self._split(packed, self.real.n_packed)
        return self.real.unpack(logits, tuple(columns), self._free(free))

    def _split(self, outputs: Tensor, columns: int) -> tuple[Tensor, ...]:
        return outputs.split((self.n_logits, *[self.reals] * columns), -1)

    def _free(self, free: Tensor) -> tuple[Tensor, ...]:
        return (free,) if self.real.n_free else ()

    @staticmethod
    def masked(logits: Tensor, mask: Tensor) -> Tensor:
        """Packed logits with log 0 where the mask [.., Σ nvec] is 0.

        Some environments give an empty mask with the final observation, which needs no action: it allows all.
        """
        allowed = mask.bool()
        return torch.where(allowed | ~allowed.any(-1, keepdim=True), logits, LOG_ZERO)

    def padded_logits(self, logits: Tensor) -> Tensor:
        """Packed logits → [.., heads, max_categories], log 0 where a head has no such category."""
        if self.padded:
            return nn.functional.pad(logits, (0, 1), value=LOG_ZERO)[..., self._packed_index]
        return logits.unflatten(-1, (self.heads, self.max_categories))

    def log_probs(self, logits: Tensor) -> Tensor:
        """Packed logits → log-probabilities [.., heads, max_categories], log 0 where a head has no such category."""
        return torch.log_softmax(self.padded_logits(logits), -1)

    # -- actions -------------------------------------------------------------------------------------------------------

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise of single steps, [*shape, heads + reals], drawn on the generator's device."""
        uniform = torch.rand((*shape, self.heads), generator=generator, device=generator.device)
        if not self.reals:
            return uniform
        normal = torch.randn((*shape, self.reals), generator=generator, device=generator.device)
        return torch.cat([uniform, normal], -1)

    def matrices(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise that several steps share, [*shape, n_matrix]: standard normal exploration matrices, flat."""
        return torch.randn((*shape, self.n_matrix), generator=generator, device=generator.device)

    def all_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Everything that `sample` needs, with a new matrix for each entry: [*shape, heads + reals + n_matrix]."""
        noise = self.noise(shape, generator)
        return torch.cat((noise, self.matrices(shape, generator)), -1) if self.n_matrix else noise

    def sample(self, params: Parameters, noise: Tensor) -> Tensor:
        """The action that `noise` [.., heads + reals + n_matrix] selects: what `noise` and `matrices` draw.

        The same noise gives the same action.
        """
        parts = []
        if self.heads:
            parts.append(self.sample_categories(params.logits, noise[..., : self.heads]))
        if self.reals:
            parts.append(self.real.sample(params, noise[..., self.heads :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def sample_categories(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """The categories [.., heads] that `uniform` [.., heads] selects."""
        # Inverse CDF sampling: the first category whose cumulative probability exceeds u. The CDF is set to 0 at
        # categories of probability 0, so rounding in a parallel sum cannot select them, and scaled to its maximum, so
        # u < 1 always selects one.
        # Categories come first: on a GPU, torch's sum along a short last dimension takes many times as long.
        probs = torch.log_softmax(self.padded_logits(logits), -1).exp().movedim(-1, 0)
        cdf = probs.contiguous().cumsum(0) * (probs > 0)
        threshold = uniform * cdf.amax(0)
        return (cdf > threshold).to(torch.int8).argmax(0).to(uniform.dtype)

    def mode(self, params: Parameters) -> Tensor:
        """The most likely action."""
        parts = []
        if self.heads:
            best = torch.log_softmax(self.padded_logits(params.logits), -1).argmax(-1)
            parts.append(best.to(params.logits.dtype))
        if self.reals:
            parts.append(self.real.mode(params))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def to_env(self, action: Tensor) -> Tensor:
        """The flat action as the environment takes it: reals scaled and clipped to their range, categories as is."""
        if not self.reals:
            return action
        reals = self.scale_reals(self.real.to_range(action[..., self.heads :]))
        return reals if not self.heads else torch.cat((action[..., : self.heads], reals), -1)

    def scale_reals(self, reals: Tensor) -> Tensor:
        """Reals in units where the range is [-1, 1] → reals of the action space."""
        return torch.minimum(torch.maximum(reals * self.scale + self.shift, self.low), self.high)

    def export(self, params: Parameters) -> Tensor:
        """The deterministic action as the environment takes it."""
        return self.to_env(self.mode(params))

    # -- measures ------------------------------------------------------------------------------------------------------

    def log_prob_and_entropy(self, params: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of `action` and the entropy, both [..], summed over heads and reals."""
        table = self.log_probs(params.logits) if self.heads else None
        return self._log_prob(params, action, table), self._entropy(params, table)

    def log_prob(self, params: Parameters, action: Tensor) -> Tensor:
        """Log-probability [..] of `action`, summed over heads and reals."""
        return self._log_prob(params, action, self.log_probs(params.logits) if self.heads else None)

    def entropy(self, params: Parameters) -> Tensor:
        """Entropy [..], summed over heads and reals."""
        return self._entropy(params, self.log_probs(params.logits) if self.heads else None)

    def kl(self, params: Parameters, other: Parameters) -> Tensor:
        """KL(params ‖ other) [..], summed over heads and reals."""
        divergence = torch.zeros(params.logits.shape[:-1], device=params.logits.device)
        if self.heads:
            table = self.log_probs(params.logits)
            divergence = (table.exp() * (table - self.log_probs(other.logits))).sum((-1, -2))
        return divergence + self.real.kl(params, other) if self.reals else divergence

    def _log_prob(self, params: Parameters, action: Tensor, table: Tensor | None) -> Tensor:
        for_reals = self.real.log_prob(params, action[..., self.heads :]) if self.reals else None
        if table is None:
            assert for_reals is not None
            return for_reals
        chosen = action[..., : self.heads].long().unsqueeze(-1)
        for_heads = table.gather(-1, chosen).squeeze(-1).sum(-1)
        return for_heads if for_reals is None else for_heads + for_reals

    def _entropy(self, params: Parameters, table: Tensor | None) -> Tensor:
        for_reals = self.real.entropy(params).expand(params.logits.shape[:-1]) if self.reals else None
        if table is None:
            assert for_reals is not None
            return for_reals
        for_heads = -(table.exp() * table).sum((-1, -2))
        return for_heads if for_reals is None else for_heads + for_reals


def action_distribution(layout: ActionLayout, name: str) -> ActionDistribution:
    """The distribution called `name` (gaussian, squashed or beta) for actions laid out as `layout`."""
    return ActionDistribution(layout, _REAL_DISTRIBUTIONS[name]())
