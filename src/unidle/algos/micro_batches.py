"""Out of memory while learning: the same minibatch in pieces, whose gradients are added up.

The recipe stays as it is. A loss is a mean over rows, so the gradients of the pieces, each weighted by its share of the
rows, add up to the gradient of the whole, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from unidle.nn.optim.flat_parameters import FlatParameters

FallBack = Callable[[str, Exception, str], None]  # is told what takes a slower way, why, and which
_Result = TypeVar("_Result")
_NOTHING = torch.empty(0)


class Loss(NamedTuple):
    """Of some rows: what is minimised, a mean over them; other means, to be logged; and what each row gave."""

    loss: Tensor  # []
    means: Tensor  # [M]
    each: Tensor = _NOTHING  # [rows]


class Pieces:
    """In how many pieces some work is done: one, and from the moment that memory runs out twice as many, and so on."""

    def __init__(self, what: str, fall_back: FallBack) -> None:
        """`what` is done, for those who are told."""
        self.count = 1
        self._what, self._fall_back = what, fall_back

    def __call__(self, rows: int, work: Callable[[int], _Result]) -> _Result:
        """`work(count)` on so many `rows`, again in more pieces as often as there is not memory enough."""
        while True:
            try:
                return work(self.count)
            except torch.OutOfMemoryError as error:
                # A capture that ran out of memory is over: it is for the capturer to say what comes next.
                is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
                if self.count >= rows or is_capturing:
                    raise
                self.count = min(rows, 2 * self.count)
                self._fall_back(self._what, error, "does not fit in memory and is done in pieces, to the same effect")
            # Not above: the error holds on to all that had been computed.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def gradient(
        self, parameters: FlatParameters, rows: int, loss_of: Callable[[slice], Loss]
    ) -> tuple[Tensor, Tensor]:
        """Put the gradient of the loss of all `rows` in place; returns the means over them, and what each gave.

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
        parameters.add(part.loss, share)
        means.append(share * part.means)
        each.append(part.each)
    return torch.stack(means).sum(0), torch.cat(each)
