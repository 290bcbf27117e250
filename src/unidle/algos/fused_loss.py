"""PPO's loss of a minibatch and its slopes by what the network gave, in three kernels (Triton).

Through autograd the loss is some hundred kernels that take longer to start than to run. Here one looks at a minibatch's
advantages, one reads everything else where it lies, without gathering it first, and one adds up; the way back is a
product each. The network itself, whatever it is, stays with autograd.

The formulas are those of ppo.py, differentiated by hand; `tests/algos/test_ppo_kernels.py` compares both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.algos.fused_step import FIGURES
from unidle.algos.micro_batches import Loss
from unidle.kernels.triton.small_mlp import distribution
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS

if TYPE_CHECKING:
    from unidle.algos.ppo import PPO, Batch
    from unidle.nn.actor_critic import ActorCritic

_MOST_OUTPUTS, _MOST_HEADS = 128, 8
_OUTPUTS_AT_ONCE, _ADVANTAGES_AT_ONCE = 2048, 16384  # that a program looks at
_SEEN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)  # what is not a number stays in, to be seen


@triton.jit
def policy_terms(
    log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside,
    SHARE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Of samples i: slope of the policy loss by their log-probabilities; sums of that loss, of KL, of what is clipped.

    Each sample has this SHARE of the minibatch.
    """
    advantage = tl.load(advantages + i, mask=inside, other=0.0)
    advantage = (advantage - tl.load(advantage_norm)) * tl.load(advantage_norm + 1)
    log_ratio = log_prob - tl.load(log_probs + i, mask=inside, other=0.0)
    log_ratio = tl.where(inside, log_ratio, 0.0)
    ratio = tl.exp(log_ratio)
    clip = tl.load(clip_range)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip, _SEEN), 1.0 + clip, _SEEN)
    weight = tl.load(weights + i, mask=inside, other=0.0) if WEIGHTED else inside.to(tl.float32)
    kept = ~(ratio * advantage > clipped * advantage)  # so that what is not a number stays in, to be seen
    by_log_prob = tl.where(kept, -weight * advantage * ratio, 0.0) * SHARE
    surrogate = tl.minimum(ratio * advantage, clipped * advantage, _SEEN)
    return (
        tl.where(inside, by_log_prob, 0.0),
        tl.sum(tl.where(inside, -weight * surrogate, 0.0)),
        tl.sum(ratio - 1.0 - log_ratio),
        tl.sum((tl.abs(ratio - 1.0) > clip).to(tl.float32)),
    )


@triton.jit
def value_terms(
    value, values, returns, i, inside, SHARE: tl.constexpr, CLIP_VALUES: tl.constexpr, VALUE_RANGE: tl.constexpr
):
    """Of samples i, which have this SHARE each: slope of the value loss by their values, and sum of that loss."""
    target = tl.load(returns + i, mask=inside, other=0.0)
    error = value - target
    slope = inside
    if CLIP_VALUES:
        old = tl.load(values + i, mask=inside, other=0.0)
        moved = tl.minimum(tl.maximum(value - old, -VALUE_RANGE, _SEEN), VALUE_RANGE, _SEEN)
        slope = inside & (tl.abs(value - old) <= VALUE_RANGE)
        error = old + moved - target
    error = tl.where(inside, error, 0.0)
    return tl.where(slope, 2.0 * SHARE * error, 0.0), tl.sum(error * error)


@triton.jit
def _normalise(advantages, order, norm, SAMPLES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of a minibatch's advantages, and one over their deviation."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, SAMPLES, BLOCK):
        sample = begin + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        total += tl.load(advantages + i, mask=sample < SAMPLES, other=0.0)
    mean = tl.sum(total) / SAMPLES
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, SAMPLES, BLOCK):
        sample = begin + tl.arange(0, BLOCK)
        i = tl.load(order + sample // LENGTH, mask=sample < SAMPLES, other=0) * LENGTH + sample % LENGTH
        difference = tl.load(advantages + i, mask=sample < SAMPLES, other=0.0) - mean
        total += tl.where(sample < SAMPLES, difference * difference, 0.0)
    deviation = tl.sqrt(tl.sum(total) / (SAMPLES - 1))
    tl.store(norm, mean)
    tl.store(norm + 1, 1.0 / (deviation + 1e-8))


@triton.jit
def _slopes(
    logits, mean, log_std, value,  # what the network gave: [SAMPLES, LOGITS], [SAMPLES, REALS], [REALS], [SAMPLES]
    actions, log_probs, values, advantages, returns, weights,  # of the whole rollout
    order,  # int64: which of its sequences are the minibatch
    advantage_norm, clip_range,
    by_logits, by_mean, by_value,  # the same shapes
    spreads,  # [programs, OUTS_UP]: each one's part of the slopes by log_std
    sums,  # [programs, FIGURES]: policy loss, value loss, entropy, KL, clipped
    LOGITS_ROW: tl.constexpr, REALS_ROW: tl.constexpr,  # numbers from one sample's to the next's
    SAMPLES: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr,
    LOGITS: tl.constexpr, OUTS_UP: tl.constexpr, WEIGHTED: tl.constexpr, CLIP_VALUES: tl.constexpr,
    VALUE_RANGE: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    """Compute the slopes of the loss, and each program's sums of its terms."""
    block = tl.program_id(0)
    sample = block * BM + tl.arange(0, BM)
    inside = sample < SAMPLES
    share: tl.constexpr = 1.0 / SAMPLES
    i = tl.load(order + sample // LENGTH, mask=inside, other=0) * LENGTH + sample % LENGTH
    column = tl.arange(0, OUTS_UP)[None, :]
    real = column - LOGITS
    is_logit = inside[:, None] & (column < LOGITS)
    is_real = inside[:, None] & (real >= 0) & (real < REALS)
    y = tl.load(logits + sample[:, None] * LOGITS_ROW + column, mask=is_logit, other=0.0)
    y += tl.load(mean + sample[:, None] * REALS_ROW + real, mask=is_real, other=0.0)
    log_prob, entropy, by_y, entropy_by_y, log_prob_by_log_std = distribution(
        y, actions, actions, log_std, i, inside, 0, HEADS, STARTS, REALS, LOGITS, OUTS_UP, False
    )
    by_log_prob, loss, divergence, clipped = policy_terms(
        log_prob, log_probs, advantages, weights, advantage_norm, clip_range, i, inside, share, WEIGHTED
    )
    by_entropy = tl.where(inside, -ENTROPY * share, 0.0)
    dy = by_log_prob[:, None] * by_y + by_entropy[:, None] * entropy_by_y
    tl.store(by_logits + sample[:, None] * LOGITS + column, dy, mask=is_logit)
    tl.store(by_mean + sample[:, None] * REALS + real, dy, mask=is_real)
    if REALS:
        by_log_std = tl.sum(by_log_prob[:, None] * log_prob_by_log_std + by_entropy[:, None], 0)
        tl.store(spreads + block * OUTS_UP + tl.arange(0, OUTS_UP), by_log_std)
    given = tl.load(value + sample, mask=inside, other=0.0)
    slope, error = value_terms(given, values, returns, i, inside, VALUE * share, CLIP_VALUES, VALUE_RANGE)
    tl.store(by_value + sample, slope, mask=inside)
    tl.store(sums + block * FIGURES, loss)
    tl.store(sums + block * FIGURES + 1, error)
    tl.store(sums + block * FIGURES + 2, tl.sum(tl.where(inside, entropy, 0.0)))
    tl.store(sums + block * FIGURES + 3, divergence)
    tl.store(sums + block * FIGURES + 4, clipped)


@triton.jit
def _add_up(
    sums, spreads, loss, means, by_log_std,
    SAMPLES: tl.constexpr, BLOCKS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr, OUTS_UP: tl.constexpr,
    ENTROPY: tl.constexpr, VALUE: tl.constexpr, AT_ONCE: tl.constexpr, FIGURES: tl.constexpr,
):  # fmt: skip
    """Add up what each program gave, in order."""
    figure, column = tl.arange(0, FIGURES), tl.arange(0, OUTS_UP)
    total, spread = tl.zeros((FIGURES,), tl.float32), tl.zeros((OUTS_UP,), tl.float32)
    for begin in range(0, BLOCKS, AT_ONCE):
        block = begin + tl.arange(0, AT_ONCE)[:, None]
        here = (block < BLOCKS) & (figure < 5)[None, :]
        total += tl.sum(tl.load(sums + block * FIGURES + figure[None, :], mask=here, other=0.0), 0)
        if REALS:
            spread += tl.sum(tl.load(spreads + block * OUTS_UP + column[None, :], mask=block < BLOCKS, other=0.0), 0)
    total = total / SAMPLES
    tl.store(means + figure, total, mask=figure < 5)
    # A term that does not count may be infinite.
    terms = tl.where(figure == 0, total, 0.0) + tl.where(figure == 1, VALUE * total, 0.0)
    if ENTROPY != 0.0:
        terms -= tl.where(figure == 2, ENTROPY * total, 0.0)
    tl.store(loss, tl.sum(terms))
    if REALS:
        tl.store(by_log_std + column - LOGITS, spread, mask=(column >= LOGITS) & (column < LOGITS + REALS))


class _Loss(torch.autograd.Function):
    """From what the network gave to the loss, and the means of what is logged [5]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, mean: Tensor, log_std: Tensor, value: Tensor, kernels: FusedLoss, *of: Any
    ) -> tuple[Tensor, Tensor]:
        loss, means, *slopes = kernels.launch(logits, mean, log_std, value, *of)
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(means)
        return loss, means

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*(slope * by_given for by_given in ctx.saved_tensors), *(None,) * 4)


def has_fused_loss(policy: ActorCritic) -> bool:
    """Whether there are kernels for the loss of such a policy."""
    chosen = policy.distribution
    if chosen.name not in KERNEL_DISTRIBUTIONS:
        return False
    return chosen.n_logits + chosen.reals <= _MOST_OUTPUTS and chosen.heads <= _MOST_HEADS


class FusedLoss:
    """Does what `PPO.loss_of` does."""

    def __init__(self, algo: PPO) -> None:
        """`algo`'s policy must be one that has it (see `has_fused_loss`)."""
        recipe, chosen = algo.recipe, algo.policy.distribution
        device = algo.parameters.flat.device
        self._algo, self._nothing = algo, torch.zeros(1, device=device)
        self._plain = torch.tensor([0.0, 1.0], device=device)
        outs_up = max(16, triton.next_power_of_2(chosen.n_logits + chosen.reals))
        self._obs = max(16, min(64, _OUTPUTS_AT_ONCE // outs_up))  # that a program takes
        self._sizes = {
            "REALS": chosen.reals,
            "LOGITS": chosen.n_logits,
            "OUTS_UP": outs_up,
            "ENTROPY": recipe.ent_coef,
            "VALUE": recipe.vf_coef,
            "FIGURES": FIGURES,
        }
        self._constants = {
            **self._sizes,
            "LENGTH": algo.sequence_length,
            "HEADS": chosen.nvec,
            "STARTS": tuple(sum(chosen.nvec[:head]) for head in range(chosen.heads)),
            "CLIP_VALUES": recipe.clip_range_vf is not None,
            "VALUE_RANGE": recipe.clip_range_vf or 0.0,
            "BM": self._obs,
        }

    def __call__(self, batch: Batch, part: Tensor, whole: Tensor) -> Loss:
        """Loss of the sequences `part`, and what is logged; advantages are normalised as those of `whole`."""
        picked = (None if field is None else field.index_select(0, part) for field in (batch.starts, batch.states))
        params, values = self._algo.policy(batch.obs.index_select(0, part), *picked)
        norm = self.advantage_norm(batch, whole)
        given = params.logits, params.mean, params.log_std, values
        return Loss(*_Loss.apply(*given, self, batch, part, norm))

    def advantage_norm(self, batch: Batch, order: Tensor) -> Tensor:
        """Mean of these sequences' advantages, and one over their deviation; 0 and 1 where they stay as they are."""
        if not self._algo.recipe.normalize_advantage:
            return self._plain
        norm, length = torch.empty_like(self._plain), self._algo.sequence_length
        samples = len(order) * length
        block = min(_ADVANTAGES_AT_ONCE, triton.next_power_of_2(samples))
        warps = max(4, min(32, block // 512))
        _normalise[(1,)](batch.advantages, order, norm, SAMPLES=samples, LENGTH=length, BLOCK=block, num_warps=warps)
        return norm

    def launch(
        self, logits: Tensor, mean: Tensor, log_std: Tensor, value: Tensor, batch: Batch, order: Tensor, norm: Tensor
    ) -> list[Tensor]:
        """Loss, means of what is logged, and slopes by all that the network gave."""
        fields = batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns
        assert all(tensor.is_contiguous() for tensor in (value, *fields))
        samples = value.numel()
        blocks = triton.cdiv(samples, self._obs)
        slopes = [torch.empty(given.shape, device=given.device) for given in (logits, mean, log_std, value)]
        sums, spreads = value.new_empty(blocks, FIGURES), value.new_empty(blocks, self._sizes["OUTS_UP"])
        loss, means = value.new_empty(()), value.new_empty(5)
        by_logits, by_mean, by_log_std, by_value = slopes
        _slopes[(blocks,)](
            logits, mean, log_std, value, *fields,
            self._nothing if batch.weights is None else batch.weights,
            order, norm, self._algo.clip_range, by_logits, by_mean, by_value, spreads, sums,
            LOGITS_ROW=logits.stride(-2), REALS_ROW=mean.stride(-2), SAMPLES=samples,
            WEIGHTED=batch.weights is not None, **self._constants,
        )  # fmt: skip
        at_once = min(triton.next_power_of_2(blocks), 4096 // self._sizes["OUTS_UP"])
        of_all = {"SAMPLES": samples, "BLOCKS": blocks, "AT_ONCE": at_once}
        _add_up[(1,)](sums, spreads, loss, means, by_log_std, **of_all, **self._sizes)
        return [loss, means, *slopes]
