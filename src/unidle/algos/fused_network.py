"""Multi-layer perceptrons on buffers that stay, forwards and backwards (Triton beside torch's matrix products).

For networks too wide for one block of threads (see kernels/triton/small_mlp.py). Through autograd a layer of a batch of
a few hundred rows is mostly kernels that take longer to start than to run: bias, activation, their gradients, copies.
Here a layer is one product and one kernel; back, two products and one kernel. Products of weights' gradients, which
nothing waits for until the optimiser, run beside the rest, as one alone does not fill a large GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.small_mlp import activated, through_activation

_ROWS, _COLUMNS = 16, 128  # of a tile
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16


@triton.jit
def _activate(
    z, bias, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Turn products z [E, ROWS, COLUMNS] into f(z + bias), in place."""
    member = tl.program_id(2)
    row, column = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    at = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
    shift = tl.load(bias + member * COLUMNS + column, mask=column < COLUMNS, other=0.0)
    tl.store(z + at, activated(tl.load(z + at, mask=inside, other=0.0) + shift[None, :], ACTIVATION), mask=inside)


@triton.jit
def _back(
    dy, y, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, SUM: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Turn gradients by y = f(z) [E, ROWS, COLUMNS] into those by z, in place; with SUM also add them up by column.

    Without an activation they stay as they are. A program takes all rows of its columns, in order, if it sums.
    """
    member = tl.program_id(2)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for begin in range(tl.program_id(0) * BR, ROWS if SUM else (tl.program_id(0) + 1) * BR, BR):
        row = begin + tl.arange(0, BR)
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        at = (member * ROWS + row)[:, None] * COLUMNS + column[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0)
        if ACTIVATION != "none":
            gradient = through_activation(gradient, tl.load(y + at, mask=inside, other=0.0), ACTIVATION)
            tl.store(dy + at, gradient, mask=inside)
        if SUM:
            total += tl.sum(gradient, 0)
    if SUM:
        tl.store(sums + member * COLUMNS + column, total, mask=column < COLUMNS)


class SideStream:
    """A second stream: `with beside: …` starts work that nobody waits for until `join`. On a CPU, nothing special."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is inside runs as soon as what was started before it is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What comes now waits for what was started beside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class BatchedNetwork:
    """E networks: inputs [E, rows, n] → outputs [E, rows, m], the last layer without activation and *without bias*.

    Whoever reads the outputs adds it (`biases[-1]`), as that reader is a kernel that looks at a few of them.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor], rows: int, activation: str) -> None:
        """`weights` [E, n, m] and `biases` [E, m] of each layer, as views of the parameters."""
        self.weights, self.biases, self._rows, self._activation = weights, biases, rows, activation
        self._values = [w.new_zeros(len(w), rows, w.shape[2]) for w in weights]  # what each layer gave

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [E, rows, m], without the last bias; the same memory every time."""
        for layer, (weight, bias, values) in enumerate(zip(self.weights, self.biases, self._values)):
            torch.bmm(inputs, weight, out=values)
            if layer < len(self.weights) - 1:
                members, rows, columns = values.shape
                grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS), members
                _activate[grid](values, bias, rows, columns, self._activation, _ROWS, _COLUMNS)
            inputs = values
        return inputs


class BatchedGradient:
    """The way back through the rows of a `BatchedNetwork` from `since` on."""

    def __init__(self, network: BatchedNetwork, beside: SideStream, since: int = 0) -> None:
        self._network, self._beside = network, beside
        self._hidden = [values[:, since:] for values in network._values[:-1]]
        assert all(values.is_contiguous() for values in self._hidden)
        self._gradients = [torch.zeros_like(values) for values in self._hidden]  # by what each layer gave

    def by_parameters(
        self, inputs: Tensor, by_outputs: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]
    ) -> None:
        """Put the gradient by the parameters in `weights` and `biases`, given those by the outputs [E, rows, m].

        Without a last bias, whoever gave the outputs has summed up its gradient. The weights' products may still run:
        `join` before they are read.
        """
        gradient, activation, last = by_outputs, "none", len(weights) - 1
        for layer in range(last, -1, -1):
            if layer < last or biases[last] is not None:
                self._pass(gradient, layer, activation, biases[layer])
            values = self._hidden[layer - 1] if layer else inputs
            with self._beside():
                torch.bmm(values.transpose(1, 2), gradient, out=weights[layer])
            if layer:
                gradient = self._to_inputs(gradient, layer)
            activation = self._network._activation

    def by_inputs(self, by_outputs: Tensor, columns: slice, result: Tensor) -> None:
        """Put the gradient by some columns of the inputs in `result` [E, rows, columns]."""
        gradient = by_outputs
        for layer in range(len(self._network.weights) - 1, 0, -1):
            gradient = self._to_inputs(gradient, layer)
            self._pass(gradient, layer - 1, self._network._activation, None)
        torch.bmm(gradient, self._network.weights[0][:, columns].transpose(1, 2), out=result)

    def _to_inputs(self, gradient: Tensor, layer: int) -> Tensor:
        """From a layer's z to its inputs."""
        return torch.bmm(gradient, self._network.weights[layer].transpose(1, 2), out=self._gradients[layer - 1])

    def _pass(self, gradient: Tensor, layer: int, activation: str, sums: Tensor | None) -> None:
        """From what a layer gave to its z, in place."""
        members, rows, columns = gradient.shape
        values = gradient if activation == "none" else self._hidden[layer]
        shape = (_ROWS, _COLUMNS) if sums is None else (_SUMMED_ROWS, _SUMMED_COLUMNS)
        grid = triton.cdiv(rows, shape[0]) if sums is None else 1, triton.cdiv(columns, shape[1]), members
        some = gradient if sums is None else sums
        _back[grid](gradient, values, some, rows, columns, activation, sums is not None, *shape)
