"""Memories on a GPU that draw a batch in three kernels instead of fifty (Triton): random numbers, cells, transitions.

Each of the steps in replay.py is a kernel that takes longer to start than to run. The batches are the same, bit for
bit, but for the rounding of sums of several rewards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Replay, Transitions

_SAMPLES, _WORDS = 32, 64  # of a batch, and of its rows, that a program takes
_MOST_LINES = 4096
_MOST_PAIRS = 16_384  # of a sample and a line that a program can look at


@triton.jit
def _draw(
    random, entered, left, order, cells,
    B: tl.constexpr, LINES: tl.constexpr, LINES_UP: tl.constexpr, PLACES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pick cells, uniformly among all transitions of all lines, by random numbers in [0, 1)."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    line = tl.arange(0, LINES_UP)
    gone = tl.load(left + line, mask=line < LINES, other=0)
    held = tl.load(entered + line, mask=line < LINES, other=0) - gone
    upto = tl.cumsum(held)
    total = tl.sum(held)
    draw = tl.load(random + sample, mask=sample < B, other=0.0)
    pick = tl.maximum(tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1), 0)
    at = tl.sum((upto[None, :] <= pick[:, None]).to(tl.int32), 1)  # lines that end before it
    at = tl.minimum(at, LINES - 1)
    first = tl.sum(tl.where(line[None, :] == at[:, None], (gone - (upto - held))[None, :], 0), 1)
    number = first + pick
    cell = tl.load(order + number % PLACES * LINES + at, mask=sample < B, other=0)
    tl.store(cells + sample, cell.to(tl.int64), mask=sample < B)


@triton.jit
def _copy_row(obs, to, cell, sample, inside, WORDS: tl.constexpr, BW: tl.constexpr):
    """Copy this program's words of the rows."""
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
    """Follow each line from its cell for STEPS steps or as long as it goes on, and copy what is there."""
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
    """Pick cells, as many of each task, by random numbers in [0, 1)."""
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
    """Copy what is in each cell."""
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


class FusedReplay(Replay):
    """A `Replay` with kernels of its own."""

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, uniformly among all transitions of all lines, with replacement."""
        if self.n_lines > _MOST_LINES:
            return super().draw(batch_size, generator)
        random = _random(batch_size, generator, self.cursor)
        cells = torch.empty(batch_size, dtype=torch.long, device=self.cursor.device)
        lines_up = triton.next_power_of_2(self.n_lines)
        samples = min(_SAMPLES, _MOST_PAIRS // lines_up)
        _draw[(triton.cdiv(batch_size, samples),)](
            random,
            self.entered,
            self.left,
            self.order,
            cells,
            B=batch_size,
            LINES=self.n_lines,
            LINES_UP=lines_up,
            PLACES=self.n_cells // self.n_lines,
            BM=samples,
        )
        return cells

    def at(self, cells: Tensor) -> Transitions:
        """The transitions that start in these cells [B], n steps long or as long as they are."""
        batch, sizes, grid = _new_batch(cells, self.obs, self.actions)
        _follow[grid](
            cells,
            self.obs.view(torch.int32),
            self.actions,
            self.rewards,
            self.terminated,
            self.ended,
            self.acted,
            self.cursor,
            self.powers,
            *_filled(batch),
            LINES=self.n_lines,
            CELLS=self.n_cells,
            STEPS=len(self.powers) - 1,
            **sizes,
        )
        return batch


class FusedTaskReplay(TaskReplay):
    """A `TaskReplay` with kernels of its own."""

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """[B] cells, as many of each task, in the order of tasks."""
        shift = self.shift(batch_size, generator)
        random = _random(batch_size, generator, self.entered)
        cells = torch.empty(batch_size, dtype=torch.long, device=self.entered.device)
        grid = (triton.cdiv(batch_size, _SAMPLES),)
        sizes = {"B": batch_size, "TASKS": len(self.entered), "PLACES": self.places, "BM": _SAMPLES}
        _draw_of_tasks[grid](random, shift, self.entered, cells, **sizes)
        return cells

    def at(self, cells: Tensor) -> Transitions:
        """The transitions in these cells [B]."""
        batch, sizes, grid = _new_batch(cells, self.obs, self.actions)
        fields = self.obs.view(torch.int32), self.next_obs.view(torch.int32), self.actions
        flags = self.rewards, self.terminated, self.entered
        _look_up[grid](cells, *fields, *flags, *_filled(batch), GAMMA=self.gamma, PLACES=self.places, **sizes)
        return batch


def prove(device: torch.device) -> None:
    """A RuntimeError if small memories give other batches than plain ones."""
    for kinds in ((FusedReplay, Replay), (FusedTaskReplay, TaskReplay)):
        mine, theirs = (_batch_of(kind, device) for kind in kinds)
        if not all(torch.equal(ours, others) for ours, others in zip(mine.tensors(), theirs.tensors())):
            raise RuntimeError("the kernels that draw batches draw others than the plain memory")


def _batch_of(kind: Any, device: torch.device) -> Transitions:
    """What a memory gives after some random steps of three environments."""
    n_envs, obs_bytes, has_tasks = 3, 16, issubclass(kind, TaskReplay)
    memory = kind(60, *((2,) if has_tasks else ()), n_envs, obs_bytes, 1, device, 0.9)
    draws = torch.Generator(device).manual_seed(0)
    obs = torch.randint(256, (12, n_envs, obs_bytes), dtype=torch.uint8, device=device, generator=draws)
    memory.start(obs[0])
    for row, chance in zip(obs[1:], torch.rand(11, n_envs, device=device, generator=draws)):
        cut_off, over = chance < 0.2, chance > 0.8
        tasks = ((chance > 0.5).long(),) if has_tasks else ()
        memory.add(chance.unsqueeze(1), chance, over, cut_off, row, obs[0], *tasks)
    batch: Transitions = memory.sample(50, draws)
    return batch


def _random(batch_size: int, generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand(batch_size, dtype=torch.float64, device=like.device, generator=generator)


def _new_batch(cells: Tensor, obs: Tensor, actions: Tensor) -> tuple[Transitions, dict[str, int], tuple[int, int]]:
    """A batch to fill, the sizes that a kernel must know, and its programs."""
    count, words, width = len(cells), obs.shape[1] // 4, actions.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=cells.device)

    batch = Transitions(
        obs=empty(count, obs.shape[1], dtype=torch.uint8),
        actions=empty(count, width),
        returns=empty(count),
        discounts=empty(count),
        next_obs=empty(count, obs.shape[1], dtype=torch.uint8),
        index=cells,
        weights=empty(count),
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


def _filled(batch: Transitions) -> list[Tensor]:
    """The fields that a kernel writes."""
    obs, next_obs = batch.obs.view(torch.int32), batch.next_obs.view(torch.int32)
    return [obs, batch.actions, batch.returns, batch.discounts, next_obs, batch.weights]
