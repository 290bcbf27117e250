"""CUDA graphs of a function that is split where ranks reduce a gradient: a captured reduction could stall.

    graph │ reduce │ graph │ reduce │ graph

The function calls a `Seam` between a gradient and the step along it. Outside captures that is the reduction itself.
While the function is captured, the seam ends one graph and begins the next, and replays reduce in between. Warm-ups do
not reduce: their results are discarded, and each rank may need another number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unidle.algos.micro_batches import AfterGradient


class Seam:
    """Calls `reduce`, which no graph may record."""

    def __init__(self, reduce: AfterGradient) -> None:
        self._reduce = reduce
        self._is_warm_up = False
        self.is_used = False  # in the latest warm-up
        self.graphs: SplitGraphs | None = None  # that are being captured

    def __call__(self, gradient: Tensor) -> None:
        """Reduce `gradient`; during a capture, record that it is to be reduced here."""
        if self.graphs is not None:
            self.graphs.split(partial(self._reduce, gradient))
        elif self._is_warm_up:
            self.is_used = True
        else:
            self._reduce(gradient)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Do not reduce within the block."""
        self._is_warm_up, self.is_used = True, False
        try:
            yield
        finally:
            self._is_warm_up = False


class SplitGraphs:
    """Graphs with one memory pool, and what is called between them."""

    def __init__(
        self,
        pool: Any,
        generators: Sequence[torch.Generator],
        new_graph: Callable[[], torch.cuda.CUDAGraph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._pool, self._generators, self._new_graph = pool, generators, new_graph
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], object]] = []

    @contextmanager
    def capturing(self, seam: Seam) -> Iterator[None]:
        """Capture the block on the current stream, split at each call of `seam`."""
        seam.graphs = self
        self._begin()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid
                self._graphs[-1].capture_end()
            raise
        finally:
            seam.graphs = None
        self._graphs[-1].capture_end()

    def split(self, call: Callable[[], object]) -> None:
        """End the current graph; replays make this call before the next one."""
        self._graphs[-1].capture_end()
        self._calls.append(call)
        self._begin()

    def replay(self) -> None:
        """Launch the graphs, with the calls between them."""
        self._graphs[0].replay()
        for call, graph in zip(self._calls, self._graphs[1:], strict=True):
            call()
            graph.replay()

    def _begin(self) -> None:
        graph = self._new_graph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
