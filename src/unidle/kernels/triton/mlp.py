"""Multi-layer perceptrons on fixed buffers: forward and backward pass, with Triton and torch's matrix products.

For networks too wide for one block of threads (see small_mlp.py). Through autograd, a layer of a batch of a few hundred
rows is mostly kernels that take longer to launch than to run: bias, activation, their gradients, copies. Here a layer
is one matrix product and one kernel in the forward pass, two products and one kernel in the backward pass. The products
for the weights' gradients are not needed before the optimiser step, so they run on a second stream: one product alone
does not fill a large GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.small_mlp import activated, activation_backward

_BLOCK_ROWS, _BLOCK_COLUMNS = 16, 128  # tile size
_SUM_ROWS, _SUM_COLUMNS = 128, 16


@triton.jit
def _add_bias_and_activate(
    z, bias, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Turn products z [E, ROWS, COLUMNS] into f(z + bias), in place."""
    member = tl.program_id(2)
    row, column = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    offs = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
    shift = tl.load(bias + member * COLUMNS + column, mask=column < COLUMNS, other=0.0)
    tl.store(z + offs, activated(tl.load(z + offs, mask=inside, other=0.0) + shift[None, :], ACTIVATION), mask=inside)


@triton.jit
def _backward(
    dy, y, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, SUM: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Turn gradients of y = f(z) [E, ROWS, COLUMNS] into gradients of z, in place; with SUM also sum them by column.

    Without an activation the gradients stay as they are. With SUM, a program takes all rows of its columns, in order.
    """
    member = tl.program_id(2)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for start in range(tl.program_id(0) * BR, ROWS if SUM else (tl.program_id(0) + 1) * BR, BR):
        row = start + tl.arange(0, BR)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        offs = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        gradient = tl.load(dy + offs, mask=inside, other=0.0)
        if ACTIVATION != "none":
            gradient = activation_backward(gradient, tl.load(y + offs, mask=inside, other=0.0), ACTIVATION)
            tl.store(dy + offs, gradient, mask=inside)
        if SUM:
            total += tl.sum(gradient, 0)
    if SUM:
        tl.store(sums + member * COLUMNS + column, total, mask=column < COLUMNS)


class SideStream:
    """A second CUDA stream: work inside `with side():` runs asynchronously until `join`. On a CPU it runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Start after all work launched so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class BatchedMlp:
    """E networks: inputs [E, rows, n] → outputs [E, rows, m], the last layer without activation and *without bias*.

    The kernel that reads the outputs adds it (`biases[-1]`), as it reads only a few of them.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor], rows: int, activation: str) -> None:
        """`weights` [E, n, m] and `biases` [E, m] of each layer, as views of the parameters."""
        self.weights, self.biases, self._rows, self._activation = weights, biases, rows, activation
        self._values = [w.new_zeros(len(w), rows, w.shape[2]) for w in weights]  # outputs of each layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [E, rows, m] without the last bias, always in the same buffer."""
        for layer, (weight, bias, values) in enumerate(zip(self.weights, self.biases, self._values)):
            torch.bmm(inputs, weight, out=values)
            if layer < len(self.weights) - 1:
                members, rows, columns = values.shape
                grid = triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(columns, _BLOCK_COLUMNS), members
                _add_bias_and_activate[grid](values, bias, rows, columns, self._activation, _BLOCK_ROWS, _BLOCK_COLUMNS)
            inputs = values
        return inputs


class BatchedBackward:
    """The backward pass of a `BatchedMlp`, for the rows from `first_row` on."""

    def __init__(self, network: BatchedMlp, side: SideStream, first_row: int = 0) -> None:
        self._network, self._side = network, side
        self._hidden = [values[:, first_row:] for values in network._values[:-1]]
        assert all(values.is_contiguous() for values in self._hidden)
        self._gradients = [torch.zeros_like(values) for values in self._hidden]  # of the outputs of each hidden layer

    def parameter_gradients(
        self, inputs: Tensor, d_outputs: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]
    ) -> None:
        """Write the parameters' gradients to `weights` and `biases`, given those of the outputs [E, rows, m].

        The last bias is None if the kernel that computed `d_outputs` wrote its gradient already. The weights' gradients
        may still be computed on the side stream: `join` it before reading them.
        """
        gradient, activation, last = d_outputs, "none", len(weights) - 1
        for layer in range(last, -1, -1):
            if layer < last or biases[last] is not None:
                self._activation_backward(gradient, layer, activation, biases[layer])
            values = self._hidden[layer - 1] if layer else inputs
            with self._side():
                torch.bmm(values.transpose(1, 2), gradient, out=weights[layer])
            if layer:
                gradient = self._linear_backward(gradient, layer)
            activation = self._network._activation

    def input_gradients(self, d_outputs: Tensor, columns: slice, result: Tensor) -> None:
        """Write the gradient of some columns of the inputs to `result` [E, rows, columns]."""
        gradient = d_outputs
        for layer in range(len(self._network.weights) - 1, 0, -1):
            gradient = self._linear_backward(gradient, layer)
            self._activation_backward(gradient, layer - 1, self._network._activation, None)
        torch.bmm(gradient, self._network.weights[0][:, columns].transpose(1, 2), out=result)

    def _linear_backward(self, gradient: Tensor, layer: int) -> Tensor:
        """Gradient of a layer's inputs, given that of its output z before the activation."""
        return torch.bmm(gradient, self._network.weights[layer].transpose(1, 2), out=self._gradients[layer - 1])

    def _activation_backward(self, gradient: Tensor, layer: int, activation: str, sums: Tensor | None) -> None:
        """Turn the gradient of a layer's outputs into that of its z, in place."""
        members, rows, columns = gradient.shape
        values = gradient if activation == "none" else self._hidden[layer]
        shape = (_BLOCK_ROWS, _BLOCK_COLUMNS) if sums is None else (_SUM_ROWS, _SUM_COLUMNS)
        grid = triton.cdiv(rows, shape[0]) if sums is None else 1, triton.cdiv(columns, shape[1]), members
        bias_grads = gradient if sums is None else sums
        _backward[grid](gradient, values, bias_grads, rows, columns, activation, sums is not None, *shape)
