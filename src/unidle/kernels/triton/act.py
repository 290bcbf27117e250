"""One inference in one kernel: from observations on the host to actions on the host.

For a few dozen environments an inference is about 25 kernels of two microseconds each, and next to a busy learner each
of them queues for the GPU. Here one grid of blocks computes layer after layer: every block computes some tiles of a
layer, and all blocks synchronise on a counter in memory before the next layer. Observations are read from, and actions
written to, pinned host memory, so there are no copies either.

Supports what most simulators need: one float32 observation, an MLP, and Gaussian actions or SAC's squashed ones with
one head per task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from unidle.kernels.triton.small_mlp import ACTIVATIONS

_MAX_ENVS = 1024  # with more, ordinary kernels are no slower
_MAX_BLOCKS = 128


@dataclass(frozen=True)
class ActorMlp:
    """An actor's MLP, its parameters in one flat tensor."""

    widths: tuple[int, ...]  # observation, hidden layers, outputs
    weight_offsets: tuple[int, ...]  # of each layer in the flat tensor
    bias_offsets: tuple[int, ...]
    activation: str
    obs_clip: float | None  # bound on normalised observations; None: they are not normalised
    reals: int  # continuous actions
    n_tasks: int  # 0: Gaussian actions; else squashed ones, with a head for each task
    log_std_range: tuple[float, float]  # of squashed actions
    precision: str  # of products: ieee or tf32

    def unsupported(self, n_envs: int) -> str | None:
        """Why the kernel does not support this actor; None if it does."""
        if n_envs > _MAX_ENVS:
            return f"{n_envs} environments: the kernel takes up to {_MAX_ENVS}"
        if self.activation not in ACTIVATIONS.values():
            return f"activation {self.activation}: the kernel takes tanh and relu"
        return None


@dataclass(frozen=True)
class ActTensors:
    """The tensors that an inference reads and writes, always the same ones."""

    obs: Tensor  # [N, obs_bytes] uint8, page-locked
    positions: Tensor  # [N] int64, page-locked: each environment's step; T where it is not ready
    env_actions: Tensor  # [N, A], page-locked
    rollout_obs: Tensor  # [T + 1, N, obs_bytes] uint8
    rollout_actions: Tensor  # [T + 1, N, A]
    noise: Tensor  # [T + 1, N, A]
    norm_shift: Tensor  # [D]; not read unless observations are normalised
    norm_scale: Tensor
    parameters: Tensor  # flat
    log_std: Tensor  # [A]; squashed: [] 1 while actions are uniformly random
    action_scale: Tensor  # [A]
    action_shift: Tensor
    action_low: Tensor
    action_high: Tensor


@triton.jit
def _grid_barrier(counter, target):
    """Grid-wide barrier: wait for all blocks; their earlier writes are then visible."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _linear(
    x, w, b, m, n, N: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """The tile with rows m and columns n of x [N, INS] · wᵀ [OUTS, INS] + b."""
    total = tl.zeros((m.shape[0], n.shape[0]), tl.float32)
    for start in range(0, INS, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x + m[:, None] * INS + k[None, :], mask=(m[:, None] < N) & (k[None, :] < INS), other=0.0)
        right = tl.load(w + n[None, :] * INS + k[:, None], mask=(n[None, :] < OUTS) & (k[:, None] < INS), other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total + tl.load(b + n, mask=n < OUTS, other=0.0)[None, :]


@triton.jit
def _hidden_layer(
    x,
    w,
    b,
    y,
    pid,
    N: tl.constexpr,
    INS: tl.constexpr,
    OUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute this block's tiles of y [N, OUTS]."""
    tiles_per_row: tl.constexpr = (OUTS + BN - 1) // BN
    tiles: tl.constexpr = tiles_per_row * ((N + BM - 1) // BM)
    for tile in range(pid, tiles, BLOCKS):
        m = (tile // tiles_per_row) * BM + tl.arange(0, BM)
        n = (tile % tiles_per_row) * BN + tl.arange(0, BN)
        total = _linear(x, w, b, m, n, N, INS, OUTS, BK, PRECISION)
        if ACTIVATION != "none":
            total = tl.maximum(total, 0.0) if ACTIVATION == "relu" else libdevice.tanh(total)
        tl.store(y + m[:, None] * OUTS + n[None, :], total, mask=(m[:, None] < N) & (n[None, :] < OUTS))


@triton.jit
def _act_gaussian(
    positions, env_actions, rollout_actions, noise, parameters, log_std,
    range_scale, range_shift, range_low, range_high, scratch, pid,
    N: tl.constexpr, STEPS: tl.constexpr, WIDTHS: tl.constexpr, WEIGHT_OFFSETS: tl.constexpr,
    BIAS_OFFSETS: tl.constexpr, INPUT_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute this block's means; sample, store, and scale to the environment's range."""
    last: tl.constexpr = len(WEIGHT_OFFSETS) - 1
    outs: tl.constexpr = WIDTHS[last + 1]
    tiles_per_row: tl.constexpr = (outs + BN - 1) // BN
    tiles: tl.constexpr = tiles_per_row * ((N + BM - 1) // BM)
    for tile in range(pid, tiles, BLOCKS):
        m = (tile // tiles_per_row) * BM + tl.arange(0, BM)
        n = (tile % tiles_per_row) * BN + tl.arange(0, BN)
        mean = _linear(
            scratch + INPUT_OFFSETS[last],
            parameters + WEIGHT_OFFSETS[last],
            parameters + BIAS_OFFSETS[last],
            m,
            n,
            N,
            WIDTHS[last],
            outs,
            BK,
            PRECISION,
        )
        inside = (m[:, None] < N) & (n[None, :] < outs)
        position = tl.load(positions + m, mask=m < N, other=0)
        offs = (position[:, None] * N + m[:, None]) * outs + n[None, :]
        std = tl.exp(tl.load(log_std + n, mask=n < outs, other=0.0))
        action = mean + std[None, :] * tl.load(noise + offs, mask=inside, other=0.0)
        tl.store(rollout_actions + offs, action, mask=inside)
        action = action * tl.load(range_scale + n, mask=n < outs, other=0.0)[None, :]
        action += tl.load(range_shift + n, mask=n < outs, other=0.0)[None, :]
        action = tl.maximum(action, tl.load(range_low + n, mask=n < outs, other=0.0)[None, :])
        action = tl.minimum(action, tl.load(range_high + n, mask=n < outs, other=0.0)[None, :])
        is_ready = position[:, None] < STEPS  # the other environments may still be reading their previous actions
        tl.store(env_actions + m[:, None] * outs + n[None, :], action, mask=inside & is_ready)


@triton.jit
def _act_squashed(
    obs, positions, env_actions, rollout_actions, noise, parameters, at_random,
    range_scale, range_shift, range_low, range_high, scratch, counter, pid,
    N: tl.constexpr, STEPS: tl.constexpr, OBS_WORDS: tl.constexpr, WIDTHS: tl.constexpr, WEIGHT_OFFSETS: tl.constexpr,
    BIAS_OFFSETS: tl.constexpr, INPUT_OFFSETS: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr,
    REALS_P2: tl.constexpr, LOG_STD_MIN: tl.constexpr, LOG_STD_MAX: tl.constexpr, PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute this block's tiles of means and log_std; then sample for its environments, each by its task's head."""
    last: tl.constexpr = len(WEIGHT_OFFSETS) - 1
    outs: tl.constexpr = WIDTHS[last + 1]
    reals: tl.constexpr = outs // (2 * TASKS)
    _hidden_layer(
        scratch + INPUT_OFFSETS[last],
        parameters + WEIGHT_OFFSETS[last],
        parameters + BIAS_OFFSETS[last],
        scratch + INPUT_OFFSETS[last + 1],
        pid,
        N,
        WIDTHS[last],
        outs,
        "none",
        PRECISION,
        BLOCKS,
        BM,
        BN,
        BK,
    )
    _grid_barrier(counter, BLOCKS * (last + 2))
    column, real = tl.arange(0, TASKS_P2), tl.arange(0, REALS_P2)
    inside = real < reals
    for env in range(pid, N, BLOCKS):
        task = 0
        if TASKS > 1:
            one_hot = tl.load(
                obs + env * OBS_WORDS + WIDTHS[0] - TASKS + column, mask=column < TASKS, other=-float("inf")
            )
            task = tl.argmax(one_hot, 0)
        out = scratch + INPUT_OFFSETS[last + 1] + env * outs + task * 2 * reals + real
        mean = tl.load(out, mask=inside, other=0.0)
        log_std = tl.load(out + reals, mask=inside, other=0.0)
        log_std = tl.minimum(tl.maximum(log_std, LOG_STD_MIN), LOG_STD_MAX)
        position = tl.load(positions + env)
        eps = tl.load(noise + (position * N + env) * reals + real, mask=inside, other=0.0)
        action = libdevice.tanh(mean + tl.exp(log_std) * eps)
        action = tl.where(tl.load(at_random) > 0, libdevice.erf(eps * 0.7071067811865476), action)
        tl.store(rollout_actions + (position * N + env) * reals + real, action, mask=inside)
        action = action * tl.load(range_scale + real, mask=inside, other=0.0)
        action += tl.load(range_shift + real, mask=inside, other=0.0)
        action = tl.maximum(action, tl.load(range_low + real, mask=inside, other=0.0))
        action = tl.minimum(action, tl.load(range_high + real, mask=inside, other=0.0))
        tl.store(env_actions + env * reals + real, action, mask=inside & (position < STEPS))


@triton.jit
def _act(
    obs,  # [N, OBS_WORDS] float32 words, on the host
    positions,  # [N] int64, on the host: the step of each ready environment, STEPS for the others
    env_actions,  # [N, A], on the host; written for ready environments
    rollout_obs,  # [T + 1, N, OBS_WORDS]
    rollout_actions,  # [T + 1, N, A]
    noise,  # [T + 1, N, A]
    norm_shift,
    norm_scale,  # [D]
    parameters,  # all weights and biases
    log_std,  # [A]; squashed: whether actions are uniformly random
    range_scale,
    range_shift,
    range_low,
    range_high,  # [A]
    scratch,  # the inputs of all layers
    counter,
    N: tl.constexpr,
    STEPS: tl.constexpr,  # T
    OBS_WORDS: tl.constexpr,
    OBS_WORDS_P2: tl.constexpr,
    WIDTHS: tl.constexpr,  # D, hidden …, A; squashed: 2 A for each task
    WEIGHT_OFFSETS: tl.constexpr,
    BIAS_OFFSETS: tl.constexpr,  # offsets in `parameters`
    INPUT_OFFSETS: tl.constexpr,  # offsets of the layers' inputs in `scratch`
    NORMALISE: tl.constexpr,
    OBS_CLIP: tl.constexpr,
    TASKS: tl.constexpr,  # 0: Gaussian actions
    TASKS_P2: tl.constexpr,
    REALS_P2: tl.constexpr,
    LOG_STD_MIN: tl.constexpr,
    LOG_STD_MAX: tl.constexpr,  # bounds of log_std
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    pid = tl.program_id(0)
    last: tl.constexpr = len(WEIGHT_OFFSETS) - 1
    # Observations go to the rollout unchanged, to the first layer normalised.
    width: tl.constexpr = WIDTHS[0]
    column = tl.arange(0, OBS_WORDS_P2)
    for env in range(pid, N, BLOCKS):
        value = tl.load(obs + env * OBS_WORDS + column, mask=column < OBS_WORDS)
        position = tl.load(positions + env)
        tl.store(rollout_obs + (position * N + env) * OBS_WORDS + column, value, mask=column < OBS_WORDS)
        if NORMALISE:
            value -= tl.load(norm_shift + column, mask=column < width)
            value *= tl.load(norm_scale + column, mask=column < width)
            value = tl.minimum(tl.maximum(value, -OBS_CLIP), OBS_CLIP)
        tl.store(scratch + env * width + column, value, mask=column < width)
    _grid_barrier(counter, BLOCKS)
    for layer in tl.static_range(last):
        _hidden_layer(
            scratch + INPUT_OFFSETS[layer],
            parameters + WEIGHT_OFFSETS[layer],
            parameters + BIAS_OFFSETS[layer],
            scratch + INPUT_OFFSETS[layer + 1],
            pid,
            N,
            WIDTHS[layer],
            WIDTHS[layer + 1],
            ACTIVATION,
            PRECISION,
            BLOCKS,
            BM,
            BN,
            BK,
        )
        _grid_barrier(counter, BLOCKS * (layer + 2))
    if TASKS > 0:
        _act_squashed(
            obs, positions, env_actions, rollout_actions, noise, parameters, log_std,
            range_scale, range_shift, range_low, range_high, scratch, counter, pid,
            N, STEPS, OBS_WORDS, WIDTHS, WEIGHT_OFFSETS, BIAS_OFFSETS, INPUT_OFFSETS, TASKS, TASKS_P2, REALS_P2,
            LOG_STD_MIN, LOG_STD_MAX, PRECISION, BLOCKS, BM, BN, BK,
        )  # fmt: skip
    else:
        _act_gaussian(
            positions, env_actions, rollout_actions, noise, parameters, log_std,
            range_scale, range_shift, range_low, range_high, scratch, pid,
            N, STEPS, WIDTHS, WEIGHT_OFFSETS, BIAS_OFFSETS, INPUT_OFFSETS, PRECISION, BLOCKS, BM, BN, BK,
        )  # fmt: skip
    # The last block to finish resets the counter for the next launch.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == BLOCKS * (last + 2 + (TASKS > 0)) - 1:
        tl.store(counter, 0)


def max_blocks(device: torch.device, at_once: int = 1) -> int:
    """Number of blocks guaranteed to run concurrently, which they must because they wait for one another.

    `at_once` of these kernels may run at the same time: then each gets its share.
    """
    return max(1, min(_MAX_BLOCKS, torch.cuda.get_device_properties(device).multi_processor_count) // at_once)


class FusedActor:
    """Acts with one policy into one rollout buffer."""

    def __init__(self, mlp: ActorMlp, tensors: ActTensors, blocks: int) -> None:
        """`blocks` must all run concurrently (see `max_blocks`)."""
        n_envs, device = len(tensors.obs), tensors.parameters.device
        offsets = [0]
        for width in mlp.widths[:-1]:
            offsets.append(offsets[-1] + n_envs * width)
        self._arguments = (
            tensors.obs.view(torch.float32),
            tensors.positions,
            tensors.env_actions,
            tensors.rollout_obs.view(torch.float32),
            tensors.rollout_actions,
            tensors.noise,
            tensors.norm_shift,
            tensors.norm_scale,
            tensors.parameters,
            tensors.log_std,
            tensors.action_scale,
            tensors.action_shift,
            tensors.action_low,
            tensors.action_high,
            torch.zeros(n_envs * sum(mlp.widths), device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        tile = (16, 16, 128) if n_envs <= 16 else (32, 16, 128) if n_envs <= 64 else (64, 32, 64)
        words = tensors.obs.shape[1] // 4
        # More blocks than tiles would only wait, and wait longer for room next to a busy learner.
        tiles = triton.cdiv(max(mlp.widths[1:]), tile[1]) * triton.cdiv(n_envs, tile[0])
        self._blocks = blocks = min(blocks, tiles)
        self._constants = {
            "N": n_envs,
            "STEPS": len(tensors.rollout_obs) - 1,
            "OBS_WORDS": words,
            "OBS_WORDS_P2": triton.next_power_of_2(words),
            "WIDTHS": mlp.widths,
            "WEIGHT_OFFSETS": mlp.weight_offsets,
            "BIAS_OFFSETS": mlp.bias_offsets,
            "INPUT_OFFSETS": tuple(offsets),
            "NORMALISE": mlp.obs_clip is not None,
            "OBS_CLIP": mlp.obs_clip or 0.0,
            "TASKS": mlp.n_tasks,
            "TASKS_P2": triton.next_power_of_2(max(1, mlp.n_tasks)),
            "REALS_P2": triton.next_power_of_2(mlp.reals),
            "LOG_STD_MIN": mlp.log_std_range[0],
            "LOG_STD_MAX": mlp.log_std_range[1],
            "ACTIVATION": mlp.activation,
            "PRECISION": mlp.precision,
            "BLOCKS": blocks,
            **dict(zip(("BM", "BN", "BK"), tile)),
        }

    def __call__(self) -> None:
        """Act once."""
        _act[(self._blocks,)](*self._arguments, **self._constants, num_warps=4, num_stages=3)
