"""Chooses the implementation of each operation of a run.

Every operation has one plain reference in PyTorch. A faster implementation replaces it if it supports the case and its
results agree with the reference's on the run's first real batch. Otherwise the reference is used: it gives the same
results, only slower. The reason is recorded and reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

_Implementation = TypeVar("_Implementation")
Report = Callable[[str, Exception, str], None]  # operation, error, what is done instead

TOLERANCE = 0.02  # of a result's norm: TF32 rounding stays below, a wrong formula does not


def no_report(operation: str, error: Exception, instead: str) -> None:
    """Ignore the report."""


class Dispatch:
    """Chooses an implementation for each operation of a run, and records why a reference is used."""

    def __init__(self, report: Report = no_report) -> None:
        self.fallbacks: dict[str, str] = {}  # operation → why the reference is used
        self._report = report

    def choose(
        self,
        operation: str,
        reference: _Implementation,
        build: Callable[[], _Implementation],
        verify: Callable[[_Implementation], None],
        unsupported: str | None = None,
    ) -> _Implementation:
        """The result of `build` if `verify` does not raise, else `reference`.

        `unsupported` is the reason if there is no faster implementation for this case. That is no error, so it is
        recorded in `fallbacks` but not reported.
        """
        if unsupported is not None:
            self.fallbacks[operation] = unsupported
            return reference
        try:
            implementation = build()
            verify(implementation)
        except Exception as error:
            self.fallbacks[operation] = f"{type(error).__name__}: {error}"
            self._report(operation, error, "uses the plain PyTorch implementation")
            return reference
        return implementation


@torch.no_grad()
def compare(what: str, ours: Tensor, reference: Tensor, tolerance: float = TOLERANCE) -> None:
    """RuntimeError if the two differ by more than `tolerance` of the reference's norm.

    NaN and infinite values must be the same in both.
    """
    same = (ours == reference) | (ours.isnan() & reference.isnan())
    error = float(torch.linalg.vector_norm(torch.where(same, 0.0, ours - reference)))
    norm = float(torch.linalg.vector_norm(torch.where(reference.isfinite(), reference, 0.0)))
    if not error <= tolerance * norm + 1e-6:
        raise RuntimeError(f"the kernel's {what} differ from the reference's")


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Restores `tensors` on exit, even after an exception; yields copies of their values on entry."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield before
    finally:
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)
