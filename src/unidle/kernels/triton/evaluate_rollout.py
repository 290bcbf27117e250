"""Log-probabilities and values of a whole rollout in one kernel, for a small MLP.

With ordinary kernels, every activation of every step goes through memory several times; here observations and actions
are read, and two numbers per step are written. The arithmetic is that of the minibatch kernel (`small_mlp`), so the
first ratios are 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.small_mlp import MlpTensors, SmallMlp, distribution, inputs, network

_BLOCK_ROWS = 64  # samples per block


@triton.jit
def _evaluate(
    obs,  # [N_OBS, OBS_WORDS] float32 words
    masks,  # the same memory as bytes, starting at the first mask
    actions,  # [N_ACTIONS, heads + reals]: for the first N_ACTIONS observations
    norm_shift, norm_scale, parameters,
    log_probs,  # [N_ACTIONS]
    values,  # [N_OBS]
    N_ACTIONS, N_OBS,
    ACTOR_OFFSETS: tl.constexpr, CRITIC_OFFSETS: tl.constexpr, LOG_STD_OFFSET: tl.constexpr,
    OBS_WORDS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr,
    OUTS_P2: tl.constexpr, NVEC: tl.constexpr, HEAD_OFFSETS: tl.constexpr, REALS: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    x = inputs(obs, i, i < N_OBS, norm_shift, norm_scale, OBS_WORDS, INS, INS_P2, NORMALISE, OBS_CLIP)
    if tl.program_id(1) == 0:
        y = network(x, parameters, CRITIC_OFFSETS, INS, INS_P2, UNITS, 1, 16, ACTIVATION, PRECISION)
        value = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, y, 0.0), 1)
        tl.store(values + i, value, mask=i < N_OBS)
    else:
        y = network(x, parameters, ACTOR_OFFSETS, INS, INS_P2, UNITS, OUTS, OUTS_P2, ACTIVATION, PRECISION)
        log_prob, _, _, _, _ = distribution(
            y, actions, masks, parameters + LOG_STD_OFFSET, i, i < N_ACTIONS, 4 * OBS_WORDS, NVEC, HEAD_OFFSETS, REALS,
            LOGITS, OUTS_P2, MASKED,
        )  # fmt: skip
        tl.store(log_probs + i, log_prob, mask=i < N_ACTIONS)


class FusedEvaluation:
    """Evaluates rollouts with networks of one description."""

    def __init__(self, mlp: SmallMlp) -> None:
        self._mask_offset, self._constants = mlp.mask_offset, mlp.constants()

    def rollout(self, tensors: MlpTensors, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, N] of `actions` [T, N, width], and values [T + 1, N] of `obs` [T + 1, N, obs_bytes]."""
        values = torch.empty(obs.shape[:2], device=obs.device)
        log_probs = torch.empty(actions.shape[:2], device=obs.device)
        self._launch(tensors, obs.flatten(0, 1), actions, log_probs, values, 2)
        return log_probs, values

    def values(self, tensors: MlpTensors, obs: Tensor) -> Tensor:
        """Values [n] of observations [n, obs_bytes]."""
        values = torch.empty(len(obs), device=obs.device)
        self._launch(tensors, obs, values, values, values, 1)  # the critic alone: nothing is read from the others
        return values

    def _launch(
        self, tensors: MlpTensors, obs: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, networks: int
    ) -> None:
        if not len(obs):
            return
        _evaluate[triton.cdiv(len(obs), _BLOCK_ROWS), networks](
            obs.view(torch.float32),
            obs if self._mask_offset is None else obs[:, self._mask_offset :],
            actions,
            tensors.norm_shift,
            tensors.norm_scale,
            tensors.parameters,
            log_probs,
            values,
            log_probs.numel(),
            len(obs),
            **self._constants,
            BM=_BLOCK_ROWS,
            num_warps=4,
        )
