"""Output layers of critics with one head per task, forwards and backwards.

A transition belongs to one task, so only one head's value is needed: a product with ten columns, for which libraries
are slow, becomes a sum along a row. The activation before it is applied in the same kernel. A single task works too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.small_mlp import activated, through_activation

_ROWS, _COLUMNS = 8, 256  # tile size
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16


@triton.jit
def task_of(tasks, sample, inside, TASKS: tl.constexpr):
    """Load the task of each sample."""
    return tl.load(tasks + sample, mask=inside, other=0) if TASKS > 1 else tl.zeros_like(sample)


@triton.jit
def _weights(weights, member, column, task, inside, COLUMNS: tl.constexpr, TASKS: tl.constexpr):
    """Weights [rows, columns] of each row's head."""
    return tl.load(weights + (member * COLUMNS + column)[None, :] * TASKS + task[:, None], mask=inside, other=0.0)


@triton.jit
def _values(
    z, bias, weights, head_bias, tasks, values,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TASKS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute h = f(z + bias) of products z [E, ROWS, COLUMNS], in place with KEEP, and values [E, ROWS]."""
    member = tl.program_id(1)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    task = task_of(tasks, row, row < ROWS, TASKS)
    value = tl.zeros((BR,), tl.float32)
    for begin in range(0, COLUMNS, BC):
        column = begin + tl.arange(0, BC)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        at = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        shift = tl.load(bias + member * COLUMNS + column, mask=column < COLUMNS, other=0.0)
        h = activated(tl.load(z + at, mask=inside, other=0.0) + shift[None, :], ACTIVATION)
        if KEEP:
            tl.store(z + at, h, mask=inside)
        value += tl.sum(h * _weights(weights, member, column, task, inside, COLUMNS, TASKS), 1)
    value += tl.load(head_bias + member * TASKS + task)
    tl.store(values + member * ROWS + row, value, mask=row < ROWS)


@triton.jit
def _back(
    slopes, h, weights, tasks, dz, by_bias, by_weights, by_head_bias,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, ACTIVATION: tl.constexpr,
    SUM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Turn gradients of the values [E, ROWS] into gradients of z; with SUM also those of the parameters.

    To sum, a program takes all rows of its columns in order.
    """
    member = tl.program_id(2)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    head = tl.arange(0, TASKS_UP)
    of_bias, of_head_bias = tl.zeros((BC,), tl.float32), tl.zeros((TASKS_UP,), tl.float32)
    of_weights = tl.zeros((BC, TASKS_UP), tl.float32)
    for begin in range(tl.program_id(0) * BR, ROWS if SUM else (tl.program_id(0) + 1) * BR, BR):
        row = begin + tl.arange(0, BR)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        at = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        task = task_of(tasks, row, row < ROWS, TASKS)
        slope = tl.load(slopes + member * ROWS + row, mask=row < ROWS, other=0.0)
        given = tl.load(h + at, mask=inside, other=0.0)
        gradient = slope[:, None] * _weights(weights, member, column, task, inside, COLUMNS, TASKS)
        gradient = through_activation(gradient, given, ACTIVATION)
        tl.store(dz + at, gradient, mask=inside)
        if SUM:
            of_bias += tl.sum(gradient, 0)
            own = tl.where(head[None, :] == task[:, None], slope[:, None], 0.0)  # [rows, heads]
            of_head_bias += tl.sum(own, 0)
            if TASKS == 1:
                of_weights += tl.sum(given * slope[:, None], 0)[:, None]
            else:
                of_weights += tl.dot(tl.trans(given), own, input_precision="ieee")
    if SUM:
        tl.store(by_bias + member * COLUMNS + column, of_bias, mask=column < COLUMNS)
        at = (member * COLUMNS + column)[:, None] * TASKS + head[None, :]
        tl.store(by_weights + at, of_weights, mask=(column < COLUMNS)[:, None] & (head < TASKS)[None, :])
        if tl.program_id(1) == 0:
            tl.store(by_head_bias + member * TASKS + head, of_head_bias, mask=head < TASKS)


class TaskHeads:
    """E heads per task on the products [E, rows, columns] of E networks, before their bias and activation."""

    def __init__(self, weights: Tensor, bias: Tensor, before: Tensor, tasks: Tensor, activation: str) -> None:
        """`weights` [E, columns, tasks], `bias` [E, tasks], the bias `before` [E, columns]; `tasks` of the rows."""
        self._weights, self._bias, self._before, self._tasks = weights, bias, before, tasks
        members, columns, n_tasks = weights.shape
        rows = len(tasks)
        self._values = weights.new_zeros(members, rows)
        self._gradient = weights.new_zeros(members, rows, columns)
        self._sizes: dict[str, Any] = {"ROWS": rows, "COLUMNS": columns, "TASKS": n_tasks, "ACTIVATION": activation}
        # tl.dot needs at least 16 columns.
        self._tasks_up = 1 if n_tasks == 1 else max(16, triton.next_power_of_2(n_tasks))

    def forward(self, products: Tensor, *, keep: bool) -> Tensor:
        """Values [E, rows]; with `keep` the products become the inputs of the heads, for `back`."""
        rows, members = self._sizes["ROWS"], len(self._weights)
        _values[triton.cdiv(rows, _ROWS), members](
            products, self._before, self._weights, self._bias, self._tasks, self._values,
            **self._sizes, KEEP=keep, BR=_ROWS, BC=_COLUMNS,
        )  # fmt: skip
        return self._values

    def back(self, slopes: Tensor, given: Tensor, grads: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Gradients of the products, given those of the values [E, rows] and the inputs of the heads.

        `grads` receive those of the bias before, of the heads' weights and of their bias.
        """
        shape = (_ROWS, _COLUMNS) if grads is None else (_SUMMED_ROWS, _SUMMED_COLUMNS)
        grid = (
            triton.cdiv(self._sizes["ROWS"], shape[0]) if grads is None else 1,
            triton.cdiv(self._sizes["COLUMNS"], shape[1]),
            len(self._weights),
        )
        _back[grid](
            slopes, given, self._weights, self._tasks, self._gradient, *(grads or (slopes, slopes, slopes)),
            **self._sizes, TASKS_UP=self._tasks_up, SUM=grads is not None, BR=shape[0], BC=shape[1],
        )  # fmt: skip
        return self._gradient
