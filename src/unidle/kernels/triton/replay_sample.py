"""Sampling from replay buffers in three kernels instead of fifty: random numbers, cells, transitions.

Each step of the PyTorch version (buffers/replay.py, buffers/multitask.py) is a kernel that takes longer to launch than
to run. The batches are the same bit for bit, except for the rounding of sums of several rewards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SAMPLES, _WORDS = 32, 64  # transitions, and 4-byte words of an observation, per program
MAX_ENVS = 4096  # that `sample_cells` supports
_MAX_PAIRS = 16_384  # (sample, environment) pairs per program


@triton.jit
def _sample_cells(
    uniform, added, overwritten, order, cells,
    B: tl.constexpr, N_ENVS: tl.constexpr, N_ENVS_P2: tl.constexpr, RING_SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pick cells uniformly among all transitions of all environments, given random numbers in [0, 1)."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    env = tl.arange(0, N_ENVS_P2)
    n_overwritten = tl.load(overwritten + env, mask=env < N_ENVS, other=0)
    n_stored = tl.load(added + env, mask=env < N_ENVS, other=0) - n_overwritten
    cumulative = tl.cumsum(n_stored)
    total = tl.sum(n_stored)
    draw = tl.load(uniform + sample, mask=sample < B, other=0.0)
    pick = tl.maximum(tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1), 0)
    picked_env = tl.sum((cumulative[None, :] <= pick[:, None]).to(tl.int32), 1)
    picked_env = tl.minimum(picked_env, N_ENVS - 1)
    is_picked = env[None, :] == picked_env[:, None]
    first = tl.sum(tl.where(is_picked, (n_overwritten - (cumulative - n_stored))[None, :], 0), 1)
    number = first + pick
    cell = tl.load(order + number % RING_SIZE * N_ENVS + picked_env, mask=sample < B, other=0)
    tl.store(cells + sample, cell.to(tl.int64), mask=sample < B)


@triton.jit
def _copy_obs(obs, out, cell, sample, inside, WORDS: tl.constexpr, BW: tl.constexpr):
    """Copy this program's words of the observations."""
    word = (tl.program_id(1) * BW + tl.arange(0, BW))[None, :]
    valid = inside[:, None] & (word < WORDS)
    values = tl.load(obs + cell[:, None] * WORDS + word, mask=valid, other=0)
    tl.store(out + sample[:, None] * WORDS + word, values, mask=valid)


@triton.jit
def _copy_action(actions, out, cell, sample, inside, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr):
    column = tl.arange(0, WIDTH_P2)[None, :]
    valid = inside[:, None] & (column < WIDTH)
    values = tl.load(actions + cell[:, None] * WIDTH + column, mask=valid, other=0.0)
    tl.store(out + sample[:, None] * WIDTH + column, values, mask=valid)


@triton.jit
def _gather_n_step(
    cells, obs, actions, rewards, terminated, ended, has_transition, cursor, powers,
    obs_out, actions_out, returns, discounts, next_obs_out, weights,
    B: tl.constexpr, N_ENVS: tl.constexpr, N_CELLS: tl.constexpr, STEPS: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Follow each episode from its cell for at most STEPS steps, and write its n-step transition."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    first = tl.load(cells + sample, mask=inside, other=0)
    open_cell = tl.load(cursor + first % N_ENVS, mask=inside, other=0)
    continues, last, length = inside, first, tl.zeros_like(first)
    total = tl.zeros((BM,), tl.float32)
    for step in tl.static_range(STEPS):
        cell = (first + step * N_ENVS) % N_CELLS
        if step > 0:
            continues = continues & (tl.load(ended + last, mask=continues, other=1) == 0) & (cell != open_cell)
        reward = tl.load(rewards + cell, mask=continues, other=0.0) * tl.load(powers + step)
        total += tl.where(continues, reward, 0.0)
        last = tl.where(continues, cell, last)
        length += continues.to(tl.int64)
    _copy_obs(obs, obs_out, first, sample, inside, WORDS, BW)
    _copy_obs(obs, next_obs_out, (last + N_ENVS) % N_CELLS, sample, inside, WORDS, BW)
    if tl.program_id(1) == 0:
        is_terminated = tl.load(terminated + last, mask=inside, other=0) != 0
        discount = tl.where(is_terminated, 0.0, tl.load(powers + length, mask=inside, other=0.0))
        tl.store(returns + sample, total, mask=inside)
        tl.store(discounts + sample, discount, mask=inside)
        tl.store(weights + sample, tl.load(has_transition + first, mask=inside, other=0).to(tl.float32), mask=inside)
        _copy_action(actions, actions_out, first, sample, inside, WIDTH, WIDTH_P2)


@triton.jit
def _sample_cells_by_task(
    uniform, shift, added, cells,
    B: tl.constexpr, TASKS: tl.constexpr, RING_SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pick equally many cells of each task, given random numbers in [0, 1)."""
    sample = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    task = tl.minimum((sample * TASKS + tl.load(shift)) // B, TASKS - 1)
    n_stored = tl.minimum(tl.load(added + task), RING_SIZE)
    draw = tl.load(uniform + sample, mask=sample < B, other=0.0)
    slot = tl.maximum(tl.minimum((draw * n_stored.to(tl.float64)).to(tl.int64), n_stored - 1), 0)
    tl.store(cells + sample, task * RING_SIZE + slot, mask=sample < B)


@triton.jit
def _gather_by_task(
    cells, obs, next_obs, actions, rewards, terminated, added,
    obs_out, actions_out, returns, discounts, next_obs_out, weights,
    GAMMA: tl.constexpr, B: tl.constexpr, RING_SIZE: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_P2: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Copy the transition in each cell."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    cell = tl.load(cells + sample, mask=inside, other=0)
    _copy_obs(obs, obs_out, cell, sample, inside, WORDS, BW)
    _copy_obs(next_obs, next_obs_out, cell, sample, inside, WORDS, BW)
    if tl.program_id(1) == 0:
        is_terminated = tl.load(terminated + cell, mask=inside, other=0) != 0
        tl.store(returns + sample, tl.load(rewards + cell, mask=inside, other=0.0), mask=inside)
        tl.store(discounts + sample, tl.where(is_terminated, 0.0, GAMMA), mask=inside)
        n_stored = tl.load(added + cell // RING_SIZE, mask=inside, other=0)
        tl.store(weights + sample, (n_stored > 0).to(tl.float32), mask=inside)
        _copy_action(actions, actions_out, cell, sample, inside, WIDTH, WIDTH_P2)


def sample_cells(uniform: Tensor, added: Tensor, overwritten: Tensor, order: Tensor) -> Tensor:
    """[B] cells, uniform among all transitions, given `uniform` [B] float64 in [0, 1) and a `Replay`'s tensors."""
    batch_size, n_envs = len(uniform), len(added)
    cells = torch.empty(batch_size, dtype=torch.long, device=uniform.device)
    envs_p2 = triton.next_power_of_2(n_envs)
    samples = min(_SAMPLES, _MAX_PAIRS // envs_p2)
    _sample_cells[(triton.cdiv(batch_size, samples),)](
        uniform,
        added,
        overwritten,
        order,
        cells,
        B=batch_size,
        N_ENVS=n_envs,
        N_ENVS_P2=envs_p2,
        RING_SIZE=len(order) // n_envs,
        BM=samples,
    )
    return cells


def gather(
    cells: Tensor,
    obs: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    ended: Tensor,
    has_transition: Tensor,
    cursor: Tensor,
    powers: Tensor,
) -> tuple[Tensor, ...]:
    """The n-step transitions from `cells` [B]: obs, actions, returns, discounts, next_obs, weights."""
    batch, sizes, grid = _new_batch(cells, obs, actions)
    _gather_n_step[grid](
        cells,
        obs.view(torch.int32),
        actions,
        rewards,
        terminated,
        ended,
        has_transition,
        cursor,
        powers,
        *(_words(field) for field in batch),
        N_ENVS=len(cursor),
        N_CELLS=len(rewards),
        STEPS=len(powers) - 1,
        **sizes,
    )
    return batch


def sample_cells_by_task(uniform: Tensor, shift: Tensor, added: Tensor, ring_size: int) -> Tensor:
    """[B] cells, equally many of each task, as `buffers.multitask.TaskReplay.sample_cells`."""
    batch_size = len(uniform)
    cells = torch.empty(batch_size, dtype=torch.long, device=uniform.device)
    sizes = {"B": batch_size, "TASKS": len(added), "RING_SIZE": ring_size, "BM": _SAMPLES}
    _sample_cells_by_task[(triton.cdiv(batch_size, _SAMPLES),)](uniform, shift, added, cells, **sizes)
    return cells


def gather_by_task(
    cells: Tensor,
    obs: Tensor,
    next_obs: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    added: Tensor,
    *,
    gamma: float,
    ring_size: int,
) -> tuple[Tensor, ...]:
    """The transitions in `cells` [B]: obs, actions, returns, discounts, next_obs, weights."""
    batch, sizes, grid = _new_batch(cells, obs, actions)
    stored = obs.view(torch.int32), next_obs.view(torch.int32), actions, rewards, terminated, added
    _gather_by_task[grid](
        cells, *stored, *(_words(field) for field in batch), GAMMA=gamma, RING_SIZE=ring_size, **sizes
    )
    return batch


def _new_batch(
    cells: Tensor, obs: Tensor, actions: Tensor
) -> tuple[tuple[Tensor, ...], dict[str, int], tuple[int, int]]:
    """An empty batch, the constants of a kernel that fills it, and its grid."""
    count, words, width = len(cells), obs.shape[1] // 4, actions.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=cells.device)

    batch = (
        empty(count, obs.shape[1], dtype=torch.uint8),
        empty(count, width),
        empty(count),
        empty(count),
        empty(count, obs.shape[1], dtype=torch.uint8),
        empty(count),
    )
    sizes = {
        "B": count,
        "WORDS": words,
        "WIDTH": width,
        "WIDTH_P2": triton.next_power_of_2(width),
        "BM": _SAMPLES,
        "BW": _WORDS,
    }
    return batch, sizes, (triton.cdiv(count, _SAMPLES), triton.cdiv(words, _WORDS))


def _words(field: Tensor) -> Tensor:
    """Observations as 4-byte words."""
    return field.view(torch.int32) if field.dtype == torch.uint8 else field
