"""A function on static tensors, replayed as one CUDA graph instead of launched kernel by kernel.

What a function must keep to: it takes no arguments, reads and writes tensors that stay where they are, never asks the
host for a value, and does the same work every time. On a CPU, or if capturing fails, it runs as it is: the results are
the same bit for bit, only slower, and the reason is told once.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unidle.engine.callbacks import OnGpu

_WARM_UPS = 3  # libraries set themselves up in the first calls, which a graph must not record


class Capture:
    """Turns functions into replays on one device, and remembers what could not be captured."""

    def __init__(self, device: torch.device, tell: Callable[[str], None], graphs: bool = True) -> None:
        """`tell` gets one sentence if something falls back; without `graphs` everything stays as it is."""
        self.device = device
        self._graphs = graphs and device.type == "cuda"
        self._tell = tell
        self._told: set[tuple[str, str]] = set()
        self.fallbacks: dict[str, str] = {}  # name → why it runs eagerly on a GPU
        self.tried = 0  # captures so far

    def __call__(
        self,
        name: str,
        function: Callable[[], None],
        changes: Sequence[Tensor],
        instead: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[[], None]:
        """`function` as a replay; `changes` are all tensors it changes that must be as before after the warm-up.

        `instead` does the same in a simpler way, should `function` not run here. Each replay draws from `generators` as
        they stand then.
        """
        if not self._graphs:
            return function
        return _Replay(self, name, [function] if instead is None else [function, instead], changes, generators)

    def on_gpu(self) -> OnGpu | None:
        """The GPU that this captures on, for whoever watches it."""
        if self.device.type != "cuda":
            return None
        return OnGpu(str(torch.cuda.get_device_properties(self.device).uuid), lambda: self.tried)

    def fall_back(self, name: str, error: Exception, to: str) -> None:
        """Note and tell, once, that `name` takes a slower way."""
        while isinstance(error.__context__, Exception):  # the end of a capture that went wrong raises once more
            error = error.__context__
        reason = f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{_culprit(error)}"
        if (name, to) not in self._told:
            self._told.add((name, to))
            self._tell(f"{name} {to}, which is slower: {reason}")
        self.fallbacks[name] = reason


class _Replay:
    """Captures on the first call, replays from then on."""

    def __init__(
        self,
        capture: Capture,
        name: str,
        ways: Sequence[Callable[[], None]],
        changes: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        """`ways` to do it, the fastest first."""
        self._capture, self._name, self._ways, self._changes = capture, name, ways, changes
        self._generators = generators
        self._run: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._run is None:
            self._capture.tried += 1
            self._run = self._captured()
        self._run()

    def _captured(self) -> Callable[[], None]:
        for way in self._ways[:-1]:
            try:
                return self._capture_one(way)
            except Exception as error:
                self._capture.fall_back(self._name, error, "does not run here; it is done in a simpler way")
        last = self._ways[-1]
        try:
            return self._capture_one(last)
        except Exception as error:
            self._capture.fall_back(self._name, error, "could not be captured as a CUDA graph and runs eagerly")
            return last

    def _capture_one(self, function: Callable[[], None]) -> Callable[[], None]:
        kept = [tensor.detach().clone() for tensor in self._changes]
        generators = [*self._generators, _default_generator(self._capture.device)]  # the last is in every graph
        drawn = [generator.get_state() for generator in generators]
        here = torch.cuda.current_stream(self._capture.device)
        stream = torch.cuda.Stream(self._capture.device, priority=here.priority)  # a graph keeps it for its kernels
        stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    function()
                    self._put_back(kept)  # each call begins where the first real one will
            # Only this thread must keep still meanwhile: others may copy and launch.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                function()
        except Exception:
            del graph
            torch.cuda.set_stream(here)  # a capture that went wrong does not go back by itself
            for generator in generators:  # and leaves its generators as if it still went on
                # Graphs captured earlier keep the old state of torch's own: should a user's layer draw from it in one
                # of them, as dropout does, it goes on from there.
                generator.graphsafe_set_state(torch.Generator(self._capture.device))
            raise
        finally:
            here.wait_stream(stream)
            self._put_back(kept)
            for generator, state in zip(generators, drawn):
                generator.set_state(state)
        return graph.replay

    @torch.no_grad()
    def _put_back(self, kept: list[Tensor]) -> None:
        for tensor, before in zip(self._changes, kept):
            tensor.copy_(before)


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _culprit(error: Exception) -> str:
    """The line that could not be captured: the innermost one that is not torch's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if f"{os.sep}torch{os.sep}" not in frame.filename and frame.filename != __file__:
            return f" (at `{frame.line}`, {os.path.basename(frame.filename)} line {frame.lineno})"
    return ""
