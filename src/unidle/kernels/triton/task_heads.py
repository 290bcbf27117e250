"""Output layers of critics with one head per task: forward and backward pass.

A transition belongs to one task, so only one head's value is needed: a product with, say, ten columns, for which
libraries are slow, becomes a sum along a row. The preceding activation is applied in the same kernel. A single task
works too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.small_mlp import activated, activation_backward

_BLOCK_ROWS, _BLOCK_COLUMNS = 8, 256  # tile size
_SUM_ROWS, _SUM_COLUMNS = 128, 16


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
    for start in range(0, COLUMNS, BC):
        column = start + tl.arange(0, BC)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        offs = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        shift = tl.load(bias + member * COLUMNS + column, mask=column < COLUMNS, other=0.0)
        h = activated(tl.load(z + offs, mask=inside, other=0.0) + shift[None, :], ACTIVATION)
        if KEEP:
            tl.store(z + offs, h, mask=inside)
        value += tl.sum(h * _weights(weights, member, column, task, inside, COLUMNS, TASKS), 1)
    value += tl.load(head_bias + member * TASKS + task)
    tl.store(values + member * ROWS + row, value, mask=row < ROWS)


@triton.jit
def _backward(
    d_values, h, weights, tasks, dz, bias_grad, weight_grad, head_bias_grad,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr, ACTIVATION: tl.constexpr,
    SUM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute dz from the gradients of the values [E, ROWS]; with SUM also the gradients of the parameters.

    With SUM, a program takes all rows of its columns, in order.
    """
    member = tl.program_id(2)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    head = tl.arange(0, TASKS_P2)
    d_bias, d_head_bias = tl.zeros((BC,), tl.float32), tl.zeros((TASKS_P2,), tl.float32)
    d_weights = tl.zeros((BC, TASKS_P2), tl.float32)
    for start in range(tl.program_id(0) * BR, ROWS if SUM else (tl.program_id(0) + 1) * BR, BR):
        row = start + tl.arange(0, BR)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        offs = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        task = task_of(tasks, row, row < ROWS, TASKS)
        d_value = tl.load(d_values + member * ROWS + row, mask=row < ROWS, other=0.0)
        hidden = tl.load(h + offs, mask=inside, other=0.0)
        gradient = d_value[:, None] * _weights(weights, member, column, task, inside, COLUMNS, TASKS)
        gradient = activation_backward(gradient, hidden, ACTIVATION)
        tl.store(dz + offs, gradient, mask=inside)
        if SUM:
            d_bias += tl.sum(gradient, 0)
            d_head = tl.where(head[None, :] == task[:, None], d_value[:, None], 0.0)  # [rows, heads]
            d_head_bias += tl.sum(d_head, 0)
            if TASKS == 1:
                d_weights += tl.sum(hidden * d_value[:, None], 0)[:, None]
            else:
                d_weights += tl.dot(tl.trans(hidden), d_head, input_precision="ieee")
    if SUM:
        tl.store(bias_grad + member * COLUMNS + column, d_bias, mask=column < COLUMNS)
        offs = (member * COLUMNS + column)[:, None] * TASKS + head[None, :]
        tl.store(weight_grad + offs, d_weights, mask=(column < COLUMNS)[:, None] & (head < TASKS)[None, :])
        if tl.program_id(1) == 0:
            tl.store(head_bias_grad + member * TASKS + head, d_head_bias, mask=head < TASKS)


class TaskHeads:
    """Heads per task on the last hidden layers [E, rows, columns] of E networks, before their bias and activation."""

    def __init__(self, weights: Tensor, bias: Tensor, hidden_bias: Tensor, tasks: Tensor, activation: str) -> None:
        """The heads' `weights` [E, columns, tasks], `bias` [E, tasks]; `hidden_bias` [E, columns]; `tasks` [rows]."""
        self._weights, self._bias, self._hidden_bias, self._tasks = weights, bias, hidden_bias, tasks
        members, columns, n_tasks = weights.shape
        rows = len(tasks)
        self._values = weights.new_zeros(members, rows)
        self._gradient = weights.new_zeros(members, rows, columns)
        self._sizes: dict[str, Any] = {"ROWS": rows, "COLUMNS": columns, "TASKS": n_tasks, "ACTIVATION": activation}
        # tl.dot needs at least 16 columns.
        self._tasks_p2 = 1 if n_tasks == 1 else max(16, triton.next_power_of_2(n_tasks))

    def forward(self, products: Tensor, *, keep: bool) -> Tensor:
        """Values [E, rows]; with `keep`, `products` are overwritten with the heads' inputs, for `backward`."""
        rows, members = self._sizes["ROWS"], len(self._weights)
        _values[triton.cdiv(rows, _BLOCK_ROWS), members](
            products, self._hidden_bias, self._weights, self._bias, self._tasks, self._values,
            **self._sizes, KEEP=keep, BR=_BLOCK_ROWS, BC=_BLOCK_COLUMNS,
        )  # fmt: skip
        return self._values

    def backward(self, d_values: Tensor, hidden: Tensor, grads: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Gradients of the products, given those of the values [E, rows] and the heads' inputs `hidden`.

        The gradients of the hidden bias, of the heads' weights and of their bias are written to `grads`.
        """
        shape = (_BLOCK_ROWS, _BLOCK_COLUMNS) if grads is None else (_SUM_ROWS, _SUM_COLUMNS)
        grid = (
            triton.cdiv(self._sizes["ROWS"], shape[0]) if grads is None else 1,
            triton.cdiv(self._sizes["COLUMNS"], shape[1]),
            len(self._weights),
        )
        _backward[grid](
            d_values, hidden, self._weights, self._tasks, self._gradient, *(grads or (d_values, d_values, d_values)),
            **self._sizes, TASKS_P2=self._tasks_p2, SUM=grads is not None, BR=shape[0], BC=shape[1],
        )  # fmt: skip
        return self._gradient
