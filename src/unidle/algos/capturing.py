"""The interface for capturing functions as CUDA graphs; engine/cuda_graphs.py implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

NODES_PER_GRAPH = 5000  # a larger graph takes long to capture and to launch


class Capturer(Protocol):
    """Makes a function on static tensors faster without changing its results (see engine/cuda_graphs.py)."""

    def __call__(
        self,
        name: str,
        function: Callable[[], None],
        changes: Sequence[Tensor],
        fallback: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[[], None]:
        """`function` or a faster equivalent; `changes` are the tensors it modifies.

        `fallback` is an equivalent function to use if `function` fails. `generators` are the generators it draws from.
        """

    def fall_back(self, name: str, error: Exception, to: str) -> None:
        """Report once that `name` falls back to a slower implementation `to`, and why."""


class _NoCapture:
    def __call__(
        self,
        name: str,
        function: Callable[[], None],
        changes: Sequence[Tensor],
        fallback: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[[], None]:
        return function

    def fall_back(self, name: str, error: Exception, to: str) -> None:
        pass


no_capture = _NoCapture()  # captures nothing and reports nothing
