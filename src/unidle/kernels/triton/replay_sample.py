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
MAX_ENVS = 4096  # that `draw` can handle
_MAX_PAIRS = 16_384  # of a sample and an environment, per program


@triton.jit
def _draw(
    random, entered, left, order, cells,
    B: tl.constexpr, LINES: tl.constexpr, LINES_UP: tl.constexpr, PLACES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pick cells uniformly among all transitions of all environments, by random numbers in [0, 1)."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    line = tl.arange(0, LINES_UP)
    gone = tl.load(left + line, mask=line < LINES, other=0)
    held = tl.load(entered + line, mask=line < LINES, other=0) - gone
    upto = tl.cumsum(held)
    total = tl.sum(held)
    draw = tl.load(random + sample, mask=sample < B, other=0.0)
    pick = tl.maximum(tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1), 0)
    at = tl.sum((upto[None, :] <= pick[:, None]).to(tl.int32), 1)  # environments whose transitions come before it
    at = tl.minimum(at, LINES - 1)
    first = tl.sum(tl.where(line[None, :] == at[:, None], (gone - (upto - held))[None, :], 0), 1)
    number = first + pick
    cell = tl.load(order + number % PLACES * LINES + at, mask=sample < B, other=0)
    tl.store(cells + sample, cell.to(tl.int64), mask=sample < B)


@triton.jit
def _copy_row(obs, to, cell, sample, inside, WORDS: tl.constexpr, BW: tl.constexpr):
    """Copy this program's words of the observations."""
    word = (tl.program_id(1) * BW + tl.arange(0, BW))[None, :]
    here = inside[:, None] & (word < WORDS)
    tl.store(
        to + sample[:, None] * WORDS + word, tl.load(obs + cell[:, None] * WORDS + word, mask=here, other=0), mask=here
    )


@triton.jit
def _copy_action(actions, to, cell, sample, inside, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr):
    number = tl.arange(0, WIDTH_UP)[None, :]
    here = inside[:, None] & (number < WIDTH)
    tl.store(
        to + sample[:, None] * WIDTH + number,
        tl.load(actions + cell[:, None] * WIDTH + number, mask=here, other=0.0),
        mask=here,
    )


@triton.jit
def _follow(
    cells, obs, actions, rewards, terminated, ended, acted, cursor, powers,
    obs_out, actions_out, returns, discounts, next_obs_out, weights,
    B: tl.constexpr, LINES: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Follow each episode from its cell for at most STEPS steps, and write the n-step transition."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    first = tl.load(cells + sample, mask=inside, other=0)
    open_cell = tl.load(cursor + first % LINES, mask=inside, other=0)
    goes_on, last, made = inside, first, tl.zeros_like(first)
    total = tl.zeros((BM,), tl.float32)
    for step in tl.static_range(STEPS):
        cell = (first + step * LINES) % CELLS
        if step > 0:
            goes_on = goes_on & (tl.load(ended + last, mask=goes_on, other=1) == 0) & (cell != open_cell)
        reward = tl.load(rewards + cell, mask=goes_on, other=0.0) * tl.load(powers + step)
        total += tl.where(goes_on, reward, 0.0)
        last = tl.where(goes_on, cell, last)
        made += goes_on.to(tl.int64)
    _copy_row(obs, obs_out, first, sample, inside, WORDS, BW)
    _copy_row(obs, next_obs_out, (last + LINES) % CELLS, sample, inside, WORDS, BW)
    if tl.program_id(1) == 0:
        over = tl.load(terminated + last, mask=inside, other=0) != 0
        tl.store(returns + sample, total, mask=inside)
        tl.store(discounts + sample, tl.where(over, 0.0, tl.load(powers + made, mask=inside, other=0.0)), mask=inside)
        tl.store(weights + sample, tl.load(acted + first, mask=inside, other=0).to(tl.float32), mask=inside)
        _copy_action(actions, actions_out, first, sample, inside, WIDTH, WIDTH_UP)


@triton.jit
def _draw_of_tasks(
    random, shift, entered, cells,
    B: tl.constexpr, TASKS: tl.constexpr, PLACES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pick equally many cells of each task, by random numbers in [0, 1)."""
    sample = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    task = tl.minimum((sample * TASKS + tl.load(shift)) // B, TASKS - 1)
    held = tl.minimum(tl.load(entered + task), PLACES)
    draw = tl.load(random + sample, mask=sample < B, other=0.0)
    place = tl.maximum(tl.minimum((draw * held.to(tl.float64)).to(tl.int64), held - 1), 0)
    tl.store(cells + sample, task * PLACES + place, mask=sample < B)


@triton.jit
def _look_up(
    cells, obs, next_obs, actions, rewards, terminated, entered,
    obs_out, actions_out, returns, discounts, next_obs_out, weights,
    GAMMA: tl.constexpr, B: tl.constexpr, PLACES: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_UP: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Copy the transition in each cell."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    cell = tl.load(cells + sample, mask=inside, other=0)
    _copy_row(obs, obs_out, cell, sample, inside, WORDS, BW)
    _copy_row(next_obs, next_obs_out, cell, sample, inside, WORDS, BW)
    if tl.program_id(1) == 0:
        over = tl.load(terminated + cell, mask=inside, other=0) != 0
        tl.store(returns + sample, tl.load(rewards + cell, mask=inside, other=0.0), mask=inside)
        tl.store(discounts + sample, tl.where(over, 0.0, GAMMA), mask=inside)
        held = tl.load(entered + cell // PLACES, mask=inside, other=0)
        tl.store(weights + sample, (held > 0).to(tl.float32), mask=inside)
        _copy_action(actions, actions_out, cell, sample, inside, WIDTH, WIDTH_UP)


def draw(random: Tensor, entered: Tensor, left: Tensor, order: Tensor) -> Tensor:
    """[B] cells, uniform among all transitions; `random` [B] float64 in [0, 1), the rest is a `Replay`'s."""
    batch_size, n_envs = len(random), len(entered)
    cells = torch.empty(batch_size, dtype=torch.long, device=random.device)
    envs_up = triton.next_power_of_2(n_envs)
    samples = min(_SAMPLES, _MAX_PAIRS // envs_up)
    _draw[(triton.cdiv(batch_size, samples),)](
        random,
        entered,
        left,
        order,
        cells,
        B=batch_size,
        LINES=n_envs,
        LINES_UP=envs_up,
        PLACES=len(order) // n_envs,
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
    acted: Tensor,
    cursor: Tensor,
    powers: Tensor,
) -> tuple[Tensor, ...]:
    """The n-step transitions from `cells` [B]: obs, actions, returns, discounts, next_obs, weights."""
    batch, sizes, grid = _new_batch(cells, obs, actions)
    _follow[grid](
        cells,
        obs.view(torch.int32),
        actions,
        rewards,
        terminated,
        ended,
        acted,
        cursor,
        powers,
        *(_words(field) for field in batch),
        LINES=len(cursor),
        CELLS=len(rewards),
        STEPS=len(powers) - 1,
        **sizes,
    )
    return batch


def draw_by_task(random: Tensor, shift: Tensor, entered: Tensor, places: int) -> Tensor:
    """[B] cells, equally many of each task, as `buffers.multitask.TaskReplay.draw`."""
    batch_size = len(random)
    cells = torch.empty(batch_size, dtype=torch.long, device=random.device)
    sizes = {"B": batch_size, "TASKS": len(entered), "PLACES": places, "BM": _SAMPLES}
    _draw_of_tasks[(triton.cdiv(batch_size, _SAMPLES),)](random, shift, entered, cells, **sizes)
    return cells


def gather_by_task(
    cells: Tensor,
    obs: Tensor,
    next_obs: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    entered: Tensor,
    *,
    gamma: float,
    places: int,
) -> tuple[Tensor, ...]:
    """The transitions in `cells` [B]: obs, actions, returns, discounts, next_obs, weights."""
    batch, sizes, grid = _new_batch(cells, obs, actions)
    stored = obs.view(torch.int32), next_obs.view(torch.int32), actions, rewards, terminated, entered
    _look_up[grid](cells, *stored, *(_words(field) for field in batch), GAMMA=gamma, PLACES=places, **sizes)
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
        "WIDTH_UP": triton.next_power_of_2(width),
        "BM": _SAMPLES,
        "BW": _WORDS,
    }
    return batch, sizes, (triton.cdiv(count, _SAMPLES), triton.cdiv(words, _WORDS))


def _words(field: Tensor) -> Tensor:
    """Observations as 4-byte words."""
    return field.view(torch.int32) if field.dtype == torch.uint8 else field
