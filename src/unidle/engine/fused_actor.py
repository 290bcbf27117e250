"""The whole of one inference as one kernel: from observations on the host to actions on the host.

For a few dozen environments a service is some 25 kernels of two microseconds each, and beside a busy learner each of
them waits for its place on the GPU. Here one grid of blocks goes through the layers together: every block computes some
tiles of a layer, then all wait for one another (a counter in memory), then comes the next. Observations are read from,
and actions written to, page-locked host memory, so there is no copy either.

Covers what most simulators need: one float32 observation, an MLP, Gaussian actions, or SAC's squashed ones with a head
for each task. `FusedActor.of` says None to the rest, and to many environments, where ordinary kernels are no slower.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra import libdevice

from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.kernels.triton.small_mlp import ACTIVATIONS
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.sac_policy import SACPolicy
from unidle.spaces.distributions import KERNEL_DISTRIBUTIONS, LOG_STD_RANGE

_MOST_ENVS = 1024
_MOST_BLOCKS = 128


@triton.jit
def _wait_for_all(counter, target):
    """Go on when every block has come here; what they wrote before is then visible."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _linear(
    x, w, b, m, n, N: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """The tile of rows m and columns n of x [N, INS] · wᵀ [OUTS, INS] + b."""
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
    across: tl.constexpr = (OUTS + BN - 1) // BN
    tiles: tl.constexpr = across * ((N + BM - 1) // BM)
    for tile in range(pid, tiles, BLOCKS):
        m = (tile // across) * BM + tl.arange(0, BM)
        n = (tile % across) * BN + tl.arange(0, BN)
        total = _linear(x, w, b, m, n, N, INS, OUTS, BK, PRECISION)
        if ACTIVATION != "none":
            total = tl.maximum(total, 0.0) if ACTIVATION == "relu" else libdevice.tanh(total)
        tl.store(y + m[:, None] * OUTS + n[None, :], total, mask=(m[:, None] < N) & (n[None, :] < OUTS))


@triton.jit
def _gaussian(
    positions, env_actions, rollout_actions, noise, parameters, log_std,
    range_scale, range_shift, range_low, range_high, scratch, pid,
    N: tl.constexpr, STEPS: tl.constexpr, WIDTHS: tl.constexpr, WEIGHTS: tl.constexpr, BIASES: tl.constexpr,
    PLACES: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute this block's means; sample, keep, and hand out in the environment's range."""
    last: tl.constexpr = len(WEIGHTS) - 1
    outs: tl.constexpr = WIDTHS[last + 1]
    across: tl.constexpr = (outs + BN - 1) // BN
    tiles: tl.constexpr = across * ((N + BM - 1) // BM)
    for tile in range(pid, tiles, BLOCKS):
        m = (tile // across) * BM + tl.arange(0, BM)
        n = (tile % across) * BN + tl.arange(0, BN)
        mean = _linear(
            scratch + PLACES[last],
            parameters + WEIGHTS[last],
            parameters + BIASES[last],
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
        at = (position[:, None] * N + m[:, None]) * outs + n[None, :]
        std = tl.exp(tl.load(log_std + n, mask=n < outs, other=0.0))
        action = mean + std[None, :] * tl.load(noise + at, mask=inside, other=0.0)
        tl.store(rollout_actions + at, action, mask=inside)
        action = action * tl.load(range_scale + n, mask=n < outs, other=0.0)[None, :]
        action += tl.load(range_shift + n, mask=n < outs, other=0.0)[None, :]
        action = tl.maximum(action, tl.load(range_low + n, mask=n < outs, other=0.0)[None, :])
        action = tl.minimum(action, tl.load(range_high + n, mask=n < outs, other=0.0)[None, :])
        is_ready = position[:, None] < STEPS  # others have theirs, and may just be reading it
        tl.store(env_actions + m[:, None] * outs + n[None, :], action, mask=inside & is_ready)


@triton.jit
def _squashed(
    obs, positions, env_actions, rollout_actions, noise, parameters, at_random,
    range_scale, range_shift, range_low, range_high, scratch, counter, pid,
    N: tl.constexpr, STEPS: tl.constexpr, ROW: tl.constexpr, WIDTHS: tl.constexpr, WEIGHTS: tl.constexpr,
    BIASES: tl.constexpr, PLACES: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, REALS_UP: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute this block's tiles of means and deviations; then sample for its environments, each by its task's head."""
    last: tl.constexpr = len(WEIGHTS) - 1
    outs: tl.constexpr = WIDTHS[last + 1]
    reals: tl.constexpr = outs // (2 * TASKS)
    _hidden_layer(
        scratch + PLACES[last],
        parameters + WEIGHTS[last],
        parameters + BIASES[last],
        scratch + PLACES[last + 1],
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
    _wait_for_all(counter, BLOCKS * (last + 2))
    place, real = tl.arange(0, TASKS_UP), tl.arange(0, REALS_UP)
    inside = real < reals
    for env in range(pid, N, BLOCKS):
        task = 0
        if TASKS > 1:
            told = tl.load(obs + env * ROW + WIDTHS[0] - TASKS + place, mask=place < TASKS, other=-float("inf"))
            task = tl.argmax(told, 0)
        own = scratch + PLACES[last + 1] + env * outs + task * 2 * reals + real
        mean = tl.load(own, mask=inside, other=0.0)
        log_std = tl.load(own + reals, mask=inside, other=0.0)
        log_std = tl.minimum(tl.maximum(log_std, LOWEST), HIGHEST)
        position = tl.load(positions + env)
        drawn = tl.load(noise + (position * N + env) * reals + real, mask=inside, other=0.0)
        action = libdevice.tanh(mean + tl.exp(log_std) * drawn)
        action = tl.where(tl.load(at_random) > 0, libdevice.erf(drawn * 0.7071067811865476), action)
        tl.store(rollout_actions + (position * N + env) * reals + real, action, mask=inside)
        action = action * tl.load(range_scale + real, mask=inside, other=0.0)
        action += tl.load(range_shift + real, mask=inside, other=0.0)
        action = tl.maximum(action, tl.load(range_low + real, mask=inside, other=0.0))
        action = tl.minimum(action, tl.load(range_high + real, mask=inside, other=0.0))
        tl.store(env_actions + env * reals + real, action, mask=inside & (position < STEPS))


@triton.jit
def _act(
    obs,  # [N, ROW] float32 words, on the host
    positions,  # [N] int64, on the host: the step of each environment that is ready, STEPS of the others
    env_actions,  # [N, A], on the host; of those that are ready
    rollout_rows,  # [T + 1, N, ROW]
    rollout_actions,  # [T + 1, N, A]
    noise,  # [T + 1, N, A]
    norm_shift,
    norm_scale,  # [D]
    parameters,  # all weights and biases
    log_std,  # [A]; squashed: whether to act at random
    range_scale,
    range_shift,
    range_low,
    range_high,  # [A]
    scratch,  # the inputs of all layers
    counter,
    N: tl.constexpr,
    STEPS: tl.constexpr,  # T
    ROW: tl.constexpr,
    ROW_UP: tl.constexpr,  # to a power of two
    WIDTHS: tl.constexpr,  # D, hidden …, A; squashed: 2 A for each task
    WEIGHTS: tl.constexpr,
    BIASES: tl.constexpr,  # where each layer's begin in `parameters`
    PLACES: tl.constexpr,  # where each layer's input begins in `scratch`
    NORMALISE: tl.constexpr,
    TASKS: tl.constexpr,  # 0: Gaussian actions
    TASKS_UP: tl.constexpr,
    REALS_UP: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,  # that log_std may be
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    pid = tl.program_id(0)
    last: tl.constexpr = len(WEIGHTS) - 1
    # Observations in: to the rollout as they are, to the first layer normalised.
    width: tl.constexpr = WIDTHS[0]
    column = tl.arange(0, ROW_UP)
    for env in range(pid, N, BLOCKS):
        value = tl.load(obs + env * ROW + column, mask=column < ROW)
        position = tl.load(positions + env)
        tl.store(rollout_rows + (position * N + env) * ROW + column, value, mask=column < ROW)
        if NORMALISE:
            value -= tl.load(norm_shift + column, mask=column < width)
            value *= tl.load(norm_scale + column, mask=column < width)
            value = tl.minimum(tl.maximum(value, -10.0), 10.0)
        tl.store(scratch + env * width + column, value, mask=column < width)
    _wait_for_all(counter, BLOCKS)
    for layer in tl.static_range(last):
        _hidden_layer(
            scratch + PLACES[layer],
            parameters + WEIGHTS[layer],
            parameters + BIASES[layer],
            scratch + PLACES[layer + 1],
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
        _wait_for_all(counter, BLOCKS * (layer + 2))
    if TASKS > 0:
        _squashed(
            obs, positions, env_actions, rollout_actions, noise, parameters, log_std,
            range_scale, range_shift, range_low, range_high, scratch, counter, pid,
            N, STEPS, ROW, WIDTHS, WEIGHTS, BIASES, PLACES, TASKS, TASKS_UP, REALS_UP, LOWEST, HIGHEST, PRECISION,
            BLOCKS, BM, BN, BK,
        )  # fmt: skip
    else:
        _gaussian(
            positions, env_actions, rollout_actions, noise, parameters, log_std,
            range_scale, range_shift, range_low, range_high, scratch, pid,
            N, STEPS, WIDTHS, WEIGHTS, BIASES, PLACES, PRECISION, BLOCKS, BM, BN, BK,
        )  # fmt: skip
    # The last to leave sets the counter back for the next launch.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == BLOCKS * (last + 2 + (TASKS > 0)) - 1:
        tl.store(counter, 0)


class FusedActor:
    """Acts with one policy into one rollout; everything it reads and writes stays where it is."""

    def __init__(self, arguments: tuple[Tensor, ...], constants: dict[str, Any], blocks: int) -> None:
        self._arguments, self._constants, self._blocks = arguments, constants, blocks

    @staticmethod
    def of(
        policy: AnyPolicy, rollout: Rollout, obs: Tensor, positions: Tensor, actions: Tensor, noise: Tensor
    ) -> FusedActor | None:
        """For observations `obs`, `positions` [N] and `actions` in page-locked memory; None if it does not apply."""
        if not isinstance(policy, (ActorCritic, SACPolicy)):
            return None
        n_tasks = policy.n_tasks if isinstance(policy, SACPolicy) else 0
        encoder, distribution, trunk = policy.encoder, policy.distribution, policy.actor_trunk
        linears: list[Any] = [layer for layer in trunk if isinstance(layer, nn.Linear)] + [policy.actor_head]
        kinds = {type(layer) for layer in trunk if not isinstance(layer, nn.Linear)}
        n_envs, device = len(obs), rollout.obs.device
        storage = policy.actor_head.weight.untyped_storage()
        together = all(layer.weight.untyped_storage().data_ptr() == storage.data_ptr() for layer in linears)
        if (
            n_envs > _MOST_ENVS
            or (isinstance(policy, ActorCritic) and (policy.core is not None or policy.in_bf16))
            or (isinstance(policy, ActorCritic) and distribution.name not in KERNEL_DISTRIBUTIONS)
            or not encoder.is_plain
            or policy.masked
            or distribution.heads
            or len(kinds) != 1
            or not kinds <= ACTIVATIONS.keys()
            or not together
        ):
            return None
        widths = (encoder.n_numbers, *(layer.out_features for layer in linears))
        places = [0]
        for width in widths[:-1]:
            places.append(places[-1] + n_envs * width)
        norm = encoder.norm
        nothing = torch.zeros(1, device=device)
        arguments = (
            obs.view(torch.float32),
            positions,
            actions,
            rollout.obs.view(torch.float32),
            rollout.actions_and_trash,
            noise,
            nothing if norm is None else norm.shift,
            nothing if norm is None else norm.scale,
            torch.empty(0, device=device).set_(storage),
            policy.distribution.at_random if isinstance(policy, SACPolicy) else policy.log_std,
            distribution._scale,
            distribution._shift,
            distribution._low,
            distribution._high,
            torch.zeros(n_envs * sum(widths), device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        # No more blocks than can be at work at the same time: they wait for one another.
        blocks = min(_MOST_BLOCKS, torch.cuda.get_device_properties(device).multi_processor_count)
        tile = (16, 16, 128) if n_envs <= 16 else (32, 16, 128) if n_envs <= 64 else (64, 32, 64)
        words = rollout.obs.shape[2] // 4
        constants = {
            "N": n_envs,
            "STEPS": rollout.shape[0],
            "ROW": words,
            "ROW_UP": triton.next_power_of_2(words),
            "WIDTHS": widths,
            "WEIGHTS": tuple(layer.weight.storage_offset() for layer in linears),
            "BIASES": tuple(layer.bias.storage_offset() for layer in linears),
            "PLACES": tuple(places),
            "NORMALISE": norm is not None,
            "TASKS": n_tasks,
            "TASKS_UP": triton.next_power_of_2(max(1, n_tasks)),
            "REALS_UP": triton.next_power_of_2(distribution.reals),
            "LOWEST": LOG_STD_RANGE[0],
            "HIGHEST": LOG_STD_RANGE[1],
            "ACTIVATION": ACTIVATIONS[kinds.pop()],
            "PRECISION": "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee",
            "BLOCKS": blocks,
            **dict(zip(("BM", "BN", "BK"), tile)),
        }
        return FusedActor(arguments, constants, blocks)

    def __call__(self) -> None:
        """Act once."""
        _act[(self._blocks,)](*self._arguments, **self._constants, num_warps=4, num_stages=3)
