"""How a faster way is compared with the plain one before anything is learned by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_TOLERANCE = 0.02  # of a result's length: products in TF32 differ by less, a wrong formula by more


@torch.no_grad()
def compare(what: str, ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
    """A RuntimeError if they differ by more than a part of their length."""
    error = float(torch.linalg.vector_norm(ours - theirs))
    if not error <= tolerance * float(torch.linalg.vector_norm(theirs)) + 1e-6:  # nor if it is NaN
        raise RuntimeError(f"the kernel's {what} are not those of the plain formulas")


@contextmanager
def undone(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What happens inside may change `tensors`, which are then as before; gives their values."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield before
    finally:
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)
