"""What an algorithm asks of the engine: to make a function faster without changing what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

NODES_PER_GRAPH = 5000  # of a part of an iteration: a larger one takes long to capture and to launch


class Capturer(Protocol):
    """Makes a function on static tensors faster without changing what it does (see engine/cuda_graphs.py)."""

    def __call__(
        self,
        name: str,
        function: Callable[[], None],
        changes: Sequence[Tensor],
        instead: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[[], None]:
        """`function`, or something that does the same; `changes` are the tensors it changes.

        `instead` does the same in a simpler way, should `function` not run here. `generators` are those that it draws
        from.
        """


def as_it_is(
    name: str,
    function: Callable[[], None],
    changes: Sequence[Tensor],
    instead: Callable[[], None] | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Callable[[], None]:
    """The capturer that captures nothing."""
    return function
