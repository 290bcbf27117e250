"""A whole rollout of a classic-control task with a small MLP in one kernel.

With ordinary kernels, a step of CartPole is about 250 launches of a microsecond or two each, for any number of
environments. Here a block of threads takes some environments through all steps of the rollout: their state and the
policy's weights stay on the chip, and only the contents of the rollout are written.

Does the same as `engine.collect.device` with `tasks.classic_control`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.classic_control import advance, begin, episode_word, observation
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
    """What the kernel reads and writes, changed in place only."""

    noise: Tensor  # [T, N, 1]
    # The environments: [N, ..]
    physics: Tensor
    episodes: Tensor
    lengths: Tensor
    indices: Tensor
    seed: Tensor  # [1] scrambled
    # Their open episodes: [N]
    starts_next: Tensor  # bool: the next step starts an episode
    returns: Tensor
    counts: Tensor
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
def _category(y, u, OUTS: tl.constexpr, OUTS_UP: tl.constexpr):
    """The category that u in [0, 1) picks from logits y [M, OUTS_UP] (see `spaces.distributions`)."""
    column = tl.arange(0, OUTS_UP)[None, :]
    scores = tl.where(column < OUTS, y, -1e30)
    mass = tl.exp(scores - tl.max(scores, 1)[:, None])
    mass = mass / tl.sum(mass, 1)[:, None]
    reach = tl.where(mass > 0, tl.cumsum(mass, 1), 0.0)
    threshold = u * tl.max(reach, 1)
    return tl.min(tl.where(reach > threshold[:, None], column, OUTS_UP), 1).to(tl.float32)


@triton.jit
def _rollout(
    noise,  # [T, N]
    physics, episodes, lengths, indices, seed,  # the environments: [N, PHYSICS], [N], [N], [N]
    begins, returns, counts,  # [N]: whether the step starts an episode; its return and length so far
    ended,  # [blocks, 3]: number of finished episodes, sums of their returns and lengths
    obs, starts, actions, rewards, terminated, truncated, final_obs, final_at,  # the rollout
    norm_shift, norm_scale, parameters, range_scale, range_shift, range_low, range_high,
    T: tl.constexpr, N: tl.constexpr,
    TASK: tl.constexpr, PHYSICS: tl.constexpr, LIMIT: tl.constexpr, CUTS: tl.constexpr,
    ACTOR_PLACES: tl.constexpr, LOG_STD: tl.constexpr, ROW: tl.constexpr, INS: tl.constexpr, INS_UP: tl.constexpr,
    UNITS: tl.constexpr, OUTS: tl.constexpr, OUTS_UP: tl.constexpr, REALS: tl.constexpr,
    NORMALISE: tl.constexpr, OBS_CLIP: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    env = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = env < N
    w1 = layer_weights(parameters, ACTOR_PLACES[0], UNITS, INS, UNITS, INS_UP)
    b1 = layer_bias(parameters, ACTOR_PLACES[1], UNITS, UNITS)
    w2 = layer_weights(parameters, ACTOR_PLACES[2], UNITS, UNITS, UNITS, UNITS)
    b2 = layer_bias(parameters, ACTOR_PLACES[3], UNITS, UNITS)
    w3 = layer_weights(parameters, ACTOR_PLACES[4], OUTS, UNITS, OUTS_UP, UNITS)
    b3 = layer_bias(parameters, ACTOR_PLACES[5], OUTS, OUTS_UP)
    column = tl.arange(0, INS_UP)[None, :]
    keeps = inside[:, None] & (column < INS)
    a = tl.load(physics + env * PHYSICS, mask=inside, other=0.0)
    b = tl.load(physics + env * PHYSICS + 1, mask=inside, other=0.0)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    if PHYSICS == 4:
        c = tl.load(physics + env * PHYSICS + 2, mask=inside, other=0.0)
        d = tl.load(physics + env * PHYSICS + 3, mask=inside, other=0.0)
    index = tl.load(indices + env, mask=inside, other=0)
    episode = tl.load(episodes + env, mask=inside, other=0)
    length = tl.load(lengths + env, mask=inside, other=0)
    starting = tl.load(begins + env, mask=inside, other=0)
    total = tl.load(returns + env, mask=inside, other=0.0)
    count = tl.load(counts + env, mask=inside, other=0)
    cut = tl.zeros((BM,), tl.int32)
    episodes_ended, returns_ended, lengths_ended = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    seen = observation(a, b, c, d, INS_UP, TASK)
    for t in range(T):
        at = t * N + env.to(tl.int64)
        tl.store(obs + at[:, None] * ROW + column, seen, mask=keeps)
        tl.store(starts + at, starting, mask=inside)
        x = normalised(seen, norm_shift, norm_scale, INS, INS_UP, NORMALISE, OBS_CLIP)
        h = activated(layer(x, w1, b1, PRECISION), ACTIVATION)
        h = activated(layer(h, w2, b2, PRECISION), ACTIVATION)
        y = layer(h, w3, b3, PRECISION)
        drawn = tl.load(noise + at, mask=inside, other=0.0)
        if REALS:
            mean = tl.sum(tl.where(tl.arange(0, OUTS_UP)[None, :] == 0, y, 0.0), 1)
            action = mean + tl.exp(tl.load(parameters + LOG_STD)) * drawn
            done = action * tl.load(range_scale) + tl.load(range_shift)
            done = tl.minimum(tl.maximum(done, tl.load(range_low)), tl.load(range_high))
        else:
            action = _category(y, drawn, OUTS, OUTS_UP)
            done = action
        tl.store(actions + at, action, mask=inside)
        a, b, c, d, reward, over = advance(a, b, c, d, done, TASK)
        length += 1
        late = (length >= LIMIT) & ~over
        ends = over | late
        tl.store(rewards + at, reward, mask=inside)
        tl.store(terminated + at, over.to(tl.uint8), mask=inside)
        tl.store(truncated + at, late.to(tl.uint8), mask=inside)
        # The final observation of a truncated episode.
        seen = observation(a, b, c, d, INS_UP, TASK)
        kept = inside & late & (cut < CUTS)
        final = cut.to(tl.int64) * N + env
        tl.store(final_obs + final[:, None] * ROW + column, seen, mask=kept[:, None] & (column < INS))
        tl.store(final_at + final, at, mask=kept)
        cut += late.to(tl.int32)
        total += reward
        count += 1
        episodes_ended += ends.to(tl.float32)
        returns_ended += tl.where(ends, total, 0.0)
        lengths_ended += tl.where(ends, count.to(tl.float32), 0.0)
        total, count = tl.where(ends, 0.0, total), tl.where(ends, 0, count)
        starting = ends.to(tl.uint8)
        # Finished environments reset.
        episode += ends.to(tl.int64)
        length = tl.where(ends, 0, length)
        a0, b0, c0, d0 = begin(episode_word(tl.load(seed), index, episode), TASK)
        a, b, c, d = tl.where(ends, a0, a), tl.where(ends, b0, b), tl.where(ends, c0, c), tl.where(ends, d0, d)
        seen = observation(a, b, c, d, INS_UP, TASK)
    at = T * N + env.to(tl.int64)
    tl.store(obs + at[:, None] * ROW + column, seen, mask=keeps)
    tl.store(starts + at, starting, mask=inside)
    tl.store(physics + env * PHYSICS, a, mask=inside)
    tl.store(physics + env * PHYSICS + 1, b, mask=inside)
    if PHYSICS == 4:
        tl.store(physics + env * PHYSICS + 2, c, mask=inside)
        tl.store(physics + env * PHYSICS + 3, d, mask=inside)
    tl.store(episodes + env, episode, mask=inside)
    tl.store(lengths + env, length, mask=inside)
    tl.store(begins + env, starting, mask=inside)
    tl.store(returns + env, total, mask=inside)
    tl.store(counts + env, count, mask=inside)
    own = ended + tl.program_id(0) * 3
    tl.store(own, tl.sum(tl.where(inside, episodes_ended, 0.0)))
    tl.store(own + 1, tl.sum(tl.where(inside, returns_ended, 0.0)))
    tl.store(own + 2, tl.sum(tl.where(inside, lengths_ended, 0.0)))


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
        unused = ("CRITIC_PLACES", "HEADS", "STARTS", "LOGITS", "MASKED")
        self._constants = {
            **{name: value for name, value in mlp.constants().items() if name not in unused},
            "T": n_steps,
            "N": n_envs,
            "TASK": task,
            "PHYSICS": tensors.physics.shape[1],
            "LIMIT": limit,
            "CUTS": len(tensors.final_at) // n_envs,
            "BM": envs,
        }

    def __call__(self) -> Tensor:
        """Fill it; returns the number of finished episodes and the sums of their returns and lengths [3]."""
        _rollout[(len(self._ended),)](*self._arguments, **self._constants, num_warps=4)
        return self._ended.double().sum(0)
