"""Captures functions on static tensors as CUDA graphs.

A function must take no arguments, only read and write tensors that stay in place, never sync with the host, and do the
same work every time. On a CPU, or if capturing fails, it runs eagerly: the results are the same bit for bit, only
slower, and the reason is reported once.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from unidle.algos.micro_batches import AfterGradient
from unidle.engine.callbacks import RunGpu
from unidle.engine.split_graphs import Seam, SplitGraphs

EAGERLY = "could not be captured as a CUDA graph and runs eagerly"  # the wording of the message
_MEMORY_RETRIES = 3  # captures that start over after running out of memory
_WARM_UPS = 3  # libraries initialise in the first calls, which must not be captured


class Capture:
    """Turns functions into graph replays on one device, and records what could not be captured."""

    def __init__(self, device: torch.device, say: Callable[[str], None], graphs: bool = True) -> None:
        """`say` gets one message for each fallback; without `graphs` everything runs eagerly."""
        self.device = device
        self._graphs = graphs and device.type == "cuda"
        self._say = say
        self._reported: set[tuple[str, str]] = set()
        self.fallbacks: dict[str, str] = {}  # name → why it runs eagerly on a GPU
        self.attempts = 0  # captures so far, successful or not
        self.seam: Seam | None = None  # at which captured functions are split

    def __call__(
        self,
        name: str,
        function: Callable[[], None],
        changes: Sequence[Tensor],
        fallback: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[[], None]:
        """`function` as a replay; `changes` are the tensors that it changes and that the warm-up must restore.

        `fallback` is a simpler implementation, in case `function` fails. Replays draw from the current state of
        `generators`.
        """
        if not self._graphs:
            return function
        return _Replay(self, name, [function] if fallback is None else [function, fallback], changes, generators)

    def split_at(self, reduce: AfterGradient) -> AfterGradient:
        """`reduce` for use in captured functions, which are split where they call it; once per `Capture`."""
        if not self._graphs:
            return reduce
        self.seam = Seam(reduce)
        return self.seam

    def on_gpu(self) -> RunGpu | None:
        """The GPU that this captures on, for the meter."""
        if self.device.type != "cuda":
            return None
        return RunGpu(str(torch.cuda.get_device_properties(self.device).uuid), lambda: self.attempts)

    def fall_back(self, name: str, error: Exception, to: str) -> None:
        """Record, and report once, that `name` uses a slower implementation."""
        while isinstance(error.__context__, Exception):  # ending a failed capture raises another exception
            error = error.__context__
        reason = f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{_failing_line(error)}"
        if (name, to) not in self._reported:
            self._reported.add((name, to))
            self._say(f"{name} {to}, which is slower: {reason}")
        self.fallbacks[name] = reason


class _Replay:
    """Captures on the first call, replays from then on."""

    def __init__(
        self,
        capture: Capture,
        name: str,
        implementations: Sequence[Callable[[], None]],
        changes: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        """`implementations` of the same function, fastest first."""
        self._capture, self._name, self._changes = capture, name, changes
        self._implementations = implementations
        self._generators = generators
        self._run: Callable[[], None] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._run is None:
            self._capture.attempts += 1
            self._run = self._captured()
        self._run()

    @property
    def handle(self) -> int | None:
        """The executable graph; None before it is captured, if it runs eagerly, and in versions of torch without it."""
        return getattr(self._graph, "raw_cuda_graph_exec", lambda: None)()

    def _captured(self) -> Callable[[], None]:
        for implementation in self._implementations[:-1]:
            try:
                return self._capture_one(implementation)
            except Exception as error:
                self._capture.fall_back(self._name, error, "does not run here; the plain implementation is used")
        last = self._implementations[-1]
        try:
            return self._capture_one(last)
        except Exception as error:
            self._capture.fall_back(self._name, error, EAGERLY)
            return last

    def _capture_one(self, function: Callable[[], None]) -> Callable[[], None]:
        for _ in range(_MEMORY_RETRIES):
            try:
                return self._try_capture(function)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()  # and again, with twice as many micro-batches (see algos/micro_batches.py)
        return self._try_capture(function)

    def _try_capture(self, function: Callable[[], None]) -> Callable[[], None]:
        device = self._capture.device
        kept = [tensor.detach().clone() for tensor in self._changes]
        generators = [*self._generators, _default_generator(device)]  # the default one is part of every graph
        generator_states = [generator.get_state() for generator in generators]
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device, priority=current.priority)  # the graph's kernels keep its priority
        stream.wait_stream(current)
        seam, pool = self._capture.seam, torch.cuda.graph_pool_handle()
        graph: torch.cuda.CUDAGraph | SplitGraphs | None = None
        try:
            with torch.cuda.stream(stream), nullcontext() if seam is None else seam.warming_up():
                for _ in range(_WARM_UPS):
                    function()
                    self._restore(kept)  # every call starts from the state of the first real one
            # Other threads may copy and launch during the capture.
            if seam is not None and seam.is_used:
                graph = SplitGraphs(pool, self._generators)
                torch.cuda.synchronize(device)
                with torch.cuda.stream(stream), graph.capturing(seam):
                    function()
            else:
                graph = torch.cuda.CUDAGraph()
                for generator in self._generators:
                    graph.register_generator_state(generator)
                with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                    function()
        except Exception:
            del graph
            _end_allocation(device, pool)
            torch.cuda.set_stream(current)  # a failed capture does not restore it
            for generator in generators:  # nor the generators, which it leaves in capture mode
                # Graphs captured earlier keep the old state of torch's default generator: a layer such as dropout that
                # draws from it in one of them continues from there.
                generator.graphsafe_set_state(torch.Generator(device))
            raise
        finally:
            current.wait_stream(stream)
            self._restore(kept)
            for generator, state in zip(generators, generator_states):
                generator.set_state(state)
        if isinstance(graph, torch.cuda.CUDAGraph):
            self._graph = graph
        return graph.replay

    @torch.no_grad()
    def _restore(self, kept: list[Tensor]) -> None:
        for tensor, before in zip(self._changes, kept):
            tensor.copy_(before)


def graph_handle(function: Callable[[], None]) -> int | None:
    """The executable CUDA graph behind a function that `Capture` returned; None if there is none."""
    return function.handle if isinstance(function, _Replay) else None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[_index(device)]


def _end_allocation(device: torch.device, pool: tuple[int, int]) -> None:
    """Stop allocating from the pool of a capture that could not be ended.

    torch does not do this itself: it would never free cached memory again, and run out of it.
    """
    with suppress(RuntimeError):  # the capture was ended, and the graph has freed its pool
        torch._C._cuda_endAllocateToPool(_index(device), pool)
        torch._C._cuda_releasePool(_index(device), pool)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or an error that led to it, is an out-of-memory error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error.__context__))


def _failing_line(error: Exception) -> str:
    """The line that could not be captured: the innermost one outside torch."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename != __file__:
            return f" (at `{frame.line}`, {os.path.basename(frame.filename)} line {frame.lineno})"
    return ""
