"""A whole rollout of a classic-control task with a small MLP in one kernel.

With ordinary kernels, a step of CartPole is about 250 launches of a microsecond or two each, for any number of
environments. Here a block of threads steps some environments through the whole rollout: their state and the policy's
weights stay on the chip, and only the contents of the rollout are written.

Does the same as `engine.collect.device` with `tasks.classic_control`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.classic_control import episode_hash, observation, reset_state, step
from unidle.kernels.triton.small_mlp import (
    MlpTensors,
    SmallMlp,
    activated,
    layer,
    layer_bias,
    layer_weights,
    normalised,
)


@dataclass(frozen=True)
class RolloutTensors:
    """The tensors that the kernel reads and writes, always the same ones."""

    noise: Tensor  # [T, N, 1]
    # The environments: [N, ..]
    physics: Tensor
    episodes: Tensor
    lengths: Tensor  # steps of the open episode, counted by the environment for its time limit
    indices: Tensor
    seed: Tensor  # [1] hashed
    # Their open episodes: [N]
    starts_next: Tensor  # bool: the next step starts an episode
    returns: Tensor
    counts: Tensor  # lengths, counted by the collector for its statistics
    # The rollout (see `buffers.rollout.Rollout`)
    obs: Tensor
    starts: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor
    final_at: Tensor
    # The action range: [A]
    action_scale: Tensor
    action_shift: Tensor
    action_low: Tensor
    action_high: Tensor


@triton.jit
def _sample_category(y, u, OUTS: tl.constexpr, OUTS_P2: tl.constexpr):
    """The category that u in [0, 1) selects, given logits y [M, OUTS_P2] (see `spaces.distributions`)."""
    column = tl.arange(0, OUTS_P2)[None, :]
    logits = tl.where(column < OUTS, y, -1e30)
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    cdf = tl.where(p > 0, tl.cumsum(p, 1), 0.0)
    threshold = u * tl.max(cdf, 1)
    return tl.min(tl.where(cdf > threshold[:, None], column, OUTS_P2), 1).to(tl.float32)


@triton.jit
def _rollout(
    noise,  # [T, N]
    physics, episodes, lengths, indices, seed,  # the environments: [N, STATE_SIZE], [N], [N], [N]
    begins, returns, counts,  # [N]: whether the next step starts an episode; return and length of the open episodes
    ended,  # [blocks, 3]: number of finished episodes, sums of their returns and lengths
    obs, starts, actions, rewards, terminated, truncated, final_obs, final_at,  # the rollout
    norm_shift, norm_scale, parameters, range_scale, range_shift, range_low, range_high,
    T: tl.constexpr, N: tl.constexpr,
    TASK: tl.constexpr, STATE_SIZE: tl.constexpr, MAX_LENGTH: tl.constexpr, MAX_TRUNCATIONS: tl.constexpr,
    ACTOR_OFFSETS: tl.constexpr, LOG_STD_OFFSET: tl.constexpr, OBS_WORDS: tl.constexpr, INS: tl.constexpr,
    INS_P2: tl.constexpr, UNITS: tl.constexpr, OUTS: tl.constexpr, OUTS_P2: tl.constexpr, REALS: tl.constexpr,
    NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    env = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = env < N
    w1 = layer_weights(parameters, ACTOR_OFFSETS[0], UNITS, INS, UNITS, INS_P2)
    b1 = layer_bias(parameters, ACTOR_OFFSETS[1], UNITS, UNITS)
    w2 = layer_weights(parameters, ACTOR_OFFSETS[2], UNITS, UNITS, UNITS, UNITS)
    b2 = layer_bias(parameters, ACTOR_OFFSETS[3], UNITS, UNITS)
    w3 = layer_weights(parameters, ACTOR_OFFSETS[4], OUTS, UNITS, OUTS_P2, UNITS)
    b3 = layer_bias(parameters, ACTOR_OFFSETS[5], OUTS, OUTS_P2)
    column = tl.arange(0, INS_P2)[None, :]
    valid = inside[:, None] & (column < INS)
    a = tl.load(physics + env * STATE_SIZE, mask=inside, other=0.0)
    b = tl.load(physics + env * STATE_SIZE + 1, mask=inside, other=0.0)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    if STATE_SIZE == 4:
        c = tl.load(physics + env * STATE_SIZE + 2, mask=inside, other=0.0)
        d = tl.load(physics + env * STATE_SIZE + 3, mask=inside, other=0.0)
    index = tl.load(indices + env, mask=inside, other=0)
    episode = tl.load(episodes + env, mask=inside, other=0)
    length = tl.load(lengths + env, mask=inside, other=0)
    starting = tl.load(begins + env, mask=inside, other=0)
    total = tl.load(returns + env, mask=inside, other=0.0)
    count = tl.load(counts + env, mask=inside, other=0)
    n_truncations = tl.zeros((BM,), tl.int32)
    episodes_ended, returns_ended, lengths_ended = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    current_obs = observation(a, b, c, d, INS_P2, TASK)
    for t in range(T):
        offs = t * N + env.to(tl.int64)
        tl.store(obs + offs[:, None] * OBS_WORDS + column, current_obs, mask=valid)
        tl.store(starts + offs, starting, mask=inside)
        x = normalised(current_obs, norm_shift, norm_scale, INS, INS_P2, NORMALISE, OBS_CLIP)
        h = activated(layer(x, w1, b1, PRECISION), ACTIVATION)
        h = activated(layer(h, w2, b2, PRECISION), ACTIVATION)
        y = layer(h, w3, b3, PRECISION)
        eps = tl.load(noise + offs, mask=inside, other=0.0)
        if REALS:
            mean = tl.sum(tl.where(tl.arange(0, OUTS_P2)[None, :] == 0, y, 0.0), 1)
            action = mean + tl.exp(tl.load(parameters + LOG_STD_OFFSET)) * eps
            env_action = action * tl.load(range_scale) + tl.load(range_shift)
            env_action = tl.minimum(tl.maximum(env_action, tl.load(range_low)), tl.load(range_high))
        else:
            action = _sample_category(y, eps, OUTS, OUTS_P2)
            env_action = action
        tl.store(actions + offs, action, mask=inside)
        a, b, c, d, reward, terminates = step(a, b, c, d, env_action, TASK)
        length += 1
        truncates = (length >= MAX_LENGTH) & ~terminates
        done = terminates | truncates
        tl.store(rewards + offs, reward, mask=inside)
        tl.store(terminated + offs, terminates.to(tl.uint8), mask=inside)
        tl.store(truncated + offs, truncates.to(tl.uint8), mask=inside)
        # The final observation of a truncated episode.
        current_obs = observation(a, b, c, d, INS_P2, TASK)
        is_final = inside & truncates & (n_truncations < MAX_TRUNCATIONS)
        final = n_truncations.to(tl.int64) * N + env
        tl.store(final_obs + final[:, None] * OBS_WORDS + column, current_obs, mask=is_final[:, None] & (column < INS))
        tl.store(final_at + final, offs, mask=is_final)
        n_truncations += truncates.to(tl.int32)
        total += reward
        count += 1
        episodes_ended += done.to(tl.float32)
        returns_ended += tl.where(done, total, 0.0)
        lengths_ended += tl.where(done, count.to(tl.float32), 0.0)
        total, count = tl.where(done, 0.0, total), tl.where(done, 0, count)
        starting = done.to(tl.uint8)
        # Reset finished environments.
        episode += done.to(tl.int64)
        length = tl.where(done, 0, length)
        a0, b0, c0, d0 = reset_state(episode_hash(tl.load(seed), index, episode), TASK)
        a, b = tl.where(done, a0, a), tl.where(done, b0, b)
        c, d = tl.where(done, c0, c), tl.where(done, d0, d)
        current_obs = observation(a, b, c, d, INS_P2, TASK)
    offs = T * N + env.to(tl.int64)
    tl.store(obs + offs[:, None] * OBS_WORDS + column, current_obs, mask=valid)
    tl.store(starts + offs, starting, mask=inside)
    tl.store(physics + env * STATE_SIZE, a, mask=inside)
    tl.store(physics + env * STATE_SIZE + 1, b, mask=inside)
    if STATE_SIZE == 4:
        tl.store(physics + env * STATE_SIZE + 2, c, mask=inside)
        tl.store(physics + env * STATE_SIZE + 3, d, mask=inside)
    tl.store(episodes + env, episode, mask=inside)
    tl.store(lengths + env, length, mask=inside)
    tl.store(begins + env, starting, mask=inside)
    tl.store(returns + env, total, mask=inside)
    tl.store(counts + env, count, mask=inside)
    out = ended + tl.program_id(0) * 3
    tl.store(out, tl.sum(tl.where(inside, episodes_ended, 0.0)))
    tl.store(out + 1, tl.sum(tl.where(inside, returns_ended, 0.0)))
    tl.store(out + 2, tl.sum(tl.where(inside, lengths_ended, 0.0)))


class FusedRollout:
    """Fills one rollout buffer with steps of environments of one task."""

    def __init__(self, mlp: SmallMlp, weights: MlpTensors, tensors: RolloutTensors, task: str, limit: int) -> None:
        """`limit` is the length at which an episode is truncated."""
        n_steps, n_envs = tensors.rewards.shape
        envs = 32 if n_envs <= 8192 else 64  # per block
        self._ended = torch.zeros(triton.cdiv(n_envs, envs), 3, device=tensors.noise.device)
        self._arguments = (
            tensors.noise,
            tensors.physics,
            tensors.episodes,
            tensors.lengths,
            tensors.indices,
            tensors.seed,
            tensors.starts_next.view(torch.uint8),
            tensors.returns,
            tensors.counts,
            self._ended,
            tensors.obs.view(torch.float32),
            tensors.starts.view(torch.uint8),
            tensors.actions,
            tensors.rewards,
            tensors.terminated.view(torch.uint8),
            tensors.truncated.view(torch.uint8),
            tensors.final_obs.view(torch.float32),
            tensors.final_at,
            weights.norm_shift,
            weights.norm_scale,
            weights.parameters,
            tensors.action_scale,
            tensors.action_shift,
            tensors.action_low,
            tensors.action_high,
        )
        unused = ("CRITIC_OFFSETS", "NVEC", "HEAD_OFFSETS", "LOGITS", "MASKED")
        self._constants = {
            **{name: value for name, value in mlp.constants().items() if name not in unused},
            "T": n_steps,
            "N": n_envs,
            "TASK": task,
            "STATE_SIZE": tensors.physics.shape[1],
            "MAX_LENGTH": limit,
            "MAX_TRUNCATIONS": len(tensors.final_at) // n_envs,
            "BM": envs,
        }

    def __call__(self) -> Tensor:
        """Fill the rollout; returns [3]: the number of finished episodes, and sums of their returns and lengths."""
        _rollout[(len(self._ended),)](*self._arguments, **self._constants, num_warps=4)
        return self._ended.double().sum(0)
