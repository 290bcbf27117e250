"""Log-probabilities and values of a whole rollout as one kernel, for a small network (Triton).

By ordinary kernels every activation of every step goes through memory several times; here only observations and actions
are read, and one number for each is written. The arithmetic is that of the kernel that learns (`small_mlp`), so the
first ratios are 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.kernels.triton.small_mlp import SmallMlp, distribution, inputs, network
from unidle.nn.actor_critic import ActorCritic

_ROWS = 64  # that a block takes


@triton.jit
def _evaluate(
    obs,  # [VALUES, ROW] float32 words
    masks,  # the same memory as bytes, from the first mask on
    actions,  # [ACTED, heads + reals]: of the first of them
    norm_shift, norm_scale, parameters,
    log_probs,  # [ACTED]
    values,  # [VALUES]
    ACTED, VALUES,
    ACTOR_PLACES: tl.constexpr, CRITIC_PLACES: tl.constexpr, LOG_STD: tl.constexpr,
    ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_UP: tl.constexpr, HEADS: tl.constexpr, STARTS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    x = inputs(obs, i, i < VALUES, norm_shift, norm_scale, ROW, INS, INS_UP, NORMALISE, OBS_CLIP)
    if tl.program_id(1) == 0:
        y = network(x, parameters, CRITIC_PLACES, INS, INS_UP, UNITS, 1, 16, ACTIVATION, PRECISION)
        value = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, y, 0.0), 1)
        tl.store(values + i, value, mask=i < VALUES)
    else:
        y = network(x, parameters, ACTOR_PLACES, INS, INS_UP, UNITS, OUTS, OUTS_UP, ACTIVATION, PRECISION)
        log_prob, _, _, _, _ = distribution(
            y, actions, masks, parameters + LOG_STD, i, i < ACTED, 4 * ROW, HEADS, STARTS, REALS, LOGITS, OUTS_UP,
            MASKED,
        )  # fmt: skip
        tl.store(log_probs + i, log_prob, mask=i < ACTED)


class FusedEvaluation:
    """Evaluates rollouts with one policy, or with a copy of it whose parameters are one flat tensor too."""

    def __init__(self, policy: ActorCritic, shape: SmallMlp) -> None:
        """`shape` is that of `policy`."""
        self._policy, self._shape = policy, shape.constants()
        self._nothing = torch.zeros(1, device=policy.log_std.device)

    def rollout(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, N] of all that was done, and values [T + 1, N]."""
        return self._evaluated(self._policy, rollout)

    def score(self, policy: ActorCritic, rollout: Rollout) -> Tensor:
        """Log-probabilities [T, N] of all that was done, by a copy of the policy."""
        return self._evaluated(policy, rollout)[0]

    def _evaluated(self, policy: ActorCritic, rollout: Rollout) -> tuple[Tensor, Tensor]:
        values = torch.empty_like(rollout.starts, dtype=torch.float32)
        log_probs = torch.empty_like(rollout.rewards)
        self._launch(policy, rollout.obs.flatten(0, 1), rollout.actions, log_probs, values, 2)
        return log_probs, values

    def values(self, obs: Tensor) -> Tensor:
        """Values [n] of rows [n, obs_bytes]."""
        values = torch.empty(len(obs), device=obs.device)
        self._launch(self._policy, obs, self._nothing, self._nothing, values, 1)
        return values

    def _launch(
        self, policy: ActorCritic, obs: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, networks: int
    ) -> None:
        norm, nothing = policy.encoder.norm, self._nothing
        first = next(p for p in policy.parameters() if p.numel())  # begins where the flat tensor begins
        assert first.storage_offset() == 0
        if not len(obs):
            return
        _evaluate[triton.cdiv(len(obs), _ROWS), networks](
            obs.view(torch.float32),
            obs[:, policy.obs_layout.mask_offset :] if policy.masked else obs,
            actions,
            nothing if norm is None else norm.shift,
            nothing if norm is None else norm.scale,
            first,
            log_probs,
            values,
            log_probs.numel(),
            len(obs),
            **self._shape,
            BM=_ROWS,
            num_warps=4,
        )
