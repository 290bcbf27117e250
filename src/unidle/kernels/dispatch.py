"""Chooses the implementation of each operation of a run.

Every operation has one plain reference in PyTorch. A faster implementation replaces it if it supports the case and its
results agree with the reference's on the run's first real batch. Otherwise the reference is used: it gives the same
results, only slower. The reason is recorded and reported once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

_Implementation = TypeVar("_Implementation")
_Reference = TypeVar("_Reference")
Report = Callable[[str, Exception, str], None]  # operation, error, what is done instead

TOLERANCE = 0.02  # of a result's norm: TF32 rounding stays below, a wrong formula does not
# The same for a gradient, by the precision of matrix products. Float32 errors of about 1e-7 grow in log-probabilities,
# which divide by small standard deviations. TF32 has 11 significant bits and bfloat16 has 8, so rounding changes a
# product's inputs by up to 2^-11 or 2^-8. Through three layers forwards and backwards, the independent errors of 12
# inputs add up to √12 of that, and to twice as much where a GPU truncates instead of rounding: 2^-8.2 or 2^-5.2.
GRADIENT_TOLERANCE = {"ieee": 1e-3, "tf32": 2**-8, "bf16": 2**-5}
NOISE_MARGIN = 4.0  # a kernel may be this many times as far from the float32 result as the reference at its precision
_ALWAYS_TOLERATED = 1e-6  # norm of a difference


def no_report(operation: str, error: Exception, instead: str) -> None:
    """Ignore the report."""


def warn(operation: str, error: Exception, instead: str) -> None:
    """Report as a Python warning: for what is chosen once per process, where no run is known."""
    warnings.warn(f"{operation} {instead}, which is slower: {error}", RuntimeWarning, stacklevel=2)


class Dispatch:
    """Chooses an implementation for each operation of a run, and records why a reference is used."""

    def __init__(self, report: Report = no_report, agree: Callable[[bool], bool] | None = None) -> None:
        """`agree`, on several ranks: whether an implementation works on all of them, given whether it does here."""
        self.fallbacks: dict[str, str] = {}  # operation → why the reference is used
        self._report, self._agree = report, agree

    def choose(
        self,
        operation: str,
        reference: _Reference,
        build: Callable[[], _Implementation],
        verify: Callable[[_Implementation], None],
        unsupported: str | None = None,
    ) -> _Implementation | _Reference:
        """The result of `build` if `verify` does not raise, else `reference`.

        `unsupported` is the reason if there is no faster implementation for this case. That is no error, so it is
        recorded in `fallbacks` but not reported.
        """
        if unsupported is not None:
            self.fallbacks[operation] = unsupported
            return reference
        failure: Exception | None = None
        try:
            implementation = build()
            verify(implementation)
        except Exception as error:
            failure = error
        if self._agree is not None and not self._agree(failure is None) and failure is None:
            failure = RuntimeError("it does not work on another rank")
        if failure is not None:
            self.fallbacks[operation] = f"{type(failure).__name__}: {failure}"
            self._report(operation, failure, "uses the plain PyTorch implementation")
            return reference
        return implementation


@torch.no_grad()
def compare(what: str, ours: Tensor, reference: Tensor, tolerance: float = TOLERANCE) -> None:
    """RuntimeError if the two differ by more than `tolerance` of the reference's norm.

    NaN and infinite values must be the same in both.
    """
    error, norm = _distance(ours, reference)
    if not error <= tolerance * norm + _ALWAYS_TOLERATED:
        raise RuntimeError(f"the kernel's {what} differ from the reference's")


@torch.no_grad()
def relative_error(found: Tensor, exact: Tensor) -> float:
    """The distance of the two as a share of the exact result's norm; 0 if `compare` tolerates it in any case."""
    error, norm = _distance(found, exact)
    return 0.0 if error <= _ALWAYS_TOLERATED else error / max(norm, _ALWAYS_TOLERATED)


def _distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The norms of the difference and of what is expected, without values that are not finite in both."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = float(torch.linalg.vector_norm(torch.where(same, 0.0, found - expected)))
    return error, float(torch.linalg.vector_norm(torch.where(expected.isfinite(), expected, 0.0)))


def matmul_precision() -> str:
    """Precision of float32 matrix products on a GPU, as Triton names it."""
    return "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee"


@contextmanager
def exact_products() -> Iterator[None]:
    """Computes products of float32 matrices in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Restores `tensors` on exit, even after an exception; yields copies of their values on entry."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield before
    finally:
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)
