"""Gradient accumulation: a minibatch that does not fit in memory is computed in micro-batches.

The recipe stays the same. A loss is a mean over rows, so the gradients of the micro-batches, each weighted by its share
of the rows, add up to the gradient of the minibatch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unidle.kernels.dispatch import Report
from unidle.nn.optim.flat_parameters import FlatParameters

_Result = TypeVar("_Result")
_NONE = torch.empty(0)
# Called between a gradient and the step along it; changes the flat gradient [member, parameter] in place.
AfterGradient = Callable[[Tensor], object]


class Loss(NamedTuple):
    """The mean loss of some rows, other means to log, and one value per row."""

    loss: Tensor  # []
    means: Tensor  # [M]
    each: Tensor = _NONE  # [rows]


class MicroBatches:
    """Splits work on rows into `count` parts: one at first, twice as many each time memory runs out."""

    def __init__(self, what: str, report: Report) -> None:
        """`what` names the work in reports."""
        self.count = 1
        self._what, self._report = what, report

    def __call__(self, rows: int, work: Callable[[int], _Result]) -> _Result:
        """The result of `work(count)`; retried with more parts, at most one per row, while memory runs out."""
        while True:
            try:
                return work(self.count)
            except torch.OutOfMemoryError as error:
                if self.count >= rows:
                    raise
                self.count = min(rows, 2 * self.count)
                self._report(
                    self._what, error, "does not fit in memory and is split into micro-batches, with the same result"
                )
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise  # a capture that ran out of memory must start over
            # Outside the handler: the error keeps all intermediate tensors alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def gradient(
        self, parameters: FlatParameters, rows: int, loss_of: Callable[[slice], Loss]
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the loss of all `rows` in place; returns the means and the values per row.

        `loss_of` computes the loss of a part of the rows.
        """
        return self(rows, lambda count: _gradient(parameters, rows, loss_of, count))


def _gradient(
    parameters: FlatParameters, rows: int, loss_of: Callable[[slice], Loss], count: int
) -> tuple[Tensor, Tensor]:
    if count == 1:
        whole = loss_of(slice(0, rows))
        parameters.backward(whole.loss)
        return whole.means, whole.each
    parameters.grad.zero_()
    means: list[Tensor] = []
    each: list[Tensor] = []
    for first, end in pairwise(rows * number // count for number in range(count + 1)):
        part, share = loss_of(slice(first, end)), (end - first) / rows
        parameters.add_gradient(part.loss, share)
        means.append(share * part.means)
        each.append(part.each)
    return torch.stack(means).sum(0), torch.cat(each)
